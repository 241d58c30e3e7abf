"""Covers attention over the tiles of a layout: every implementation equals the whole formula, with gradients."""

import importlib
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import kernels, memory
from shardfn.core import fold_in, threefry2x32
from shardfn.kernels import Dropped, Given, Tiles, _build, block_sparse_attention, block_sparse_attention_backward

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def drawn(seed: int, dtype: torch.dtype = torch.float32, small: bool = False) -> tuple[Any, ...]:
    """Queries, keys, values; tiles; their pairs [L, T, S]; `Given`; block and scale."""
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    block = draw.choice([4, 16] if small else [5, 16, 17, 32, 64])
    B, G, R, K = (
        draw.choice([1, 2]),
        draw.choice([1, 2]),
        draw.choice([1, 3]),
        draw.choice([8, 16] if small else [1, 12, 32, 40]),
    )
    T = S = draw.randrange(1, (3 if small else 5) * block)
    if draw.random() < 0.3:
        S = draw.randrange(1, 4 * block)
    H, N, M = G * R, -(-T // block), -(-S // block)
    L = draw.choice([1, H])
    on = torch.rand(L, N, M, generator=g) < draw.choice([0.3, 0.7, 1.0])
    patterns = torch.rand(draw.randrange(3), block, block, generator=g) < 0.6
    kinds = torch.randint(-1, len(patterns), (int(on.sum()),), generator=g, dtype=torch.int32)
    starts = torch.cat([torch.zeros(1), on.sum(-1).flatten().cumsum(0)]).int()
    starts = torch.stack([starts[layout * N : (layout + 1) * N + 1] for layout in range(L)])
    tiles = Tiles(starts, on.nonzero()[:, 2].int(), kinds, patterns.byte())
    pairs = torch.zeros(L, N, block, M, block, dtype=torch.bool)
    for at, (layout, i, j) in enumerate(on.nonzero().tolist()):
        pairs[layout, i, :, j] = True if kinds[at] < 0 else patterns[kinds[at]]
    pairs = pairs.view(L, N * block, M * block)[:, :T, :S]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    some = draw.random() < 0.4
    ids_q, ids_k = (torch.randint(2, (B, n), generator=g) if some else None for n in (T, S))
    added = table = None
    if draw.random() < 0.5:
        added = normal(*(draw.choice([1, n]) for n in (B, H, T, S)))
        added = added.masked_fill(torch.rand(added.shape, generator=g) < 0.1, -math.inf)
    if draw.random() < 0.5:
        table = normal(draw.choice([1, H]), T + S - 1)
    dropped = None
    if draw.random() < 0.5:
        keys = torch.randint(1 << 32, (B, 2), generator=g)
        dropped = Dropped(keys, draw.choice([1, 9000, 40000]), draw.randrange(9), draw.randrange(9), 5)
    return (
        (normal(B, T, H, K), normal(B, S, G, K), normal(B, S, G, K)),
        tiles,
        pairs,
        Given(ids_q, ids_k, added, table, dropped),
        block,
        K**-0.5,
    )


def multiplied(dropped: Dropped | None, sizes: tuple[int, int, int]) -> Tensor:
    """[B, H, T, S] by the cipher of `core`."""
    H, T, S = sizes
    if dropped is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.float64)
    keys_BH = fold_in(dropped.keys[:, None], torch.arange(H) + dropped.head)
    t, s = torch.arange(T)[:, None] + dropped.query, torch.arange(S) + dropped.key
    first, second = (w.long() & 0xFFFFFFFF for w in threefry2x32(keys_BH[:, :, None, None], (t << 32) + s // 4))
    number = torch.where(s % 4 < 2, first, second) >> 16 * (s % 2) & 0xFFFF
    return (number >= dropped.level).double() * (65536 / (65536 - dropped.level))


def plain(qkv: Any, pairs: Tensor, given: Given, scale: float) -> tuple[Tensor, Tensor]:
    """The formula, over all pairs."""
    q, k, v = (x.double() for x in qkv)
    (T, H), (S, G) = q.shape[1:3], k.shape[1:3]
    k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    s = torch.einsum("bthk,bshk->bhts", q, k) * scale
    if given.added is not None:
        s = s + given.added.double()
    if given.table is not None:
        at = torch.arange(S) - torch.arange(T)[:, None] + T - 1
        s = s + given.table.double()[:, at]
    if given.ids_q is not None and given.ids_k is not None:
        pairs = pairs & (given.ids_q[:, None, :, None] == given.ids_k[:, None, None])
    s = s.masked_fill(~pairs, -math.inf)
    top = s.detach().amax(-1, keepdim=True)
    e = (s - top.masked_fill(top == -math.inf, 0.0)).exp()
    total = e.sum(-1, keepdim=True)
    p = e / total.masked_fill(total == 0, 1.0) * multiplied(given.dropped, (H, T, S))
    y = torch.einsum("bhts,bshk->bthk", p, v)
    return y, s.detach().logsumexp(-1)


def compare(seed: int, dtype: torch.dtype, small: bool = False) -> None:
    qkv, tiles, pairs, given, block, scale = drawn(seed, dtype, small)
    leaves = [x.double().requires_grad_() for x in qkv]
    want, want_lse = plain(leaves, pairs, given, scale)
    dy = torch.randn(want.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    grads = torch.autograd.grad(want, leaves, dy.double())
    y, lse = block_sparse_attention(qkv[0], qkv[1], qkv[2], tiles, given, block=block, scale=scale)
    assert y.dtype == dtype and y.is_contiguous()
    got = block_sparse_attention_backward(dy, qkv, y, lse, tiles, given, block=block, scale=scale)
    near: dict[str, Any] = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(lse.double(), want_lse.detach(), **near)
    for a, b in zip((y, *got), (want.detach(), *grads), strict=True):
        torch.testing.assert_close(a.double(), b, **near)
    empty = want_lse == -math.inf
    assert not y.transpose(1, 2)[empty].any() and not got[0].transpose(1, 2)[empty].any()


@pytest.mark.day("native-torch.float32")
@pytest.mark.parametrize(
    "dtype", [pytest.param(x, marks=() if x == torch.float32 else pytest.mark.nightly) for x in TOLERANCE], ids=str
)
@pytest.mark.parametrize("which", ["reference", "native"])
def test_implementations_are_the_formula(which: str, dtype: torch.dtype) -> None:
    with kernels.implemented_by(which):
        for seed in range(6):
            compare(seed, dtype)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "dtype", [pytest.param(x, marks=() if x == torch.float32 else pytest.mark.nightly) for x in TOLERANCE], ids=str
)
@pytest.mark.parametrize("which", ["reference", "native"])
def test_implementations_are_the_formula_in_many_cases(which: str, dtype: torch.dtype) -> None:
    with kernels.implemented_by(which):
        for seed in range(100, 130):
            compare(seed, dtype)


@pytest.mark.parametrize("generation", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_older_processors_compute_the_same(generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "NEWEST", generation)
    with kernels.implemented_by("native"):
        for seed in range(12, 16):
            compare(seed, torch.float32)
        compare(20, torch.float64)


def triton_is_the_formula(monkeypatch: pytest.MonkeyPatch, seeds: range, dtype: torch.dtype, small: bool) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with kernels.implemented_by("triton"):
        for seed in seeds:
            compare(seed, dtype, small)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.float32, torch.bfloat16],
    ids=str,
)
def test_triton_is_the_formula(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_is_the_formula(monkeypatch, range(31, 33), dtype, small=True)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_triton_is_the_formula_in_many_cases(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tiles of more rows than one program holds."""
    triton_is_the_formula(monkeypatch, range(40, 46), dtype, small=True)
    module = importlib.import_module("shardfn.kernels._block_sparse_attention_triton")
    monkeypatch.setattr(module, "MOST", 16)
    triton_is_the_formula(monkeypatch, range(50, 52), dtype, small=False)


@pytest.mark.parametrize(
    "which",
    ["reference", pytest.param("native", marks=pytest.mark.nightly), pytest.param("triton", marks=pytest.mark.nightly)],
)
def test_the_same_elements_are_dropped(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities of equal scores, and values that identify their pair: y shows the kept ones."""
    if which == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    cases = (5, (1, 1 << 20, 7)), (16, (0, 0, 0)), (17, (3, 5, 2))
    for block, first in cases[: 1 if which == "triton" else None]:
        T = 2 * block + 3
        starts = torch.arange(4) * 3
        tiles = Tiles(
            starts[None].int(),
            torch.arange(3).repeat(3).int(),
            -torch.ones(9).int(),
            torch.ones(0, block, block).byte(),
        )
        dropped = Dropped(torch.tensor([[1 << 31, 5], [7, (1 << 32) - 1]]), 20000, *first)
        q, v = torch.zeros(2, T, 2, T), torch.eye(T)[None, :, None].expand(2, -1, 1, -1).contiguous()
        with kernels.implemented_by(which):
            y, _ = block_sparse_attention(q, v, v, tiles, Given(dropped=dropped), block=block, scale=1.0)
        want = multiplied(dropped, (2, T, T)).transpose(1, 2)
        assert torch.equal(y != 0, want != 0)
        torch.testing.assert_close(y * T, want.float(), rtol=1e-5, atol=0)


def test_a_ledger_counts_the_memory_of_the_kernel() -> None:
    """At the peak, forward and backward, beside arguments and results; with the fp32 copies of 16-bit values."""
    if not kernels.is_native("block_sparse_attention"):
        pytest.skip("no C++ compiler")
    for dtype in (torch.float32, torch.bfloat16):
        qkv, tiles, _, given, block, scale = drawn(3, dtype)
        dy, how = torch.randn_like(qkv[0]), {"block": block, "scale": scale}
        rest = (*tiles, *given[:4], None, 0, 0, 0, 0, block, scale)
        with memory.ledger() as book:
            y, lse = block_sparse_attention(qkv[0], qkv[1], qkv[2], tiles, given._replace(dropped=None), **how)
        op = torch.ops.shardfn_kernels.block_sparse_attention.default
        assert book.peak("device") - y.nbytes - lse.nbytes == kernels.scratch_bytes(op, (*qkv, *rest)) > 0
        assert book.live("device") == y.nbytes + lse.nbytes
        with memory.ledger() as book:
            grads = block_sparse_attention_backward(
                dy, qkv, y, lse, tiles, given._replace(dropped=None), block=block, scale=scale
            )
        op = torch.ops.shardfn_kernels.block_sparse_attention_backward.default
        told = kernels.scratch_bytes(op, (dy, *qkv, y, lse, *rest))
        assert book.peak("device") - sum(x.nbytes for x in grads) == told > 2 * sum(x.nbytes for x in qkv[1:])
