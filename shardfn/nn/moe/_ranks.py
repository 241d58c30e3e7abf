"""Sums over ranks inside of a loss that has other terms."""

from torch import Tensor

from shardfn.collectives import psum, pvary
from shardfn.core import Axes


def summed_over(x: Tensor, axes: Axes) -> Tensor:
    """Returns the sum over the ranks, as a part of each rank's own loss."""
    # The transpose sums the ranks' cotangents, which the step's mean of the losses divides by their number: with the
    # sum alone a loss that has other terms would have a gradient n times too small.
    return pvary(psum(x, axes), axes)
