"""`best`: the checkpoints of a run with the lowest, or the highest, value of a metric.

The manifest holds the value, so value and checkpoint appear and disappear together.
"""

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from shardfn.core import did_you_mean, not_scalar

from ._located import store_of
from ._place import Store, read_manifest


class Ranking:
    """Orders the checkpoints of a store by a metric.

    Args:
        store: the checkpoints.
        metric: name of the metric, such as "loss".
        mode: "min" or "max": the best value is the lowest, or the highest.

    Raises:
        ValueError: there is no such mode.
    """

    def __init__(self, store: Store, metric: str, mode: str) -> None:
        if mode not in ("min", "max"):
            raise ValueError(
                f"mode={mode!r}: the best value of {metric!r} is the lowest, 'min', or the highest, 'max'."
            )
        self.metric, self._store, self._sign = metric, store, 1.0 if mode == "min" else -1.0
        # The values that were read, by step; NaN where a checkpoint lacks the metric.
        self._known: dict[int, float] = {}

    def first(self, steps: Iterable[int], num: int) -> list[int]:
        """Returns the best `num` steps, from the best on.

        The earliest of equal steps comes first. Steps without a value are left out.
        """
        values = {n: self._sign * self._metric_value(n) for n in steps}
        return sorted((n for n, x in values.items() if not math.isnan(x)), key=lambda n: (values[n], n))[:num]

    def forget(self, step: int) -> None:
        """Reads the value of a step again when the checkpoint is replaced."""
        self._known.pop(step, None)

    def measured(self, metrics: Mapping[str, Any] | None, step: int, *, required: bool) -> dict[str, float]:
        """Returns the metric's value, for the manifest.

        Args:
            metrics: the caller's values by name.
            step: number of the checkpoint.
            required: whether the metric must be there.

        Raises:
            ValueError: the metric is missing. The message lists the metrics that are given.
            TypeError: the value is not a number.
        """
        if metrics is None or self.metric not in metrics:
            if not required:
                return {}
            there = [*metrics] if metrics is not None else []
            has = f"metrics= has {', '.join(map(repr, there))}" if there else "metrics= is missing or empty"
            raise ValueError(
                f"Manager(best={self.metric!r}): at step {step} {has}.{did_you_mean(self.metric, there)} Pass"
                f" metrics={{{self.metric!r}: value}} whenever a save is due. With now=True it may be absent."
            )
        x = metrics[self.metric]
        if wrong := not_scalar(x):
            raise TypeError(f"metrics[{self.metric!r}] must be a number or a 0-d tensor, but is {wrong}.")
        return {self.metric: float(x)}

    def _metric_value(self, step: int) -> float:
        if step not in self._known:
            try:
                self._known[step] = read_manifest(self._store.at(step)).metrics.get(self.metric, math.nan)
            except (OSError, ValueError):
                return math.nan  # damaged: a restore of the checkpoint raises the error
        return self._known[step]


def best(directory: str | os.PathLike[str], metric: str, mode: str = "min") -> int | None:
    """Returns the step of the checkpoint with the best value of a metric, as stored by `Manager(best=metric)`.

    Args:
        directory: a run's checkpoints.
        metric: name of the metric, such as "loss".
        mode: "min" or "max": whether the lowest or the highest value is the best.

    Returns:
        The step (the earliest step if values are equal), or None if no complete checkpoint has the metric.

    Raises:
        ValueError: there is no such mode.

    Example:
        >>> import tempfile, torch
        >>> from shardfn.checkpoint import Manager
        >>> directory = tempfile.mkdtemp()
        >>> with Manager(directory, best="loss", keep_last=1) as manager:
        ...     for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
        ...         _ = manager.save({"w": torch.ones(2)}, step, metrics={"loss": loss})
        >>> best(directory, "loss")
        1
    """
    store = store_of(directory)
    return next(iter(Ranking(store, metric, mode).first(store.steps(), 1)), None)
