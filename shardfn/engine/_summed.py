"""Finds a loss that is summed over ranks over which the step averages already, from autograd's graph in eager steps."""

from torch import Tensor

from shardfn.collectives import is_summed
from shardfn.graph import AxisTypeError

from ._plan import Plan


def refuse_summed(loss: Tensor, plan: Plan) -> None:
    """Refuses a loss that reaches the parameters through sums over an axis that cuts the batch, and not otherwise.

    Every rank's loss is then a function of the same sums, and the mean over ranks counts each gradient once in place of
    n times. What a graph does not show, inside `remat` say, passes. The type pass of a captured step says the same.

    Raises:
        AxisTypeError: names the axis and the remedy.
    """
    for axis in plan.batch_axes:
        n = plan.mesh.shape[axis]
        if n > 1 and is_summed(loss, axis):
            raise AxisTypeError(
                f"the loss is summed over {axis!r} already, and {axis!r} cuts the batch: the step averages over it"
                f" again, so gradients would be {n} times too small. If {axis!r} is an axis of the model, whose ranks"
                f" are given the same rows, leave it out of batch={plan.batch_axes}. If each has rows of its own,"
                f" return this rank's own loss, without psum or pmean over {axis!r}; or pass what was summed through"
                f" sf.pvary(x, {axis!r})."
            )
