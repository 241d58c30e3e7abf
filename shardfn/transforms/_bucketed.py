"""`bucketed`: captured functions of tensors of any length, padded to a few lengths.

`Padding`: the dims of arguments and results with one length, and the padded sizes.

Rows beyond the length must not change the result: `testing.assert_bucket_invariant` checks the contract.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from shardfn import core, engine
from shardfn.collectives import GlobalTensor


def is_dim(x: Any) -> bool:
    """Returns whether `x` is a leaf of `in_dims` or `out_dims`. None means no padding and no cut."""
    return x is None or (isinstance(x, int) and not isinstance(x, bool))


def _is_fill(x: Any) -> bool:
    return x is None or isinstance(x, int | float | bool)


@dataclasses.dataclass(frozen=True)
class Padding:
    """Arguments of `bucketed`. See there."""

    in_dims: tuple[core.PyTree, ...]
    out_dims: core.PyTree
    sizes: tuple[int, ...] | None
    fill: core.PyTree = 0
    with_length: bool = True

    def check(self) -> None:
        """Checks the dims and sizes.

        Raises:
            TypeError: a dim is not an int or None, or a size not an int.
            ValueError: no dim is padded, or sizes are not positive and ascending.
        """
        named = [*core.named_leaves(self.in_dims, "in_dims", is_leaf=is_dim)]
        rows = [*named, *core.named_leaves(self.out_dims, "out_dims", is_leaf=is_dim)]
        wrong = [f"{path} is {core.a_kind(x)}; pass the number of a dim, or None" for path, x in rows if not is_dim(x)]
        core.raise_all(TypeError, "bucketed: the padded dims:", wrong)
        if all(x is None for _, x in named):
            raise ValueError(
                f"bucketed must have a dim to pad, got in_dims={self.in_dims!r}. For dim 0 of args[1], pass"
                " in_dims=(None, 0)."
            )
        if self.sizes is None:
            return
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in self.sizes):
            raise TypeError(f"bucketed(sizes={self.sizes!r}): pass ints, or leave sizes out for powers of two.")
        if not self.sizes or self.sizes[0] < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"bucketed(sizes={self.sizes}): pass one size or more, from 1 on, in ascending order.")

    def length(self, args: Sequence[Any]) -> int:
        """Returns the length of all padded dims.

        Raises:
            TypeError: a padded leaf is not a tensor of a single device.
            ValueError: a leaf lacks the dim, or lengths differ.
        """
        rows = [(path, x, dim) for path, x, dim, _ in self._list_leaves(args) if dim is not None]
        core.raise_all(
            TypeError,
            "bucketed pads plain tensors alone:",
            [
                f"{n} is {core.a_kind(x)}; pad it before sf.shard, or name no dim of it"
                for n, x, _ in rows
                if not _is_plain(x)
            ],
        )
        short = [(n, x, d) for n, x, d in rows if not -x.ndim <= d < x.ndim]
        core.raise_all(
            ValueError, "bucketed:", [f"{n} of shape {tuple(x.shape)} has no dim {d} to be padded" for n, x, d in short]
        )
        if not rows:
            raise ValueError(
                "bucketed: an argument must have a leaf with a dim of in_dims. Without such a leaf, call the function"
                " itself."
            )
        lengths = {x.shape[d] for _, x, d in rows}
        if len(lengths) > 1:
            core.raise_all(
                ValueError,
                "bucketed: padded dims have one length; nest bucketed for dims of another:",
                [f"{n} has {x.shape[d]} along dim {d}" for n, x, d in rows],
            )
        return lengths.pop()

    def bucket(self, length: int) -> int:
        """Returns the smallest size with room.

        Raises:
            ValueError: the length is above all sizes.
        """
        if self.sizes is None:
            return 1 << max(0, length - 1).bit_length()
        at = bisect.bisect_left(self.sizes, length)
        if at == len(self.sizes):
            raise ValueError(
                f"bucketed: a length of {length} is above the largest of sizes={self.sizes}. Add {length}, or call the"
                " function for parts."
            )
        return self.sizes[at]

    def padded(self, args: Sequence[Any], length: int, size: int, rows: Any = None) -> tuple[Any, ...]:
        """Returns the arguments of the same size, and the length as a tensor. Rows beyond `size` are cut.

        Args:
            args: arguments of the call.
            length: length of the arguments.
            size: size of the bucket.
            rows: function for tests, from a leaf, the dim and a number of rows to the rows beyond the length.
        """
        leaves, treedef = core.tree_flatten(tuple(args))
        length = min(length, size)
        device = torch.device("cpu")
        for i, (_, x, dim, fill) in enumerate(self._list_leaves(args)):
            if dim is None:
                continue
            device, own = x.device, x.narrow(dim, 0, length)
            if length < size:
                more = (
                    _make_filled(own, dim, size - length, fill) if rows is None else rows(own, dim, size - length, fill)
                )
                own = torch.cat([own, more], dim)
            # One layout for all lengths of a bucket: strides are part of a graph.
            leaves[i] = own.contiguous()
        out = core.tree_unflatten(treedef, leaves)
        return (*out, torch.tensor(length, device=device)) if self.with_length else out

    def cut(self, out: core.PyTree, length: int, size: int) -> core.PyTree:
        """Returns the result without the rows of the padding.

        Raises:
            ValueError: a leaf has another size along the dim in `out_dims`, or ranks cut the dim.
        """
        leaves, treedef = core.tree_flatten(out)
        dims = core.broadcast_prefix(self.out_dims, out, is_dim, names=("out_dims", "result"))
        named = [*zip(core.tree_paths(out, "result"), leaves, dims, strict=True)]
        core.raise_all(ValueError, "bucketed: out_dims does not fit the result:", list(_find_misfits(named, size)))
        return core.tree_unflatten(treedef, [x if d is None else _narrow_rows(x, d, length) for _, x, d in named])

    def undeclared(self, out: core.PyTree) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a result's uncut leaves, by path."""
        dims = core.broadcast_prefix(self.out_dims, out, is_dim, names=("out_dims", "result"))
        rows = zip(core.tree_paths(out, "result"), core.tree_leaves(out), dims, strict=True)
        return {n: tuple(x.shape) for n, x, d in rows if d is None and isinstance(x, Tensor | GlobalTensor)}

    def rest(self, args: Sequence[Any]) -> Any:
        """Returns all sizes of the arguments except the length."""
        return tuple(
            tuple(n for k, n in enumerate(x.shape) if dim is None or k != dim % x.ndim)
            for _, x, dim, _ in self._list_leaves(args)
            if isinstance(x, Tensor | GlobalTensor)
        )

    def _list_leaves(self, args: Sequence[Any]) -> Iterator[tuple[str, Any, int | None, Any]]:
        """Yields the path, value, padded dim and fill of each leaf of the arguments."""
        if len(self.in_dims) > len(args):
            raise ValueError(
                f"bucketed: in_dims has {len(self.in_dims)} entries, one an argument, and the call has {len(args)}"
                " arguments."
            )
        more = (None,) * (len(args) - len(self.in_dims))
        fills = self.fill if _is_fill(self.fill) else (*self.fill, *more)[: len(args)]
        for k, (tree, dims) in enumerate(zip(args, (*self.in_dims, *more), strict=True)):
            each = core.broadcast_prefix(dims, tree, is_dim, names=(f"in_dims[{k}]", f"args[{k}]"))
            fill = fills if _is_fill(fills) else fills[k]
            values = core.broadcast_prefix(fill, tree, _is_fill, names=(f"fill[{k}]", f"args[{k}]"))
            yield from zip(core.tree_paths(tree, f"args[{k}]"), core.tree_leaves(tree), each, values, strict=True)


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor)


