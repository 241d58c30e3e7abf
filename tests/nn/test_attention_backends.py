"""Covers the bodies of attention: values and gradients of the formula, any mask and sizes, on one rank and many."""

import dataclasses
import functools
import itertools
import math
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import core, nn
from shardfn.collectives import bind_mesh
from shardfn.nn import _attention_backends, _online, _parallel, _ring
from shardfn.testing import distributed

with warnings.catch_warnings():  # ranks import this file, and torch's decompositions for jvp warn of torch's own code
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp

TOL = {torch.float64: 1e-12, torch.float32: 1e-5}


def plain(
    q: Tensor, k: Tensor, v: Tensor, mask: nn.Mask, slopes: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """The definition, without the library's arithmetic."""
    T, H, K = q.shape[1:]
    S, G = k.shape[1:3]
    k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    s = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    if slopes is not None:
        s = s - slopes[:, None, None] * (torch.arange(T)[:, None] - torch.arange(S)).abs()
    bias = mask.bias((0, T), (0, S))
    s = s if bias is None else s + bias
    pairs = mask.pairs((0, T), (0, S)).expand(s.shape)
    p = torch.where(pairs, s, -1e300 if s.dtype == torch.float64 else -1e30).softmax(-1)
    p = torch.where(pairs, p, 0.0)
    return torch.einsum("bhts,bshk->bthk", p, v)


def drawn_numbers(draw: random.Random, B: int, H: int, T: int) -> Tensor:
    """Numbers to be added to scores, some of them -inf."""
    lead = draw.choice([(), (1,), (H,), (B, 1), (1, H), (B, H)])
    numbers = torch.randn(*lead, draw.choice([1, T]), draw.choice([1, T]), dtype=torch.float64)
    return numbers.masked_fill(torch.rand(numbers.shape) < 0.1, -math.inf)


def drawn_mask(draw: random.Random, B: int, T: int, H: int) -> nn.Mask:
    """A mask, often one that leaves rows without keys."""
    block = draw.choice([1, 3, 16])
    num = -(-T // block)
    layout = torch.rand(*draw.choice([(), (H,)]), num, num) < 0.3
    choices: list[nn.Mask] = [
        nn.Full(),
        nn.Causal(),
        nn.Window(draw.randrange(T + 1), draw.choice([0, 2, None])),
        nn.Prefix(draw.randrange(T + 1)),
        nn.Segments(torch.randint(3, (B, T)).sort(-1).values),
        nn.BlockLayout(layout | torch.eye(num).bool(), block, padded=True),
        nn.BlockLayout(layout, block, padded=True, allow_empty=True),
        nn.Keys(torch.rand(B, T) < 0.8),
        nn.Added(drawn_numbers(draw, B, H, T)),
        nn.Relative(torch.randn(draw.choice([1, H]), 2 * draw.randint(0, T) + 1, dtype=torch.float64)),
    ]
    mask = draw.choice(choices)
    for other in draw.sample(choices, draw.randrange(3)):
        mask = mask & other
    if draw.random() < 0.4 and num > 1:  # blocks off the diagonal alone: rows without keys
        mask = mask & nn.Causal() & nn.BlockLayout(1 - torch.eye(num), block, padded=True)
    return mask


def case(draw: random.Random, longest: int) -> tuple[list[Tensor], Tensor, nn.Mask, Tensor | None]:
    """q, k, v; a cotangent; a mask; slopes or none."""
    torch.manual_seed(draw.randrange(1 << 30))
    B, T, G, K = draw.randint(1, 3), draw.randint(1, longest), draw.randint(1, 4), draw.randint(1, 5)
    H = G * draw.randint(1, 9 // G)
    qkv = [torch.randn(B, T, n, K, dtype=torch.float64) for n in (H, G, G)]
    mask = drawn_mask(draw, B, T, H)
    slopes = torch.rand(H, dtype=torch.float64) if mask.looks_back and draw.random() < 0.5 else None
    return qkv, torch.randn(B, T, H, K, dtype=torch.float64), mask, slopes


def differentiated(
    qkv: list[Tensor], w: Tensor, mask: nn.Mask, slopes: Tensor | None, impl: Any = None, softcap: float | None = None
) -> list[Tensor]:
    """y, dq, dk and dv of a body, or of the plain formula."""
    own = [x.detach().clone().requires_grad_() for x in qkv]
    q, k, v = own
    if impl is None:
        y = plain(q, k, v, mask, slopes, softcap)
    else:
        y = nn.attention(q, k, v, mask=mask, slopes_H=slopes, softcap=softcap, impl=impl)
    return [y.detach(), *torch.autograd.grad((y * w).sum(), own)]


def assert_close(got: list[Tensor], want: list[Tensor], told: str = "") -> None:
    for name, a, b in zip(("y", "dq", "dk", "dv"), got, want, strict=True):
        assert a.shape == b.shape, told
        if b.numel():
            # Relative to the largest element; 1 where all of them are zeros.
            error, size = (a - b).abs().max(), max(float(b.abs().max()), 1.0)
            assert error <= TOL[b.dtype] * size, f"{name} is off by {error:.3g} of {size:.3g}: {told}"


def one_rank(seed: int, longest: int) -> None:
    draw = random.Random(seed)
    qkv, w, mask, slopes = case(draw, longest)
    softcap = draw.choice([None, None, 0.7])
    want = differentiated(qkv, w, mask, slopes, softcap=softcap)
    blocks = nn.Blockwise(draw.choice([1, 7, 32, 512]) if longest < 50 else 64)
    for impl in (nn.Dense(), blocks, nn.BlockSparse(draw.choice([None, 3, 16, 64])), nn.Ring("sp")):
        if softcap is not None and isinstance(impl, nn.BlockSparse):
            with pytest.raises(ValueError, match=r"BlockSparse\(\) has no softcap=0.7"):
                differentiated(qkv, w, mask, slopes, impl, softcap)
            continue
        got = differentiated(qkv, w, mask, slopes, impl, softcap)
        assert_close(got, want, f"{impl} {mask} softcap={softcap} seed {seed}")


def test_bodies_on_one_rank() -> None:
    torch.set_num_threads(1)
    for seed in range(20):
        one_rank(seed, 40)
    one_rank(1000, 200)


def test_rows_without_keys_are_zeros() -> None:
    """The first two rows see no key, and do not affect the gradients."""
    qkv = [torch.randn(1, 4, 2, 3, dtype=torch.float64) for _ in range(3)]
    mask = nn.Causal() & nn.BlockLayout([[0, 1], [1, 0]], 2)
    for impl in (nn.Dense(), nn.Blockwise(2), nn.Blockwise(3), nn.BlockSparse(), nn.BlockSparse(3)):
        y, dq, dk, dv = differentiated(qkv, torch.ones(1, 4, 2, 3, dtype=torch.float64), mask, None, impl)
        assert not y[:, :2].any()
        assert not dq[:, :2].any()
        assert not dk[:, 2:].any()
        assert not dv[:, 2:].any()
        assert all(x.isfinite().all() for x in (y, dq, dk, dv))


@pytest.mark.day("Dense()", "Blockwise(block=2)")
@pytest.mark.parametrize("impl", [nn.Dense(), nn.Blockwise(2), nn.BlockSparse(2)], ids=str)
def test_a_rank_without_heads(impl: Any) -> None:
    """As where there are more ranks than heads: results and gradients are empty, also in batches of `vmap`."""
    for groups in (0, 2):
        for mask in (nn.Causal(), nn.Full(), nn.Window(2)):
            qkv = [torch.randn(3, 2, 4, n, 5).requires_grad_() for n in (0, groups, groups)]
            attend = functools.partial(nn.attention, mask=mask, impl=impl)
            for y in (attend(*(x[0] for x in qkv)), torch.func.vmap(attend)(*qkv)):
                assert y.shape[-3:] == (4, 0, 5)
                grads = torch.autograd.grad(y.sum(), qkv)
                assert [g.shape for g in grads] == [x.shape for x in qkv]
                assert not any(g.any() for g in grads)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The definition: one more key of this score, whose value is 0. Causal."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    p = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1).softmax(-1)
    return torch.einsum("bhts,bshk->bthk", p[..., :-1], v)


@pytest.mark.day(3)
@pytest.mark.parametrize("width", [3, 5, 7])
@pytest.mark.parametrize(
    "impl",
    [
        nn.Dense(),
        pytest.param(nn.Blockwise(3), marks=pytest.mark.nightly),
        pytest.param(nn.BlockSparse(4), marks=pytest.mark.nightly),
        nn.Chunked(3),
    ],
    ids=str,
)
def test_values_of_another_width_and_sinks(impl: Any, width: int) -> None:
    torch.manual_seed(0)
    shapes = (2, 7, 4, 5), (2, 7, 2, 5), (2, 7, 2, width)
    qkv = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_()
    if isinstance(impl, nn.Chunked):
        with pytest.raises(ValueError, match="Chunked attention does not support sinks"):
            nn.attention(*qkv, sinks_H=sinks, impl=impl)
        sinks = torch.full((4,), -math.inf, dtype=torch.float64)  # equal to no sinks
        got = nn.attention(*qkv, impl=impl)
    else:
        got = nn.attention(*qkv, sinks_H=sinks, impl=impl)
    want, inputs = with_sinks(qkv[0], qkv[1], qkv[2], sinks), [*qkv, sinks] if sinks.requires_grad else qkv
    w = torch.randn(want.shape, dtype=torch.float64)
    pairs = zip(
        torch.autograd.grad((got * w).sum(), inputs), torch.autograd.grad((want * w).sum(), inputs), strict=True
    )
    for a, b in ((got, want), *pairs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_sinks_are_closed_under_transforms() -> None:
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64) for shape in ((1, 5, 2, 3), (1, 5, 1, 3), (1, 5, 1, 3), (2,))]
    other = tuple(torch.randn_like(x) for x in given)

    def body(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return nn.attention(q, k, v, sinks_H=sinks, impl=nn.Blockwise(2))

    tangents = [torch.func.jvp(f, tuple(given), other)[1] for f in (body, with_sinks)]
    torch.testing.assert_close(*tangents, rtol=1e-12, atol=1e-13)

    def second(f: Any) -> tuple[Tensor, ...]:
        xs = [x.clone().requires_grad_() for x in given]
        grads = torch.autograd.grad(f(*xs).square().sum(), xs, create_graph=True)
        return torch.autograd.grad(torch.stack([(g * t).sum() for g, t in zip(grads, other, strict=True)]).sum(), xs)

    for a, b in zip(second(body), second(with_sinks), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    """16-bit values are multiplied and summed in float32: no further from the truth than torch's kernel, twice over."""
    qkv = [torch.randn(2, 50, 4, 8).to(dtype) for _ in range(3)]
    w = torch.randn(2, 50, 4, 8).to(dtype)
    want = differentiated([x.double() for x in qkv], w.double(), nn.Causal(), None)
    dense = differentiated(qkv, w, nn.Causal(), None, nn.Dense())
    for impl in (nn.Blockwise(16), nn.BlockSparse(16)):
        for a, b, c in zip(want, dense, differentiated(qkv, w, nn.Causal(), None, impl), strict=True):
            assert c.dtype == dtype
            assert (c - a).abs().max() <= 2 * (b - a).abs().max() + torch.finfo(dtype).eps * a.abs().max()


def test_queries_and_keys_of_other_numbers() -> None:
    q, k, v = (torch.randn(2, n, 2, 3, dtype=torch.float64) for n in (5, 9, 9))
    w = torch.randn(2, 5, 2, 3, dtype=torch.float64)
    want = differentiated([q, k, v], w, nn.Full(), None)
    for impl in (nn.Dense(), nn.Blockwise(4), nn.BlockSparse(4)):
        assert_close(differentiated([q, k, v], w, nn.Full(), None, impl), want)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_blocks_are_closed_under_transforms() -> None:
    """vmap, jvp, grad of grad, and vmap of grad; the plain formula is the reference."""
    ids = torch.tensor([[0] * 3 + [1] * 3] * 2)
    mask = nn.Causal() & nn.Segments(ids)
    slopes = torch.tensor([0.5, 0.25])
    q, k, v, *tangents = (torch.randn(2, 6, n, 2, dtype=torch.float64) for n in (2, 1, 1) * 2)
    impl = nn.Blockwise(4)

    def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.attention(q, k, v, mask=mask, slopes_H=slopes, softcap=0.9, impl=impl)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v, mask, slopes, 0.9)

    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    args = q, k, v
    got, want = (torch.func.jvp(f, args, tuple(tangents)) for f in (blocks, formula))
    close(got, want)
    many = torch.stack([q, 2 * q, -q])
    batched = [
        torch.func.vmap(torch.func.grad(lambda q, f=f: f(q, k, v).square().sum()))(many) for f in (blocks, formula)
    ]
    close(*batched)
    twice = [
        torch.func.grad(lambda q, f=f: torch.func.grad(lambda q: f(q, k, v).pow(3).sum())(q).square().sum())(q)
        for f in (blocks, formula)
    ]
    close(*twice)
    inputs = [x.clone().requires_grad_() for x in args]
    assert torch.autograd.gradcheck(blocks, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(blocks, inputs, fast_mode=True)
    both = torch.stack([ids, ids * 0])
    packed = torch.func.vmap(lambda ids: nn.attention(q, k, v, mask=nn.Segments(ids), impl=impl))(both)
    close(packed, torch.stack([plain(q, k, v, nn.Segments(ids)) for ids in both]))


@pytest.mark.nightly
def test_many_bodies_on_one_rank() -> None:
    torch.set_num_threads(1)
    for seed in range(600):
        one_rank(seed, 300 if seed % 5 == 0 else 60)


def many_ranks(mesh: sf.Mesh, impls: Any, seeds: range, longest: int) -> None:
    """Every rank draws the same, and takes its tokens of the whole."""
    torch.set_num_threads(1)
    for seed in seeds:
        draw = random.Random(seed)
        qkv, w, mask, slopes = case(draw, longest)
        T = qkv[0].shape[1]
        softcap = 0.7 if seed % 2 else None
        want = differentiated(qkv, w, mask, slopes, softcap=softcap)
        for impl in impls(T, draw):
            if softcap is not None and isinstance(getattr(impl, "inner", None), nn.BlockSparse):
                continue
            with bind_mesh(mesh):
                at = torch.cat([torch.arange(a, b) for a, b in (*impl.rows(T), (0, 0))])
                own = [x[:, at] for x in qkv]
                assert torch.equal(nn.rank_positions(impl, len(at)), at)
                got = differentiated(own, w[:, at], mask, slopes, impl, softcap)
            assert_close(got, [x[:, at] for x in want], f"{impl} {mask} T={T} seed {seed}")


def line(T: int, draw: random.Random) -> list[nn.AttentionBackend]:
    block = draw.choice([1, 5, 64]) if T < 50 else 64
    return [
        nn.Ulysses("sp", T),
        nn.Ulysses("sp", T, nn.Blockwise(block)),
        nn.Ulysses("sp", T, nn.BlockSparse()),
        nn.Ring("sp", T, block=block),
        nn.Ring("sp", T, zigzag=True, block=block),
    ]


def grid(T: int, draw: random.Random) -> list[nn.AttentionBackend]:
    ring = nn.Ring("r", zigzag=draw.random() < 0.5, block=16)
    return [nn.Ulysses("u", T, ring), nn.Ulysses(("r", "u"), T), nn.Ring(("u", "r"), T, zigzag=True, block=16)]


@pytest.mark.nightly
@distributed(world=3)
def test_bodies_on_a_line() -> None:
    many_ranks(sf.make_mesh({"sp": 3}), line, range(4), 40)


@pytest.mark.nightly
@distributed(world=4)
def test_bodies_on_a_grid() -> None:
    many_ranks(sf.make_mesh({"r": 2, "u": 2}), grid, range(3), 40)


@pytest.mark.nightly
@distributed(world=2)
def test_sequence_bodies_are_closed_under_transforms() -> None:
    """On several ranks too: jvp, vmap, vmap of grad; each rank has its tokens of the plain formula's results."""
    torch.set_num_threads(1)
    mesh, T = sf.make_mesh({"sp": 2}), 7
    torch.manual_seed(3)
    mask = nn.Causal() & nn.Segments(torch.tensor([[0] * 3 + [1] * 4]))
    sizes = (3, 3, 3)
    args, tangents, many = (
        [torch.randn(*lead, 1, T, n, 2, dtype=torch.float64) for n in sizes] for lead in ((), (), (4,))
    )
    w = torch.randn(1, T, 3, 2, dtype=torch.float64)

    def scalar(f: Any, w: Tensor) -> Any:
        return lambda *qkv: (f(*qkv).pow(2) * w).sum()

    def results(f: Any, cut: Any) -> list[Tensor]:
        all_three = torch.func.grad(scalar(f, cut(w)), argnums=(0, 1, 2))
        duals = torch.func.jvp(f, tuple(map(cut, args)), tuple(map(cut, tangents)))
        batch = [cut(x) for x in many]
        with warnings.catch_warnings():  # torch's kernel is vmapped a sample at a time, with a warning
            warnings.filterwarnings("ignore", ".*performance drop")
            mapped = [torch.func.vmap(f)(*batch), *torch.func.vmap(all_three)(*batch)]
        return [*duals, *mapped]

    want = results(lambda q, k, v: plain(q, k, v, mask), lambda x: x)
    ring, ulysses = nn.Ring("sp", T), nn.Ulysses("sp", T)
    for impl in (ring, ulysses, nn.Ring("sp", T, zigzag=True), nn.Ulysses("sp", T, nn.Blockwise(2))):
        with bind_mesh(mesh):
            own = functools.partial(
                torch.index_select, dim=-3, index=nn.rank_positions(impl, T // 2 + (mesh.rank == 0))
            )
            got = results(functools.partial(nn.attention, mask=mask, impl=impl), own)
        torch.testing.assert_close(got, [own(x) for x in want], rtol=1e-12, atol=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(2))
@distributed(world=[2, 3, 4], timeout=900)
def test_many_bodies_on_a_line(part: int, world: int) -> None:
    many_ranks(sf.make_mesh({"sp": world}), line, range(100 + part, 200, 2), 300)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(5))
@distributed(world=6, timeout=900)
def test_many_bodies_on_a_grid(part: int) -> None:
    many_ranks(sf.make_mesh({"r": 3, "u": 2}), grid, range(100 + part, 200, 5), 300)


# Transfers and computed tiles.


def sent(
    impl: nn.AttentionBackend, mask: nn.Mask, tokens: int, heads: int, key_heads: int
) -> tuple[list[int], list[int]]:
    """Bytes of elements that this rank sends and its calls, forward and backward, in float64."""
    sizes = (heads, key_heads, key_heads)
    q, k, v = (torch.randn(1, tokens, n, 4, dtype=torch.float64, requires_grad=True) for n in sizes)
    numbers, calls = [], []
    with sf.collectives.count_traffic() as forward:
        y = nn.attention(q, k, v, mask=mask, impl=impl)
    with sf.collectives.count_traffic() as backward:
        torch.autograd.grad(y.sum(), (q, k, v))
    for traffic in (forward, backward):
        numbers.append(sum(x for _, x in traffic.by_op.values()) // 8)
        calls.append(sum(n for n, _ in traffic.by_op.values()))
    return numbers, calls


@pytest.mark.nightly
@distributed(world=[2, 4])
def test_bytes_are_those_of_the_formulas(world: int) -> None:
    torch.set_num_threads(1)
    mesh, P, K = sf.make_mesh({"sp": world}), world, 4
    for T, H, G in ((32, 4, 4), (64, 8, 4), (32, 4, 2)):
        full, h, h_kv = nn.Full(), H * K, G * K
        with bind_mesh(mesh):
            (forward, backward), _ = sent(nn.Ulysses("sp", T), full, T // P, H, G)
            # (2 + 2 kv / heads) N h / P a rank, less the 1 / P that it keeps; fewer key heads than ranks are repeated.
            wide = max(G, P) * K
            assert forward == backward == (2 * h + 2 * wide) * T // P * (P - 1) // P
            (forward, backward), calls = sent(nn.Ring("sp", T, block=16), full, T // P, H, G)
            assert forward == 2 * T * h_kv * (P - 1) // P
            assert backward == 2 * forward
            # Keys P - 1 times each way; their gradients P - 2 times onward, and home once.
            assert calls == [P - 1, (P - 1) + (P - 2) + 1]


@pytest.mark.nightly
@distributed(world=4)
def test_hops_without_pairs_are_not_sent() -> None:
    """A causal ring sends half; a window of one block sends once; documents, which are data, do not change it."""
    torch.set_num_threads(1)
    mesh, T = sf.make_mesh({"sp": 4}), 32
    one = 2 * 2 * 4 * (T // 4)  # keys and values of a rank: 2 heads of 4
    with bind_mesh(mesh):
        causal, _ = sent(nn.Ring("sp", T), nn.Causal(), T // 4, 2, 2)
        window, calls = sent(nn.Ring("sp", T), nn.Window(8), T // 4, 2, 2)
        packed, _ = sent(nn.Ring("sp", T), nn.Causal() & nn.Segments(torch.arange(T)[None]), T // 4, 2, 2)
    # Rank r passes on the keys of ranks 0 .. r while there is a rank ahead; gradients go onward, and home.
    onward = {0: 1, 1: 2, 2: 3, 3: 0}[mesh.rank]
    assert causal[0] == packed[0] == one * onward
    assert window[0] == one * (mesh.rank < 3)
    assert calls[0] == 1
    assert causal[1] <= 3 * one * 3


def test_zigzag_is_balanced_and_sends_no_more() -> None:
    """No rank has 2% more pairs of a causal mask than the mean; cut plainly, the last has nearly twice the mean."""
    for T, P in ((4096, 4), (4097, 3), (1000, 8)):
        ranges = _parallel.ranges_over(T, [P])
        cuts = _attention_backends._deal_zigzag(ranges)
        work = [sum(nn.Causal().count(q, (0, T)) for q in rows) for rows in cuts]
        assert sum(work) == T * (T + 1) // 2
        assert max(work) <= 1.02 * sum(work) / P
        assert [sum(b - a for a, b in rows) for rows in cuts] == [b - a for a, b in ranges]


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 2)], ids=str)
def test_ranks_have_their_blocks_of_the_order(sizes: tuple[int, ...]) -> None:
    """The positions of a rank are the rows that its spec cuts from `sequence_order`, also where ranks have none."""
    axes = {"ab"[i]: num for i, num in enumerate(sizes)}
    for T, chunk in itertools.product(range(14), (1, 2, 4, 5, 100)):
        ring = nn.Ring(tuple(axes), T, zigzag=True)
        for body in (ring, nn.Chunked(chunk, tuple(axes), T), nn.Ulysses("a", T), nn.Ulysses(tuple(axes), T)):
            order = nn.sequence_order(body, T, sizes)
            assert order.sort().values.equal(torch.arange(T))
            for at in core.all_coords(axes):
                with bind_mesh(sf.make_mesh(axes, device="cpu", abstract=at)):
                    own = core.block_slices((T,), sf.P(body.axes), axes, at)
                    rows = body.rows(T)
                    assert torch.cat([torch.arange(a, b) for a, b in (*rows, (0, 0))]).equal(order[own]), (body, at)


def test_one_number_for_a_ring_of_two_axes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_ranks=4 is for 1 axes, and Ring.* deals tokens over \('a', 'b'\)"):
        nn.sequence_order(nn.Ring(("a", "b"), 9, zigzag=True), 9, 4)


def test_tiles_without_pairs_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    usual = _online._compute_scores
    monkeypatch.setattr(_online, "_compute_scores", lambda *args: (seen.append(1), usual(*args))[1])
    monkeypatch.setattr(_ring, "kernel_tile", lambda *args: None)
    x = torch.randn(1, 64, 1, 2, requires_grad=True)
    nn.attention(x, x, x, mask=nn.Causal() & nn.Window(7), impl=nn.Blockwise(8)).sum().backward()
    assert len(seen) == 2 * (8 + 7)  # the diagonal and the one below it, forward and backward


def test_autocast_rounds_bodies_alike() -> None:
    g = torch.Generator().manual_seed(0)
    base = [3 * torch.randn(1, 64, 2, 16, generator=g) for _ in range(3)]
    weight = torch.randn(1, 64, 2, 16, generator=g)

    def gradients(impl: Any, on: bool, dtype: torch.dtype = torch.float32) -> tuple[torch.dtype, list[Tensor]]:
        xs = [x.to(dtype).requires_grad_() for x in base]
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            y = nn.attention(*xs, impl=impl)
        return y.dtype, [t.double() for t in torch.autograd.grad((y * weight).sum(), xs)]

    exact = gradients(nn.Dense(), False, torch.float64)[1]
    kinds, errors = [], []
    for impl in (nn.Dense(), nn.Blockwise(16), nn.BlockSparse(16)):
        dtype, found = gradients(impl, True)
        kinds.append(dtype)
        errors.append(max(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)))
    assert kinds == [torch.bfloat16] * 3
    assert max(errors) < 1.5 * errors[0]


@pytest.mark.parametrize(
    "impl",
    [
        nn.Ulysses("sp", 6),
        pytest.param(nn.Ring("sp", 6), marks=pytest.mark.nightly),
        pytest.param(nn.Chunked(2, "sp", 6), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_sequences_that_a_body_cannot_cut_are_refused(impl: Any) -> None:
    """Before any transfer: the error has the shapes, and the bodies that can."""
    mesh = sf.make_mesh({"sp": 2}, abstract=True, device="cpu")
    q, k, other = torch.ones(1, 3, 5, 2), torch.ones(1, 3, 2, 2), torch.ones(1, 4, 5, 2)
    with bind_mesh(mesh):
        with pytest.raises(ValueError, match="of key heads must divide the number of query heads, got 2 and 5"):
            nn.attention(q, k, k, impl=impl)
        with pytest.raises(
            ValueError, match="3 queries and 4 keys on a rank of a sequence of 6: both numbers must be equal"
        ):
            nn.attention(q, other, other, mask=nn.Full(), impl=impl)
        with pytest.raises(ValueError, match="this rank has 4 tokens, but of 6 over 2 ranks of 'sp' its part is 3"):
            nn.attention(other, other, other, impl=impl)
        with pytest.raises(ValueError, match=r"axis 'seq' is not in the mesh, which has \('sp',\)"):
            nn.attention(q, q, q, impl=dataclasses.replace(impl, axis="seq"))
    with pytest.raises(ValueError, match=r"4 queries over 9 keys.*Use Blockwise\(\)"):
        nn.attention(other, *[torch.ones(1, 9, 5, 2)] * 2, mask=nn.Full(), impl=nn.Chunked(2))
