"""Factors of updates: `scale` of any sign, and `scale_by_learning_rate`, the last rule: `u = -lr * g`.

`add_decayed_weights`: weight decay as a rule, `u = g + weight_decay * p`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import core

from . import _base as base
from ._checks import MEANT, check_finite, check_not_negative, describe_non_rate
from ._decide import resolve_per_leaf, resolve_prefix
from ._elementwise import is_zero, vary_number
from ._leaves import check_params, check_state, leaves_like, wide, zero_count


class ScaleByScheduleState(NamedTuple):
    """Number of steps that the schedule has seen.

    Attributes:
        count: int32, 0-d: steps taken.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name


def scale(step_size: base.Number) -> base.GradientTransformation:
    """Scales updates: `u = step_size * g`. The sign is kept, so an optimizer ends with a negative scale.

    Args:
        step_size: any finite number, or a 0-d tensor.

    Returns:
        The corresponding `GradientTransformation`, without a state.

    Raises:
        ValueError: the number is not finite.

    Example:
        >>> scale(-0.5).update([torch.tensor([2.0])], ())[0]
        [tensor([-1.])]
    """
    check_finite("scale", step_size=step_size)
    ascends = not isinstance(step_size, Tensor) and step_size > 0  # the sign of a tensor is not checked
    rule = base.stateless(lambda updates, params, specs: _scale_updates(updates, step_size, specs))
    return rule._replace(needs=base.Needs("element", ascends=ascends))


def scale_by_schedule(step_size_fn: base.Schedule) -> base.GradientTransformation:
    """Scales updates by a schedule: `u = step_size_fn(count) * g`, where count is 0 at the first step.

    The sign is kept, so pass a negative learning rate, or add `scale(-1.0)`. `scale_by_learning_rate` changes the sign.

    Args:
        step_size_fn: schedule, possibly with negative values.

    Returns:
        The corresponding `GradientTransformation`, with a `ScaleByScheduleState` as state.

    Raises:
        TypeError: `step_size_fn` is not a function, or (on use) the function does not return a number.

    Example:
        >>> tx = scale_by_schedule(lambda count: -0.5 * (count + 1))
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))[0]
        [tensor([-0.5000])]
    """
    if not callable(step_size_fn):
        raise TypeError(
            f"scale_by_schedule: step_size_fn={step_size_fn!r} is not a function of the count. Use optim.scale(x)."
        )
    return _scale_by_count("scale_by_schedule", step_size_fn, _scale_updates)


@core.explains_keywords(**MEANT)
def scale_by_learning_rate(learning_rate: base.LearningRate) -> base.GradientTransformation:
    """Steps downhill: `u = -lr * g`, where lr is a number or `schedule(count)` with count = 0 at the first step.

    Args:
        learning_rate: a number >= 0, a 0-d tensor, or a schedule.

    Returns:
        The corresponding `GradientTransformation`, with a count only if `learning_rate` is a schedule.

    Raises:
        ValueError: the number is negative or not finite.

    Example:
        >>> scale_by_learning_rate(0.5).update([torch.tensor([2.0])], ())[0]
        [tensor([-1.])]
    """
    check_rate("scale_by_learning_rate", learning_rate)
    if not callable(learning_rate):
        return base.stateless(
            lambda updates, params, specs: _scale_descending(updates, learning_rate, specs), "element"
        )
    return _scale_by_count("scale_by_learning_rate", learning_rate, _scale_descending)


def _scale_by_count(
    who: str, schedule: base.Schedule, step: Callable[[base.Updates, Any, base.Specs], core.PyTree]
) -> base.GradientTransformation:
    def init_fn(params: base.Params) -> ScaleByScheduleState:
        return ScaleByScheduleState(zero_count(params))

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        del params
        check_state(who, state, ScaleByScheduleState)
        return step(updates, evaluate_schedule(schedule, state.count), specs), ScaleByScheduleState(state.count + 1)

    return base.GradientTransformation(init_fn, update_fn, needs=base.Needs("element"))


def _scale_updates(updates: base.Updates, by: Any, specs: base.Specs) -> core.PyTree:
    gs, treedef = core.tree_flatten(updates)
    rows = zip(gs, vary_number(gs, by, updates, specs), strict=True)
    return core.tree_unflatten(treedef, [(x * g).to(g.dtype) for g, x in rows])


def _scale_descending(updates: base.Updates, rate: Any, specs: base.Specs) -> core.PyTree:
    gs, treedef = core.tree_flatten(updates)
    rows = zip(gs, vary_number(gs, rate, updates, specs), strict=True)
    return core.tree_unflatten(treedef, [(-lr * g).to(g.dtype) for g, lr in rows])


