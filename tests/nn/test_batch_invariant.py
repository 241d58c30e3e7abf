"""Covers exact layers: a row has the bits that it has alone, on any number of ranks; derivatives are those of torch."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import kernels, nn
from shardfn.nn._batch_invariant import rank_node

NIGHTLY = pytest.mark.nightly
WIDTHS = [77, pytest.param(1409, marks=NIGHTLY)]
_func: Any = torch.func


def _drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(params=[1, pytest.param(2, marks=NIGHTLY)])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """A number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# The law: the layers of single tokens.


def _layers(width: int) -> dict[str, Callable[[Tensor], Tensor]]:
    narrow = 41
    up, gate, down = _drawn(narrow, width), _drawn(narrow, width, seed=1), _drawn(width, narrow, seed=2)
    up, gate, down = (nn.BatchInvariantWeight.of(w / 8) for w in (up, gate, down))
    wide, short = _drawn(width, seed=3), _drawn(narrow, seed=4)
    return {
        "linear": lambda x: nn.linear(x, up, short),
        "mlp": lambda x: nn.mlp(x, up, down, short, wide),
        "swiglu": lambda x: nn.swiglu(x, gate, up, down),
        "layer_norm": lambda x: nn.batch_invariant_layer_norm(x, wide, wide),
        "rms_norm": lambda x: nn.batch_invariant_rms_norm(x, wide),
    }


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["linear", "mlp", "swiglu", "layer_norm", "rms_norm"])
def test_a_row_has_its_bits_alone(name: str, width: int) -> None:
    layer, x = _layers(width)[name], _drawn(65, width, seed=5)
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in (*range(1, 66, 7), 64, 65):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows
    assert torch.equal(layer(x.view(5, 13, width)).view(65, -1), alone)


def test_the_gradient_of_a_row_has_its_bits_alone() -> None:
    weight, x, dy = _drawn(41, 77), _drawn(1100, 77, seed=1), _drawn(1100, 41, seed=2)
    layer = _func.vjp(lambda x: nn.linear(x, nn.BatchInvariantWeight.of(weight)), x)[1]
    for rows in (1, 7, 65):
        alone = _func.vjp(lambda x: nn.linear(x, nn.BatchInvariantWeight.of(weight)), x[:rows])[1]
        assert torch.equal(alone(dy[:rows])[0], layer(dy)[0][:rows]), rows


def test_panels_and_forms_of_a_weight_have_the_same_bits() -> None:
    x, weight, bias = _drawn(5, 12), _drawn(14, 12, seed=1), _drawn(14, seed=2)
    want = nn.linear(x, nn.BatchInvariantWeight.of(weight), bias)
    packed = nn.BatchInvariantWeight(kernels.pack_rows(weight), (14, 12))
    by_head = nn.BatchInvariantWeight(kernels.pack_rows(weight), (2, 7, 12))
    for w in (packed, by_head.flatten(0, 1), nn.BatchInvariantWeight.of(weight.view(2, 7, 12)).flatten(0, 1)):
        assert torch.equal(nn.linear(x, w, bias), want)
        assert torch.equal(F.linear(x, w, bias), want)  # pyright: ignore[reportArgumentType]
    assert torch.equal(nn.column_linear(x, by_head, bias.view(2, 7)).flatten(1), want)
    inward = nn.BatchInvariantWeight.of(weight.view(14, 3, 4))
    assert torch.equal(nn.row_linear(x, inward, bias), want)
    torch.testing.assert_close(want, F.linear(x, weight, bias))
    assert (packed.ndim, packed.dtype, packed.device) == (2, torch.float32, torch.device("cpu"))


def test_rows_of_panels_are_those_of_the_table() -> None:
    table, index = _drawn(150, 6), torch.tensor([[0, 63, 64], [149, 128, 3]])
    packed: Any = nn.BatchInvariantWeight(kernels.pack_rows(table), table.shape)
    assert torch.equal(nn.embedding(index, packed), table[index])
    assert torch.equal(F.embedding(index, packed), table[index])
    assert torch.equal(nn.embedding(index, nn.BatchInvariantWeight.of(table)), table[index])


# Derivatives.


def _loss(layer: Callable[..., Tensor], exact: bool) -> Callable[..., Tensor]:
    def weight(w: Tensor) -> Any:
        return nn.BatchInvariantWeight.of(w) if exact else w

    return lambda x, *ws: layer(weight, x, *ws).sin().sum()


