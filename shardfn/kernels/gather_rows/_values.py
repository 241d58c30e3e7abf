"""The dtype of sums of rows, and the check of their indices."""

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers of another one are added up."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def refuse_index(num: int) -> None:
    """Raises IndexError for an index that names no row."""
    raise IndexError(f"an index is not from -1 to {num - 1}, the last row of x; -1 adds nothing")