def check_rate(who: str, learning_rate: base.LearningRate) -> None:
    """Checks that `learning_rate` is a schedule or a finite number >= 0.

    Raises:
        TypeError: the value is parameters, a class, or a scheduler of torch.
        ValueError: the number is negative or not finite.
    """
    if (problem := describe_non_rate(who, learning_rate)) is not None:
        raise TypeError(problem)
    if not callable(learning_rate):
        check_not_negative(who, learning_rate=learning_rate)


def evaluate_schedule(schedule: base.Schedule, count: Int[Tensor, ""]) -> base.Number:
    """Returns the value of a schedule for a count.

    Raises:
        TypeError: the value is neither a number nor a 0-d tensor.
    """
    rate = schedule(count)
    if (problem := core.not_scalar(rate)) is not None:
        raise TypeError(
            f"the schedule {getattr(schedule, '__name__', schedule)!r} returned {problem}."
            " A schedule must return a number or a 0-d tensor."
        )
    return rate


def next_rate(learning_rate: base.LearningRate, state: base.OptState) -> float | int | Float[Tensor, ""]:
    """Returns the rate of this step, for in-place forms, and advances the schedule's count in place."""
    if not callable(learning_rate):
        return learning_rate.detach() if isinstance(learning_rate, Tensor) else learning_rate
    check_state("scale_by_learning_rate", state, ScaleByScheduleState)
    lr = evaluate_schedule(learning_rate, state.count)
    lr = state.count.clone() if lr is state.count else lr  # a schedule may return its argument
    state.count.add_(1)
    return lr


def on_device(rate: float | int | Float[Tensor, ""], device: torch.device) -> float | Float[Tensor, ""]:
    """Returns `rate` in a form that a kernel on `device` can read."""
    return rate.to(device) if isinstance(rate, Tensor) else float(rate)


@core.explains_keywords(**MEANT)
def add_decayed_weights(weight_decay: base.Number = 0.0, mask: base.Mask = None) -> base.GradientTransformation:
    """Adds decay: `u = g + weight_decay * p` on the leaves that the mask names, `u = g` elsewhere.

    Before the moments, the decay is an L2 penalty. After the moments, the decay is decoupled.

    Args:
        weight_decay: factor of the decay, >= 0, or a 0-d tensor.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree, of structure and
            shapes only. None: all.

    Returns:
        The corresponding `GradientTransformation`, without a state.

    Raises:
        ValueError: the factor is negative or not finite, or (on use) params are missing or the mask does not match the
            params.

    Example:
        >>> import torch
        >>> add_decayed_weights(0.1).update([torch.zeros(1)], (), [torch.ones(1)])[0]
        [tensor([0.1000])]

    References:
        Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2017, https://arxiv.org/abs/1711.05101
    """
    check_not_negative("add_decayed_weights", weight_decay=weight_decay)
    flags = decay_flags(weight_decay, mask)

    def update_fn(updates: base.Updates, params: base.Params, specs: base.Specs) -> base.Updates:
        check_params("add_decayed_weights", params)
        ps, treedef = core.tree_flatten(params)
        gs = leaves_like(updates, treedef, "updates", "params")
        on, by = flags(params, ps, treedef, specs), vary_number(ps, weight_decay, params, specs)
        return core.tree_unflatten(
            treedef, [_add_decay(*row) if on else row[0] for *row, on in zip(gs, ps, by, on, strict=True)]
        )

    def decide_leaves(params: base.Params) -> base.GradientTransformation:
        return add_decayed_weights(weight_decay, resolve_prefix(mask, params, bool, "mask"))

    return base.stateless(update_fn)._replace(needs=base.Needs("element", resolve_masks=decide_leaves, ascends=True))


def decay_flags(weight_decay: base.Number, mask: base.Mask) -> Callable[..., Sequence[bool]]:
    """Returns a function from the flattened params to a bool a leaf.

    Whether the leaf decays. False if the factor is 0.
    """
    resolve = resolve_per_leaf(True if mask is None else mask, bool, "mask")

    def leaf_flags(params: base.Params, leaves: list[Tensor], treedef: Any, specs: base.Specs = None) -> Sequence[bool]:
        on = resolve(params, leaves, treedef, specs)
        return (False,) * len(leaves) if is_zero(weight_decay) else on

    return leaf_flags


def _add_decay(g: Tensor, p: Tensor, weight_decay: base.Number) -> Tensor:
    return (wide(g) + weight_decay * p).to(g.dtype)
