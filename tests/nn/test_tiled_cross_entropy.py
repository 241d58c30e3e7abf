"""Covers the loss in tiles: equal to that of all logits at once, its gradients, classes that are cut, and memory."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
from shardfn import memory, nn, optim
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

B, T, D, V = 3, 7, 5, 11


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in ((B, T, D), (V, D)))
    targets = torch.randint(V, (B, T), generator=g).masked_fill(torch.rand(B, T, generator=g) < 0.3, -100)
    return x, w, targets


@pytest.mark.parametrize(
    "tile",
    [
        1,
        pytest.param(4, marks=pytest.mark.nightly),
        pytest.param(7, marks=pytest.mark.nightly),
        21,
        pytest.param(1000, marks=pytest.mark.nightly),
    ],
)
def test_tiles_are_the_whole(tile: int) -> None:
    x, w, some = drawn()
    for targets in (some, torch.full_like(some, -100)):
        results = []
        for f in (
            lambda x, w, t=targets: nn.tiled_cross_entropy(x, w, t, tile=tile),
            lambda x, w, t=targets: nn.cross_entropy_sum(nn.linear(x, w), t),
        ):
            own = x.clone().requires_grad_(), w.clone().requires_grad_()
            total, count = f(*own)
            results.append([total.detach(), count, *torch.autograd.grad(3 * total, own)])
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_transforms() -> None:
    """`torch.func.grad` and `vmap` work; a second derivative is not supported, and is refused instead of 0."""
    x, w, targets = drawn()
    tiled = lambda x: nn.tiled_cross_entropy(x, w, targets, tile=4)[0]  # noqa: E731
    whole = lambda x: nn.cross_entropy_sum(nn.linear(x, w), targets)[0]  # noqa: E731
    many = torch.stack([x, 2 * x])
    for f in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
        given = x if f is torch.func.grad else many
        torch.testing.assert_close(f(tiled)(given), f(whole)(given), rtol=1e-12, atol=1e-12)
    own = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(tiled(own), own, create_graph=True)
    with pytest.raises(NotImplementedError, match="only a first derivative"):
        torch.autograd.grad(first.sum(), own)
    with torch.no_grad():
        torch.testing.assert_close(tiled(x), whole(x))


def test_sixteen_bits_are_summed_in_float32() -> None:
    x, w, targets = drawn(torch.bfloat16)
    own = x.clone().requires_grad_(), w.clone().requires_grad_()
    total = nn.tiled_cross_entropy(*own, targets, tile=2)[0]
    assert total.dtype == torch.float32
    exact = x.double().requires_grad_(), w.double().requires_grad_()
    want = torch.autograd.grad(nn.cross_entropy_sum(nn.linear(*exact), targets)[0], exact)
    for got, right in zip(torch.autograd.grad(total, own), want, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - right).abs().max() <= 1.6e-2 * right.abs().max()


def test_no_more_than_a_tile_of_logits_is_there() -> None:
    """The largest tensor that any op makes has a tile's logits, or is like x or w."""
    sizes = set[int]()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.update(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor))
            return out

    x, w = torch.randn(1, 512, 8), torch.randn(300, 8, requires_grad=True)
    targets = torch.randint(300, (1, 512))
    with Sizes():
        nn.tiled_cross_entropy(x, w, targets, tile=32)[0].backward()
    assert max(sizes) == 32 * 300
    with Sizes():
        nn.cross_entropy_sum(nn.linear(x, w), targets)[0].backward()
    assert max(sizes) == 512 * 300


SHAPE: dict[str, Any] = {"vocab_size": V, "num_layers": 1, "d_model": 12, "num_heads": 3, "max_len": 7, "d_ff": 10}


def parity(mesh: sf.Mesh, config: gpt.Config, plain: gpt.Config, jit: bool, **options: Any) -> None:
    torch.set_num_threads(1)
    loss = functools.partial(gpt.loss, config, axis="tp", **options)
    params = sf.core.tree_map(torch.Tensor.double, gpt.init(plain, sf.key(0)))
    batch = {"tokens": torch.randint(V, (2, 8), generator=torch.Generator().manual_seed(1))}
    assert_parity(
        sf.jit(loss, backend="graph") if jit else loss,
        optim.sgd(0.1),
        params,
        [batch],
        mesh=mesh,
        reference=functools.partial(gpt.loss, plain),
        specs=gpt.specs(config, tp="tp"),
        batch=sf.P("dp"),
        zero=sf.Zero(stage=3, persist_elements=0) if "dp" in mesh.shape else None,
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "cases",
    [
        [("tp", False, {"sequence": True})],
        pytest.param([("tp", True, {}), ("dp", False, {})], marks=pytest.mark.nightly),
    ],
    ids=["sequence", "captured and whole"],
)
@distributed(world=2)
def test_cut_classes_equal_one_device(cases: list[tuple[str, bool, dict[str, Any]]]) -> None:
    style: dict[str, Any] = {"position": "rope", "norm": "rms", "per_head": True}
    plain = gpt.Config(**SHAPE, **style)
    config = gpt.Config(**SHAPE, **style, loss_tile=4)
    for axis, jit, options in cases:
        parity(sf.make_mesh({axis: 2}), config, plain, jit=jit, **options)


def test_refusals() -> None:
    x, w, targets = drawn()
    with pytest.raises(ValueError, match="Each token must have a target"):
        nn.tiled_cross_entropy(x, w, targets[:, 1:])
    with pytest.raises(ValueError, match="tile must be 1 or more"):
        nn.tiled_cross_entropy(x, w, targets, tile=0)
    with pytest.raises(ValueError, match="loss_tile=0 must be at least 1"):
        gpt.Config(**SHAPE, loss_tile=0)


def test_two_tiles_of_logits_are_alive_at_most() -> None:
    """And two tensors like w, while the gradient of one tile is added."""
    for tile, size in ((64, 2 * 64 * 500 + 500 * 8), (1, 2 * 500 * 8 + 500)):
        x, w = torch.randn(1, 64, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
        targets = torch.randint(500, (1, 64))
        with memory.ledger() as book:
            nn.tiled_cross_entropy(x, w, targets, tile=tile)
        assert size <= book.peak("device") // 4 <= size + 2 * 64 * 8 + 64 * 20
