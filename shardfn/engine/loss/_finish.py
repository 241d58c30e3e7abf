"""The end of a step for the model state: a pure function of the state, called once, after the last microbatch.

    finish(model_state) -> model_state

The function sees this rank's blocks, and may call collectives over the axes of the mesh. Every executor calls the
function before an update writes anything. So an error inside leaves the state unchanged, and a skipped step never calls
the function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import transforming
from shardfn.core import PyTree, named_leaves, raise_all, tree_map

from ._model_state import check_returned

Finish = Callable[[PyTree], PyTree]


def check_finish(finish: Any, *, has_state: bool) -> None:
    """Refuses a value that cannot be the end of a step.

    Raises:
        TypeError: the value is not a function.
        ValueError: the step has no model state.
    """
    if finish is None:
        return
    if not callable(finish):
        raise TypeError(
            "sharded_step(finish=...) takes a function, finish(model_state) -> model_state, and this is of type"
            f" {type(finish).__name__}."
        )
    if not has_state:
        raise ValueError(
            "sharded_step(finish=f) has no effect without a model state, which f(model_state) takes and returns. Pass"
            " has_state=True, or drop finish=."
        )


def finished(finish: Finish | None, model_state: PyTree) -> PyTree:
    """Returns the model state after the end of a step, or the same without a function. The mesh must be bound.

    Args:
        finish: the function.
        model_state: a tree of this rank's blocks, after the last microbatch.

    Raises:
        TypeError: a leaf of the result is not a tensor.
        ValueError: the function returns another tree, or leaves of other shapes or dtypes, or writes to the argument.
            Every such leaf is listed by path.
    """
    if finish is None:
        return model_state
    if transforming():  # a derivative may pass through the end, and tensors of a transform count no writes
        new = finish(model_state)
        check_returned(model_state, new, "finish")
        return new
    named = named_leaves(model_state, "model_state")
    versions = [x._version for _, x in named]
    with torch.no_grad():
        new = finish(model_state)
    raise_all(
        ValueError,
        "finish writes to the model state that it is given. Return new tensors, x + 1 in place of x.add_(1):",
        [path for (path, x), was in zip(named, versions, strict=True) if x._version != was],
    )
    check_returned(model_state, new, "finish")
    return tree_map(Tensor.detach, new)
