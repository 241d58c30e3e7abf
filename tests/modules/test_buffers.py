"""Covers the buffers of modules: constants, which a forward may read and overwrite for one call, and not change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import shardfn as sf
from shardfn.testing import assert_same, distributed, on_mesh, one_device


class Counted(nn.Module):
    """A linear layer, a buffer `n` in a part of its own, and a forward that uses it."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], n: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.part = nn.Linear(3, 2), nn.Module()
        self.part.register_buffer("n", n)
        self.own = forward

    def forward(self, x: Tensor) -> Tensor:
        by = self.own(self.part, x)
        return (self.lin(x) * (1.0 if by is None else by)).square().mean()


def _add(part: Any, x: Tensor) -> Tensor:
    part.n += 1
    return part.n


def _assign(part: Any, x: Tensor) -> Tensor:
    part.n = part.n + 1
    return part.n


def _assign_copy(part: Any, x: Tensor) -> None:
    n = part.n.clone()
    n += 1
    part.n = n


def _assign_cast(part: Any, x: Tensor) -> None:
    n = part.n.to(torch.float64)
    part.n = n + 1


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "+=": (_add, "writes to it .add_|writes to it .__iadd__"),
    "assigned": (_assign, "reads it .add. and then assigns"),
    "a copy": (_assign_copy, "reads it .clone. and then assigns"),
    "a cast": (_assign_cast, "reads it .add. and then assigns"),
    "data": (lambda part, x: part.n.data.add_(1), "writes to it .add_"),
    "other memory": (lambda part, x: setattr(part.n, "data", part.n.data + 1), "gives it other memory"),
    "a view": (lambda part, x: part.n.view(-1)[0].add_(1), "writes to it .add_"),
    "an item": (lambda part, x: part.n.view(-1).__setitem__(0, 7.0), "writes to it .__setitem__"),
    "out": (lambda part, x: torch.add(x.sum(), 1, out=part.n), "writes to it .add."),
    "foreach": (lambda part, x: torch._foreach_add_([part.n], 1), "writes to it ._foreach_add_"),
    "mean": (lambda part, x: part.n.copy_(0.9 * part.n + x.mean()), "reads it .* and then writes it .copy_"),
}


@pytest.mark.day(4)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "how", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(CHANGES)]
)
def test_a_forward_that_changes_a_buffer_is_refused_before_it_does(how: str, jit: bool) -> None:
    forward, match = CHANGES[how]
    n = torch.full((), 3.0)
    module = Counted(forward, n)
    params, apply = sf.from_module(module)
    step = sf.sharded_step(sf.jit(apply, backend="graph") if jit else apply, sf.optim.sgd(0.1))
    state = step.init(params)
    with pytest.raises(ValueError, match=rf"forward of part \(Module\) changes its buffer 'n': it ({match})"):
        step(state, torch.ones(4, 3))
    assert module.part.n is n
    assert n.item() == 3


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "batch_norm": (lambda: nn.BatchNorm1d(3), (4, 3), r"1 \(BatchNorm1d\) changes its buffer 'num_batches_tracked'"),
    "momentum": (lambda: nn.BatchNorm2d(3, momentum=None), (4, 3, 2, 2), r"1 \(BatchNorm2d\) changes its buffer"),
    "instance": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (4, 3, 5), "instance_norm in training"),
    "no statistics": (
        lambda: nn.BatchNorm1d(3, track_running_stats=False),
        (4, 3),
        "batch_norm in training normalises",
    ),
    "spectral": (lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), (4, 3), "_SpectralNorm.*buffer '_[uv]'"),
    "old spectral": (lambda: _spectral(nn.Linear(3, 3)), (4, 3), r"1 \(Linear\) changes its buffer 'weight_[uv]'"),
    "observer": (lambda: _observer(), (4, 3), r"MinMaxObserver\) changes its buffer"),
}


def _spectral(layer: nn.Module) -> nn.Module:
    return torch.nn.utils.spectral_norm(layer)


def _observer() -> nn.Module:
    from torch.ao.quantization.observer import MovingAverageMinMaxObserver

    return MovingAverageMinMaxObserver()


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(LAYERS)]
)
def test_layers_with_statistics_are_refused_in_training(name: str) -> None:
    make, shape, match = LAYERS[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Identity(), make())
    params, apply = sf.from_module(net)
    before = {k: x.clone() for k, x in net.named_buffers()}
    x = torch.randn(shape)
    with pytest.raises(ValueError, match=match):
        apply(params, x)
    assert all(torch.equal(x, before[k]) for k, x in net.named_buffers())
    if name not in ("no statistics", "observer"):  # the remedy: constants
        net.get_submodule("1").eval()
        assert torch.equal(apply(params, x), net(x))


def test_the_remedy_of_the_message_works() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3)))
    params, apply = sf.from_module(net)
    with pytest.raises(ValueError, match="makes it a constant") as caught:
        apply(params, torch.ones(2, 3))
    (remedy,) = (w for w in str(caught.value).split(", ") if w.startswith("module."))
    eval(remedy.split(" makes")[0], {"module": net})
    assert torch.equal(apply(params, torch.ones(2, 3)), net(torch.ones(2, 3)))


