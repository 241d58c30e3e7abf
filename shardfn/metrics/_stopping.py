"""Ends of a run: after evaluations without improvement, and after steps that are not finite."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardfn.core import explains_fields, not_scalar

# Keywords of Lightning, Keras and transformers, with the counterparts here.
_MEANT = {
    "early_stopping_patience": "patience={value!r}",
    "early_stopping_threshold": "min_delta={value!r}",
    "threshold": "min_delta={value!r}",
    "monitor": "nothing: pass the value of the metric to update(value)",
    "metric": "nothing: pass the value of the metric to update(value)",
    "metric_for_best_model": "nothing: pass the value of the metric to update(value)",
    "greater_is_better": 'mode="max" where higher values are better, or mode="min"',
    "baseline": "best={value!r}",
    "restore_best_weights": "nothing: checkpoint.Manager keeps the best checkpoints",
}


@explains_fields(**_MEANT)
class EarlyStopping(NamedTuple):
    """Ends a run if a metric no longer improves: a pure value that each evaluation turns into the next value.

        improved  = value < best - min_delta        ("max": value > best + min_delta)
        best'     = value if improved else best
        waited'   = 0 if improved else waited + 1
        stop      = waited >= patience

    NaN is no improvement. Pass values that all ranks have, as `step.evaluate` returns, so that ranks stop after the
    same step.

    Attributes:
        patience: number of evaluations without improvement after which `stop` is True.
        min_delta: least change that is an improvement.
        mode: "min" or "max": whether lower or higher values are better.
        best: best value so far, or None for the worst there is.
        waited: number of evaluations since the best value.

    Example:
        >>> stopping = EarlyStopping(patience=2)
        >>> for n, loss in enumerate([3.0, 2.0, 2.5, 2.25, 1.0]):
        ...     stopping = stopping.update(loss)
        ...     if stopping.stop:
        ...         break
        >>> n, stopping.state()
        (3, {'best': 2.0, 'waited': 2})
        >>> EarlyStopping(patience=3).at(stopping.state()).stop  # a run that resumes, with more patience
        False
    """

    patience: int
    min_delta: float = 0.0
    mode: str = "min"
    best: float | None = None
    waited: int = 0

    @property
    def stop(self) -> bool:
        """Returns whether the run should end."""
        _check_options(self)
        return self.waited >= self.patience

    def update(self, value: Any) -> "EarlyStopping":
        """Returns the value after a further evaluation.

        Args:
            value: value of the metric, a number or a 0-d tensor.

        Raises:
            ValueError: a field is out of range.
            TypeError: `value` is neither a number nor a 0-d tensor.
        """
        _check_options(self)
        if wrong := not_scalar(value):
            raise TypeError(f"EarlyStopping.update expected a number or a 0-d tensor, got {wrong}.")
        new, sign = float(value), 1.0 if self.mode == "min" else -1.0
        best = sign * math.inf if self.best is None else self.best
        improved = sign * new < sign * best - self.min_delta
        return self._replace(best=new, waited=0) if improved else self._replace(best=best, waited=self.waited + 1)

    def state(self) -> dict[str, Any]:
        """Returns the part that changes, for `user=` of a checkpoint. `at` takes the part back."""
        return {"best": self.best, "waited": self.waited}

    def at(self, state: Mapping[str, Any]) -> "EarlyStopping":
        """Returns the same rule at a state that `state` has returned.

        Raises:
            ValueError: the argument is not such a state.
        """
        if state.keys() != {"best", "waited"}:
            raise ValueError(
                f"EarlyStopping.at expected the result of state(), with 'best' and 'waited', got {[*state]}."
            )
        return self._replace(**state)


def _check_options(x: EarlyStopping) -> None:
    if x.mode not in ("min", "max") or x.patience < 1 or not x.min_delta >= 0:
        raise ValueError(
            f"EarlyStopping(patience={x.patience}, min_delta={x.min_delta}, mode={x.mode!r}): patience must"
            " be at least 1, min_delta at least 0, and mode 'min' or 'max'."
        )


class NonFiniteGuard:
    """Counts steps in a row whose loss or gradient is infinite or NaN, and ends the run after too many such steps.

    Save a checkpoint only after a finite step, so that the last good checkpoint stays:

        if guard(n + 1, metrics):
            checkpoints.save(state, n + 1)

    Metrics are the same on all ranks, so that all ranks end at the same step. To read metrics waits for the step.

    Args:
        max_steps: number of such steps in a row that ends the run, 1 or more.

    Attributes:
        count: number of such steps in a row until now.

    Raises:
        ValueError: `max_steps` is below 1.

    Example:
        >>> guard = NonFiniteGuard(2)
        >>> guard(1, {"loss": 0.5, "finite": True}), guard(2, {"loss": float("nan"), "finite": False})
        (True, False)
    """

    def __init__(self, max_steps: int) -> None:
        if max_steps < 1:
            raise ValueError(f"NonFiniteGuard(max_steps={max_steps}): must be at least 1.")
        self.max_steps, self.count = max_steps, 0

    def __call__(self, step: int, metrics: Mapping[str, Any], *, last: bool = False) -> bool:
        """Returns whether a step was finite.

        Args:
            step: number of the step, for the message.
            metrics: metrics of the step, with "finite".
            last: whether no step follows. A last step that is not finite ends the run, too, since the model is not to
                be used.

        Raises:
            FloatingPointError: the last `max_steps` steps were not finite. The message names the steps.
        """
        if bool(metrics["finite"]):
            self.count = 0
            return True
        self.count += 1
        if last or self.count >= self.max_steps:
            first = step - self.count + 1
            steps = f"step {step}" if first == step else f"steps {first} to {step}"
            loss, norm = (float(metrics[name]) for name in ("loss", "grad_norm"))
            raise FloatingPointError(
                f"the loss and the gradient must be finite, got NaN or infinity in {steps} (in the last one: loss"
                f" {loss:g}, gradient norm {norm:g}). Use a smaller learning rate, or look at the rows of these steps."
            )
        return False
