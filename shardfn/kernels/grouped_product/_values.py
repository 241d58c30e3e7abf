"""The check of the sizes of groups, and the scratch memory of the C++."""

import functools

from torch import Tensor

from shardfn.kernels._num_threads import threads_for as threads_for_work

# Number of columns computed together.
PANEL = 64
# Of `grouped_outer`: rows with separately added products, and columns of x for each turn of a thread.
_DEPTH, _COLUMNS = 512, 504
# Rows of a group from which a transposed copy of the result pays.
_MANY = 4096
# Multiply-adds up to which a second thread does not pay.
FEW = 1 << 20


# Threads that share a number of multiply-adds.
threads_for = functools.partial(threads_for_work, few=FEW)


def panel_bytes(work: int, depth: int, itemsize: int) -> int:
    """Bytes of a packed panel for each thread, where `depth` products are added up."""
    return threads_for(work) * depth * PANEL * itemsize


def outer_depth(rows: int) -> int:
    """Returns the rows of PANEL numbers for each thread of `grouped_outer`, with at most `rows` rows a group."""
    return rows if rows <= _DEPTH else _DEPTH + _COLUMNS


def turns(m: int, k: int, n: int, e: int) -> bool:
    """Returns whether `grouped_outer` computes the transpose.

    Rows of the narrower operand are read by columns, nearer to each other in memory. With few rows of a group the
    transposed copy of the result costs more than the order saves.
    """
    return k > n and m >= _MANY * e


def check_counts(counts: Tensor, rows: int) -> int:
    """Checks counts, and returns the largest count. Reads counts on the host, so only for a CPU.

    Raises:
        ValueError: a count is negative, or the counts are more than the rows.
    """
    sizes = counts.tolist()
    if any(size < 0 for size in sizes) or sum(sizes) > rows:
        raise ValueError(f"counts must be sizes of groups of x's {rows} rows, got {sizes}, of sum {sum(sizes)}")
    return max(sizes, default=0)