@distributed(world=2)
def test_all_ranks_raise_and_buffers_are_unchanged(world: int) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    params, apply = sf.from_module(net)
    for stage in (0, 3):
        step = sf.sharded_step(
            lambda p, x: apply(p, x).square().mean(),
            sf.optim.sgd(0.1),
            mesh=sf.make_mesh({"dp": world}),
            zero=sf.Zero(stage=stage, persist_elements=0),
        )
        state = step.init(params)
        with pytest.raises(ValueError, match="num_batches_tracked"):
            step(state, torch.ones(4, 3))
    assert net.get_buffer("1.num_batches_tracked").item() == 0


# --- allowed uses ---


def _read(part: Any, x: Tensor) -> Tensor:
    return part.n * 2


def _cached(part: Any, x: Tensor) -> Tensor:
    if part.n.shape[0] < x.shape[0]:
        part.n = torch.arange(1.0, x.shape[0] + 1)
        part.known = x.shape[0]
    return part.n[: x.shape[0], None]


def _registered(part: Any, x: Tensor) -> Tensor:
    part.register_buffer("m", torch.full((1,), 2.0))
    part.n.copy_(part.m * 3)
    return part.n + part.m


def _same(part: Any, x: Tensor) -> Tensor:
    part.n = part.n.to(x.dtype)
    return part.n


def _zeroed(part: Any, x: Tensor) -> Tensor:
    part.n.zero_()
    part.n += 5
    return part.n


CACHES = {"read": _read, "cached": _cached, "registered": _registered, "same": _same, "zeroed": _zeroed}


SLOW = ("read", "same", "zeroed")


@pytest.mark.day(3)
@pytest.mark.parametrize(
    ("how", "jit"),
    [
        *((how, False) for how in CACHES),
        *(pytest.param(how, True, marks=pytest.mark.nightly if how in SLOW else ()) for how in CACHES),
    ],
)
def test_constants_and_caches_are_allowed_and_each_call_starts_anew(how: str, jit: bool) -> None:
    n = torch.full((1,), 3.0)
    module = Counted(CACHES[how], n)
    attributes = dict(module.part.__dict__)
    params, apply = sf.from_module(module)
    batches = [torch.ones(4, 3), torch.ones(4, 3) * 2, torch.ones(4, 3)]
    loss = sf.jit(apply, backend="graph") if jit else apply
    got = on_mesh(loss, sf.optim.sgd(0.1), params, batches, mesh=sf.make_mesh({"dp": 1}))
    assert module.part.n is n
    assert n.item() == 3
    assert module.part.__dict__ == attributes
    fresh = [Counted(CACHES[how], torch.full((1,), 3.0)) for _ in batches]
    applies = iter([sf.from_module(m)[1] for m in fresh])
    want = one_device(lambda p, x: next(applies)(p, x), sf.optim.sgd(0.1), params, batches)
    assert_same(got, want)


def test_data_that_stays_is_no_change() -> None:
    params, apply = sf.from_module(Counted(lambda part, x: setattr(part.n, "data", part.n.data), torch.ones(())))
    assert apply(params, torch.ones(4, 3)).isfinite()


class InPlace(nn.Module):
    """Writes to its own results."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.register_buffer("n", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x) * self.n
        h += 1
        h[:, 0] = 0
        return torch.relu_(h).square().mean()


def test_a_forward_that_writes_to_its_results_passes_through_torch_func() -> None:
    module, x = InPlace(), torch.linspace(-1, 1, 12).view(4, 3)
    params, apply = sf.from_module(module)
    step = sf.sharded_step(apply, sf.optim.sgd(0.1))
    got = torch.func.grad(step.loss)(step.init(params).params, x)
    want = torch.autograd.grad(module(x), list(module.parameters()))
    for g, w in zip(got.values(), want, strict=True):
        torch.testing.assert_close(g.local, w)
    both = torch.vmap(apply, in_dims=(0, None))({k: torch.stack([p, 2 * p]) for k, p in params.items()}, x)
    torch.testing.assert_close(both[0], module(x).detach())


class Standardized(nn.Conv1d):
    """Normalises its weight by batch_norm, whose "batch" is then not rows of the batch."""

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = nn.functional.batch_norm(rows, None, None, training=True, momentum=0.0).reshape_as(self.weight)
        return nn.functional.conv1d(input, weight, self.bias)


@distributed(world=2)
def test_a_weight_may_be_standardized_by_batch_norm() -> None:
    torch.manual_seed(0)
    params, apply = sf.from_module(Standardized(3, 4, 2).double())
    mesh, rows = sf.make_mesh({"dp": 2}), [torch.randn(4, 3, 5, dtype=torch.float64) for _ in range(2)]

    def loss(p: dict, x: Tensor) -> Tensor:
        return apply(p, x).square().mean()

    for stage in (0, 3):
        got = on_mesh(loss, sf.optim.sgd(0.1), params, rows, mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0))
        assert_same(got, one_device(loss, sf.optim.sgd(0.1), params, rows))
