"""`assert_bucket_invariant`: checks the contract of a bucketed function by other values of the padding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import PyTree, named_leaves, tree_map
from shardfn.state import copy_value
from shardfn.transforms import Bucketed


def assert_bucket_invariant(
    f: Bucketed,
    *args: Any,
    select: Callable[[PyTree], PyTree] = lambda out: out,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Asserts that the result depends neither on the rows of padding nor on the number of such rows.

    In one bucket the bits are equal for padding by the fill, by copies of the first and of the last row, and for
    floating-point arguments by large numbers. In the next bucket the result is close, as sums of other shapes may round
    otherwise.

    Args:
        f: function from `bucketed`.
        *args: arguments as for a call, with at least one row. Donated leaves are copied.
        select: function to the compared part of the result, where padding may write to another part, such as a block of
            a KV cache that is never read.
        rtol: relative tolerance for the next bucket. Default: torch's for the dtype.
        atol: absolute tolerance for the next bucket. Default: torch's for the dtype.

    Raises:
        AssertionError: names the leaf and the padding.

    Example:
        >>> from shardfn import bucketed, jit
        >>> masked = lambda x, n: (x * (torch.arange(len(x)) < n)).sum() / n
        >>> assert_bucket_invariant(bucketed(jit(masked, backend="graph"), (0,), sizes=(4, 8)), torch.ones(3))
        >>> mean = bucketed(jit(lambda x, n: x.mean(), backend="graph"), (0,), sizes=(4, 8))
        >>> assert_bucket_invariant(mean, torch.ones(3))
        Traceback (most recent call last):
            ...
        AssertionError: result differs in the bucket of 4 if the 1 rows of padding are copies of the first row: ...
    """
    padding, length = f.padding, f.padding.length(args)
    size = padding.bucket(length)
    # With at least one row of padding.
    size = size if size > length else padding.bucket(length + 1)
    larger = padding.bucket(size + 1) if padding.sizes is None or size < padding.sizes[-1] else None

    def run_bucket(rows: Any, size: int) -> PyTree:
        given = padding.padded(tree_map(_copy_fresh, args), length, size, rows)
        return select(padding.cut(f.inner(*given), length, size))

    want = run_bucket(None, size)
    for how, rows in _ROWS.items():
        for (path, x), (_, y) in zip(
            named_leaves(want, "result"), named_leaves(run_bucket(rows, size), "result"), strict=True
        ):
            why = f"{path} differs in the bucket of {size} if the {size - length} rows of padding are {how}"
            _assert_close(x, y, why, rtol=0.0, atol=0.0)
    if larger is not None:
        for (path, x), (_, y) in zip(
            named_leaves(want, "result"), named_leaves(run_bucket(None, larger), "result"), strict=True
        ):
            _assert_close(x, y, f"{path} differs between the buckets of {size} and {larger}", rtol=rtol, atol=atol)


def _fill_copies(x: Tensor, dim: int, rows: int, fill: Any, at: int) -> Tensor:
    del fill
    return x.narrow(dim, at % x.shape[dim], 1).expand([rows if k == dim % x.ndim else n for k, n in enumerate(x.shape)])


def _fill_large(x: Tensor, dim: int, rows: int, fill: Any) -> Tensor:
    """Returns large numbers for floats, and copies for integers, which may be indices."""
    first = _fill_copies(x, dim, rows, fill, 0)
    return first.sign() * 1e4 + 1e4 / 3 if x.is_floating_point() else first


_ROWS: dict[str, Callable[..., Tensor]] = {
    "copies of the first row": lambda *given: _fill_copies(*given, at=0),
    "copies of the last row": lambda *given: _fill_copies(*given, at=-1),
    "large numbers": _fill_large,
}


def _copy_fresh(x: Any) -> Any:
    return x.with_block(copy_value(x.held, x.memory_kind)) if isinstance(x, GlobalTensor) else x


def _assert_close(x: Any, y: Any, why: str, *, rtol: float | None, atol: float | None) -> None:
    x, y = (v.local if isinstance(v, GlobalTensor) else v for v in (x, y))
    if not isinstance(x, Tensor):
        assert x == y, f"{why}: {x!r} and {y!r}"
        return
    torch.testing.assert_close(y, x, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{why}: {text}")
