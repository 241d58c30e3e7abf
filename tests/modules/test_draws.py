"""Covers random numbers in modules: dropout by key and sample, everything else refused, with remedies that work."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfn as sf
from shardfn.testing import assert_same, distributed, on_mesh, one_device

ROWS = 12


class Net(nn.Module):
    """Every dropout of torch, one after the other, on [B, 4, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.drops = nn.ModuleList([nn.Dropout(0.2), nn.Dropout1d(0.3), nn.AlphaDropout(0.2)])
        self.drops.append(nn.FeatureAlphaDropout(0.3))
        self.heads = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.rnn = nn.GRU(4, 4, 2, dropout=0.3, batch_first=True)
        self.block = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        for drop in self.drops:
            x = drop(x)
        x = x + self.heads(x, x, x)[0] + self.heads(x, x, x, need_weights=False)[0]
        x = x + F.scaled_dot_product_attention(x, x, x, dropout_p=0.2) + self.rnn(x)[0]
        x = F.dropout2d(x[..., None], 0.2, self.training).squeeze(-1)
        return F.dropout(self.block(x), 0.1, self.training, inplace=True).square().mean()


def net() -> tuple[dict[str, Tensor], Callable[..., Any]]:
    torch.manual_seed(0)
    params, apply = sf.from_module(Net().double())

    def loss(params: dict[str, Tensor], batch: dict[str, Tensor], key: Tensor) -> Tensor:
        return apply.keyed(key, batch["index"])(params, batch["x"])

    return params, loss


def batches() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    x = [torch.randn(ROWS, 4, 4, dtype=torch.float64, generator=g) for _ in range(2)]
    return [{"x": x, "index": torch.arange(ROWS) + n * ROWS} for n, x in enumerate(x)]


def run_of(transform: Callable[..., Any] | None = None) -> Any:
    params, loss = net()
    loss = loss if transform is None else transform(loss)
    how: dict[str, Any] = {"mesh": sf.make_mesh({"dp": -1}), "zero": sf.Zero(stage=3, persist_elements=0)}
    return on_mesh(loss, sf.optim.sgd(0.1), params, batches(), key=sf.key(5), **how)


def want() -> Any:
    params, loss = net()
    return one_device(loss, sf.optim.sgd(0.1), params, batches(), key=sf.key(5))


@pytest.mark.nightly
@distributed(world=2)
def test_masks_belong_to_samples() -> None:
    assert_same(run_of(), want())


GRAPH = functools.partial(sf.jit, backend="graph")
MICRO = functools.partial(sf.accumulate, num_microbatches=2)


@pytest.mark.nightly
@distributed(world=[1, 2, 3], timeout=600)
def test_masks_belong_to_samples_under_every_transform() -> None:
    for transform in (None, sf.remat, MICRO, GRAPH, lambda f: GRAPH(MICRO(sf.remat(f)))):
        assert_same(run_of(transform), want())


def test_masks_differ_between_places_steps_and_samples() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    params, apply = sf.from_module(module)
    x, index = torch.ones(4, 64), torch.arange(4)
    y = apply.keyed(sf.key(0), index)(params, x)
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert len(y.unique(dim=0)) == 4
    assert not torch.equal(y, apply.keyed(sf.key(1), index)(params, x))
    _, twice = sf.from_module(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    kept = twice.keyed(sf.key(0), index)({}, x) != 0
    assert kept.float().mean() == pytest.approx(0.25, abs=0.1)
    assert torch.equal(apply.keyed(sf.key(0), index)(params, x), y)


DROPS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.25),
    "dropout2d": lambda x: F.dropout2d(x.view(64, 16, 8, 8), 0.25).reshape(64, -1),
    "attention": lambda x: F.scaled_dot_product_attention(
        torch.zeros(64, 32, 4), torch.zeros(64, 32, 4), torch.ones(64, 32, 4), dropout_p=0.25
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(DROPS)]
)
def test_means_are_kept(name: str) -> None:
    class Drop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return DROPS[name](x)

    _, apply = sf.from_module(Drop())
    y = apply.keyed(sf.key(0), torch.arange(64))({}, torch.ones(64, 1024))
    assert y.mean().item() == pytest.approx(1.0, abs=0.03)


def test_a_module_inside_a_module_draws_by_its_own_key() -> None:
    heads = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
    params, inner = sf.from_module(heads)
    x, keyed = torch.ones(3, 5, 4), (sf.key(0), torch.arange(3))
    _, outer = sf.from_module(Draws(lambda x: inner.keyed(*keyed)(params, x, x, x)[0]))
    assert torch.equal(outer({}, x), inner.keyed(*keyed)(params, x, x, x)[0])


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    _, apply = sf.from_module(nn.AlphaDropout(0.25))
    x = F.selu(torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)))
    y = apply.keyed(sf.key(0), torch.arange(64))({}, x)
    assert y.mean().item() == pytest.approx(x.mean().item(), abs=0.02)
    assert y.std().item() == pytest.approx(x.std().item(), abs=0.02)


