"""Steps that learn from a teacher for a while: L = L_lm + b(n) L_teacher at step n, with b = 0 from step `until` on.

A small student under-fits its own data when it follows a teacher to the end. So the teacher is left out for the last
part of training. The two parts are two steps on one state, each with its own graph, and the second neither computes
the teacher's forward nor gathers its leaves.

Rajbhandari et al., DeepSpeed-MoE, 2022, https://arxiv.org/abs/2201.05596, section 4.2 (Mixture-of-Students)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.core import raise_all
from shardfn.engine import Loss
from shardfn.optim import GradientTransformation, Pair, Schedule
from shardfn.transforms import StepSwitch, sharded_step, switch_step


def staged_step(
    loss: Loss,
    optimizer: GradientTransformation | Pair,
    *,
    until: int,
    weight: float | Schedule = 1.0,
    wrap: Callable[[Loss], Loss] = lambda inner: inner,
    **options: Any,
) -> StepSwitch:
    """Returns a step with a teacher before step `until`, and without the teacher from then on (`sf.switch_step`).

    Args:
        loss: `loss(params, batch[, key], *, weight)`. `weight` is b(n), a 0-d tensor, or None in the steps without the
            teacher, where the loss must not compute the teacher's forward.
        optimizer: see `sharded_step`. Its state and its count of steps continue from the first part to the second.
        until: number of steps with the teacher. 0 is a training without the teacher.
        weight: b, a number or a schedule of `shardfn.optim`: a function of the number of the step. In captured steps
            the same graph serves all weights.
        wrap: function applied to both losses, such as `sf.jit`, or `functools.partial(sf.accumulate,
            num_microbatches=4)`.
        options: options of `sharded_step`. `trainable=` has False for the teacher.

    Raises:
        TypeError: `weight` is neither a number nor a function.
        ValueError: `until` is below 0, a weight is below 0 or not finite, or as `sharded_step`.

    Example:
        >>> import shardfn as sf
        >>> def loss(params, x, *, weight):
        ...     y = params["student"] * x
        ...     own = (y - x).square().mean()
        ...     return own if weight is None else own + weight * (y - params["teacher"] * x).square().mean()
        >>> step = staged_step(loss, sf.optim.sgd(0.5), until=1, trainable={"student": True, "teacher": False})
        >>> state = step.init({"student": torch.tensor(0.0), "teacher": torch.tensor(3.0)})
        >>> for _ in range(2):
        ...     state, metrics = step(state, torch.ones(2))
        ...     print(metrics["loss"].item(), state.params["student"].full_tensor().item())
        10.0 4.0
        9.0 1.0
    """
    _check_stages(until, weight)
    taught = sharded_step(wrap(_Taught(loss, weight)), optimizer, count=True, **options)
    alone = sharded_step(wrap(functools.partial(loss, weight=None)), optimizer, **options)
    return switch_step(taught, alone, choose=lambda state: (int(int(state.step) >= until),))


class _Taught(NamedTuple):
    """Loss of a step with the teacher, which takes the number of the step.

    Attributes:
        loss: loss that takes a weight.
        weight: weight, or its schedule.
    """

    loss: Loss
    weight: Any

    @property
    def __name__(self) -> str:  # in errors
        return getattr(self.loss, "__name__", str(self.loss))

    def __call__(self, *args: Any, step: Tensor) -> Any:
        value = self.weight(step) if callable(self.weight) else self.weight
        number = value if isinstance(value, Tensor) else torch.tensor(value, device=step.device)
        return self.loss(*args, weight=number)


def _check_stages(until: int, weight: Any) -> None:
    if not callable(weight) and (isinstance(weight, bool) or not isinstance(weight, int | float)):
        raise TypeError(
            f"staged_step: weight must be a number or a function of the number of the step, got {weight!r}. Pass"
            " for example optim.linear_schedule(1.0, 0.0, 1000)."
        )
    problems = []
    if until < 0:
        problems.append(f"until must be 0 or more steps with the teacher, got {until}")
    if not callable(weight) and not 0 <= weight < float("inf"):
        problems.append(
            f"weight must be 0 or more and finite, got {weight}. A negative weight leads away from the teacher"
        )
    raise_all(ValueError, "staged_step:", problems)
