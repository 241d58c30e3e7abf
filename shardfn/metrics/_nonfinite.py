"""`NonFiniteGuard`: ends a run whose steps are not finite, for example after a learning rate that is too large."""

from collections.abc import Mapping
from typing import Any


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
