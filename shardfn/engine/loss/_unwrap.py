"""Takes a step's loss out of the transforms that the step itself carries out, and describes a step in lines.

The lines are the constant facts that determine the messages of ranks. Ranks compare the hash of the lines in the
exchange at the beginning of a call. So different steps never meet in a transfer, and the error shows the different
lines.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardfn.core import PyTree, describe

from ._accumulated import Accumulated
from ._callable import function_name
from ._jitted import Jitted
from ._loss import Loss
from ._mixed import Mixed
from ._model_state import past_the_batch
from ._transform_order import Transform, find_transforms


@dataclasses.dataclass(frozen=True)
class CountedLoss:
    """Loss that gets its last argument, the number of the step, by the name `step`.

    Transforms pass all arguments behind the batch on by position.

    Attributes:
        inner: loss with an argument `step`.
    """

    inner: Loss

    def __call__(self, *args: Any) -> Any:
        """Returns the loss."""
        return self.inner(*args[:-1], step=args[-1])

    @property
    def __name__(self) -> str:  # in errors
        return function_name(self.inner)


def pass_count(loss: Loss) -> Loss:
    """Returns a loss that takes the number of the step as its last argument, inside the transforms around it."""
    if isinstance(loss, Transform) and hasattr(loss, "inner"):
        return dataclasses.replace(loss, inner=pass_count(loss.inner))  # pyright: ignore
    return CountedLoss(loss)  # pyright: ignore[reportArgumentType]  # a transform is callable


class Unwrapped(NamedTuple):
    """Loss in the order of a step's run, and the transforms that were around the loss.

    Attributes:
        loss: loss, accumulated, of mixed precision, of the plain loss.
        jitted: the jit of the whole step.
        mixed: the precision, taken over by the layout.
    """

    loss: Loss
    jitted: Jitted | None = None
    mixed: Mixed | None = None


def unwrap(loss: Callable[..., Any], *, has_state: bool = False, count: bool = False) -> Unwrapped:
    """Sorts `jit`, `accumulate` and `mixed_precision`, which mean the same step in any order.

    Args:
        loss: the loss.
        has_state: whether the loss takes and returns a model state, past all these transforms.
        count: whether the loss takes the number of the step, which is then the last argument.

    Raises:
        ValueError: the loss is jitted twice, or has two policies, or a transform was made with has_state=True.
    """
    _refuse_unannounced_state(loss, has_state=has_state)
    around, inner = find_transforms(loss)
    if count:
        inner = with_count() if (with_count := getattr(inner, "with_count", None)) else pass_count(inner)
    if has_state:
        inner = with_state() if (with_state := getattr(inner, "with_state", None)) else past_the_batch(inner)
    named = {x.transform: x for x in around}
    jitted, mixed = named.get("jit"), named.get("mixed_precision")
    parted = named.get("partition")
    if parted is not None:
        if has_state:
            raise ValueError("partition(loss) takes no model state. Build the step without has_state.")
        inner = dataclasses.replace(parted, inner=inner, _programs=parted._programs)
    if mixed is not None:
        inner = mixed = Mixed(inner, mixed.policy, mixed.loss_scale)
    for x in reversed(around):
        if x.transform == "accumulate":
            inner = Accumulated(inner, x.num_microbatches, split=x.split)
    return Unwrapped(inner, jitted, mixed)


def trained_leaves(loss: Callable[..., Any]) -> PyTree:
    """Returns the leaves that a loss trains by default: the attribute `trains`, as from `LoRA.adapt`, or None.

    Args:
        loss: the loss, perhaps inside transforms and `functools.partial`.
    """
    inner: Any = loss
    while inner is not None:
        if (found := getattr(inner, "trains", None)) is not None:
            return found
        inner = getattr(inner, "inner", None) or getattr(inner, "func", None)
    return None


def _refuse_unannounced_state(loss: Callable[..., Any], *, has_state: bool) -> None:
    """Refuses a loss with transforms that take a model state, in a step that was built without a state.

    Raises:
        ValueError: the transforms take a model state.
    """
    if not has_state and any(getattr(x, "has_state", False) for x in find_transforms(loss)[0]):
        raise ValueError("the loss takes a model state, and the step was built without. Pass has_state=True to both.")


def check_state(outer: str, loss: Callable[..., Any], *, has_state: bool) -> None:
    """Refuses a transform with `has_state` around a transform without, or the other way round.

    Raises:
        ValueError: the two differ.
    """
    for x in find_transforms(loss)[0]:
        if hasattr(x, "has_state") and x.has_state != has_state:
            raise ValueError(
                f"{outer}(..., has_state={has_state}) of {x.transform}(..., has_state={x.has_state}): a loss has a"
                " model state or not. Pass the same to both."
            )


def describe_function(loss: Unwrapped, name: str) -> list[str]:
    """Returns a line per fact: a function's transforms, and the capture.

    The wrapped function is described no further than values built from this package's functions: each rank may have
    another function, and ranks agree on leaves and gradients during the run.
    """
    lines = [f"torch {torch.__version__}", *_describe_captured(loss.jitted)]
    around, inner = find_transforms(loss.loss)
    cuts = [x for x in around if x.transform == "accumulate"]
    if loss.mixed is not None:
        lines += describe((loss.mixed.policy, loss.mixed.loss_scale), "mixed_precision")
    lines += [f"partition along {x.axes}" for x in around if x.transform == "partition"]
    counts = [f"{x.num_microbatches}{'' if x.split is None else ' by split='}" for x in cuts]
    lines.append(f"accumulate {' x '.join(counts)}" if cuts else "no accumulate")
    return [*lines, *describe(inner, name, strangers=False)]


def _describe_captured(jitted: Jitted | None) -> list[str]:
    if jitted is None:
        return ["eager, without jit"]
    how = f"jit {jitted.chooses_by()}, backend {jitted.backend!r}, max_graphs {jitted.max_graphs}"
    if jitted.cluster is not None:  # each rank may have separate measurements and limits of memory. Rank 0 chooses
        return [how]
    return [how, *describe(jitted.schedule, "jit.schedule")]
