"""`EarlyStopping`: a count of evaluations without improvement, as a value."""

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
