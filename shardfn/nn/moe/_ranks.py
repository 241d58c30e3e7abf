"""Sums over ranks inside of a loss with other terms."""

from torch import Tensor

from shardfn.collectives import psum, pvary
from shardfn.core import Axes


def summed_over(x: Tensor, axes: Axes) -> Tensor:
    """Returns the sum over the ranks, as a part of each rank's own loss."""
    # The transpose sums the ranks' cotangents. The step's mean of the losses divides the cotangents by the number of
    # ranks: with only the sum a loss with other terms would have a gradient n times too small.
    return pvary(psum(x, axes), axes)
