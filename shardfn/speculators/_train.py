"""Training of a speculator on the hidden states of a frozen model, and the figure by which drafters are compared."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn.collectives import unshard
from shardfn.core import Mesh, P, Zero, fold_in, key, raise_all
from shardfn.inference import Engine, Sampling
from shardfn.optim import adamw, chain, clip_by_global_norm, warmup_cosine_decay_schedule
from shardfn.transforms import sharded_step

from ._config import SpeculatorConfig
from ._loss import Params, init, loss


class HiddenRows(NamedTuple):
    """Rows of tokens, and the hidden states of a frozen model for each token.

    Attributes:
        hidden: [N, S, D], from `hidden_states`, D the width of all wanted states. None for a loss that computes them.
        tokens: int64 [N, S].
    """

    hidden: Float[Tensor, "n s d"] | None
    tokens: Int64[Tensor, "n s"]


def train(
    config: SpeculatorConfig,
    states: HiddenRows,
    *,
    steps: int,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    seed: int = 0,
    mesh: Mesh | None = None,
    zero: Zero | int | None = None,
    of_batch: Callable[[Params, dict[str, Tensor]], Any] | None = None,
    shared: Mapping[str, Tensor] | None = None,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Params:
    """Returns the parameters of a speculator after some steps of AdamW, on batches of rows in random order.

    The learning rate rises over a tenth of the steps, and falls by a cosine to a tenth. Collective.

    Args:
        config: shape.
        states: rows of this rank. All ranks have the same number of rows.
        steps: number of steps.
        batch_size: rows of this rank in a step.
        learning_rate: largest learning rate.
        seed: seed of parameters and of the order of rows.
        mesh: mesh with the axis "dp", or None for a single device.
        zero: ZeRO rule of the step.
        of_batch: loss of parameters and a batch in place of `loss`, such as a partial of `owl_loss`.
        shared: leaves that begin with these values, such as the model's embedding and head, or "draft_tokens" as from
            `find_frequent_tokens`. Leaves of another shape are left out.
        report: function of the number of a step and its loss.

    Raises:
        ValueError: there are too few rows or tokens, or a number is out of range.

    Example:
        >>> from shardfn.speculators import RecurrentConfig
        >>> config = RecurrentConfig("mlp", vocab_size=64, d_model=32, num_layers=2, d_inner=16)
        >>> states = HiddenRows(torch.ones(4, 9, 32), torch.zeros(4, 9, dtype=torch.int64))
        >>> losses = []
        >>> params = train(config, states, steps=3, batch_size=2, report=lambda step, loss: losses.append(loss))
        >>> losses[2] < losses[0]
        True
    """
    problems = [
        f"{name} must be an integer of at least 1, got {value!r}"
        for name, value in (("steps", steps), ("batch_size", batch_size))
        if type(value) is not int or value < 1
    ]
    if not problems and len(states.tokens) < batch_size:
        problems = [f"batch_size must be at most the {len(states.tokens)} rows, got {batch_size}"]
    raise_all(ValueError, "speculators.train:", problems)
    warmup = max(1, steps // 10)
    rate = warmup_cosine_decay_schedule(0.0, learning_rate, warmup, max(steps, warmup + 1), learning_rate / 10)
    params, own = init(config, fold_in(key(seed), 0)), shared or {}
    params = {name: own[name].clone() if _fits(own.get(name), x) else x for name, x in params.items()}
    step = sharded_step(
        functools.partial(loss, config) if of_batch is None else of_batch,
        chain(clip_by_global_norm(1.0), adamw(rate, b2=0.95, weight_decay=0.1)),
        mesh=mesh,
        batch=P("dp") if mesh is not None else P(),
        zero=zero,
        trainable={name: name != "draft_tokens" for name in params},
    )
    state = step.init(params)
    drawn, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    for i in range(steps):
        if len(order) < batch_size:
            order = torch.randperm(len(states.tokens), generator=drawn)
        rows, order = order[:batch_size], order[batch_size:]
        batch = {name: x[rows] for name, x in states._asdict().items() if x is not None}
        state, metrics = step(state, batch)
        report(i, float(metrics["loss"]))
    return {name: unshard(x) for name, x in state.params.items()}


def find_frequent_tokens(tokens: Int64[Tensor, "*shape"], num: int) -> Int64[Tensor, " num"]:
    """Returns the most frequent tokens in ascending order: the tokens that a speculator with a `draft_vocab` guesses.

    Args:
        tokens: tokens of a text.
        num: number of tokens. Where the text has fewer, other tokens fill the places.

    Example:
        >>> find_frequent_tokens(torch.tensor([[7, 2, 7], [5, 5, 7]]), 2)
        tensor([5, 7])
    """
    counts = torch.bincount(tokens.flatten(), minlength=num)
    return counts.sort(descending=True, stable=True).indices[:num].sort().values


def _fits(x: Tensor | None, like: Tensor) -> bool:
    return x is not None and x.shape == like.shape


def measure_acceptance(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> float:
    """Returns the accepted drafts of a step, over all steps in which a token of these prompts is drawn.

    Prompts are completed one after another. A step with no drafts counts, too, so that drafters can be compared: t
    tokens with a accepted drafts took t - a steps. Without a drafter the result is 0.

    Args:
        engine: engine with a drafter.
        prompts: token ids of each prompt.
        sampling: sampling of all prompts.
    """
    before, tokens = engine.stats.speculation.accepted, 0
    for prompt in prompts:
        tokens += len(engine.generate([prompt], sampling)[0].tokens)
    accepted = engine.stats.speculation.accepted - before
    return accepted / max(1, tokens - accepted)
