"""Covers tiles of a long dim: values and gradients of the whole, gathers, memory, and refusals."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import memory, nn, optim
from shardfn.core import tree_leaves, tree_map
from shardfn.models import gpt
from shardfn.testing import RTOL, assert_parity, distributed
from shardfn.transforms import policies

B, T, D, F = 2, 7, 5, 9


def feed(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return nn.swiglu(nn.rms_norm(x, p["norm"]), p["gate"], p["up"], p["down"])


def total(w: Tensor, x: Tensor, targets: Tensor, *, scale: Tensor) -> sf.WeightedMean:
    loss, count = nn.cross_entropy_sum(nn.linear(x * scale, w), targets)
    return sf.WeightedMean(loss, count)


def drawn(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(s, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return {"norm": draw(D), "gate": draw(F, D), "up": draw(F, D), "down": draw(D, F)}, draw(B, T, D)


def results(f: Callable[..., Any], *args: Any, **whole: Any) -> list[Tensor]:
    """Values, and gradients of a sum of them whose weights depend on the position."""
    own = tree_map(lambda x: x.clone().requires_grad_() if x.is_floating_point() else x, args)
    out = tree_leaves(f(*own, **whole))
    told = [(x * (1 + torch.arange(x.numel()).view(x.shape) % 3)).sum() for x in out if x.requires_grad]
    seen = torch.stack(told).sum()
    given = [x for x in tree_leaves(own) if x.requires_grad]
    return [*(x.detach() for x in out), *torch.autograd.grad(seen, given)]


def near(got: Any, want: Any, rtol: float) -> None:
    """Equal up to the tolerance of the dtype, relative to the largest element of a leaf."""
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= rtol * b.abs().max()


@pytest.mark.parametrize(
    "tiles",
    [
        None,
        pytest.param(1, marks=pytest.mark.nightly),
        pytest.param(3, marks=pytest.mark.nightly),
        7,
        pytest.param(9, marks=pytest.mark.nightly),
    ],
)
def test_tiles_are_the_whole(tiles: int | None) -> None:
    p, x = drawn()
    close = functools.partial(near, rtol=RTOL[torch.float64])
    close(results(sf.tiled(feed, 1, tiles=tiles), p, x), results(feed, p, x))
    close(results(sf.tiled(feed, 0, tiles=tiles), p, x), results(feed, p, x))
    targets = torch.randint(D, (B, T), generator=torch.Generator().manual_seed(1))
    targets[0, 2:6] = -100  # tiles without a target that counts
    given, whole = (p["gate"][:D].contiguous(), x, targets), {"scale": torch.arange(D).double()}
    close(results(sf.tiled(total, 1, tiles=tiles), *given, **whole), results(total, *given, **whole))


@pytest.mark.day("dtype1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_summed_in_float32(dtype: torch.dtype) -> None:
    """64 times half of the dtype's epsilon, and then 1: each would be lost beside the 1."""
    w, small = torch.ones(1, dtype=dtype), torch.finfo(dtype).eps / 2
    x = torch.full((1, 65, 1), small).to(dtype)
    x[0, -1] = 1.0  # its gradient comes first
    mapped = sf.tiled(lambda w, x: w * x, 1, tiles=65)

    def of_w(w: Tensor) -> Tensor:
        return mapped(w, x).float().sum()

    want = torch.tensor([1 + 64 * small]).to(dtype)
    own = w.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(of_w(own), own)[0], want)
    assert torch.equal(torch.func.grad(of_w)(w), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's own decompositions
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_transforms_go_through(dtype: torch.dtype) -> None:
    p, x = drawn(dtype)
    several, close = torch.stack([x, 2 * x]), functools.partial(near, rtol=RTOL[dtype])
    for f in (
        lambda g: torch.func.grad(lambda p: g(p, x).sum())(p),
        lambda g: torch.func.vmap(lambda x: g(p, x))(several),
        lambda g: torch.func.vmap(torch.func.grad(lambda x: g(p, x).sum()))(several),
        lambda g: torch.func.jvp(lambda p: g(p, x), (p,), (p,)),
        lambda g: results(sf.remat(g), p, x),
    ):
        close(f(sf.tiled(feed, 1, tiles=3)), f(feed))


def test_a_tile_is_there_and_not_the_whole() -> None:
    """Bytes alive at once: with tiles the F features of one tile, forward and backward, beside tensors like x."""
    N, wide = 512, 64

    def peak(f: Callable[..., Any]) -> int:
        g = torch.Generator().manual_seed(0)
        p = [torch.randn(s, generator=g) for s in ((wide, 4), (wide, 4), (4, wide))]
        w, x = [v.requires_grad_() for v in p], torch.randn(1, N, 4, generator=g).requires_grad_()
        with memory.ledger() as book:
            torch.autograd.grad(f(w, x).sum(), [*w, x])
        return book.peak("device")

    whole, like_x = peak(lambda w, x: nn.swiglu(x, *w)), N * 4 * 4
    in_tiles = peak(sf.tiled(lambda w, x: nn.swiglu(x, *w), 1, tiles=32))
    assert whole > 4 * N * wide * 4
    assert in_tiles < 6 * like_x + 8 * (N // 32) * wide * 4 + 8 * 4 * wide * 4


SHAPE: dict[str, Any] = {"vocab_size": 11, "num_layers": 3, "d_model": 8, "num_heads": 2, "max_len": 7, "d_ff": 10}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False, "per_head": True}


def step_of(mesh: sf.Mesh, *, tiles: int | None, jit: bool, remat: bool, stacked: bool, axis: Any = None) -> Any:
    config = gpt.Config(**SHAPE, **LLAMA, stacked=stacked, loss_tile=4 if tiles else None)
    options: dict[str, Any] = {} if tiles is None else {"tile": functools.partial(sf.tiled, tiles=tiles)}
    loss = functools.partial(gpt.loss, config, axis=axis, wrap=sf.remat if remat else lambda f: f, **options)
    return config, sf.jit(loss, backend="graph") if jit else loss


def parity(mesh: sf.Mesh, **how: Any) -> None:
    torch.set_num_threads(1)
    tp = "tp" if "tp" in mesh.shape else None
    config, loss = step_of(mesh, axis=tp, **how)
    assert_parity(
        loss,
        optim.adamw(1e-2),
        tree_map(torch.Tensor.double, gpt.init(config, sf.key(0))),
        [{"tokens": torch.randint(11, (6, 8), generator=torch.Generator().manual_seed(n))} for n in range(2)],
        mesh=mesh,
        reference=functools.partial(gpt.loss, gpt.Config(**SHAPE, **LLAMA, stacked=how["stacked"])),
        specs=gpt.specs(config, tp=tp),
        batch=sf.P("dp"),
        zero=sf.Zero(stage=3, persist_elements=0) if "dp" in mesh.shape else None,
    )


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 3])
def test_a_sharded_step_is_that_of_one_device(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    parity(mesh, tiles=3, jit=False, remat=True, stacked=True)


@pytest.mark.nightly
@distributed(world=[1, 3])
def test_a_captured_step_is_that_of_one_device(world: int) -> None:
    parity(sf.make_mesh({"dp": world}), tiles=3, jit=True, remat=False, stacked=True)


@pytest.mark.nightly
@distributed(world=2)
def test_features_may_be_cut() -> None:
    parity(sf.make_mesh({"tp": 2}), tiles=9, jit=False, remat=False, stacked=False)


@pytest.mark.nightly
@distributed(world=2)
def test_parameters_come_once_for_all_tiles() -> None:
    """A tiled step sends the same as one with `remat`; only the recomputation gathers again."""
    mesh = sf.make_mesh({"dp": 2})
    sent = {}
    for tiles in (1, 5):
        for window in (0, 1 << 20):
            config, loss = step_of(mesh, tiles=tiles, jit=False, remat=False, stacked=False)
            zero = sf.Zero(stage=3, persist_elements=0, pace=sf.Pace(prefetch_bytes=window))
            step = sf.sharded_step(
                loss, optim.sgd(0.1), mesh=mesh, specs=gpt.specs(config), batch=sf.P("dp"), zero=zero
            )
            state = step.init(gpt.init(config, sf.key(0)))
            batch = {"tokens": torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(mesh.rank))}
            state, _ = step(state, batch)
            with sf.count_traffic() as traffic:
                step(state, batch)
            sent[tiles, window] = traffic.calls, traffic.bytes
    assert sent[5, 0] == sent[1, 0]
    assert sent[5, 1 << 20] == sent[1, 1 << 20]


