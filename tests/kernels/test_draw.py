"""Covers kernels.draw: the bits of its definition, rows by themselves, transformers' filters, and the distribution."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn import kernels
from shardfn.kernels.draw import _reference

F64 = torch.float64


def _case(rows: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Rows with all kinds of arguments, and some that are not finite."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g) * 3
    logits[3 % rows, vocab // 2], logits[4 % rows], logits[5 % rows, 0] = math.nan, -math.inf, math.inf
    logits[6 % rows, : vocab - 3], logits[7 % rows] = -math.inf, 0.0
    how = {name: torch.rand(rows, generator=g, dtype=F64) for name in ("temperature", "top_p", "min_p")}
    how["temperature"] *= 2
    how["temperature"][::7], how["temperature"][1::5], how["top_p"][::2], how["min_p"][::3] = 0, 1, 1, 0
    how["top_k"] = torch.randint(min(50, vocab), (rows,), generator=g)
    how["top_k"][::3] = 0
    return logits, torch.rand(rows, generator=g, dtype=F64), how


def _of(rows: int, **how: float) -> dict[str, Tensor]:
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | how
    return {k: torch.full((rows,), x, dtype=torch.int64 if k == "top_k" else F64) for k, x in given.items()}


@pytest.mark.parametrize("vocab", [1, 63, 777, pytest.param(4096, marks=pytest.mark.nightly)])
def test_c_has_the_bits_of_the_definition(vocab: int) -> None:
    logits, uniform, how = _case(40, vocab)
    got = kernels.draw(logits, uniform, **how)
    with kernels.implemented_by("reference"):
        want = kernels.draw(logits, uniform, **how)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1].nan_to_num(9), want[1].nan_to_num(9)) and torch.equal(got[0] < 0, got[1].isnan())


def test_a_row_is_drawn_like_the_row_alone() -> None:
    logits, uniform, how = _case(30, 333)
    tokens, logprobs = kernels.draw(logits, uniform, **how)
    for i in range(30):
        one = slice(i, i + 1)
        token, logprob = kernels.draw(logits[one], uniform[one], **{k: x[one] for k, x in how.items()})
        assert token == tokens[one] and (logprob == logprobs[one] or (logprob.isnan() and logprobs[one].isnan()))


def test_log_probabilities_are_of_the_logits_as_given() -> None:
    logits, uniform, how = _case(50, 500)
    tokens, logprobs = kernels.draw(logits, uniform, **how)
    there = tokens >= 0
    want = logits.double().log_softmax(-1)[there].gather(1, tokens[there, None])[:, 0]
    torch.testing.assert_close(logprobs[there].double(), want, rtol=1e-6, atol=1e-6)
    assert there.sum() == 47


def test_temperature_zero_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert kernels.draw(logits, torch.tensor([0.99], dtype=F64), **_of(1, temperature=0.0))[0].tolist() == [1]


@pytest.mark.parametrize(
    "how", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}]
)
def test_the_tokens_that_are_left_are_those_of_transformers(how: dict[str, Any]) -> None:
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(12, 40, generator=torch.Generator().manual_seed(1)) * 2
    left = logits / 0.9
    for name, warper in (
        ("top_k", logits_process.TopKLogitsWarper),
        ("top_p", logits_process.TopPLogitsWarper),
        ("min_p", logits_process.MinPLogitsWarper),
    ):
        left = warper(how[name])(None, left) if name in how else left
    fine = torch.arange(4000, dtype=F64) / 4000
    for row, kept in zip(logits, left, strict=True):
        tokens, _ = kernels.draw(row.expand(4000, -1).clone(), fine, **_of(4000, temperature=0.9, **how))
        counts = torch.bincount(tokens, minlength=40) / 4000
        assert set(tokens.tolist()) <= set(kept.isfinite().nonzero()[:, 0].tolist())
        # Evenly spaced numbers give every token its probability, up to one draw.
        torch.testing.assert_close(counts.double(), kept.double().softmax(-1), rtol=0, atol=1.1 / 4000)


def test_own_functions_are_exact_to_a_unit() -> None:
    x = -torch.rand(5000, dtype=F64, generator=torch.Generator().manual_seed(0)) * 700
    torch.testing.assert_close(_reference.exponential(x), x.exp(), rtol=4.5e-16, atol=0)
    for value in (1.0, 1.4142135623730951, 2.0, 3.7, 49152.0, 1e10):
        assert math.isclose(_reference.logarithm(value), math.log(value), rel_tol=4.5e-16, abs_tol=2e-16)


@pytest.mark.parametrize(
    "how, said",
    [
        ({"temperature": math.nan}, "temperature is nan in row 0"),
        ({"temperature": -1.0}, "temperature is -1.0 in row 0"),
        ({"top_p": 1.5}, "top_p is 1.5 in row 0"),
        ({"top_k": 7}, "top_k is 7 in row 0; must be from 0 to 6"),
        ({"min_p": -0.1}, "min_p is -0.1"),
    ],
)
def test_arguments_out_of_range_are_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kernels.draw(torch.zeros(2, 6), torch.zeros(2, dtype=F64), **_of(2, **how))


def test_a_uniform_number_of_one_and_no_token() -> None:
    with pytest.raises(ValueError, match=r"uniform is 1\.0 in row 1"):
        kernels.draw(torch.zeros(2, 6), torch.tensor([0.5, 1.0], dtype=F64), **_of(2))
    with pytest.raises(ValueError, match="there is no token"):
        kernels.draw(torch.zeros(2, 0), torch.zeros(2, dtype=F64), **_of(2))


def test_a_captured_draw_refuses_values_when_it_runs() -> None:
    given = {"logits": torch.zeros(2, 6), "uniform": torch.full((2,), 0.5, dtype=F64), **_of(2, top_k=2)}
    graph = make_fx(lambda given: kernels.draw(**given), tracing_mode="fake")(given)
    assert torch.equal(graph(given)[0], kernels.draw(**given)[0])
    with pytest.raises(ValueError, match="top_k is 7 in row 1; must be from 0 to 6"):
        graph(given | {"top_k": torch.tensor([0, 7])})


def test_a_row_of_temperature_zero_needs_no_uniform_number() -> None:
    uniform, temperature = torch.tensor([math.nan, 1.0, 0.5], dtype=F64), torch.tensor([0.0, 0.0, 1.0], dtype=F64)
    tokens, _ = kernels.draw(torch.eye(3) * 40, uniform, **_of(3) | {"temperature": temperature})
    assert tokens.tolist() == [0, 1, 2]


def test_a_backward_is_refused() -> None:
    logits = torch.zeros(2, 6, requires_grad=True)
    _, logprobs = kernels.draw(logits, torch.full((2,), 0.5, dtype=F64), **_of(2))
    with pytest.raises(NotImplementedError, match=r"kernels\.draw has no derivative; draw from logits\.detach"):
        logprobs.sum().backward()
    assert logits.grad is None