SHAPES: dict[str, tuple[Callable[..., Tensor], Any, list[tuple[int, ...]]]] = {
    "linear": (lambda w, x, a, b: nn.linear(x, w(a), b), None, [(2, 3, 5), (4, 5), (4,)]),
    "by heads": (lambda w, x, a: nn.column_linear(x, w(a)), None, [(2, 3, 5), (2, 2, 5)]),
    "mlp": (lambda w, x, a, b, c: nn.mlp(x, w(a), w(b), c), None, [(3, 5), (4, 5), (5, 4), (4,)]),
    "swiglu": (lambda w, x, a, b, c: nn.swiglu(x, w(a), w(b), w(c)), None, [(3, 5), (4, 5), (4, 5), (5, 4)]),
    "layer_norm": (nn.batch_invariant_layer_norm, nn.layer_norm, [(3, 5), (5,), (5,)]),
    "rms_norm": (nn.batch_invariant_rms_norm, nn.rms_norm, [(3, 5), (5,)]),
}


def _pair(name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    layer, plain, shapes = SHAPES[name]
    args = [_drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    if plain is None:
        return _loss(layer, True), _loss(layer, False), args
    return lambda *xs: layer(*xs).sin().sum(), lambda *xs: plain(*xs).sin().sum(), args


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_and_tangents_are_those_of_torch_in_float64(name: str) -> None:
    exact, plain, args = _pair(name)
    wide = [x.double() for x in args]
    for i in range(len(args)):
        _close(_func.grad(exact, i)(*args), _func.grad(plain, i)(*wide))
    tangents = tuple(_drawn(*x.shape, seed=9) for x in args)
    pushed = _func.jvp(plain, tuple(wide), tuple(t.double() for t in tangents))[1]
    _close(_func.jvp(exact, tuple(args), tangents)[1], pushed)
    leaves = [x.clone().requires_grad_() for x in args]
    for got, i in zip(torch.autograd.grad(exact(*leaves), leaves), range(len(args)), strict=True):
        _close(got, _func.grad(plain, i)(*wide))


@pytest.mark.parametrize("name", [pytest.param(x, marks=NIGHTLY if x in ("mlp", "by heads") else ()) for x in SHAPES])
def test_maps_and_second_derivatives_are_those_of_torch(name: str) -> None:
    exact, plain, args = _pair(name)
    wide = [x.double() for x in args]
    many = torch.stack([args[0], 2 * args[0]])
    dims = (0, *[None] * (len(args) - 1))
    mapped = _func.vmap(_func.grad(exact, 1), dims)(many, *args[1:])
    _close(mapped, _func.vmap(_func.grad(plain, 1), dims)(many.double(), *wide[1:]))
    of_weights = _func.vmap(exact, (None, 0, *dims[2:]))(args[0], torch.stack([args[1], -args[1]]), *args[2:])
    _close(of_weights, torch.stack([plain(wide[0], wide[1], *wide[2:]), plain(wide[0], -wide[1], *wide[2:])]))
    vector = _drawn(*args[1].shape, seed=9)

    def second(f: Any, xs: list[Tensor], v: Tensor) -> Tensor:
        return _func.grad(lambda w: (_func.grad(f, 1)(xs[0], w, *xs[2:]) * v).sum())(xs[1])

    _close(second(exact, args, vector), second(plain, wide, vector.double()))


def test_a_pipeline_puts_off_the_gradient_of_an_exact_weight() -> None:
    w, x = _drawn(4, 6).requires_grad_(), _drawn(3, 6, seed=1).requires_grad_()
    deferred = nn.DeferredGradients([w])
    with deferred.recorded():
        y = nn.linear(x, nn.BatchInvariantWeight.of(w)).sum()
    none, dx = deferred.first([y], [torch.tensor(1.0)], [x])
    assert none is None
    torch.testing.assert_close(dx, w.sum(0).expand(3, 6))
    torch.testing.assert_close(deferred.rest()[0], x.sum(0).expand(4, 6))


# Attention.


def _qkv(B: int = 2, T: int = 9, H: int = 4, G: int = 2, K: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return _drawn(B, T, H, K), _drawn(B, T, G, K, seed=1), _drawn(B, T, G, K, seed=2)


HOW: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"mask": nn.Causal() & nn.Window(3)},
    "alibi": {"slopes_H": torch.tensor(nn.alibi_slopes(4))},
    "sinks": {"sinks_H": torch.tensor([0.5, -1.0, 0.0, 2.0]), "scale": 0.3},
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=NIGHTLY if x == "alibi" else ()) for x in HOW])
def test_exact_attention_has_the_bits_of_a_prefix_and_of_a_sample_alone(name: str) -> None:
    qkv = _qkv()
    y = nn.attention(*qkv, **HOW[name], impl=nn.BatchInvariant())
    torch.testing.assert_close(y, nn.attention(*qkv, **HOW[name]))
    for t in (1, 5, 8):
        part = [x[:, :t] for x in qkv]
        assert torch.equal(nn.attention(part[0], part[1], part[2], **HOW[name], impl=nn.BatchInvariant()), y[:, :t])
    alone = [x[1:] for x in qkv]
    assert torch.equal(nn.attention(alone[0], alone[1], alone[2], **HOW[name], impl=nn.BatchInvariant()), y[1:])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
