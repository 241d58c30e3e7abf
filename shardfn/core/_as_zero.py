"""`as_zero`: the ZeRO rule from a user's `zero=`."""

from typing import Any

from ._zero import Zero


def as_zero(zero: Any) -> Zero:
    """Returns the rule: a bare stage is `Zero(stage)`, and None is stage 0.

    Raises:
        TypeError: `zero` is neither.
        ValueError: the stage does not exist.

    Example:
        >>> as_zero(3) == Zero(stage=3), as_zero(None).stage
        (True, 0)
    """
    if isinstance(zero, Zero):
        return zero
    if zero is None or (isinstance(zero, int) and not isinstance(zero, bool)):
        return Zero(zero or 0)
    fields = ", ".join(f"{k}={v!r}" for k, v in zero.items()) if isinstance(zero, dict) else "stage=3"
    raise TypeError(
        f"zero={zero!r} is a {type(zero).__name__}. Pass a stage, as in zero=3, or a rule, as in"
        f" zero=sf.Zero({fields})."
    )
