"""The versions of torch that shardfn runs on, checked at the import, and errors of torch in other words."""

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def in_other_words(parts: Sequence[str], message: str) -> Iterator[None]:
    """Turns a RuntimeError with one of some parts in the text into a ValueError with a message.

    Example:
        >>> with in_other_words(["saved tensor hooks"], "leave out the checkpoint."):
        ...     raise RuntimeError("torch.func does not support saved tensor hooks")
        Traceback (most recent call last):
        ValueError: leave out the checkpoint.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(part in str(error) for part in parts):
            raise
        raise ValueError(message) from error


# The oldest and the newest minor of torch against which `_names.py` was checked.
OLDEST, NEWEST = (2, 11), (2, 14)


def minor_of(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version.

    Example:
        >>> minor_of("2.13.1+cpu")
        (2, 13)
    """
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


# Whether inductor's C++ rounds 16-bit intermediates op by op, as eager code does, under `emulate_precision_casts`.
INDUCTOR_ROUNDS = minor_of(torch.__version__) >= (2, 13)


def check_torch(version: str) -> None:
    """Refuses an older torch, and warns of a newer minor than the newest known minor.

    Raises:
        ImportError: torch is too old. The message has the remedy.

    Example:
        >>> check_torch("2.13.1+cpu")
    """
    found = minor_of(version)
    oldest, newest = (".".join(map(str, x)) for x in (OLDEST, NEWEST))
    if found < OLDEST:
        raise ImportError(
            f"shardfn needs torch {oldest} to {newest}, and this is torch {version}. Install a newer one: pip install"
            f" 'torch>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}'."
        )
    if found > NEWEST:
        warnings.warn(
            f"shardfn is written for torch {oldest} to {newest}, and this is torch {version}: it uses parts of torch"
            " that change from minor to minor, so steps may fail, or differ. Install one of these: pip install"
            f" 'torch>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}'.",
            stacklevel=2,
        )


check_torch(torch.__version__)
