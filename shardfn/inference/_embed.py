"""Embeddings: hidden states of a prompt, pooled by one fixed expression.

The sum of a mean goes through positions in order, in float64, and is rounded once; so chunks and steps cannot matter.
"""

import math
from dataclasses import dataclass, field

from jaxtyping import Float32, Float64
from torch import Tensor

from ._requests import Sampling

POOLINGS = ("last", "mean")


@dataclass
class Pooled:
    """The embedding of a prompt while its hidden states come.

    Args:
        pooling: one of `POOLINGS`.
        count: positions so far.
        total: the sum so far, or the last state; None before the first.
    """

    pooling: str
    count: int = 0
    total: Float64[Tensor, " d"] | None = field(default=None)

    @property
    def sampling(self) -> Sampling:
        """The request whose steps have these states in their rows."""
        return Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=self.pooling == "mean")

    def take(self, state_D: Float32[Tensor, " d"]) -> None:
        """The state of the next position."""
        wide = state_D.double()
        self.count += 1
        self.total = wide if self.total is None or self.pooling == "last" else self.total + wide

    def result(self, normalize: bool) -> Float32[Tensor, " d"]:
        """The embedding.

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


def check_pooling(pooling: str, normalize: bool) -> None:
    """Refuses other values.

    Raises:
        ValueError: names the argument.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling is {pooling!r}; it must be one of {', '.join(map(repr, POOLINGS))}.")
    if type(normalize) is not bool:
        raise ValueError(f"normalize is {normalize!r}; it must be True or False.")
