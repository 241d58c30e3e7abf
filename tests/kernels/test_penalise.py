"""Covers kernels.penalise: its formulas, the bits of its definition, transformers' processor, and refusals."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from shardfn import kernels
from shardfn.kernels import _build, _penalise

F64 = torch.float64


def _case(rows: int, vocab: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Rows with all kinds of arguments, ids that repeat, and some logits that are not finite."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g) * 3
    logits[0, ::3], logits[1 % rows, ::4], logits[2 % rows, ::5] = -math.inf, math.nan, math.inf
    logits[3 % rows, ::2] = -0.0
    history = torch.randint(-1, vocab, (rows, width), generator=g).int()
    prompts = torch.randint(width + 1, (rows,), generator=g).int()
    how = {"repetition": torch.rand(rows, generator=g, dtype=F64) + 0.5}
    how |= {name: torch.randn(rows, generator=g, dtype=F64) for name in ("presence", "frequency")}
    how["repetition"][::2], how["presence"][::3], how["frequency"][::4] = 1, 0, 0
    return logits, history, prompts, how


def _of(rows: int, **how: float) -> dict[str, Tensor]:
    given = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0} | how
    return {k: torch.full((rows,), x, dtype=F64) for k, x in given.items()}


def test_the_formulas() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0, 7.0]])
    history, prompts = torch.tensor([[-1, 0, 1, 1, 2, 2, 2, -1]]).int(), torch.tensor([3]).int()  # prompt: 0, 1
    got = [
        kernels.penalise(logits, history, prompts, **_of(1, **how))[0].tolist()
        for how in ({"repetition": 2.0}, {"presence": 0.5}, {"frequency": 0.5})
    ]
    assert got[0] == [1.0, -4.0, 0.5, 0.0, 7.0]
    assert got[1] == [2.0, -2.5, 0.5, 0.0, 7.0]
    assert got[2] == [2.0, -2.5, -0.5, 0.0, 7.0]
    together = kernels.penalise(logits, history, prompts, **_of(1, repetition=2.0, presence=0.5, frequency=0.25))
    assert together[0].tolist() == [1.0, -4.75, -0.75, 0.0, 7.0]


@pytest.mark.day(3)
@pytest.mark.parametrize("vocab, width", [(1, 3), (50, 0), (50, 130), (777, 40)])
@pytest.mark.parametrize("threads", [1, 2])
def test_c_has_the_bits_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, vocab: int, width: int, threads: int
) -> None:
    monkeypatch.setattr(_penalise, "FEW", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    logits, history, prompts, how = _case(30, vocab, width)
    got = kernels.penalise(logits, history, prompts, **how)
    with kernels.implemented_by("reference"):
        want = kernels.penalise(logits, history, prompts, **how)
    there = ~got.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int32)[there], want.view(torch.int32)[there])
    alone = [
        kernels.penalise(logits[[i]], history[[i]], prompts[[i]], **{k: x[[i]] for k, x in how.items()})
        for i in range(30)
    ]
    assert torch.equal(torch.cat(alone).nan_to_num(9), got.nan_to_num(9))


@pytest.mark.nightly
def test_triton_has_the_bits_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    logits, history, prompts, how = _case(5, 40, 12)
    want = kernels.penalise(logits, history, prompts, **how)
    with kernels.implemented_by("triton"), np.errstate(all="ignore"):  # the interpreter computes with numpy
        got = kernels.penalise(logits, history, prompts, **how)
    assert torch.equal(got.nan_to_num(9), want.nan_to_num(9)) and torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_neutral_rows_and_tokens_outside_the_history_keep_their_bits(kind: str) -> None:
    if kind == "native" and _build.library() is None:
        pytest.skip("no C++ compiler")
    words = torch.randint(-(2**31), 2**31 - 1, (6, 90), generator=torch.Generator().manual_seed(1))
    logits = words.int().view(torch.float32)  # NaNs with all kinds of bits, too
    _, history, prompts, _ = _case(6, 90, 33)
    with kernels.implemented_by(kind):
        same = kernels.penalise(logits, history, prompts, **_of(6))
        other = kernels.penalise(logits, history, prompts, **_of(6, presence=1.0, repetition=1.5))
    assert torch.equal(same.view(torch.int32), logits.view(torch.int32)) and same.data_ptr() != logits.data_ptr()
    for row, ids, x in zip(other, history, logits, strict=True):
        rest = torch.tensor([i for i in range(90) if i not in ids.tolist()])
        assert torch.equal(row[rest].view(torch.int32), x[rest].view(torch.int32))


@pytest.mark.parametrize("penalty", [0.75, 1.5, 1.3])
def test_repetition_is_that_of_transformers(penalty: float) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    g = torch.Generator().manual_seed(4)
    logits, ids = torch.randn(5, 60, generator=g), torch.randint(60, (5, 20), generator=g)
    want = processors.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    got = kernels.penalise(logits, ids.int(), torch.full((5,), 8).int(), **_of(5, repetition=penalty))
    if penalty == 1.3:  # no float32: transformers rounds it first
        torch.testing.assert_close(got, want, rtol=3e-7, atol=0)
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"history": 5}, "history must be from -1 to 4, got 5 in row 1"),
        ({"history": -2}, "history must be from -1 to 4, got -2 in row 1"),
        ({"prompts": 4}, "prompts must be from 0 to 3, got 4 in row 1"),
        ({"repetition": 0.0}, r"repetition must be above 0 and finite, got 0\.0 in row 1"),
        ({"repetition": math.nan}, "repetition must be .*, got nan in row 1"),
        ({"presence": math.inf}, "presence must be finite, got inf in row 1"),
        ({"frequency": math.nan}, "frequency must be .*, got nan in row 1"),
    ],
)
@pytest.mark.parametrize("kind", ["native", "reference"])
def test_values_out_of_range_are_refused(kind: str, change: dict[str, float], said: str) -> None:
    if kind == "native" and _build.library() is None:
        pytest.skip("no C++ compiler")
    given = {"history": torch.zeros(2, 3).int(), "prompts": torch.zeros(2).int(), **_of(2)}
    for name, value in change.items():
        given[name][1] = value
    with kernels.implemented_by(kind), pytest.raises(ValueError, match=said):
        kernels.penalise(torch.zeros(2, 5), **given)


def test_a_backward_is_refused() -> None:
    logits = torch.zeros(2, 6, requires_grad=True)
    y = kernels.penalise(logits, torch.zeros(2, 3).int(), torch.zeros(2).int(), **_of(2))
    with pytest.raises(NotImplementedError, match=r"kernels\.penalise has no derivative: call it on logits\.detach"):
        y.sum().backward()
