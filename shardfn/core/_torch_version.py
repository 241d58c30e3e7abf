"""A warning, when the package is imported, if torch has another version than the supported one."""

import warnings

import torch

# The version that pyproject.toml pins, by minor.
MINOR = "2.13"


def check_torch(version: str) -> None:
    """Warns of another minor of torch; those of one minor differ in nothing that is used here.

    Example:
        >>> check_torch(MINOR + ".1+cpu")
    """
    if version.split("+")[0].split(".")[:2] != MINOR.split("."):
        warnings.warn(
            f"shardfn is written for torch {MINOR}, and this is torch {version}: it stands on parts of torch that"
            f" change from minor to minor, so steps may fail, or differ. Install it: pip install 'torch=={MINOR}.*'.",
            stacklevel=2,
        )


check_torch(torch.__version__)
