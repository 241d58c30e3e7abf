"""Covers `kernels.ragged_attention(rows=)`: fewer queries than keys, with the bits of the rows of the full call."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, kernels
from shardfn.kernels import _build
from shardfn.testing import distributed
from tests.kernels.test_ragged_attention import _plan

# The interpreter of Triton is slow: some cases by night.
KINDS = ["native", "reference", pytest.param("triton", marks=pytest.mark.nightly)]
HOW: list[tuple[tuple[int, int, int], torch.dtype, dict[str, Any]]] = [
    ((4, 2, 7), torch.float32, {}),
    ((6, 2, 16), torch.bfloat16, {"window": 5, "softcap": 3.0}),
    ((3, 1, 8), torch.int8, {"slopes": True, "sinks": True}),
    ((4, 4, 5), torch.float64, {"window": 3}),
]
# Tokens of queries: last tokens of prompts, any order with repetitions, and no tokens.
ROWS = [[6, 45, 48], [45, 6, 6, 20, 3], [], list(range(49))]


def _call(heads: tuple[int, int, int], dtype: torch.dtype, how: dict[str, Any], *, tree: bool) -> dict[str, Any]:
    """Returns a call of 49 tokens: prompts of 7 and 39 tokens, and 3 guesses after the first prompt."""
    (H, G, K), draw = heads, torch.Generator().manual_seed(heads[2])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lengths, block = (7, 39), 4
    positions = [*range(7), *range(39), 7, 8, 8]
    sequences = [0] * 7 + [1] * 39 + [0] * 3
    tables = torch.randperm(26, generator=draw)[:24].view(2, 12).int()
    at, of = torch.tensor(positions), torch.tensor(sequences)
    slots = tables[of, at // block] * block + at % block
    if tree:  # guesses are in spare slots
        slots[-3:] = tables[0, 10] * block + torch.arange(3)
    guesses = torch.zeros(49, 49, dtype=torch.bool)
    guesses[46, [46]] = guesses[47, [46, 47]] = guesses[48, [46, 48]] = True
    changed = {name: torch.randn(H, generator=draw, dtype=wide) for name in ("slopes", "sinks") if how.get(name)}
    q, k, v = (torch.randn(49, n, K, generator=draw, dtype=wide) for n in (H, G, G))
    cache = torch.zeros(
        26, 2, G, block, kernels.cache_row(K, dtype), dtype=torch.uint8 if dtype == torch.int8 else dtype
    )
    assert sum(lengths) + 3 == len(positions)
    plan = {"positions": at.int(), "sequences": of.int(), "slots": slots.int(), "tables": tables}
    cache = cache.view(dtype) if dtype == torch.int8 else cache
    return {"q": q, "k": k, "v": v, "cache": cache, **plan, **how, **changed, "tree": guesses if tree else None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [False, True], ids=["line", "tree"])
@pytest.mark.parametrize("heads, dtype, how", HOW, ids=["float32", "bfloat16", "int8", "float64"])
def test_wanted_rows_are_rows_of_the_full_call(
    heads: Any, dtype: Any, how: Any, tree: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    args = _call(heads, dtype, how, tree=tree)
    chosen = kind if kind != "native" or _build.library() else "reference"
    with kernels.implemented_by(chosen), np.errstate(all="ignore"):  # the interpreter computes with numpy
        whole = {**args, "cache": args["cache"].clone()}
        y, lse = kernels.ragged_attention(**whole)
        for rows in ROWS:
            part = {**args, "cache": args["cache"].clone(), "q": args["q"][rows]}
            got = kernels.ragged_attention(**part, rows=torch.tensor(rows, dtype=torch.int32))
            assert torch.equal(got[0], y[rows]) and torch.equal(got[1], lse[rows]), rows
            assert torch.equal(part["cache"].view(torch.uint8), whole["cache"].view(torch.uint8))
    assert y.isfinite().all()


def test_rows_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    args = {name: x[:10] if name in "qkv" or name in ("slots", "positions", "sequences") else x
            for name, x in _call((2, 1, 5), torch.float32, {"sinks": True}, tree=False).items()}  # fmt: skip
    with kernels.implemented_by("triton"), np.errstate(all="ignore"):
        y, lse = kernels.ragged_attention(**{**args, "cache": args["cache"].clone()})
        rows = torch.tensor([9, 2, 6, 6], dtype=torch.int32)
        got = kernels.ragged_attention(**{**args, "q": args["q"][rows]}, rows=rows)
    assert torch.equal(got[0], y[rows]) and torch.equal(got[1], lse[rows])


def test_native_rows_are_those_of_the_definition() -> None:
    args = _call((4, 2, 32), torch.float32, {}, tree=True)
    rows, found = torch.tensor([48, 45, 6, 7], dtype=torch.int32), []
    for kind in ("native" if _build.library() else "reference", "reference"):
        with kernels.implemented_by(kind):
            part = {**args, "cache": args["cache"].clone(), "q": args["q"][rows]}
            found.append(kernels.ragged_attention(**part, rows=rows)[0])
    assert torch.equal(*found)


def _two_layers(w: Tensor, caches: list[Tensor], x: Tensor, rows: Tensor, plan: tuple[Tensor, ...]) -> Any:
    """A layer of all tokens, then a layer whose queries are only those of the wanted rows."""
    q, k, v = (x @ w).view(len(x), 4, 8).split([2, 1, 1], 1)
    x = x + kernels.ragged_attention(q, k, v, caches[0], *plan)[0].flatten(1)
    q, k, v = (x @ w).view(len(x), 4, 8).split([2, 1, 1], 1)
    wanted = rows.long()
    y, _ = kernels.ragged_attention(q[wanted], k, v, caches[1], *plan, rows=rows)
    return x[wanted] + y.flatten(1), caches


@distributed(world=1)
def test_a_captured_call_has_the_bits_of_the_rows() -> None:
    mesh, draw = sf.make_mesh({"tp": 1}), torch.Generator().manual_seed(0)
    w = torch.randn(16, 32, generator=draw)
    out = (None, sf.Donated(1))
    f = sf.sharded(sf.jit(_two_layers, backend="graph"), mesh=mesh, in_specs=(P(),), out_specs=out, donate=1)
    params = f.init(w)
    mine, whole = ([torch.zeros(4, 2, 1, 4, 8) for _ in range(2)] for _ in range(2))
    caches = [sf.GlobalTensor(c, c.shape, P(), mesh) for c in mine]
    positions = torch.arange(7, dtype=torch.int32)
    tables = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    slots = tables[0, positions.long() // 4] * 4 + positions % 4
    plan = slots, positions, torch.zeros_like(positions), tables
    bound = None
    for rows in ([6, 2], [0, 5], [3, 3]):
        x, at = torch.randn(7, 16, generator=draw), torch.tensor(rows, dtype=torch.int32)
        bound = bound or f.bind(params, caches, x, at, plan)
        y, caches = bound(params, caches, x, at, plan)
        with torch.no_grad():
            every, _ = _two_layers(w, whole, x, positions, plan)
        assert torch.equal(y, every[rows])
        assert all(torch.equal(a, b) for a, b in zip(mine, whole, strict=True))
    text = f.lower(params, caches, x, at, plan).as_text()
    assert text.count("shardfn_kernels.ragged_attention(") == 2, text


def test_bad_rows_are_refused_and_nothing_is_written() -> None:
    for kind in ("native" if _build.library() else "reference", "reference"):
        with kernels.implemented_by(kind):
            for rows, error, said in (
                (
                    torch.tensor([2], dtype=torch.int32),
                    ValueError,
                    r"rows\[0\] is 2, must be from 0 to 1: the call has 2",
                ),
                (torch.tensor([-1], dtype=torch.int32), ValueError, r"rows\[0\] is -1, must be from 0 to 1"),
                (torch.tensor([0]), TypeError, "rows .*int64.*int32|rows .*int32.*int64"),
            ):
                (args,) = _plan(q=torch.ones(1, 4, 3), rows=rows)
                with pytest.raises(error, match=said):
                    inspect.unwrap(kernels.ragged_attention)(**args)  # without the shape checks of tests
                assert not args["cache"].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads, dtype", [((4, 1, 20), torch.float32), ((8, 1, 48), torch.bfloat16),
                                          ((3, 1, 24), torch.int8), ((2, 2, 5), torch.float64)])  # fmt: skip
def test_keys_that_are_values_have_the_bits_of_equal_values(
    heads: Any, dtype: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    args = _call(heads, dtype, {"sinks": True}, tree=True)
    args["v"] = args["k"]
    one = {**args, "cache": args["cache"][:, :1].clone()}
    chosen = kind if kind != "native" or _build.library() else "reference"
    with kernels.implemented_by(chosen), np.errstate(all="ignore"):
        want, got = (
            kernels.ragged_attention(**args),
            kernels.ragged_attention(**{**one, "v": torch.zeros_like(args["v"])}),
        )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for part in (0, 1):
        assert torch.equal(one["cache"][:, 0].view(torch.uint8), args["cache"][:, part].view(torch.uint8))


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_a_latent_row_of_576_numbers(kind: str) -> None:
    args = _call((16, 1, 576), torch.float32, {}, tree=False)
    args = {**args, "cache": args["cache"][:, :1].contiguous(), "v": args["k"]}
    with kernels.implemented_by(kind if _build.library() else "reference"):
        y, _ = kernels.ragged_attention(**args)
    q, k = args["q"][7:46], args["k"][7:46, 0]
    scores = torch.einsum("thk,sk->hts", q, k) * 576**-0.5
    p = scores.masked_fill(torch.ones(39, 39).triu(1) > 0, -torch.inf).softmax(-1)
    torch.testing.assert_close(y[7:46], torch.einsum("hts,sk->thk", p, k), rtol=1e-4, atol=1e-5)
