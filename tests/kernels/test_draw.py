"""Covers kernels.draw: the bits of its definition, rows by themselves, transformers' filters, and the distribution."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn import core, kernels
from shardfn.kernels import _build, _draw
from shardfn.kernels._fixed_bits import exponential

F64, INTS = torch.float64, ("top_k", "targets")
MASK = 0xFFFFFFFF


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
    return {k: torch.full((rows,), x, dtype=torch.int64 if k in INTS else F64) for k, x in given.items()}


def _same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1].nan_to_num(9), b[1].nan_to_num(9))


@pytest.mark.parametrize("vocab", [1, 63, 777, pytest.param(4096, marks=pytest.mark.nightly)])
def test_c_has_the_bits_of_the_definition(generation: int, vocab: int) -> None:
    logits, uniform, how = _case(40, vocab)
    targets = torch.full((40,), -1)
    targets[::9] = vocab // 2
    got = kernels.draw(logits, uniform, **how, targets=targets)
    with kernels.implemented_by("reference"):
        want = kernels.draw(logits, uniform, **how, targets=targets)
    assert _same(got, want) and torch.equal(got[0] < 0, got[1].isnan()), generation


@pytest.mark.nightly
@pytest.mark.parametrize("vocab", [1, 130])
def test_triton_has_the_bits_of_a_cpu(monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    logits, uniform, how = _case(20, vocab)
    targets, keys = torch.full((20,), -1), torch.arange(20) * 7**18
    targets[::9] = vocab // 2
    want = kernels.draw(logits, uniform, **how, targets=targets), kernels.draw_uniforms(keys, keys + 2**33)
    with kernels.implemented_by("triton"), np.errstate(all="ignore"):  # the interpreter computes with numpy
        got = kernels.draw(logits, uniform, **how, targets=targets), kernels.draw_uniforms(keys, keys + 2**33)
    assert _same(got[0], want[0]) and torch.equal(got[1], want[1])


# Ties, signs of zero, spreads that fall into one bin or overflow, and temperatures at the ends of their range.
@pytest.mark.parametrize("temperature", [1e-300, 0.99e-5, 1e-5, 1e-3, 1.0, 100.0, 1e300, math.inf])
def test_ties_and_extremes_have_the_bits_of_the_definition(temperature: float) -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 300, generator=g)
    logits[0], logits[1] = torch.where(logits[0] > 0, 0.0, -0.0), logits[1].round()
    logits[2], logits[3] = logits[2] * 1e38, logits[3] * 1e-40
    logits[4], logits[5, ::2] = logits[4].sign() * 3e38, -math.inf
    logits[6, 7], logits[7], logits[8] = 3.4e38, torch.arange(300) // 3 * -0.25, -5.0
    uniform = torch.rand(9, dtype=F64, generator=g)
    for how in ({}, {"top_k": 7}, {"top_p": 0.6}, {"top_k": 200, "top_p": 0.9}, {"min_p": 0.3, "top_p": 0.0}):
        given = _of(9, temperature=temperature, **how)
        got = kernels.draw(logits, uniform, **given)
        with kernels.implemented_by("reference"):
            assert _same(got, kernels.draw(logits, uniform, **given)), how


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_drawn_like_the_row_alone(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(_draw, "FEW", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    logits, uniform, how = _case(65, 333)
    alone = [kernels.draw(logits[[i]], uniform[[i]], **{k: x[[i]] for k, x in how.items()}) for i in range(65)]
    tokens, logprobs = map(torch.cat, zip(*alone, strict=True))
    for n in range(1, 66):
        got = kernels.draw(logits[:n], uniform[:n], **{k: x[:n] for k, x in how.items()})
        assert _same(got, (tokens[:n], logprobs[:n])), n


@pytest.mark.day(3)
@pytest.mark.parametrize("vocab", [1, 63, 777])
def test_top_tokens_have_the_bits_of_the_definition(generation: int, vocab: int) -> None:
    logits = _case(40, vocab)[0]
    logits[8:20] = logits[8:20].round()  # with ties
    logits[20] *= 0.0
    logits[21, ::2] = -0.0
    for num in {1, min(20, vocab), vocab}:
        got = kernels.top_logprobs(logits, num)
        with kernels.implemented_by("reference"):
            assert _same(got, kernels.top_logprobs(logits, num)), generation
        assert torch.equal(got[0] < 0, got[1].isnan())
        for i in (0, 9, 20, 21, 33):  # each is the value of a draw, and of the row alone
            assert _same(kernels.top_logprobs(logits[[i]], num), (got[0][[i]], got[1][[i]]))
            for token, logprob in zip(got[0][i], got[1][i], strict=True):
                drawn = kernels.draw(logits[[i]], torch.zeros(1, dtype=F64), **_of(1), targets=token[None])
                assert torch.equal(drawn[1], logprob[None]) or bool(logprob.isnan())


def test_top_tokens_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    logits = _case(20, 130)[0]
    logits[9] = logits[9].round()
    want = kernels.top_logprobs(logits, 7)
    with kernels.implemented_by("triton"), np.errstate(all="ignore"):
        assert _same(kernels.top_logprobs(logits, 7), want)


def test_the_number_of_top_tokens() -> None:
    for num in (0, 7):
        with pytest.raises(ValueError, match=rf"num must be from 1 to 6, the number of logits, got {num}"):
            kernels.top_logprobs(torch.zeros(2, 6), num)


def test_a_target_is_scored_instead_of_a_draw() -> None:
    logits, uniform, how = _case(30, 200)
    targets = torch.arange(30) * 3 - 1
    uniform[1:] = math.nan  # not read
    tokens, logprobs = kernels.draw(logits, uniform, **how, targets=targets)
    failed = tokens < 0
    assert failed.tolist() == [i in (3, 4, 5) for i in range(30)]
    keep = ~failed & (targets >= 0)
    assert torch.equal(tokens[keep], targets[keep])
    want = logits.double().log_softmax(-1)[keep].gather(1, targets[keep, None])[:, 0]
    torch.testing.assert_close(logprobs[keep].double(), want, rtol=1e-6, atol=1e-6)
    assert logprobs[6] == -math.inf  # the token is excluded
    drawn, same = kernels.draw(logits[:1], uniform[:1], **{k: x[:1] for k, x in how.items()})
    again = kernels.draw(logits[:1], uniform[:1], **{k: x[:1] for k, x in how.items()}, targets=drawn)
    assert torch.equal(again[1], same)  # one expression for tokens that are drawn and given


def test_frequencies_are_those_of_the_softmax() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 1.5
    num = 20000
    uniform = kernels.draw_uniforms(torch.full((num,), 77), torch.arange(num))
    tokens, _ = kernels.draw(logits.expand(num, -1).contiguous(), uniform, **_of(num, temperature=0.8))
    want = (logits.double() / 0.8).softmax(-1) * num
    chi = float(((torch.bincount(tokens, minlength=40) - want).square() / want).sum())
    assert chi < 72.1  # the quantile 0.999 for 39 degrees of freedom


def test_uniform_numbers_are_the_words_of_core_and_of_jax() -> None:
    g = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (500,), generator=g)
    places = torch.cat([torch.arange(490), torch.randint(2**62, (10,), generator=g)])
    pair = torch.stack([keys >> 32 & MASK, keys & MASK], -1)
    hi, lo = (word.to(torch.int64) & MASK for word in core.threefry2x32(pair, places))
    want = torch.tensor([(h << 32 | n) >> 11 for h, n in zip(hi.tolist(), lo.tolist(), strict=True)]).double() * 2**-53
    for kind in ("native", "reference") if _build.library() else ("reference",):
        with kernels.implemented_by(kind):
            assert torch.equal(kernels.draw_uniforms(keys, places), want)
            assert torch.equal(kernels.draw_uniforms(keys.view(torch.uint64), places), want)
            assert torch.equal(kernels.draw_uniforms(keys[::2], places[::2]), want[::2])
            assert kernels.draw_uniforms(keys[:3], places[:3].int()).tolist() == want[:3].tolist()
            # The key and counter of zeros: 0x6b200159, 0x99ba4efe in the paper's test vectors.
            zero = torch.tensor([0])
            assert kernels.draw_uniforms(zero, zero).item() == (0x6B20015999BA4EFE >> 11) / 2**53
    assert (want >= 0).all() and (want < 1).all()


def test_uniform_numbers_refuse_other_types() -> None:
    with pytest.raises(TypeError, match=r"keys is torch\.int32, must be torch\.int64 or torch\.uint64"):
        kernels.draw_uniforms(torch.zeros(2).int(), torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"places is of shape \(3,\), must be \(2,\): one for each key"):
        kernels.draw_uniforms(torch.zeros(2).long(), torch.zeros(3).long())


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


@pytest.mark.day("how0", "how2")
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
    torch.testing.assert_close(exponential(x), x.exp(), rtol=4.5e-16, atol=0)
    for value in (1.0, 1.4142135623730951, 2.0, 3.7, 49152.0, 1e10):
        assert math.isclose(_draw.compute_logarithm(value), math.log(value), rel_tol=4.5e-16, abs_tol=2e-16)


@pytest.mark.parametrize(
    "how, said",
    [
        ({"temperature": math.nan}, "temperature must be .*, got nan in row 0"),
        ({"temperature": -1.0}, "temperature must be .*, got -1.0 in row 0"),
        ({"top_p": 1.5}, "top_p must be .*, got 1.5 in row 0"),
        ({"top_k": 7}, "top_k must be from 0 to 6, got 7 in row 0"),
        ({"min_p": -0.1}, "min_p must be .*, got -0.1"),
        ({"targets": 6}, "targets must be from -1 to 5, got 6 in row 0"),
        ({"targets": -2}, "targets must be from -1 to 5, got -2 in row 0"),
    ],
)
def test_arguments_out_of_range_are_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kernels.draw(torch.zeros(2, 6), torch.zeros(2, dtype=F64), **_of(2, **how))


def test_a_uniform_number_of_one_and_no_token() -> None:
    with pytest.raises(ValueError, match=r"uniform must be from 0 and below 1\.0, got 1\.0 in row 1"):
        kernels.draw(torch.zeros(2, 6), torch.tensor([0.5, 1.0], dtype=F64), **_of(2))
    with pytest.raises(ValueError, match="at least one row and one token"):
        kernels.draw(torch.zeros(2, 0), torch.zeros(2, dtype=F64), **_of(2))


def test_a_captured_draw_refuses_values_when_it_runs() -> None:
    given = {"logits": torch.zeros(2, 6), "uniform": torch.full((2,), 0.5, dtype=F64), **_of(2, top_k=2)}
    graph = make_fx(lambda given: kernels.draw(**given), tracing_mode="fake")(given)
    assert torch.equal(graph(given)[0], kernels.draw(**given)[0])
    with pytest.raises(ValueError, match="top_k must be from 0 to 6, got 7 in row 1"):
        graph(given | {"top_k": torch.tensor([0, 7])})


def test_a_row_of_temperature_zero_needs_no_uniform_number() -> None:
    uniform, temperature = torch.tensor([math.nan, 1.0, 0.5], dtype=F64), torch.tensor([0.0, 0.0, 1.0], dtype=F64)
    tokens, _ = kernels.draw(torch.eye(3) * 40, uniform, **_of(3) | {"temperature": temperature})
    assert tokens.tolist() == [0, 1, 2]


def test_a_backward_is_refused() -> None:
    logits = torch.zeros(2, 6, requires_grad=True)
    _, logprobs = kernels.draw(logits, torch.full((2,), 0.5, dtype=F64), **_of(2))
    with pytest.raises(NotImplementedError, match=r"kernels\.draw has no derivative: draw from logits\.detach"):
        logprobs.sum().backward()
    assert logits.grad is None
