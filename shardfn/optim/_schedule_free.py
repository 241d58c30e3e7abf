"""`schedule_free`: an average in place of a decaying learning rate."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.core import PyTree, tree_flatten, tree_leaves, tree_map, tree_unflatten

from ._base import GradientTransformation
from ._checks import check_not_negative
from ._hyper import vary_number
from ._inplace import apply_updates
from ._learning_rate import check_rate, evaluate_schedule
from ._leaves import check_params, check_state, leaves_like, wide, zero_count
from ._needs import join_needs, refuse_phases
from ._norm import dtype_of_squares
from ._pair import as_transformation
from ._types import LearningRate, OptState, Pair, Params, Specs, Updates


class ScheduleFreeState(NamedTuple):
    """The sequence that the rule steps.

    Attributes:
        step_count: int32, 0-d: steps taken.
        b1: 0-d: the part of the average in the parameters.
        weight_sum: 0-d: the sum of the weights of all steps.
        max_lr: 0-d: the largest learning rate so far.
        base_optimizer_state: the state of the rule.
        z: tree like params: the sequence.
    """

    step_count: Int[Tensor, ""]
    b1: Float[Tensor, ""]
    weight_sum: Float[Tensor, ""]
    max_lr: Float[Tensor, ""]
    base_optimizer_state: OptState
    z: PyTree


def schedule_free(
    base_optimizer: GradientTransformation | Pair,
    learning_rate: LearningRate,
    b1: float = 0.9,
    weight_lr_power: float = 2.0,
) -> GradientTransformation:
    """Trains at `y = (1 - b1) z + b1 x`, where the rule steps `z` and `x` is the average of all `z`.

    The weight of a step in the average is the largest learning rate so far to the power `weight_lr_power`. The
    parameters of the step are y. The parameters to evaluate and export are x, from `sf.eval_state(state)`. Use a rule
    without momentum, for example `adamw(lr, b1=0.0)`, and a learning rate that warms up and does not decay. Put the
    rule outermost.

    Args:
        base_optimizer: the rule that steps z.
        learning_rate: learning rate of the rule. A schedule is called with the number of this step, from 1 on, as in
            optax.
        b1: part of the average in y, in (0, 1).
        weight_lr_power: power of the learning rate in the weights, >= 0.

    Returns:
        A rule with a `ScheduleFreeState`.

    Raises:
        ValueError: a number is out of range, or the rule averages gradients for itself.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx, w = schedule_free(sgd(1.0), 1.0, b1=0.5), [torch.zeros(1)]
        >>> tx.update([torch.ones(1)], tx.init(w), w)[0]
        [tensor([-1.], dtype=torch.float64)]

    References:
        Defazio et al., The Road Less Scheduled, 2024, https://arxiv.org/abs/2405.15682
    """
    check_rate("schedule_free", learning_rate)
    check_not_negative("schedule_free", weight_lr_power=weight_lr_power)
    if not 0 < b1 < 1:
        raise ValueError(f"schedule_free: b1={b1!r} must be a number in (0, 1).")
    tx = as_transformation(base_optimizer)
    refuse_phases("schedule_free", tx)
    return _ScheduleFree(tx, learning_rate, b1, weight_lr_power).rule()


@dataclass(frozen=True)
class _ScheduleFree:
    tx: GradientTransformation
    learning_rate: LearningRate
    b1: float
    power: float

    def rule(self) -> GradientTransformation:
        """Returns the rule as a `GradientTransformation`."""
        again = lambda tx: _ScheduleFree(tx, self.learning_rate, self.b1, self.power).rule()  # noqa: E731
        needs = join_needs([self.tx], again, states=lambda s: (s.base_optimizer_state,))
        return GradientTransformation(self.init, self.update, needs=needs._replace(ascends=self.tx.needs.ascends))

    def init(self, params: Params) -> ScheduleFreeState:
        count = zero_count(params)
        number = torch.zeros((), dtype=dtype_of_squares(tree_leaves(params)), device=count.device)
        b1 = torch.full_like(number, self.b1)
        z = tree_map(lambda p: p.detach().clone(), params)
        return ScheduleFreeState(count, b1, number, number.clone(), self.tx.init(params), z)

    def update(
        self, updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        check_params("schedule_free", params)
        check_state("schedule_free", state, ScheduleFreeState)
        ys, treedef = tree_flatten(params)
        old = leaves_like(state.z, treedef, "state.z", "params")
        count, total = state.step_count + 1, state.weight_sum
        rate = self.learning_rate
        lr = torch.as_tensor(
            evaluate_schedule(rate, count) if callable(rate) else rate, dtype=total.dtype, device=total.device
        )
        largest = torch.maximum(state.max_lr, lr)
        weight = largest**self.power
        total = total + weight
        # A rate of 0 until now has no weight.
        part = torch.where(total == 0, 0.0, weight / torch.where(total == 0, 1.0, total))
        updates, inner = self.tx.update(updates, state.base_optimizer_state, params, specs=specs)
        z = apply_updates(state.z, updates)
        out = [
            self._leaf_update(y, before, after, c)
            for y, before, after, c in zip(ys, old, tree_leaves(z), vary_number(ys, part, params, specs), strict=True)
        ]
        new = ScheduleFreeState(count, state.b1, total, largest, inner, z)
        return tree_unflatten(treedef, out), new

    def _leaf_update(self, y: Tensor, old: Tensor, new: Tensor, part: Tensor) -> Tensor:
        """Returns the update of y, in a dtype without rounding."""
        y, old, new = (wide(x).double() for x in (y, old, new))
        x = _average_leaf(y, old, self.b1)
        x = x + part * (new - x)
        return self.b1 * x + (1 - self.b1) * new - y


def schedule_free_eval_params(state: ScheduleFreeState, params: Params) -> Params:
    """Returns the average x, at which to evaluate: `x = (y - (1 - b1) z) / b1`, where y are the parameters.

    For trees of plain tensors, of the same layout. For the state of a step use `sf.eval_state`.

    Args:
        state: the state of `schedule_free`.
        params: tree of tensors: the parameters after the step.

    Returns:
        A tree like params.

    Raises:
        ValueError: `state` is another rule's, or does not match `params`.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx, w = schedule_free(sgd(1.0), 1.0, b1=0.5), [torch.zeros(1)]
        >>> schedule_free_eval_params(tx.init(w), w)
        [tensor([0.])]
    """
    check_state("schedule_free_eval_params", state, ScheduleFreeState)
    ys, treedef = tree_flatten(params)
    pairs = zip(ys, leaves_like(state.z, treedef, "state.z", "params"), strict=True)
    return tree_unflatten(treedef, [_average_leaf(y.double(), z.double(), state.b1).to(y.dtype) for y, z in pairs])


def _average_leaf(y: Tensor, z: Tensor, b1: float | Tensor) -> Tensor:
    return (y - (1 - b1) * z) / b1
