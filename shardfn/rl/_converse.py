"""Rollouts of several turns.

An answer calls a tool, whose tokens go into the answer, and the model continues behind them.

The rollout has the places of the tokens that the model drew, so that every loss of this room learns only from these
tokens, and sees the tool's tokens as it sees a prompt's.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from shardfn.core import check_key
from shardfn.engine import WeightedMean
from shardfn.inference import Completion, Engine, Sampling

from ._completions import row_mean
from ._rollout import FAILURES, Rollout
from ._sample import check_end, check_prompts, check_sampling, put_routes, rollout_for, seeds_of
from ._scores import Called, Outcome, count_kinds, outcomes_of
from ._shapes import check_shapes


class Conversations(NamedTuple):
    """Rollout of answers that call a tool, and the failures of the tool.

    Attributes:
        rollout: rollout without rewards. `lengths`, `logprobs` and `versions` are of the tokens that the model drew,
            and `places` has their places in `ids`.
        calls: calls of the tool, in each answer.
        counts: "raised", "late", "invalid" (no list of ids) and "died" (the process ended), of all calls.
        first: first failure, with its error, empty if nothing failed.
        failed: calls in each answer that failed, by kind in the order of `FAILURES`.
    """

    rollout: Rollout
    calls: Int[Tensor, " b"]
    counts: dict[str, int]
    first: str
    failed: Int[Tensor, "b kinds"]


@dataclasses.dataclass
class _Talk:
    """One conversation so far."""

    ids: list[int]  # the prompt, and all behind it
    prompt: int
    seed: int
    places: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    calls: int = 0
    ended: bool = False
    last: Completion | None = None

    def take(self, one: Completion) -> None:
        self.last = one
        self.places += range(len(self.ids), len(self.ids) + len(one.tokens))
        self.ids += one.tokens
        self.logprobs += one.logprobs
        self.versions += one.versions


def converse(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    tool: Callable[[list[int], list[int]], Sequence[int]],
    *,
    call_tokens: Sequence[int],
    key: Int64[Tensor, "2"],
    start: int = 0,
    length: int | None = None,
    since: int = 0,
    calls: int = 4,
    failed: Sequence[int] = (),
    seconds: float = 10.0,
    workers: int = 1,
) -> Conversations:
    """Returns answers to prompts, `sampling.n` to each, in which the model may call a tool. Rewards are missing.

    Where the model draws one of `call_tokens`, the tool gets the ids of the prompt and of the answer so far, and its
    result is put behind them. The answer ends by a stop token, or where `sampling.max_tokens` are drawn, `calls` are
    used up, or the row has no room for a result and a further token. An answer is the same next to any other answers if
    the tool is a function of its arguments.

    Each turn is a request with the whole conversation as its prompt, whose full blocks the engine still has in its KV
    cache. With a batch-invariant model, `completion_logprobs(logits, rollout.ids, rollout.spans)` of one forward of
    the whole conversation has the bits of the rollout's log probabilities.

    Args:
        engine: see `sample`. Several ranks divide the calls of the tool, and have the same results.
        prompts: ids of each prompt.
        sampling: see `sample`. `max_tokens` is T, the most tokens that the model draws in an answer.
        tool: function `tool(prompt, answer) -> ids`, run in a fork of this process, as the function of `score`.
        call_tokens: ids that call the tool. None of them is a stop token.
        key: key of this iteration.
        start: number of the first prompt, where ranks or calls have different prompts.
        length: L, the same on all ranks. Default: the engine's context.
        since: see `sample`.
        calls: most calls in an answer.
        failed: ids that take the place of a result where the tool fails.
        seconds: limit of a call.
        workers: number of processes.

    Raises:
        ValueError: as `sample`, or no token calls the tool, or such a token is a stop token, or a number is out of
            range.
        RuntimeError: as `sample`.
        NotImplementedError: this system has no fork.

    Example:
        >>> from shardfn import core, inference
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=8, num_layers=1, d_model=32, num_heads=4, max_len=32, batch_invariant=True)
        >>> engine = Engine(inference.decoder(config), gpt.init(config, core.key(0)))
        >>> sampling, echo = Sampling(max_tokens=6, stop_tokens=(0,)), lambda prompt, answer: answer[:2]
        >>> found = converse(engine, [[5, 6], [7]], sampling, echo, call_tokens=(1, 2, 3, 4), key=core.key(1))
        >>> found.rollout.places.shape, found.counts["raised"]
        (torch.Size([2, 6]), 0)
    """
    check_key("converse", key)
    check_sampling("converse", sampling)
    length = engine.limits.context if length is None else length
    check_prompts("converse", prompts, sampling.max_tokens, length, engine)
    _check_conversation(engine, sampling, call_tokens, failed, length, calls)
    talks = [
        _Talk(list(prompt), len(prompt), seed)
        for i, prompt in enumerate(prompts)
        for seed in seeds_of(key, (start + i) * sampling.n, sampling.n)
    ]
    asked = Called("converse", tool, _ids_below(engine.limits.vocab), f"ids below {engine.limits.vocab}")
    how: dict[str, Any] = {"seconds": seconds, "workers": workers, "mesh": engine.mesh, "axis": engine.mesh.axis_names}
    going, outcomes = list(range(len(talks))), list[Outcome]()
    while going:
        _draw_answers(engine, talks, going, sampling, call_tokens, length)
        going = [i for i in going if _may_call(talks[i], sampling, call_tokens, length, calls)]
        found = outcomes_of(asked, [_read_arguments(talks[i]) for i in going], **how)
        outcomes += [(going[row], kind, value) for row, kind, value in found]
        going = [i for i, one in zip(going, found, strict=True) if _put_outcome(talks[i], one, failed, length)]
    return Conversations(
        _make_rollout(talks, rollout_for(engine, len(talks), length, sampling.max_tokens), since, engine),
        torch.tensor([talk.calls for talk in talks], device=engine.mesh.device),
        count_kinds(outcomes),
        next((asked.text(one) for one in outcomes if one[1]), ""),
        _describe_failed(len(talks), outcomes).to(engine.mesh.device),
    )


def call_metrics(calls_B: Int[Tensor, " b"], failed_BK: Int[Tensor, "b kinds"]) -> dict[str, WeightedMean]:
    """Returns metrics for a loss's aux: means over the answers of all ranks.

    Args:
        calls_B: `Conversations.calls`.
        failed_BK: `Conversations.failed`.

    Returns:
        "calls" of an answer, and "calls_raised", "calls_late", "calls_invalid" and "calls_died", the failed calls by
        kind.

    Raises:
        ValueError: shapes do not fit.

    Example:
        >>> found = call_metrics(torch.tensor([1, 2]), torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]]))
        >>> float(found["calls"].mean()), float(found["calls_raised"].mean())
        (1.5, 0.5)
    """
    check_shapes("call_metrics", calls_B=calls_B, failed_BK=failed_BK)
    kinds = {f"calls_{kind}": failed_B for kind, failed_B in zip(FAILURES, failed_BK.unbind(1), strict=True)}
    return {name: row_mean(x_B.float()) for name, x_B in ({"calls": calls_B} | kinds).items()}


def _describe_failed(rows: int, outcomes: Sequence[Outcome]) -> Tensor:
    found = torch.zeros(rows, len(FAILURES), dtype=torch.int64)
    for row, kind, _ in outcomes:
        if kind:
            found[row, FAILURES.index(kind)] += 1
    return found


def _check_conversation(
    engine: Engine, sampling: Sampling, call_tokens: Sequence[int], failed: Sequence[int], length: int, calls: int
) -> None:
    vocab, context = engine.limits.vocab, engine.limits.context
    for name, ids in (("call_tokens", call_tokens), ("failed", failed)):
        wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocab]
        if wrong:
            raise ValueError(f"converse: {name} has {wrong[0]!r}. Pass ids from 0 to {vocab - 1}.")
    both = sorted(set(call_tokens) & set(sampling.stop_tokens))
    if both or not call_tokens:
        raise ValueError(
            f"converse: call_tokens are {list(call_tokens)}, and stop_tokens {list(sampling.stop_tokens)}. Pass one at"
            " least that calls the tool, and ends no answer."
        )
    if length > context:
        raise ValueError(
            f"converse: length is {length}, and the engine's context {context}. Pass a shorter length, or limits of a"
            " longer context."
        )
    if calls < 1:
        raise ValueError(f"converse: calls is {calls}. Pass 1 at least, or take sample for answers without a tool.")


def _ids_below(vocab: int) -> Callable[[Any], list[int]]:
    def accept_ids(value: Any) -> list[int]:
        ids = [operator.index(i) for i in value]
        if not all(0 <= i < vocab for i in ids):
            raise ValueError(ids)
        return ids

    return accept_ids


def _draw_answers(
    engine: Engine, talks: list[_Talk], going: list[int], sampling: Sampling, call_tokens: Sequence[int], length: int
) -> None:
    """Lets the model continue in each conversation, up to a call or its end."""
    each = [
        dataclasses.replace(
            sampling,
            n=1,
            seed=talk.seed,  # draws also depend on their positions, so turns share the seed
            max_tokens=min(sampling.max_tokens - len(talk.places), length - len(talk.ids)),
            stop_tokens=(*sampling.stop_tokens, *call_tokens),
        )
        for talk in (talks[i] for i in going)
    ]
    for i, one in zip(going, engine.generate([talks[i].ids for i in going], each), strict=True):
        check_end("converse", i, one)
        talks[i].take(one)
        talks[i].ended = talks[i].ids[-1] in sampling.stop_tokens


def _may_call(talk: _Talk, sampling: Sampling, call_tokens: Sequence[int], length: int, calls: int) -> bool:
    room = len(talk.places) < sampling.max_tokens and len(talk.ids) < length
    return room and talk.calls < calls and talk.ids[-1] in call_tokens


def _read_arguments(talk: _Talk) -> tuple[list[int], list[int]]:
    return talk.ids[: talk.prompt], talk.ids[talk.prompt :]


def _put_outcome(talk: _Talk, outcome: Outcome, failed: Sequence[int], length: int) -> bool:
    """Puts a result behind the call, and returns whether the model continues."""
    _, kind, value = outcome
    result: Sequence[int] = failed if kind else value
    talk.calls += 1
    if len(talk.ids) + len(result) >= length:
        return False
    talk.ids += result
    return True


def _make_rollout(talks: list[_Talk], out: Rollout, since: int, engine: Engine) -> Rollout:
    for i, talk in enumerate(talks):
        num = len(talk.places)
        out.prompts[i], out.lengths[i], out.ended[i] = talk.prompt, num, talk.ended
        out.ids[i, : len(talk.ids)] = torch.tensor(talk.ids)
        out.logprobs[i, :num] = torch.tensor(talk.logprobs, dtype=engine.dtype)
        out.versions[i, :num] = torch.tensor(talk.versions) + since
        out.places[i, :num] = torch.tensor(talk.places)
        assert talk.last is not None  # every conversation has a turn
        put_routes(out, i, talk.last)  # whose prompt was all before it
    return Rollout(*(x.to(engine.mesh.device) for x in out))