def _make_filled(x: Tensor, dim: int, rows: int, fill: Any) -> Tensor:
    shape = [*x.shape]
    shape[dim] = rows
    return x.new_full(shape, 0 if fill is None else fill)


def _find_misfits(named: Sequence[tuple[str, Any, int | None]], size: int) -> Iterator[str]:
    for path, x, dim in named:
        if dim is None:
            continue
        if not isinstance(x, Tensor | GlobalTensor):
            yield f"{path} is {core.a_kind(x)}, which has no dim {dim}. Name None for it"
        elif isinstance(x, GlobalTensor) and x.ndim and x.mesh.axes(x.spec.dim_axes(dim % x.ndim)):
            yield f"{path} is cut along dim {dim} as {x.spec!r}; return this rank's rows, with None in out_specs"
        elif not -x.ndim <= dim < x.ndim or x.shape[dim] != size:
            yield (
                f"{path} has shape {tuple(x.shape)}, and not the {size} rows of the bucket along dim {dim}. Name None"
                " for it, or the dim that has the length"
            )


def _narrow_rows(x: Tensor | GlobalTensor, dim: int, length: int) -> Tensor | GlobalTensor:
    if isinstance(x, Tensor):
        return x.narrow(dim, 0, length)
    shape = [*x.shape]
    shape[dim] = length
    return GlobalTensor(x.local.narrow(dim, 0, length), torch.Size(shape), x.spec, x.mesh, x.memory_kind)


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

    graphs: engine.CacheInfo | None
    buckets: Mapping[int, BucketCounts]

    @property
    def padding(self) -> float:
        """Returns the share of padding in all rows that were computed."""
        rows = sum(x.rows + x.padding for x in self.buckets.values())
        return sum(x.padding for x in self.buckets.values()) / max(1, rows)


def bucketed(
    f: Callable[..., Any],
    in_dims: Sequence[core.PyTree],
    out_dims: core.PyTree = None,
    *,
    sizes: Sequence[int] | None = None,
    fill: core.PyTree = 0,
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
    engine.check_order("bucketed", f)
    padding = Padding(tuple(in_dims), out_dims, None if sizes is None else tuple(sizes), fill, with_length)
    padding.check()
    jitted = f if isinstance(f, engine.Jitted) else f.jitted if isinstance(f, engine.Sharded) else None
    if padding.sizes is not None and jitted is not None and len(padding.sizes) > jitted.max_graphs:
        raise ValueError(
            f"jit(max_graphs={jitted.max_graphs}) must keep a graph for each of the {len(padding.sizes)} sizes of"
            f" bucketed. Pass max_graphs={len(padding.sizes)}, or fewer sizes."
        )
    return Bucketed(f, padding)


class Bucketed(engine.Transform):
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

    def _check_shapes(self, size: int, rest: Any, out: core.PyTree) -> None:
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
            raise ValueError("bucketed must have sizes= to be bound. Without sizes there is no last bucket.")
        if not isinstance(self.inner, engine.Sharded | Bucketed):
            raise ValueError("only a sharded function can be bound: bucketed(sharded(jit(f)), ...).")
        length, inner = self.padding.length(args), self.inner
        each = {
            n: inner.bind(*self.padding.padded(args, length, n), check_every=check_every) for n in self.padding.sizes
        }
        return BoundBuckets(self, each)

    def cache_info(self) -> BucketInfo:
        """Returns the counts of the graphs, and of calls, rows and padding by bucket. Bound calls are included."""
        counted = isinstance(self.inner, engine.Jitted) or (
            isinstance(self.inner, engine.Sharded) and self.inner.jitted is not None
        )
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
