"""Answers that call a tool: its tokens are no draws, log probabilities are the trainer's, and failures are counted."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import rl
from shardfn.inference import Engine, Runner, Sampling, decoder, limits_of
from shardfn.models import gpt
from shardfn.testing import distributed

CONFIG = gpt.Config.llama_like(
    vocab_size=12, num_layers=1, d_model=16, num_heads=2, d_ff=16, max_len=40, batch_invariant=True
)
MODEL = decoder(CONFIG)
LIMITS = limits_of(MODEL, running=8, block=4, buckets=(64,))
PROMPTS = [[3, 4, 5, 6, 7], [8], [3, 4, 9, 1, 2, 3]]
SAMPLING = Sampling(max_tokens=10, n=3, stop_tokens=(0,))
CALLS = (1, 2, 3)
runner = functools.cache(lambda: Runner(MODEL, LIMITS))


def params() -> Any:
    return gpt.init(CONFIG, sf.key(0))


def tool(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """As many tokens as the sum of the last ones tells, none among them."""
    return [11, 10, *answer[-2:], *prompt][: sum(answer) % 6]


def converse(engine: Engine | None = None, prompts: Any = PROMPTS, f: Any = tool, **how: Any) -> rl.Conversations:
    engine = Engine(MODEL, params(), limits=LIMITS, runner=runner()) if engine is None else engine
    sampling = how.pop("sampling", SAMPLING)
    return rl.converse(engine, prompts, sampling, f, **{"call_tokens": CALLS, "key": sf.key(1), "length": 32, **how})


def logprobs(params: Any, x: rl.Rollout) -> torch.Tensor:
    return rl.completion_logprobs(gpt.apply(CONFIG, params, x.ids), x.ids, x.spans)


@pytest.mark.nightly
def test_log_probabilities_are_those_of_one_forward_of_the_whole_conversation() -> None:
    x, calls, counts, *_ = converse()
    assert torch.equal(logprobs(params(), x), x.logprobs) and not any(counts.values())
    assert calls.max() > 1 and (x.places[:, 1:] - x.places[:, :-1]).max() > 1
    rl.check_versions(x, 0)
    rl.check_first_ratios(logprobs(params(), x), x)


def test_a_tool_s_tokens_follow_its_calls_and_are_not_among_those_that_are_learnt() -> None:
    x, calls, *_ = converse()
    for row in range(len(x.ids)):
        num, (prompt, answer) = int(x.lengths[row]), x.tokens(row)
        assert prompt == PROMPTS[row // 3]
        places = (x.places[row, :num] - len(prompt)).tolist()
        drawn, made = [answer[i] for i in places], list[int]()
        for at, token in enumerate(drawn):  # the answer is made again from its draws
            made.append(token)
            if token in CALLS and at + 1 < num:
                made += tool(prompt, made)
        assert made == answer and bool(x.ended[row]) == (drawn[-1] == 0)
        assert int(calls[row]) >= sum(token in CALLS for token in drawn[:-1])

    policy = x.logprobs.clone().requires_grad_()
    rl.grpo(policy, x.logprobs, torch.ones(len(x.ids)), x.lengths).total.backward()
    assert policy.grad is not None and torch.equal(policy.grad != 0, rl.completion_mask(x.lengths, x.width))


def test_no_gradient_reaches_the_logits_before_a_tool_s_tokens() -> None:
    x = converse().rollout
    logits = gpt.apply(CONFIG, params(), x.ids).detach().requires_grad_()
    rl.completion_logprobs(logits, x.ids, x.spans).sum().backward()
    assert logits.grad is not None
    learnt = torch.zeros(x.ids.shape, dtype=torch.bool)
    for row in range(len(x.ids)):
        learnt[row, x.places[row, : x.lengths[row]] - 1] = True
    assert torch.equal(logits.grad.any(-1), learnt)


def test_a_conversation_does_not_depend_on_the_others() -> None:
    whole = converse().rollout
    for i, prompt in enumerate(PROMPTS):
        alone = converse(prompts=[prompt], start=i).rollout
        for a, b in zip(alone[:5], whole[:5], strict=True):
            assert torch.equal(a, b[3 * i : 3 * i + 3])


def test_a_turn_computes_no_full_block_of_earlier_ones_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, run = list[int](), Runner.run

    def counted(self: Runner, weights: Any, cache: Any, plan: Any, *rest: Any, **how: Any) -> Any:
        computed.append(plan.num_tokens)
        return run(self, weights, cache, plan, *rest, **how)

    monkeypatch.setattr(Runner, "run", counted)
    x, calls, *_ = converse(prompts=[[5] * 12], sampling=Sampling(max_tokens=10), call_tokens=range(8))
    assert calls.tolist() == [4]
    ids = int(x.places.max())  # the last token is never fed
    # Every turn begins at the first block that is not full.
    assert ids <= sum(computed) <= ids + 4 * LIMITS.block


def failing(prompt: Sequence[int], answer: Sequence[int]) -> Any:
    del prompt
    match answer[-1]:
        case 1:
            raise ZeroDivisionError("1 / 0")
        case 2:
            time.sleep(60)
        case _:
            return [99]


@pytest.mark.nightly
def test_a_tool_that_fails_is_counted_and_the_model_goes_on() -> None:
    x, calls, counts, first, failed = converse(f=failing, failed=[11, 11], seconds=0.5, workers=9, calls=2)
    assert counts["raised"] and counts["late"] and counts["invalid"] and sum(counts.values()) == int(calls.sum())
    assert first.startswith("row ") and calls.max() == 2
    assert failed.sum(0).tolist() == list(counts.values()) and torch.equal(failed.sum(1), calls)
    metrics = rl.call_metrics(calls, failed)
    assert float(metrics["calls_late"].mean()) == pytest.approx(counts["late"] / len(calls))
    assert float(metrics["calls"].mean()) == pytest.approx(float(calls.sum()) / len(calls))
    assert torch.equal(logprobs(params(), x), x.logprobs)
    for row in range(len(x.ids)):
        num = int(x.lengths[row])
        gaps = (x.places[row, 1:num] - x.places[row, : num - 1] - 1).tolist()
        assert set(gaps) <= {0, 2}


def test_a_result_without_room_ends_the_answer() -> None:
    x, *_ = converse(f=lambda prompt, answer: [11] * 9, length=16)
    assert x.ids.shape[1] == 16 and torch.equal(logprobs(params(), x), x.logprobs)
    assert not x.ended[x.lengths < 10].all()  # some are cut


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"call_tokens": (0, 3)}, r"call_tokens are \[0, 3\], and stop_tokens \[0\]. Pass one at least"),
        ({"call_tokens": ()}, r"call_tokens are \[\]"),
        ({"failed": [12]}, "failed has 12. Pass ids from 0 to 11"),
        ({"length": 99}, "length is 99, and the engine's context 40. Pass a shorter length"),
        ({"calls": 0}, "calls is 0. Pass 1 at least"),
        ({"seconds": 0}, "converse: seconds and workers must be positive and finite, got 0 and 1"),
        ({"sampling": Sampling(top_k=3)}, "converse: top_k is 3; answers would be drawn from another distribution"),
        ({"prompts": [[]]}, r"converse: prompts\[0\] has no tokens"),
    ],
    ids=str,
)
def test_mistakes_are_named(how: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        converse(**how)


def test_places_outside_of_a_row_are_refused() -> None:
    x = converse().rollout
    with pytest.raises(ValueError, match=r"an answer does not lie in its row: .* and places from 1 to 31"):
        logprobs(params(), x._replace(places=x.places + 25))


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_of_one_engine_divide_the_calls(world: int) -> None:
    mesh = sf.make_mesh({"tp": world})
    model = decoder(CONFIG, tp="tp")
    engine = Engine(model, params(), mesh=mesh, limits=limits_of(model, running=8, block=4, buckets=(64,)))
    one = sf.make_mesh(alone=True)
    alone = converse(Engine(MODEL, params(), mesh=one, limits=LIMITS, runner=Runner(MODEL, LIMITS, mesh=one)))
    for a, b in zip(sf.tree_leaves(converse(engine).rollout), sf.tree_leaves(alone.rollout), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
