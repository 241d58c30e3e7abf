"""Elements that are not finite: counted by leaf, and refused where weights are written."""

from collections.abc import Mapping

from torch import Tensor

from ._errors import first_of, raise_all

_LISTED = 10


def count_nonfinite(x: Tensor) -> int:
    """Returns the number of elements that are infinite or NaN, or 0 for integers.

    Example:
        >>> import torch
        >>> count_nonfinite(torch.tensor([1.0, torch.nan, torch.inf])), count_nonfinite(torch.ones(2, dtype=torch.int8))
        (2, 0)
    """
    if not (x.is_floating_point() or x.is_complex()):
        return 0
    # torch has no isfinite for its types of 8 bits.
    return int((~(x.float() if x.dtype.itemsize == 1 else x).isfinite()).sum())


def raise_nonfinite(title: str, found: Mapping[str, tuple[int, int]], total: int) -> None:
    """Raises an error that names leaves with elements that are not finite, and returns if all are finite.

    Args:
        title: words for the leaves, for example "the weights for runs/model".
        found: by path the number of elements that are not finite, and of all elements.
        total: number of all leaves.

    Raises:
        ValueError: leaves have such elements. The message names ten leaves at most.
    """
    lines = [f"{path}: {bad:,} of {size:,} elements" for path, (bad, size) in found.items()]
    raise_all(
        ValueError,
        f"{title} must be finite, got NaN or infinite elements in {len(lines)} of {total} leaves, so that nothing was"
        f" written."
        " Write them from an earlier checkpoint, and train on from there with a smaller learning rate:",
        first_of(lines, _LISTED),
    )