def test_rates_of_0_and_1_and_eval_need_no_key() -> None:
    x = torch.ones(2, 3)
    for module in (nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.MultiheadAttention(3, 1, dropout=0.1).eval()):
        _, apply = sf.from_module(module)
        args = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
        out = apply(dict(module.named_parameters()), *args)
        assert torch.equal(out[0] if isinstance(out, tuple) else out, module(*args)[0] if args[1:] else module(*args))
    _, apply = sf.from_module(nn.Dropout(1.0))
    assert apply.keyed(sf.key(0), torch.arange(2))({}, x).sum() == 0


@pytest.mark.day("False")
@pytest.mark.parametrize("jit", [False, True])
def test_without_a_key_dropout_is_refused_and_both_remedies_work(jit: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))
    params, apply = sf.from_module(module)

    def step(loss: Callable[..., Tensor], **options: Any) -> None:
        made = sf.sharded_step(sf.jit(loss, backend="graph") if jit else loss, sf.optim.sgd(0.1), **options)
        made(made.init(params), torch.ones(4, 3))

    with pytest.raises(ValueError, match=r"dropout\(p=0.1\) in the forward of the module \(1\).*apply.keyed.*eval\(\)"):
        step(lambda p, x: apply(p, x).mean())
    if jit:
        return
    step(lambda p, x, key: apply.keyed(key, torch.arange(4))(p, x).mean(), key=sf.key(0))
    module.eval()
    step(lambda p, x: apply(p, x).mean())


def test_draws_that_belong_to_no_sample_are_refused() -> None:
    x, keyed = torch.ones(4, 6), (sf.key(0), torch.arange(2))
    _, apply = sf.from_module(nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"shape \(4, 6\), whose dim 0 is not the 2 row"):
        apply.keyed(*keyed)({}, x)
    module = nn.TransformerEncoderLayer(6, 2, 5, dropout=0.1)
    _, apply = sf.from_module(module)
    with pytest.raises(
        ValueError, match=r"TransformerEncoderLayer with batch_first=False; build it with batch_first=True"
    ):
        apply.keyed(*keyed)
    with pytest.raises(TypeError, match=r"index_B is int64 of shape \(2, 1\)|index_B"):
        apply.keyed(sf.key(0), torch.zeros(2, 1, dtype=torch.int64))


class Draws(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Any:
        return self.draw(x)


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: x * torch.rand(x.shape[0], 1),
    "bernoulli_": lambda x: x * x.new_empty(x.shape[0], 1).bernoulli_(0.5),
    "rand_like": lambda x: x + torch.rand_like(x),
    "normal": lambda x: x + torch.distributions.Normal(0.0, 1.0).sample((4,))[:, None],
    "multinomial": lambda x: torch.multinomial(x, 1),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "uniform_": lambda x: nn.Linear(3, 3)(x),  # torch passes the filled tensor by name
    "randperm": lambda x: x[torch.randperm(4)],
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(OTHERS)]
)
def test_other_draws_are_refused_by_name(name: str) -> None:
    _, apply = sf.from_module(Draws(OTHERS[name]))
    for f in (apply, apply.keyed(sf.key(0), torch.arange(4))):
        with pytest.raises(ValueError, match=rf"draws random numbers \({name}\).*pass the numbers\s+with the batch"):
            f({}, torch.ones(4, 3))


@pytest.mark.day("False")
@pytest.mark.parametrize("jit", [False, True])
def test_a_number_that_decides_whether_a_layer_is_skipped(jit: bool) -> None:
    """As in encoders: drawn for each layer, at any rate."""

    def skipping(rate: float) -> nn.Module:
        class Layers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
                self.gain = nn.Parameter(torch.ones(3))  # has a gradient even if all layers are skipped

            def forward(self, x: Tensor) -> Tensor:
                for layer in self.layers:
                    if torch.rand([]) < rate:
                        continue
                    x = layer(x)
                return (x * self.gain).mean()

        return Layers()

    for rate in (0.0,) if jit else (0.0, 1.0):
        params, apply = sf.from_module(skipping(rate))
        loss = sf.jit(apply, backend="graph") if jit else apply
        step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}))
        step(step.init(params), torch.ones(2, 3))
    params, apply = sf.from_module(skipping(0.5))
    with pytest.raises(ValueError, match=r"asks whether it < 0.5.*apply.keyed"):
        apply(params, torch.ones(2, 3))
    first, second = (apply.keyed(sf.key(n), torch.arange(2))(params, torch.ones(2, 3)) for n in (0, 1))
    assert torch.equal(first, apply.keyed(sf.key(0), torch.arange(2))(params, torch.ones(2, 3)))
    _, apply = sf.from_module(Draws(lambda x: x * torch.rand([])))
    with pytest.raises(ValueError, match=r"gives it to (__)?mul"):
        apply({}, torch.ones(2, 3))
    assert apply.keyed(sf.key(0), torch.arange(2))({}, torch.ones(2, 3)).unique().numel() == 1
    del second
