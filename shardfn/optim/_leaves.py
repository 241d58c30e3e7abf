"""Trees as columns of leaves: the checks and the grouping that every optimizer shares.

A tree is flattened once a step. After that an optimizer works on lists. The in-place forms need leaves for a fused
kernel: contiguous, and with the same dtype for parameter, moments and gradient. `stage_columns` copies other leaves
(for example transposed parameters), and `unstage_columns` writes the copies back.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn import core
from shardfn._torch import FakeTensor

Columns = list[list[Tensor]]
Copies = list[tuple[Tensor, Tensor]]
_BLOCK = 1 << 16  # elements: a few tensors of this size stay in a core's cache
_HALF = (torch.bfloat16, torch.float16)


def leaves_like(tree: core.PyTree, treedef: Any, name: str, like: str) -> list[Any]:
    """Returns the leaves of `tree`, which must have the structure `treedef`.

    Raises:
        ValueError: the structures differ. The message lists every path that only one side has.
    """
    leaves, own = core.tree_flatten(tree)
    if own != treedef:
        _refuse_trees(tree, core.tree_unflatten(treedef, range(treedef.num_leaves)), name, like)
    return leaves


def check_shapes(treedef: Any, params: Sequence[Tensor], **columns: Sequence[Tensor]) -> None:
    """Checks that every leaf of every column has the parameter's shape.

    Raises:
        ValueError: shapes differ. The message lists all such leaves, with both shapes.
    """
    shapes = [p.shape for p in params]
    problems = []
    for name, column in columns.items():
        if [x.shape for x in column] != shapes:
            paths = core.tree_paths(core.tree_unflatten(treedef, range(treedef.num_leaves)), name)
            problems += [
                f"{path} has shape {tuple(x.shape)}, but its parameter has {tuple(shape)}"
                for path, x, shape in zip(paths, column, shapes, strict=True)
                if x.shape != shape
            ]
    core.raise_all(
        ValueError, "leaves do not fit their parameters; pass the state that init(params) returned:", problems
    )


def check_state(who: str, state: Any, kind: type) -> None:
    """Checks that `state` has the type that `who` keeps.

    Raises:
        ValueError: the state has another type.
    """
    if not isinstance(state, kind):
        raise ValueError(
            f"{who} expected a {kind.__name__}, got a {type(state).__name__}."
            " Pass the state that init(params) returned."
        )


def check_params(who: str, params: core.PyTree) -> None:
    """Checks that `who` was given params.

    Raises:
        ValueError: `params=None`.
    """
    if params is None:
        raise ValueError(f"{who} needs the parameters. Call update(updates, state, params).")


def zeros_like(params: core.PyTree) -> core.PyTree:
    """Returns zeros of the shape, dtype and device of every leaf.

    Raises:
        ValueError: leaves are not of floating point. The message lists all such leaves.
    """
    leaves = core.tree_leaves(params)
    if not all(p.is_floating_point() for p in leaves):
        paths = zip(core.tree_paths(params, "params"), leaves, strict=True)
        wrong = [f"{path} is {p.dtype}" for path, p in paths if not p.is_floating_point()]
        core.raise_all(ValueError, "an optimizer steps floating-point leaves; put None in place of:", wrong)
    return core.tree_map(torch.zeros_like, params)


def zero_count(params: core.PyTree) -> Tensor:
    """Returns a counter: int32, 0-d, on the device of the params."""
    leaves = core.tree_leaves(params)
    return torch.zeros((), dtype=torch.int32, device=leaves[0].device if leaves else None)


def wide(x: Tensor) -> Tensor:
    """Returns `x` in the dtype of the arithmetic: float32 for half precision, else unchanged."""
    return x.float() if x.dtype in _HALF else x


def spec_leaves(specs: core.PyTree, tree: core.PyTree) -> list[core.P]:
    """Returns the spec of each leaf of `tree`. `specs` may be a prefix."""
    leaves, treedef = core.tree_flatten(specs)
    if len(leaves) > 1 and treedef == core.tree_flatten(tree)[1] and all(isinstance(s, core.P) for s in leaves):
        return leaves
    return core.broadcast_prefix(specs, tree, lambda x: isinstance(x, core.P), names=("specs", "params"))


def stage_columns(
    columns: Columns, *, widen: Callable[[Tensor], bool] | None = None, narrow: bool = False
) -> tuple[Columns, Copies]:
    """Returns columns with contiguous rows of the same dtype, and the copies to write back.

    The last column is only read.

    Args:
        columns: a list for each role, parameters first and gradients last.
        widen: predicate for parameters of half precision that are staged in float32. None: no parameters.
        narrow: whether a gradient on a CPU may keep half precision with a wider parameter. See `even`.
    """
    dtypes = [x.dtype for x in columns[0]]
    even = widen is None and all([x.dtype for x in c] == dtypes for c in columns[1:])
    if even and all([x.is_contiguous() for c in columns for x in c]):
        return columns, []
    out = [list(c) for c in columns]
    copies: Copies = []
    for i, row in enumerate(zip(*columns, strict=True)):
        dtype = row[0].dtype
        wider = dtype in _HALF and widen is not None and widen(row[0])
        plain = not wider
        for x in row:
            plain = plain and x.is_contiguous() and (x.dtype is dtype or (narrow and x is row[-1] and _is_late(x)))
        if not plain:
            ready = _stage_row(row, wider)
            copies += [(x, y) for x, y in zip(row[:-1], ready[:-1], strict=True) if y is not x]
            for column, y in zip(out, ready, strict=True):
                column[i] = y
    return out, copies


def is_any(param: Tensor) -> bool:
    """Returns True for every leaf, for `stage_columns`."""
    del param
    return True


def unstage_columns(copies: Copies) -> None:
    """Writes staged copies back."""
    for x, y in copies:
        x.copy_(y)


def group_columns(columns: Columns, flags: Sequence[Any]) -> dict[tuple[Any, ...], Columns]:
    """Returns the columns cut by (flag, device, dtype), without leaves that lack elements or memory."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (flag, p) in enumerate(zip(flags, columns[0], strict=True)):
        if p.numel():
            groups.setdefault((flag, p.device, p.dtype), []).append(i)
    return {key: [[c[i] for i in own] for c in columns] for key, own in groups.items() if key[1].type != "meta"}


