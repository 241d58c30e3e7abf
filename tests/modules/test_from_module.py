"""Covers modules as functions of their parameters: supported modules, refusals by name, and that remedies work."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import shardfn as sf
from shardfn.testing import assert_same, distributed, on_mesh, one_device


def step_on(module: nn.Module, x: Tensor, *, jit: bool = False, stage: int = 3) -> dict[str, Tensor]:
    """The parameters after a step; the loss is the mean square of the module's outputs."""
    params, apply = sf.from_module(module)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    f = sf.jit(loss, backend="graph") if jit else loss
    mesh, zero = sf.make_mesh({"dp": 1}), sf.Zero(stage=stage, persist_elements=0)
    return on_mesh(f, sf.optim.sgd(0.1), params, [x], mesh=mesh, zero=zero).params


def by_torch(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(x).square().mean().backward()
    optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


class Wrapped(nn.Module):
    """A linear layer with a given forward."""

    def __init__(self, forward: Callable[["Wrapped", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(3, 2)
        self.own = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x)


def hooked(kind: str) -> nn.Module:
    layer = nn.Linear(3, 2)
    getattr(layer.weight, kind)(lambda g: None)
    return nn.Sequential(layer)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook": (lambda: hooked("register_hook"), r"0\.weight has 1 gradient hook.*register_hook.*optim.chain"),
    "post hook": (lambda: hooked("register_post_accumulate_grad_hook"), r"0\.weight .*post_accumulate"),
    "max_norm": (lambda: nn.Embedding(4, 3, max_norm=1.0), r"Embedding\(max_norm=1.0\).*max_norm=None"),
    "bag": (lambda: nn.EmbeddingBag(4, 3, max_norm=1.0), r"EmbeddingBag\(max_norm=1.0\)"),
    "frequency": (lambda: nn.Embedding(4, 3, scale_grad_by_freq=True), "scale_grad_by_freq.*build it without"),
    "lazy": (lambda: nn.LazyLinear(3), "weight has no shape yet; call the module once"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(REFUSED)]
)
def test_unsupported_modules_are_refused_by_name(name: str) -> None:
    make, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        sf.from_module(make())


def test_the_remedies() -> None:
    module = hooked("register_hook")
    hooks: Any = module.get_parameter("0.weight")._backward_hooks
    hooks.clear()
    lazy = nn.LazyLinear(3)
    lazy(torch.zeros(1, 2))
    for each in (module, nn.Embedding(4, 3, max_norm=None), lazy):
        sf.from_module(each)


def test_memory_that_is_shared_without_being_tied() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    module = nn.Sequential(first, second)
    second.weight.data = first.weight.data
    with pytest.raises(ValueError, match=r"1\.weight shares the memory of 0\.weight.*assign the parameter itself"):
        sf.from_module(module)
    second.weight = first.weight
    params, _ = sf.from_module(module)
    assert "1.weight" not in params
    module = nn.Linear(2, 2)
    module.register_buffer("seen", module.weight.data)
    with pytest.raises(ValueError, match="seen shares the memory of weight"):
        sf.from_module(module)


def test_names_are_checked() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    params, apply = sf.from_module(module)
    x = torch.ones(1, 3)
    with pytest.raises(ValueError, match=r"'0\.wieght' is not a parameter of the module Did you mean '0\.weight'"):
        apply({"0.wieght": params["0.weight"]}, x)
    frozen = {name: p * 0 for name, p in params.items() if name.startswith("1")}  # the others are the module's own
    assert torch.equal(apply(frozen, x), torch.zeros(1, 3))
    module[1].weight = module[0].weight
    params, apply = sf.from_module(module)
    with pytest.raises(ValueError, match=r"'1\.weight' and '0\.weight' are one parameter"):
        apply(params | {"1.weight": params["0.weight"] + 1}, x)
    module.append(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"'2\.weight' was not there when from_module was called"):
        apply(params, x)


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_conversion_that_changes_nothing_passes(jit: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.lin = self.lin.to(torch.float32)
        return self.lin.float()(x)

    x = torch.ones(4, 3)
    want = step_on(Wrapped(lambda self, x: self.lin(x)), x)
    for stage in (3,) if jit else (0, 3):
        got = step_on(Wrapped(forward), x, jit=jit, stage=stage)
        assert all(torch.equal(got[k], want[k]) for k in want)
    module = Wrapped(lambda self, x: self.lin.to(torch.float64)(x.double()))
    with pytest.raises(ValueError, match=r"lin\.weight converted from torch.float32 on .* to torch.float64.*before"):
        step_on(module, x, jit=jit)
    assert module.lin.weight.dtype == torch.float32
    step_on(module.double(), x, jit=jit)  # the remedy


@pytest.mark.day("False")
@pytest.mark.parametrize("jit", [False, True])
def test_parameters_that_the_forward_assigns_or_has_by_another_way(jit: bool) -> None:
    def assigns(self: Any, x: Tensor) -> Tensor:
        self.lin.weight = nn.Parameter(torch.zeros(2, 3))
        return self.lin(x)

    module = Wrapped(assigns)
    before = module.lin.weight
    with pytest.raises(ValueError, match=r"must not assign parameters, got lin\.weight"):
        step_on(module, torch.ones(4, 3), jit=jit)
    assert module.lin.weight is before
    listed: list[Tensor] = []
    module = Wrapped(lambda self, x: x @ listed[0].T)
    listed.append(module.lin.weight)
    refused = r"the parameter 'lin\.weight' of the module instead of the parameter that the step trains"
    with pytest.raises(ValueError, match=refused):
        step_on(module, torch.ones(4, 3), jit=jit)


@pytest.mark.day("EmbeddingBag")
@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_have_dense_gradients(make: Any) -> None:
    x = torch.tensor([[1, 2, 1], [0, 3, 1]])
    torch.manual_seed(0)
    want = make(5, 3)
    module = make(5, 3, sparse=True)
    module.load_state_dict(want.state_dict())
    same = by_torch(want, x)
    for jit in (False, True):
        torch.testing.assert_close(step_on(module, x, jit=jit), same)


def test_a_cache_of_parametrizations_is_refused() -> None:
    module = parametrizations.weight_norm(nn.Linear(3, 2))
    params, apply = sf.from_module(module)
    with (
        parametrize.cached(),
        pytest.raises(ValueError, match=r"parametrize.cached\(\) must not be active around a call"),
    ):
        apply(params, torch.ones(1, 3))
    assert torch.equal(apply(params, torch.ones(1, 3)), module(torch.ones(1, 3)))


@distributed(world=2)
def test_layers_that_look_parameters_up_by_themselves(world: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4, 2, batch_first=True)
            self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
            self.heads = nn.MultiheadAttention(4, 2, batch_first=True)
            self.rows = nn.Embedding(5, 4, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.normed(self.rnn(x)[0]) + self.rows(torch.arange(x.shape[1]))
            return self.heads(h, h, h)[0].square().mean()

    torch.manual_seed(0)
    params, apply = sf.from_module(Net().double())
    batches = [torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    want = one_device(apply, sf.optim.sgd(0.5), params, batches)
    mesh = sf.make_mesh({"dp": world})
    zero = sf.Zero(stage=3, persist_elements=0)
    assert_same(on_mesh(apply, sf.optim.sgd(0.5), params, batches, mesh=mesh, zero=zero), want)


class Builtins(nn.Module):
    """Calls functions of torch whose namesakes in torch.nn.functional take other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 4))

    def forward(self, i: Tensor) -> Tensor:
        x = torch.embedding(self.w, i) + torch.embedding(self.w, i, -1, False, True)
        x = torch.instance_norm(x[None], x.new_ones(2), x.new_zeros(2), None, None, True, 0.1, 1e-5, False)
        return torch.dropout(x, 0.5, train=False)


def test_functions_of_torch_that_share_a_name_with_others() -> None:
    module, i = Builtins(), torch.tensor([1, 3])
    params, apply = sf.from_module(module)
    torch.testing.assert_close(apply(params, i), module(i))
    assert not sf.grad(lambda p: apply(p, i).square().sum())(params)["w"].is_sparse


def test_a_parameter_keeps_its_memory_in_a_forward() -> None:
    def doubles(self: Any, x: Tensor) -> Tensor:
        self.lin.weight.data = self.lin.weight.data * 2
        return self.lin(x)

    params, apply = sf.from_module(Wrapped(doubles))
    with pytest.raises(ValueError, match=r"its parameter 'lin.weight' other memory"):
        apply(params, torch.ones(2, 3))


def test_a_module_runs_in_one_thread_at_a_time() -> None:
    inside, over = threading.Event(), threading.Event()

    def waits(self: Any, x: Tensor) -> Tensor:
        if not inside.is_set():
            inside.set()
            over.wait(30)
        return self.lin(x)

    module, x = Wrapped(waits), torch.ones(2, 3)
    params, apply = sf.from_module(module)
    got: list[Tensor] = []
    thread = threading.Thread(target=lambda: got.append(apply({k: 2 * p for k, p in params.items()}, x)))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(RuntimeError, match=r"running in another thread.*deepcopy"):
        apply(params, x)
    over.set()
    thread.join()
    assert torch.equal(got[0], 2 * apply(params, x)) and torch.equal(apply(params, x), module(x))
