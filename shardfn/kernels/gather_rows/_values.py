"""Dtype of sums of rows, and the check of row indices."""

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers of a dtype are added up."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def refuse_index(num: int) -> None:
    """Raises IndexError for an index without a row."""
    raise IndexError(f"an index must be from -1 to {num - 1}, the last row of x. -1 adds nothing")