@pytest.mark.parametrize("name", [pytest.param(x, marks=NIGHTLY if x == "alibi" else ()) for x in HOW])
def test_derivatives_of_exact_attention_are_those_of_torch_in_float64(name: str) -> None:
    def loss(impl: nn.AttentionBackend, how: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        more = {"sinks_H": sinks[0]} if sinks else {}
        return nn.attention(q, k, v, **{**how, **more}, impl=impl).sin().sum()

    sinks = HOW[name].get("sinks_H")
    xs = (*_qkv(T=4), *([] if sinks is None else [sinks]))
    how, wide = HOW[name], tuple(x.double() for x in xs)
    own = {k: x.double() if isinstance(x, Tensor) else x for k, x in how.items()}
    exact, plain = functools.partial(loss, nn.BatchInvariant(), how), functools.partial(loss, nn.Dense(), own)
    for i in range(len(xs)):
        _close(_func.grad(exact, i)(*xs), _func.grad(plain, i)(*wide))
    tangents = tuple(_drawn(*x.shape, seed=9) for x in xs)
    pushed = _func.jvp(plain, wide, tuple(t.double() for t in tangents))[1]
    _close(_func.jvp(exact, xs, tangents)[1], pushed)
    many, dims = torch.stack([xs[0], -xs[0]]), (0, *[None] * (len(xs) - 1))
    one_by_one = [_func.grad(plain, 1)(m, *wide[1:]) for m in many.double()]
    _close(_func.vmap(_func.grad(exact, 1), dims)(many, *xs[1:]), torch.stack(one_by_one))


@pytest.mark.parametrize(
    "mask", [nn.Full(), nn.Prefix(2), nn.Causal() & nn.Segments(torch.zeros(2, 9, dtype=torch.int64)), nn.Window(2, 1)]
)
def test_masks_that_exact_attention_does_not_know_are_named(mask: nn.Mask) -> None:
    with pytest.raises(
        ValueError, match=r"(?s)attention by BatchInvariant\(\):.*the mask must be Causal\(\) or Window\(left\)"
    ):
        nn.attention(*_qkv(), mask=mask, impl=nn.BatchInvariant())


def test_attention_without_tokens() -> None:
    assert nn.attention(*_qkv(T=0), impl=nn.BatchInvariant()).shape == (2, 0, 4, 6)


# Rotary tables.


def test_rows_of_rotary_tables_are_rounded_from_the_true_numbers() -> None:
    positions = torch.cat([torch.arange(500), torch.tensor([99999])])
    cos, sin = nn.batch_invariant_rope_table(positions, 6)
    angles = [[float(torch.tensor(10000 ** -(i / 3)) * float(p)) for i in range(3)] for p in positions]
    true = torch.tensor([[[f(float(torch.tensor(a))) for a in row] for row in angles] for f in (math.cos, math.sin)])
    assert torch.equal(cos, true[0].repeat(1, 2)) and torch.equal(sin, true[1].repeat(1, 2))
    for rows in (1, 2, 3, 65):
        assert torch.equal(nn.batch_invariant_rope_table(positions[7 : 7 + rows], 6)[0], cos[7 : 7 + rows])
    with pytest.raises(ValueError, match="head_dim=3"):
        nn.batch_invariant_rope_table(positions, 3)


# Ranks.


def test_nodes_are_the_cuts_that_keep_the_order_of_the_tree() -> None:
    parts = [_drawn(40, seed=i) for i in range(48)]
    joined = kernels.sum_chunks
    for chunks in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48):
        for n in range(2, 13):
            if chunks % n:
                continue
            size = chunks // n
            nodes = [joined(parts[r * size : (r + 1) * size]) for r in range(n)]
            same = torch.equal(joined(nodes), joined(parts[:chunks]))
            assert same == (size & (size - 1) == 0), (chunks, n)