@pytest.mark.nightly
def test_tiles_and_values_on_the_host() -> None:
    """Blocks whose inputs wait on the host, with tiles inside, and a loss in tiles: the bits of those without."""
    config = gpt.Config(**{**SHAPE, "d_model": 64, "max_len": 64}, **LLAMA, attention=nn.Blockwise(16), loss_tile=16)
    params = tree_map(torch.Tensor.double, gpt.init(config, sf.key(0)))
    batch = {"tokens": torch.randint(11, (2, 65), generator=torch.Generator().manual_seed(0))}
    loss = functools.partial(gpt.loss, config, wrap=sf.remat, tile=functools.partial(sf.tiled, tiles=5))

    def gradients(f: Callable[..., Any]) -> tuple[list[Tensor], memory.Ledger]:
        own = tree_map(lambda x: x.clone().requires_grad_(), params)
        with memory.ledger() as book:
            out = torch.autograd.grad(f(own, batch), tree_leaves(own))
        return list(out), book

    want, _ = gradients(loss)
    got, book = gradients(sf.offload(loss, policies.offload_larger_than(4096), window=1 << 16))
    assert all(map(torch.equal, got, want))
    like_x = 2 * 64 * 64 * 8
    assert book.moved("device", "host") >= config.num_layers * like_x
    plain = gpt.Config(**{**SHAPE, "d_model": 64, "max_len": 64}, **LLAMA)
    dense, _ = gradients(functools.partial(gpt.loss, plain))
    near(got, dense, RTOL[torch.float64])


