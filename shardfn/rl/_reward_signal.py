"""`RewardSignal`: a count of rollouts without a signal to learn from, as a value."""

import warnings
from typing import Any, NamedTuple


class RewardSignal(NamedTuple):
    """Announcer of rollouts that teach nothing: a pure value that each rollout turns into the next value.

    If all advantages of all ranks are 0, for example where the answers to each prompt have equal rewards, the loss of a
    policy has no gradient. A single rollout of this kind is common. `patience` of them in a row are announced by a
    warning.

    Attributes:
        patience: number of rollouts in a row without a signal after which there is a warning, and again after as many.
        waited: number of rollouts since the last signal.

    Example:
        >>> signal = RewardSignal(patience=3)
        >>> for flat in (1.0, 1.0, 0.75, 1.0):  # "flat" of `rollout_metrics`
        ...     signal = signal.update(flat)
        >>> signal.waited
        1
    """

    patience: int = 5
    waited: int = 0

    def update(self, flat: Any) -> "RewardSignal":
        """Returns the value after one more rollout.

        Args:
            flat: part of answers whose advantage is 0, a number or a 0-d tensor that all ranks have.

        Raises:
            ValueError: patience is not 1 or more.
        """
        if self.patience < 1:
            raise ValueError(f"RewardSignal: patience must be 1 or more, got {self.patience}.")
        waited = self.waited + 1 if float(flat) >= 1 else 0
        if waited and waited % self.patience == 0:
            warnings.warn(
                f"{waited} rollouts in a row had only advantages of 0, so nothing was learnt from them: the answers to"
                " each prompt had equal rewards, or none. Look at the rewards (rl.score counts failures); take prompts"
                " that are sometimes answered well, more answers to each, or a reward with more than two values.",
                stacklevel=2,
            )
        return self._replace(waited=waited)