def _same_bits(ranks: int, chunks: int, sequence: bool) -> None:
    mesh = sf.make_mesh({"tp": ranks})
    T, D, F_ = 5, 9, 24
    x, up, down = _drawn(2, T, D), _drawn(F_, D, seed=1), _drawn(D, F_, seed=2)
    bias = _drawn(D, seed=3)
    want = nn.mlp(x, nn.BatchInvariantWeight.of(up, chunks), nn.BatchInvariantWeight.of(down, chunks), None, bias)
    with sf.collectives.bind_mesh(mesh):
        r, T_ = mesh.coords["tp"], T if sequence else None
        mine = slice(r * F_ // ranks, (r + 1) * F_ // ranks)
        block = nn.BatchInvariantWeight.of(up[mine], chunks), nn.BatchInvariantWeight.of(down[:, mine], chunks)
        rows = slice(*nn.rank_range(T, "tp")) if sequence else slice(None)
        got = nn.mlp(x[:, rows], *block, None, bias, d_ff=F_, axis="tp", sequence=T_)
    assert torch.equal(got, want[:, rows])


@pytest.mark.day("True")
@pytest.mark.parametrize("sequence", [False, True])
@sf.testing.distributed(world=2)
def test_two_ranks_have_the_bits_of_one(sequence: bool) -> None:
    _same_bits(2, 8, sequence)


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True])
@sf.testing.distributed(world=3)
def test_three_ranks_have_the_bits_of_one(sequence: bool) -> None:
    _same_bits(3, 24, sequence)


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True])
@sf.testing.distributed(world=4)
def test_four_ranks_have_the_bits_of_one(sequence: bool) -> None:
    _same_bits(4, 8, sequence)


@sf.testing.distributed(world=2)
def test_cuts_that_are_no_nodes_are_refused() -> None:
    mesh = sf.make_mesh({"tp": 2})
    with sf.collectives.bind_mesh(mesh):
        with pytest.raises(ValueError, match=r"24 chunks over the 2 ranks of 'tp'.*Use chunks=8"):
            rank_node(nn.BatchInvariantWeight.of(torch.ones(3, 6), 24), 12, "tp")
        with pytest.raises(ValueError, match=r"7 inputs in 8 chunks over the 2 ranks of 'tp'.*divide the inputs"):
            rank_node(nn.BatchInvariantWeight.of(torch.ones(3, 4), 8), 7, "tp")


@sf.testing.distributed(world=2)
def test_a_table_that_is_cut_keeps_the_sign_of_zero() -> None:
    table = _drawn(7, 3)
    table[[1, 5], 0] = -0.0
    index = torch.tensor([[1, 5], [0, 6]])
    mesh = sf.make_mesh({"tp": 2})
    with sf.collectives.bind_mesh(mesh):
        own = table[slice(*nn.rank_range(7, "tp"))]
        packed = nn.BatchInvariantWeight(kernels.pack_rows(own), own.shape)
        for w in (own, packed, nn.BatchInvariantWeight.of(own)):
            got = nn.embedding(index, w, axis="tp", vocab_size=7)
            assert torch.equal(got.view(torch.int32), table[index].view(torch.int32))


# Refusals.

_W: Any = nn.BatchInvariantWeight.of(torch.ones(4, 3))


@pytest.mark.parametrize(
    "call, kind, said",
    [
        (lambda: torch.matmul(torch.ones(2, 4), _W), TypeError, "torch's matmul does not take a BatchInvariantWeight"),
        (lambda: F.linear(_W, torch.ones(4, 3)), TypeError, "a BatchInvariantWeight is the weight"),
        (lambda: F.embedding(torch.tensor([0]), _W, 0), TypeError, "expected only the indices and the weight"),
        (
            lambda: nn.linear(torch.ones(2, 3).double(), _W),
            TypeError,
            r"x is torch\.float64, the weight is torch\.float32, ",
        ),
        (
            lambda: _W.flatten().linear(torch.ones(3)),
            ValueError,
            r"BatchInvariantWeight must have two dims, got shape \(12,\)",
        ),
        (
            lambda: nn.BatchInvariantWeight(torch.ones(1, 3, 64), (4, 5)),
            ValueError,
            r"BatchInvariantWeight of shape \(4, 5\) and panels \(1, 3, 64\): pass the panels",
        ),
    ],
)
def test_refusals(call: Callable[[], object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        call()


def test_its_text() -> None:
    assert repr(_W) == "BatchInvariantWeight((4, 3) of a weight, chunks=8)"