def test_refusals() -> None:
    p, x = drawn()
    with pytest.raises(ValueError, match=r"tiled: dim must be 0 or more.*got dim=-1"):
        sf.tiled(feed, -1)
    with pytest.raises(ValueError, match=r"tiles must be at least 1, got dim=1 and tiles=0"):
        sf.tiled(feed, 1, tiles=0)
    with pytest.raises(ValueError, match=r"xs\[1\] has shape \(3,\)(.|\n)*|by name"):
        sf.tiled(lambda p, x, k: x, 1)(p, x, torch.zeros(3))
    with pytest.raises(ValueError, match=r"(?s)xs\[0\] has 7.*xs\[1\] has 6 of shape \(2, 6\)"):
        sf.tiled(lambda p, x, y: x, 1)(p, x, torch.zeros(2, 6))
    with pytest.raises(ValueError, match="no tensor to cut"):
        sf.tiled(lambda p: p, 1)(p)
    with pytest.raises(ValueError, match=r"(?s)result\[1\] of a tile of 3 is \(2, 4\).*result\[1\] of a tile of 2"):
        sf.tiled(lambda p, x: (x, torch.zeros(2, 4)), 1, tiles=3)(p, x)
    config = gpt.Config(**SHAPE)
    with pytest.raises(ValueError, match="Drop one"):
        gpt.loss(
            config, gpt.init(config, sf.key(0)), {"tokens": torch.zeros(1, 4).long()}, sequence=True, tile=sf.tiled
        )
