"""The check of the sizes of groups."""

from torch import Tensor


def check_counts(counts: Tensor, rows: int) -> int:
    """The largest count. Reads counts on the host, so it is for a CPU.

    Raises:
        ValueError: a count is negative, or the counts are more than the rows.
    """
    sizes = counts.tolist()
    if any(size < 0 for size in sizes) or sum(sizes) > rows:
        raise ValueError(f"counts is {sizes}, of sum {sum(sizes)}; sizes of groups of x's {rows} rows are expected")
    return max(sizes, default=0)
