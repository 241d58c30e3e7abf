"""Covers dropout of attention: the same bits in any rectangle; an explicit mask as the oracle; any body and ranks."""

import functools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import kernels, nn
from shardfn.collectives import bind_mesh
from shardfn.core import fold_in, threefry2x32
from shardfn.testing import distributed

F64 = torch.empty((), dtype=torch.float64)


def told(key: Tensor, rate: float, index: list[int], heads: int, T: int, S: int) -> Tensor:
    """[B, H, T, S] by the definition, element by element."""
    drop, out = round(rate * 65536), torch.zeros(len(index), heads, T, S, dtype=torch.float64)
    for b, number in enumerate(index):
        for h in range(heads):
            own = fold_in(fold_in(key, number), h)
            for t in range(T):
                for s in range(S):
                    words = [int(w.item()) & 0xFFFFFFFF for w in threefry2x32(own, torch.tensor((t << 32) + s // 4))]
                    lane = words[s % 4 // 2] >> 16 * (s % 2) & 0xFFFF
                    out[b, h, t, s] = 65536 / (65536 - drop) * (lane >= drop)
    return out


def test_bits_are_those_of_the_definition_in_any_rectangle() -> None:
    mask = nn.PairDropout(sf.key(7), 0.3, torch.tensor([4, 0]))
    want = told(sf.key(7), 0.3, [4, 0], 3, 6, 11)
    whole = mask.scales((0, 6), (0, 11), 3, F64)
    assert whole is not None
    assert torch.equal(whole, want)
    for q, k, h in (
        ((2, 5), (1, 2), (1, 3)),
        ((0, 6), (3, 9), (2, 3)),
        ((1, 1), (4, 4), (0, 3)),
        ((5, 6), (8, 11), (1, 1)),
    ):
        part = mask.of_heads(0, 3).of_heads(*h).scales(q, k, h[1] - h[0], F64)
        assert part is not None
        assert torch.equal(part, want[:, h[0] : h[1], q[0] : q[1], k[0] : k[1]])
    one = nn.PairDropout(sf.key(7), 0.3, torch.tensor([0])).scales((0, 6), (0, 11), 3, F64)
    assert one is not None
    assert torch.equal(one, want[1:])


def test_the_rate_is_kept() -> None:
    scales = nn.PairDropout(sf.key(0), 0.1, torch.arange(8)).scales((0, 100), (0, 100), 4, F64)
    assert scales is not None
    kept = (scales != 0).double()
    assert abs(float(kept.mean()) - 0.9) < 0.003  # 5 standard deviations of 320,000 draws
    assert abs(float(scales.mean()) - 1) < 0.003
    assert nn.PairDropout(sf.key(0), 0.0, torch.arange(8)).scales((0, 2), (0, 2), 4, F64) is None


def formula(q: Tensor, k: Tensor, v: Tensor, mask: nn.Mask, scales: Tensor, slopes: Tensor | None = None) -> Tensor:
    """(scales softmax(s)) v in plain operations."""
    (T, H), (S, G) = q.shape[1:3], k.shape[1:3]
    k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    s = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    if slopes is not None:
        s = s - slopes[:, None, None] * (torch.arange(T)[:, None] - torch.arange(S)).abs()
    pairs = mask.pairs((0, T), (0, S)).expand(s.shape)
    p = torch.where(pairs, torch.where(pairs, s, -1e300).softmax(-1), 0.0)
    return torch.einsum("bhts,bshk->bthk", p * scales, v)


def case(seed: int) -> tuple[list[Tensor], Tensor, nn.Mask, nn.PairDropout, Tensor | None]:
    """q, k, v; a cotangent; a mask, dropout and slopes or none. Lengths and heads that no mesh divides."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    B, T, G, K = draw.randint(1, 3), draw.randint(1, 17), draw.randint(1, 3), draw.randint(1, 4)
    H = G * draw.randint(1, 3)
    block = draw.choice([1, 3, 8])
    blocks = (torch.rand(H, -(-T // block), -(-T // block)) < 0.5) | torch.eye(-(-T // block)).bool()
    mask = draw.choice(
        [
            nn.Full(),
            nn.Causal(),
            nn.Causal() & nn.Window(draw.randrange(T + 1)),
            nn.Causal() & nn.Segments(torch.randint(3, (B, T)).sort(-1).values),
            nn.BlockLayout(blocks, block, padded=True),
            nn.Causal() & nn.BlockLayout(1 - torch.eye(len(blocks[0])), block, padded=True, allow_empty=True),
        ]
    )
    numbers = torch.tensor(draw.sample(range(50), B))
    dropout = nn.PairDropout(sf.key(seed), draw.choice([0.1, 0.5, 0.9]), numbers)
    slopes = torch.rand(H, dtype=torch.float64) if mask.looks_back and draw.random() < 0.5 else None
    qkv = [torch.randn(B, T, n, K, dtype=torch.float64) for n in (H, G, G)]
    return qkv, torch.randn(B, T, H, K, dtype=torch.float64), mask, dropout, slopes


def differentiated(f: Any, qkv: list[Tensor], w: Tensor) -> list[Tensor]:
    own = [x.detach().clone().requires_grad_() for x in qkv]
    y = f(*own)
    return [y.detach(), *torch.autograd.grad((y * w).sum(), own)]


def wanted(seed: int) -> list[Tensor]:
    qkv, w, mask, dropout, slopes = case(seed)
    T, H = qkv[0].shape[1:3]
    scales = dropout.scales((0, T), (0, T), H, F64)
    assert scales is not None
    return differentiated(lambda q, k, v: formula(q, k, v, mask, scales, slopes), qkv, w)


def assert_close(got: list[Tensor], want: list[Tensor], what: str) -> None:
    for name, a, b in zip(("y", "dq", "dk", "dv"), got, want, strict=True):
        assert a.shape == b.shape, what
        if b.numel():
            assert (a - b).abs().max() <= 1e-12 * max(float(b.abs().max()), 1.0), f"{name} of {what}"


def one_rank(seed: int) -> None:
    qkv, w, mask, dropout, slopes = case(seed)
    want = wanted(seed)
    sparse = nn.BlockSparse(random.Random(seed).choice([None, 3, 16, 64]))
    for impl in (nn.Dense(), nn.Blockwise(1 + seed % 7), nn.Blockwise(), sparse, nn.Ring("sp", block=5)):
        attend = functools.partial(nn.attention, mask=mask & dropout, slopes_H=slopes, impl=impl)
        assert_close(differentiated(attend, qkv, w), want, f"{impl} {mask} seed {seed}")


@pytest.mark.nightly
def test_bodies_on_one_rank() -> None:
    torch.set_num_threads(1)
    for seed in range(1, 9):
        one_rank(seed)


@pytest.mark.nightly
def test_many_bodies_on_one_rank() -> None:
    torch.set_num_threads(1)
    for seed in range(12, 150):
        one_rank(seed)


def many_ranks(mesh: sf.Mesh, impls: Any, seeds: range) -> None:
    """Every rank draws the same, and takes its tokens, and along "dp" its samples, of the whole."""
    torch.set_num_threads(1)
    for seed in seeds:
        qkv, w, mask, dropout, slopes = case(seed)
        want, T = wanted(seed), w.shape[1]
        cut = not any(isinstance(m, nn.Segments) for m in mask.parts)
        for impl in impls(T):
            with bind_mesh(mesh):
                samples = slice(*nn.rank_range(len(w), "dp" if cut else None))
                at = torch.cat([torch.arange(a, b) for a, b in (*impl.rows(T), (0, 0))])
                own = [x[samples, at] for x in qkv]
                drop = nn.PairDropout(dropout.key, dropout.rate, dropout.index_B[samples])
                attend = functools.partial(nn.attention, mask=mask & drop, slopes_H=slopes, impl=impl)
                got = differentiated(attend, own, w[samples, at])
            assert_close(got, [x[samples, at] for x in want], f"{impl} {mask} seed {seed}")


def line(T: int) -> list[nn.AttentionBackend]:
    """Heads and tokens are dealt unevenly, and some ranks get no heads or tokens."""
    ulysses = [nn.Ulysses("sp", T, inner) for inner in (nn.Dense(), nn.Blockwise(6), nn.BlockSparse(6))]
    return [*ulysses, nn.Ring("sp", T, block=5), nn.Ring("sp", T, zigzag=True, block=4)]


@pytest.mark.nightly
@distributed(world=3)
def test_bodies_on_a_line() -> None:
    many_ranks(sf.make_mesh({"sp": 3}), line, range(2, 5))


def both(T: int) -> list[nn.AttentionBackend]:
    return [nn.Ulysses("u", T, nn.Ring("r", zigzag=True, block=4))]


@pytest.mark.nightly
@distributed(world=4)
def test_bodies_on_grids_and_samples_over_dp() -> None:
    many_ranks(sf.make_mesh({"r": 2, "u": 2}), both, range(4, 6))
    many_ranks(sf.make_mesh({"dp": 2, "sp": 2}), line, range(7, 9))


@pytest.mark.nightly
@distributed(world=[2, 3, 6], timeout=600)
def test_many_bodies_on_ranks(world: int) -> None:
    many_ranks(sf.make_mesh({"sp": world}), line, range(10, 40))
    if world == 6:
        many_ranks(sf.make_mesh({"dp": 2, "sp": 3}), line, range(40, 50))


@pytest.mark.day("BlockSparse(block=3)")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
@pytest.mark.parametrize("impl", [nn.Blockwise(4), nn.BlockSparse(3)], ids=str)
def test_blocks_are_closed_under_transforms(impl: nn.AttentionBackend) -> None:
    """vmap, jvp, grad of grad; the formula is the reference."""
    q, k, v, *tangents = (torch.randn(2, 6, n, 2, dtype=torch.float64) for n in (2, 1, 1) * 2)
    drop = nn.PairDropout(sf.key(2), 0.4, torch.tensor([3, 8]))
    scales = drop.scales((0, 6), (0, 6), 2, F64)
    assert scales is not None

    def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.attention(q, k, v, mask=nn.Causal() & drop, impl=impl)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return formula(q, k, v, nn.Causal(), scales)

    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close(*(torch.func.jvp(f, (q, k, v), tuple(tangents)) for f in (blocks, plain)))
    many = torch.stack([q, 2 * q, -q])
    close(*(torch.func.vmap(torch.func.grad(lambda q, f=f: f(q, k, v).square().sum()))(many) for f in (blocks, plain)))
    close(
        *(
            torch.func.grad(lambda q, f=f: torch.func.grad(lambda q: f(q, k, v).pow(3).sum())(q).square().sum())(q)
            for f in (blocks, plain)
        )
    )
    keys = sf.core.split(sf.key(1), 3)
    numbers = torch.tensor([3, 8])

    def of_key(key: Tensor) -> Tensor:
        mask = nn.Causal() & nn.PairDropout(key, 0.4, numbers)
        return nn.attention(q, k, v, mask=mask, impl=impl)

    close(torch.func.vmap(of_key)(keys), torch.stack([of_key(key) for key in keys]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    """Probabilities are dropped and summed in float32: Dense and Blockwise agree to the rounding of the result."""
    q = torch.randn(2, 20, 2, 8).to(dtype)
    mask = nn.Causal() & nn.PairDropout(sf.key(0), 0.2, torch.arange(2))
    dense = nn.attention(q, q, q, mask=mask)
    for impl in (nn.Blockwise(8), nn.BlockSparse(8)):
        y = nn.attention(q, q, q, mask=mask, impl=impl)
        assert y.dtype == dense.dtype == dtype
        assert (y.float() - dense.float()).abs().max() <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("which", ["reference", "native"])
def test_kernels_keep_the_pairs_of_the_mask(which: str) -> None:
    """Scores are equal, and values identify keys, so y shows the kept pairs. In any tile, bit for bit."""
    T = 21
    drop = nn.PairDropout(sf.key(3), 0.3, torch.tensor([7, 40]), first_head=2)
    scales = drop.scales((0, T), (0, T), 4, torch.empty(()))
    q, v = torch.zeros(2, T, 4, T), torch.eye(T)[None, :, None].expand(2, T, 2, T)
    assert scales is not None
    with kernels.implemented_by(which):
        for block in (4, 7, 16):
            y = nn.attention(q, v, v, mask=nn.Full() & drop, impl=nn.BlockSparse(block))
            assert torch.equal(y.transpose(1, 2) != 0, scales != 0)


def test_several_dropouts_and_masks_without_data() -> None:
    """Masks that a kernel does not support are not ignored: torch's products compute them, or they are refused."""
    q = torch.randn(2, 9, 2, 3, dtype=torch.float64)
    one, two = (nn.PairDropout(sf.key(n), 0.3, torch.arange(2)) for n in (1, 2))
    mask = nn.Causal() & one & two
    torch.testing.assert_close(nn.attention(q, q, q, mask=mask, impl=nn.Blockwise(4)), nn.attention(q, q, q, mask=mask))
    with pytest.raises(ValueError, match=r"supports one PairDropout, but the mask has several. Use Blockwise\(\)"):
        nn.attention(q, q, q, mask=mask, impl=nn.BlockSparse())

    class Halved(nn.Causal):
        def scales(self, queries: Any, keys: Any, heads: int, like: Tensor) -> Tensor:
            return like.new_full((queries[1] - queries[0], keys[1] - keys[0]), 0.5)

    half = nn.attention(q, q, q, mask=Halved(), impl=nn.Blockwise(4))
    torch.testing.assert_close(half, nn.attention(q, q, q) / 2)
    with pytest.raises(ValueError, match="does not know the data of Halved"):
        nn.attention(q, q, q, mask=Halved(), impl=nn.BlockSparse())


def test_refusals() -> None:
    q = torch.randn(2, 5, 2, 3)
    mask = nn.Causal() & nn.PairDropout(sf.key(0), 0.25, torch.arange(2))
    with pytest.raises(ValueError, match=r"numbers 2 samples, and the queries are of 1\. index_B must"):
        nn.attention(q[:1], q[:1], q[:1], mask=mask)
    with pytest.raises(ValueError, match=r"PairDropout: the rate must be .*, got rate=1\."):
        nn.PairDropout(sf.key(0), 1, torch.arange(2))
