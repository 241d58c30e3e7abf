"""The base of bodies of attention on one device: each has all tokens, in the order of positions."""

import abc
from collections.abc import Sequence

from torch import Tensor

from ._online import OnlineScores, Rows


class Local(abc.ABC):
    """A body that cuts nothing."""

    @abc.abstractmethod
    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Attention of this rank's queries over all keys."""

    def rows(self, length: int) -> Rows:
        """Returns the positions of this rank's tokens of a sequence."""
        return ((0, length),)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that cut the tokens, major to minor."""
        return ()

    @property
    def lengths(self) -> frozenset[int]:
        """Returns the tokens of the whole sequence that it states."""
        return frozenset()

    def order(self, length: int, num_ranks: Sequence[int]) -> Rows:
        """Returns the positions of all tokens, in the order in which they lie before they are cut."""
        del num_ranks
        return ((0, length),)

    @property
    def dealt_axes(self) -> tuple[str, ...]:
        """Axes over which tokens are dealt out of order, major to minor."""
        return ()
