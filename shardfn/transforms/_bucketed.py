"""`bucketed`: a captured function of tensors of any length, by a single graph for each of a few lengths.

Rows beyond the length must not change the result: `testing.assert_bucket_invariant` checks the contract.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from shardfn.core import PyTree
from shardfn.engine import CacheInfo, Jitted, Sharded, Transform, check_order

from ._padding import Padding


class BucketCounts(NamedTuple):
    """Counts the calls of a single bucket, for example rows of up to 512 tokens.

    Attributes:
        calls: number of calls.
        rows: sum of the lengths.
        padding: number of rows added as padding.
    """

    calls: int = 0
    rows: int = 0
    padding: int = 0


class BucketInfo(NamedTuple):
    """Counts of a bucketed function.

    Attributes:
        graphs: counts of the captured function inside, or None without a capture.
        buckets: counts of calls by size.
    """

    graphs: CacheInfo | None
    buckets: Mapping[int, BucketCounts]

    @property
    def padding(self) -> float:
        """Returns the share of padding in all rows that were computed."""
        rows = sum(x.rows + x.padding for x in self.buckets.values())
        return sum(x.padding for x in self.buckets.values()) / max(1, rows)


def bucketed(
    f: Callable[..., Any],
    in_dims: Sequence[PyTree],
    out_dims: PyTree = None,
    *,
    sizes: Sequence[int] | None = None,
    fill: PyTree = 0,
    with_length: bool = True,
) -> "Bucketed":
    """Pads dims of varying length up to the next of a few sizes: a graph for each size, not for each length.

        bucketed(f, ...)(*args) == f(*padded(args), length), cut back to the length

    For example lengths 5, 6 and 7 all run in the bucket of 8 rows. Apply `bucketed` to `jit(f)` or `sharded(jit(f))`.
    The result of `f` must not depend on the rows beyond the length, as a mean over all rows does: work row by row, or
    mask rows by `torch.arange(n) < length`. `testing.assert_bucket_invariant` checks the contract. The padding is
    computed, too: see `cache_info().padding`. Nest `bucketed` for a second length. Ranks must pass lengths of one
    bucket if the graphs communicate.

    Args:
        f: `f(*args, length)`. `length` is a 0-d int64 tensor on the device of the padded arguments. Where bucketed
            functions are nested, the length of the outer function comes first.
        in_dims: prefix tree of the dims with the length, for each argument. None, or no entry, means that an argument
            is not padded.
        out_dims: prefix tree of the dims of the result to cut back. None returns the result unchanged.
        sizes: ascending sizes. Default: powers of two, without an end.
        fill: the value of the padding, or a tuple with a prefix tree of values for each argument.
        with_length: whether `f` takes the length. False for an `f` with a mask among the arguments, for example.

    Returns:
        The function of the arguments without the length. `cache_info()` counts calls, rows and padding by bucket.
        `bind` binds all sizes.

    Raises:
        TypeError: a dim, or a size, is not an int, or (when called) a padded leaf is not a plain tensor.
        ValueError: no dim is padded, sizes do not ascend, or `jit` keeps fewer graphs than there are sizes, or (when
            called) lengths differ or are above all sizes, or a result has the bucket's size along a dim that `out_dims`
            does not name.

    Example:
        >>> import torch
        >>> from shardfn import jit
        >>> def rows_and_mean(w, x, length):
        ...     mask = torch.arange(len(x)) < length
        ...     return w * x, (x * mask).sum() / length
        >>> f = bucketed(jit(rows_and_mean, backend="graph"), (None, 0), (0, None), sizes=(4, 8))
        >>> f(torch.tensor(2.0), torch.ones(3))
        (tensor([2., 2., 2.]), tensor(1.))
        >>> f(torch.tensor(2.0), torch.ones(2))[0].shape, f.cache_info().graphs.misses
        (torch.Size([2]), 1)
        >>> f.cache_info().buckets
        {4: BucketCounts(calls=2, rows=5, padding=3)}
    """
    check_order("bucketed", f)
    padding = Padding(tuple(in_dims), out_dims, None if sizes is None else tuple(sizes), fill, with_length)
    padding.check()
    jitted = f if isinstance(f, Jitted) else f.jitted if isinstance(f, Sharded) else None
    if padding.sizes is not None and jitted is not None and len(padding.sizes) > jitted.max_graphs:
        raise ValueError(
            f"bucketed has {len(padding.sizes)} sizes, and jit(max_graphs={jitted.max_graphs}) keeps fewer graphs; pass"
            f" max_graphs={len(padding.sizes)}, or fewer sizes."
        )
    return Bucketed(f, padding)


class Bucketed(Transform):
    """Function with padded arguments. See `bucketed`."""

    transform: ClassVar[str] = "bucketed"

    def __init__(self, inner: Callable[..., Any], padding: Padding) -> None:
        self.inner, self.padding = inner, padding
        self._counts: dict[int, BucketCounts] = {}
        # Of the first call of each bucket: the other sizes of the arguments, and the shapes of results that are not
        # cut.
        self._first: dict[int, tuple[Any, dict[str, tuple[int, ...]]]] = {}

    def __call__(self, *args: Any) -> Any:
        """Returns the function's value."""
        return self.run(args, lambda size: self.inner)

    def run(self, args: tuple[Any, ...], call_of: Callable[[int], Callable[..., Any]]) -> Any:
        """Returns the value, by the function of the bucket, `call_of(size)`."""
        length = self.padding.length(args)
        size = self.padding.bucket(length)
        rest = None if size in self._first else self.padding.rest(args)
        out = call_of(size)(*self.padding.padded(args, length, size))
        result = self.padding.cut(out, length, size)
        if rest is not None:
            self._check_shapes(size, rest, out)
        before = self._counts.get(size, BucketCounts())
        self._counts[size] = BucketCounts(before.calls + 1, before.rows + length, before.padding + size - length)
        return result

    def _check_shapes(self, size: int, rest: Any, out: PyTree) -> None:
        """Refuses a shape that depends on the bucket where `out_dims` does not name the dim."""
        shapes = self.padding.undeclared(out)
        for other, (sizes, before) in self._first.items():
            changed = [n for n, s in shapes.items() if sizes == rest and before.get(n, s) != s]
            if changed:
                n = changed[0]
                raise ValueError(
                    f"bucketed: {n} has shape {shapes[n]} in the bucket of {size}, and {before[n]} in that of {other},"
                    " so it has rows of the padding. Name its dim in out_dims."
                )
        self._first[size] = rest, shapes

    def bind(self, *args: Any, check_every: int = 100) -> "BoundBuckets":
        """Returns the function bound to arguments of this layout in each of the sizes: see `Sharded.bind`. Collective.

        All graphs are captured here, so no later call waits for a capture.

        Args:
            *args: arguments as for a call, of any length.
            check_every: number of calls between two checks, see `Sharded.bind`. Calls are counted by bucket.

        Raises:
            ValueError: `sizes` was left out, or the function is not sharded, or as `Sharded.bind` does.

        Example:
            >>> import torch
            >>> from shardfn import jit, sharded
            >>> double = sharded(jit(lambda w, x, length: w * x, backend="graph"))
            >>> w = double.init(torch.tensor(2.0))
            >>> bound = bucketed(double, (None, 0), 0, sizes=(2, 4)).bind(w, torch.ones(1))
            >>> bound(w, torch.ones(3)), double.cache_info().misses
            (tensor([2., 2., 2.]), 2)
        """
        if self.padding.sizes is None:
            raise ValueError("bucketed without sizes= has no last bucket, so it cannot be bound; pass sizes=.")
        if not isinstance(self.inner, Sharded | Bucketed):
            raise ValueError("only a sharded function can be bound: bucketed(sharded(jit(f)), ...).")
        length, inner = self.padding.length(args), self.inner
        each = {
            n: inner.bind(*self.padding.padded(args, length, n), check_every=check_every) for n in self.padding.sizes
        }
        return BoundBuckets(self, each)

    def cache_info(self) -> BucketInfo:
        """Returns the counts of the graphs, and of calls, rows and padding by bucket. Bound calls are included."""
        counted = isinstance(self.inner, Jitted) or (isinstance(self.inner, Sharded) and self.inner.jitted is not None)
        inner: Any = self.inner
        graphs = inner.cache_info() if counted else inner.cache_info().graphs if isinstance(inner, Bucketed) else None
        return BucketInfo(graphs, dict(sorted(self._counts.items())))


class BoundBuckets:
    """Bucketed function, bound in each size. See `Bucketed.bind`.

    Attributes:
        bound: bound functions by size.
    """

    def __init__(self, of: Bucketed, bound: Mapping[int, Callable[..., Any]]) -> None:
        self._of, self.bound = of, bound

    def __call__(self, *args: Any) -> Any:
        """Returns the function's value, without agreement of the ranks, as `BoundCall` does."""
        return self._of.run(args, self.bound.__getitem__)
