"""Rollouts by the engine of inference."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn import core, inference

from ._rollout import Rollout, empty_rollout


def with_temperature(decoder: inference.Decoder, temperature: float) -> inference.Decoder:
    """Returns the model whose logits are the logits of another model, divided by a temperature.

    An engine of the result draws by `Sampling(temperature=1.0)` at this temperature. Its log probabilities belong to
    the sampled distribution, softmax(logits / temperature), and not to the full distribution, softmax(logits). With an
    batch-invariant model both have the bits of a training forward:

    | distribution | in training |
    |---|---|
    | sampled | `completion_logprobs(logits / temperature, ...)`, with first ratios of 1 |
    | full | `completion_logprobs(logits, ...)` |

    Args:
        decoder: decoder of the model.
        temperature: positive number. Below 1 fewer different tokens are drawn.

    Raises:
        ValueError: the temperature is not above 0 and finite.

    Example:
        >>> from shardfn import inference
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4)
        >>> with_temperature(inference.decoder(config), 0.7).vocab
        64
    """
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"with_temperature: temperature must be above 0 and finite, got {temperature}. engine.generate with"
            " Sampling(temperature=0.0) draws the most probable tokens."
        )

    def divide_logits(outputs: Callable[..., inference.Outputs]) -> Callable[..., inference.Outputs]:
        def compute_outputs(weights: core.PyTree, *rest: Any) -> inference.Outputs:
            found = outputs(weights, *rest)
            return found._replace(logits=inference.widen_floats(found.logits) / temperature)

        return compute_outputs

    more = {name: x._replace(outputs=divide_logits(x.outputs)) for name, x in decoder.more_layouts.items()}
    return dataclasses.replace(decoder, outputs=divide_logits(decoder.outputs), more_layouts=more)


def sample(
    engine: inference.Engine,
    prompts: Sequence[Sequence[int]],
    sampling: inference.Sampling,
    *,
    key: Int64[Tensor, "2"],
    start: int = 0,
    length: int | None = None,
    since: int = 0,
) -> Rollout:
    """Returns answers to prompts, `sampling.n` to each, one after another, without rewards.

    An answer is a function of the weights, the key, the number of its prompt and the answer's number. So an answer is
    the same next to any other prompts, and on any rank. Call `engine.update_weights` before, with the parameters of the
    training state.

    The log probabilities are the engine's. With a batch-invariant model, such as `gpt.Config(batch_invariant=True)`,
    `completion_logprobs` of the training forward has the same bits, otherwise both differ by rounding.

    Args:
        engine: engine of a single rank, or of several that all pass the same prompts.
        prompts: ids of each prompt.
        sampling: sampling with temperature 1 and without filters, penalties and a grammar, so that answers are drawn
            from the distribution of their log probabilities. Its seed is not used.
        key: key of this iteration.
        start: number of the first prompt, where ranks or calls have different prompts.
        length: L, the same on all ranks. Default: the engine's context.
        since: number added to the engine's versions, which begin at 0: a run that is resumed continues counting.
            `check_versions` then takes `since + engine.update_weights(...)`.

    Returns:
        `len(prompts) * sampling.n` rows of L ids and `sampling.max_tokens` columns.

    Raises:
        ValueError: answers would be drawn from another distribution. A prompt is empty, or too long, with its tokens
            and the limit.
        RuntimeError: an answer did not finish, such as for logits that are not finite.

    Example:
        >>> from shardfn import core, inference
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=16, batch_invariant=True)
        >>> engine = inference.Engine(inference.decoder(config), gpt.init(config, core.key(0)))
        >>> sampling = inference.Sampling(max_tokens=4, n=3)
        >>> rollout = sample(engine, [[5, 6], [7]], sampling, key=core.key(1))
        >>> rollout.ids.shape, rollout.prompts.tolist()
        (torch.Size([6, 16]), [2, 2, 2, 1, 1, 1])
    """
    core.check_key("sample", key)
    check_sampling("sample", sampling)
    length = engine.limits.context if length is None else length
    check_prompts("sample", prompts, sampling.max_tokens, length, engine)
    seeds = seeds_of(key, start, len(prompts))
    each = [dataclasses.replace(sampling, seed=seed) for seed in seeds]
    found = engine.generate(prompts, each)
    rows = [
        (prompt, one)
        for prompt, made in zip(prompts, found, strict=True)
        for one in (made if isinstance(made, list) else [made])
    ]
    return _make_rollout(rows, rollout_for(engine, len(rows), length, sampling.max_tokens), since, engine)


def rollout_for(engine: inference.Engine, rows: int, length: int, width: int) -> Rollout:
    """Returns the empty rollout for answers of an engine."""
    return empty_rollout(rows, length, width, expert_shape=engine.expert_shape, dtype=engine.dtype)


def seeds_of(key: Tensor, start: int, num: int) -> list[int]:
    """Returns the seeds of draws with consecutive numbers."""
    words = core.fold_in(key, torch.arange(start, start + num, device=key.device)).tolist()
    return [high << 32 | low for high, low in words]


def check_sampling(who: str, sampling: inference.Sampling) -> None:
    """Refuses a sampling that draws from another distribution than the distribution of its log probabilities.

    Raises:
        ValueError: names the field and its value.
    """
    plain = inference.Sampling()
    if sampling.grammar is not None:
        raise ValueError(
            f"{who}: the sampling must have no grammar. A grammar changes the distribution of the draws, so ratios"
            " would not begin at 1. Pass grammar=None, and give answers of another form a low reward. For an"
            " evaluation, use engine.generate."
        )
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    names += ("logit_bias", "min_tokens", "bad_words", "allowed_token_ids", "reasoning_budget", "logits_processors")
    for name in names:
        value, usual = getattr(sampling, name), getattr(plain, name)
        if value != usual:
            raise ValueError(
                f"{who}: {name} is {value}; answers would be drawn from another distribution than that of their log"
                f" probabilities, so their ratios would not begin at 1. Use {name}={usual}; "
                + (
                    f"an engine of rl.with_temperature(decoder, {value}) draws at that temperature."
                    if name == "temperature" and value
                    else "engine.generate draws answers for an evaluation."
                )
            )


def check_prompts(
    who: str, prompts: Sequence[Sequence[int]], width: int, length: int, engine: inference.Engine
) -> None:
    """Refuses prompts without tokens, or without room for an answer of `width` tokens in `length` and the context.

    Raises:
        ValueError: names the prompt, its tokens and the limits.
    """
    context = engine.limits.context
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"{who}: prompts[{i}] has no tokens, and the first token of an answer needs one before it. Begin it"
                " with a token, such as that of the beginning of a text."
            )
        if len(prompt) + width > min(length, context):
            raise ValueError(
                f"{who}: a prompt and its answer must fit into rows of {length} and the engine's context of {context},"
                f" got {len(prompt)} tokens in prompts[{i}] and up to {width} in answers, together"
                f" {len(prompt) + width}. Pass a longer length, limits of a longer context or fewer max_tokens, or"
                " leave the prompt out."
            )


def _make_rollout(
    rows: Sequence[tuple[Sequence[int], inference.Completion]], out: Rollout, since: int, engine: inference.Engine
) -> Rollout:
    for i, (prompt, one) in enumerate(rows):
        check_end("sample", i, one)
        start, num = len(prompt), len(one.tokens)
        out.prompts[i], out.lengths[i], out.ended[i] = start, num, one.finish_reason == "stop"
        out.ids[i, : start + num] = torch.tensor([*prompt, *one.tokens])
        out.logprobs[i, :num] = torch.tensor(one.logprobs, dtype=engine.dtype)
        out.versions[i, :num] = torch.tensor(one.versions) + since
        out.places[i, :num] = torch.arange(start, start + num)
        put_routes(out, i, one)
    return Rollout(*(x.to(engine.mesh.device) for x in out))


def put_routes(out: Rollout, row: int, one: inference.Completion) -> None:
    """Copies the experts of an answer, if the engine has recorded experts."""
    if one.expert_ids is not None:
        out.expert_ids[row, : len(one.expert_ids)] = one.expert_ids


def check_end(who: str, row: int, one: inference.Completion) -> None:
    """Refuses an answer that did not finish.

    Raises:
        RuntimeError: names the row, and the reason of the end.
    """
    if one.finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"{who}: the answer of row {row} ended as {one.finish_reason!r} after {len(one.tokens)} tokens; "
            + (
                "its logits are not finite: look at the parameters."
                if one.finish_reason == "error"
                else "draw it again."
            )
        )
