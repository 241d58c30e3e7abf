"""`Padding`: the dims of arguments and results with one length, and the padded sizes."""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import (
    PyTree,
    a_kind,
    broadcast_prefix,
    named_leaves,
    raise_all,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
)


def is_dim(x: Any) -> bool:
    """Returns whether `x` is a leaf of `in_dims` or `out_dims`. None means no padding and no cut."""
    return x is None or (isinstance(x, int) and not isinstance(x, bool))


def _is_fill(x: Any) -> bool:
    return x is None or isinstance(x, int | float | bool)


@dataclasses.dataclass(frozen=True)
class Padding:
    """Arguments of `bucketed`. See there."""

    in_dims: tuple[PyTree, ...]
    out_dims: PyTree
    sizes: tuple[int, ...] | None
    fill: PyTree = 0
    with_length: bool = True

    def check(self) -> None:
        """Checks the dims and sizes.

        Raises:
            TypeError: a dim is not an int or None, or a size not an int.
            ValueError: no dim is padded, or sizes are not positive and ascending.
        """
        named = [*named_leaves(self.in_dims, "in_dims", is_leaf=is_dim)]
        rows = [*named, *named_leaves(self.out_dims, "out_dims", is_leaf=is_dim)]
        wrong = [f"{path} is {a_kind(x)}; pass the number of a dim, or None" for path, x in rows if not is_dim(x)]
        raise_all(TypeError, "bucketed: the padded dims:", wrong)
        if all(x is None for _, x in named):
            raise ValueError(
                f"bucketed(in_dims={self.in_dims!r}) pads nothing; name a dim, as (None, 0) for dim 0 of args[1]."
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
        raise_all(
            TypeError,
            "bucketed pads plain tensors alone:",
            [
                f"{n} is {a_kind(x)}; pad it before sf.shard, or name no dim of it"
                for n, x, _ in rows
                if not _is_plain(x)
            ],
        )
        short = [(n, x, d) for n, x, d in rows if not -x.ndim <= d < x.ndim]
        raise_all(
            ValueError, "bucketed:", [f"{n} of shape {tuple(x.shape)} has no dim {d} to be padded" for n, x, d in short]
        )
        if not rows:
            raise ValueError("bucketed: the arguments have no leaf with a dim of in_dims; call the function itself.")
        lengths = {x.shape[d] for _, x, d in rows}
        if len(lengths) > 1:
            raise_all(
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
        leaves, treedef = tree_flatten(tuple(args))
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
        out = tree_unflatten(treedef, leaves)
        return (*out, torch.tensor(length, device=device)) if self.with_length else out

    def cut(self, out: PyTree, length: int, size: int) -> PyTree:
        """Returns the result without the rows of the padding.

        Raises:
            ValueError: a leaf has another size along the dim in `out_dims`, or ranks cut the dim.
        """
        leaves, treedef = tree_flatten(out)
        dims = broadcast_prefix(self.out_dims, out, is_dim, names=("out_dims", "result"))
        named = [*zip(tree_paths(out, "result"), leaves, dims, strict=True)]
        raise_all(ValueError, "bucketed: out_dims does not fit the result:", list(_find_misfits(named, size)))
        return tree_unflatten(treedef, [x if d is None else _narrow_rows(x, d, length) for _, x, d in named])

    def undeclared(self, out: PyTree) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a result's uncut leaves, by path."""
        dims = broadcast_prefix(self.out_dims, out, is_dim, names=("out_dims", "result"))
        rows = zip(tree_paths(out, "result"), tree_leaves(out), dims, strict=True)
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
            each = broadcast_prefix(dims, tree, is_dim, names=(f"in_dims[{k}]", f"args[{k}]"))
            fill = fills if _is_fill(fills) else fills[k]
            values = broadcast_prefix(fill, tree, _is_fill, names=(f"fill[{k}]", f"args[{k}]"))
            yield from zip(tree_paths(tree, f"args[{k}]"), tree_leaves(tree), each, values, strict=True)


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
            yield f"{path} is {a_kind(x)}, which has no dim {dim}. Name None for it"
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
