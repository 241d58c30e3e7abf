"""What a step's loss is wrapped in: the transforms that the step takes over from it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ._accumulate import Accumulated
from ._jit import Jitted
from ._loss import Loss
from ._mixed_precision import Mixed


class Unwrapped(NamedTuple):
    """A loss in the order in which a step runs it, and what was around it.

    Attributes:
        loss: accumulated, of mixed precision, of the plain loss.
        jitted: the jit, which takes in the whole step.
        mixed: the precision, which the layout takes over.
    """

    loss: Loss
    jitted: Jitted | None = None
    mixed: Mixed | None = None


def unwrap(loss: Callable[..., Any]) -> Unwrapped:
    """Sorts `jit`, `accumulate` and `mixed_precision`, which mean the same step in any order.

    Raises:
        ValueError: the loss is jitted twice, or has two policies.
    """
    jitted: Jitted | None = None
    mixed: Mixed | None = None
    cuts: list[int] = []
    inner: Any = loss
    while isinstance(inner, Jitted | Accumulated | Mixed):
        if isinstance(inner, Jitted):
            if jitted is not None:
                raise ValueError("the loss is jitted twice; drop one.")
            jitted = inner
        elif isinstance(inner, Accumulated):
            cuts.append(inner.num_microbatches)
        elif mixed is not None:
            raise ValueError("the loss has two precision policies; drop one mixed_precision.")
        else:
            mixed = inner
        inner = inner.inner
    if mixed is not None:
        inner = mixed = Mixed(inner, mixed.policy, mixed.loss_scale)
    for num in reversed(cuts):
        inner = Accumulated(inner, num)
    return Unwrapped(inner, jitted, mixed)
