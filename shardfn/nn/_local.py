"""Base of bodies of attention on a single device, with all tokens in the order of positions."""

import abc
from collections.abc import Sequence

from torch import Tensor

from ._online import OnlineScores, Rows


class Local(abc.ABC):
    """Body of attention that cuts nothing."""

    @abc.abstractmethod
    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Returns the attention of the rank's queries over all keys."""

    def rows(self, length: int) -> Rows:
        """Returns the positions of the rank's tokens of a sequence."""
        return ((0, length),)

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the axes along which tokens are cut, major to minor."""
        return ()

    @property
    def lengths(self) -> frozenset[int]:
        """Returns the stated numbers of tokens of the whole sequence."""
        return frozenset()

    def order(self, length: int, num_ranks: Sequence[int]) -> Rows:
        """Returns the positions of all tokens, in the order before the cut."""
        del num_ranks
        return ((0, length),)

    @property
    def dealt_axes(self) -> tuple[str, ...]:
        """Returns the axes over which tokens are dealt out of order, major to minor."""
        return ()
