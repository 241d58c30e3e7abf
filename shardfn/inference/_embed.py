"""Embeddings: hidden states of a prompt, pooled by one fixed expression.

The sum of a mean goes through positions in order, in float64, and is rounded once, so that chunked prefill changes no
bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtyping import Float32, Float64
from torch import Tensor

from ._hooks import EngineHooks
from ._plan import StepPlan
from ._requests import Sampling
from ._runner import StepResults
from ._schedule import Output
from ._state import State

POOLINGS = ("last", "mean")


@dataclass
class Pooled:
    """Embedding of a prompt while its hidden states come.

    Args:
        pooling: one of `POOLINGS`.
        count: positions so far.
        total: sum so far, or the last state, or None before the first state.
    """

    pooling: str
    count: int = 0
    total: Float64[Tensor, " d"] | None = field(default=None)

    @property
    def sampling(self) -> Sampling:
        """Returns the sampling of a request with hidden states in the rows of its steps."""
        return Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=self.pooling == "mean")

    def take(self, state_D: Float32[Tensor, " d"]) -> None:
        """Takes the state of the next position."""
        wide = state_D.double()
        self.count += 1
        self.total = wide if self.total is None or self.pooling == "last" else self.total + wide

    def result(self, normalize: bool) -> Float32[Tensor, " d"]:
        """Returns the embedding of a request, after all its tokens.

        Example:
            >>> import torch
            >>> pooled = Pooled("mean")
            >>> pooled.take(torch.tensor([2.0, 4.0]))
            >>> pooled.take(torch.tensor([4.0, 4.0]))
            >>> pooled.result(False), pooled.result(True)
            (tensor([3., 4.]), tensor([0.6000, 0.8000]))
        """
        assert self.total is not None
        made = self.total / self.count if self.pooling == "mean" else self.total
        if normalize:
            length = math.sqrt(math.fsum(x * x for x in made.tolist()))
            made = made / length if length else made
        return made.float()


class Embeddings:
    """Embeddings of an engine's requests, by name, from the beginning of a request until the embedding is taken.

    Args:
        possible: whether the decoder gives its hidden states.
    """

    def __init__(self, possible: bool) -> None:
        self.possible = possible
        self._pooled: dict[str, Pooled] = {}
        self._hidden: Tensor | None = None  # of the rows of the plan in flight

    @property
    def hooks(self) -> EngineHooks:
        """Returns the engine hooks that compute embeddings."""
        return EngineHooks(take=self.take, columns=lambda state, plan: {"hidden": self.wanted(state)}, ran=self.ran)

    def __contains__(self, name: str) -> bool:
        return name in self._pooled

    def sampling(self, pooling: str) -> Sampling:
        """Returns the sampling of a request whose steps have the states of a prompt in their rows.

        Raises:
            ValueError: the pooling is unknown, or the decoder has no hidden states.
        """
        check_pooling(pooling, False)
        if not self.possible:
            raise ValueError("embed: this decoder does not give its hidden states. Use a batch-invariant one.")
        return Pooled(pooling).sampling

    def begin(self, names: Sequence[str], pooling: str) -> None:
        """Waits for the states of requests."""
        self._pooled |= {name: Pooled(pooling) for name in names}

    def wanted(self, state: State) -> bool:
        """Returns whether rows of the plan in flight are embedded."""
        return bool(self._pooled) and any(one.name in self._pooled for _, one, _ in state.rows_in_flight())

    def ran(self, plan: StepPlan, results: StepResults) -> None:
        """Keeps the states of a plan's rows."""
        del plan
        self._hidden = results.hidden

    def take(self, outputs: Sequence[Output]) -> None:
        """Adds the states of a plan's rows. Requests without a last token are forgotten at their end."""
        states, self._hidden = None if self._hidden is None else self._hidden.cpu(), None
        for output in outputs if self._pooled else ():
            if output.name in self._pooled and output.row is not None:
                assert states is not None
                self._pooled[output.name].take(states[output.row])
            if output.finish_reason not in (None, "length"):
                self.forget(output.name)

    def result(self, name: str, normalize: bool) -> Float32[Tensor, " d"]:
        """Returns the embedding of a request that has ended, and forgets the embedding."""
        return self._pooled.pop(name).result(normalize)

    def forget(self, name: str) -> None:
        """Forgets a request that has not ended."""
        self._pooled.pop(name, None)


def check_pooling(pooling: str, normalize: bool) -> None:
    """Checks the arguments of an embedding.

    Raises:
        ValueError: names the argument.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(map(repr, POOLINGS))}, got {pooling!r}.")
    if type(normalize) is not bool:
        raise ValueError(f"normalize must be True or False, got {normalize!r}.")


def check_end(number: int, finish: str | None) -> None:
    """Refuses a prompt whose request has ended before its last state.

    Raises:
        FloatingPointError: states are not finite.
        ValueError: the request has ended otherwise, for example by `cancel`.
    """
    if finish == "error":
        raise FloatingPointError(f"embed: hidden states of prompt {number} are not finite.")
    if finish != "length":
        raise ValueError(f"embed: the request of prompt {number} has ended as {finish!r}.")