def split_columns(columns: Columns, size: int = _BLOCK) -> Iterator[Columns]:
    """Yields the columns in flat pieces that fit a CPU's cache. On other devices, yields all columns at once.

    For chains of elementwise kernels: temporaries are as small as a piece. Leaves must be contiguous.
    """
    if not columns[0] or columns[0][0].device.type != "cpu":
        yield columns
        return
    piece: Columns = [[] for _ in columns]
    filled = 0
    for row in zip(*columns, strict=True):
        large = row[0].numel() > size
        for cut in zip(*(x.view(-1).split(size) for x in row), strict=True) if large else [row]:
            for column, x in zip(piece, cut, strict=True):
                column.append(x)
            filled += cut[0].numel()
            if filled >= size:
                yield piece
                piece, filled = [[] for _ in columns], 0
    if piece[0]:
        yield piece


def is_disjoint(leaves: Sequence[Tensor]) -> bool:
    """Returns whether no leaves, and no elements of a leaf, share memory.

    For example, gradients may be the same tensor twice, or expanded.
    """
    if not all(x.is_contiguous() for x in leaves):
        return False
    spans = sorted((x.untyped_storage()._cdata, x.storage_offset() * x.itemsize, x.nbytes) for x in leaves)
    return all(a != b or i + num <= j for (a, i, num), (b, j, _) in itertools.pairwise(spans))


def _is_late(grad: Tensor) -> bool:
    # A tracer would record every piece of a leaf. So under a tracer the gradient is cast as a whole, with the same
    # bits.
    return grad.dtype in _HALF and grad.device.type == "cpu" and not isinstance(grad, FakeTensor)


def _stage_row(row: tuple[Tensor, ...], wider: bool) -> list[Tensor]:
    dtype = row[0].dtype
    for x in row[1:-1]:
        dtype = torch.promote_types(dtype, x.dtype)
    dtype = torch.promote_types(dtype, torch.float32) if wider else dtype
    return [x.to(dtype).contiguous() for x in row]


def _refuse_trees(tree: core.PyTree, other: core.PyTree, name: str, like: str) -> None:
    ours, theirs = core.tree_paths(tree), core.tree_paths(other)
    extra = [p for p in ours if p not in set(theirs)]
    missing = [p for p in theirs if p not in set(ours)]
    problems = [f"{like}{p} has no leaf in {name}.{core.did_you_mean(p, extra)}" for p in missing]
    problems += [f"{name}{p} has no leaf in {like}.{core.did_you_mean(p, missing)}" for p in extra]
    if not problems:
        problems = [f"the leaves agree, but their containers do not: {type(tree).__name__} and {type(other).__name__}"]
    core.raise_all(
        ValueError, f"{name} and {like} are different trees. A frozen leaf must be None in all of them:", problems
    )
