"""Values for each leaf, such as masks: a prefix tree, or a function of the whole tree that is called once.

Masks and labels are functions of structure, and of the shapes and dtypes of whole leaves. Such a function never gets a
block of a leaf or a value, because blocks differ between ranks, and values between steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn import core
from shardfn._torch import DisableTorchFunctionSubclass, make_wrapper_subclass
from shardfn.collectives import current_mesh

from ._base import Specs
from ._leaves import spec_leaves


def resolve_per_leaf(prefix: Any, kind: type | tuple[type, ...], name: str) -> Callable[..., tuple[Any, ...]]:
    """Returns a function from a flattened tree to the value that `prefix` has for each leaf.

    `f(tree, leaves, treedef, specs)`.

    `prefix` is a prefix tree, or a function from the tree to a prefix tree. The last result is kept: a prefix is a
    function of structure, shapes and dtypes, not of values.

    Raises (`f` does):
        ValueError: the prefix does not fit; or it is a function that has not been decided on whole leaves, and by
            `specs` those of the tree are blocks.
    """
    if isinstance(prefix, Resolved):
        return lambda tree, leaves, treedef, specs=None: prefix.of(tree)
    memo: dict[Any, tuple[Any, ...]] = {}

    def resolve_leaves(tree: core.PyTree, leaves: list[Any], treedef: Any, specs: Specs = None) -> tuple[Any, ...]:
        key: Any = treedef
        if callable(prefix):
            check_whole(name, tree, specs)
            key = (treedef, tuple((x.shape, x.dtype) for x in leaves))
        if key not in memo:
            full = prefix(_abstract_tree(name, tree)) if callable(prefix) else prefix
            memo.clear()
            memo[key] = tuple(core.broadcast_prefix(full, tree, lambda x: isinstance(x, kind), names=(name, "params")))
        return memo[key]

    return resolve_leaves


@dataclass(frozen=True)
class Resolved:
    """Values of a prefix tree, broadcast to the leaves of a whole tree. Parts have None in place of absent leaves.

    Attributes:
        says: value of each leaf and each None of the whole tree, by path and in order.
    """

    says: dict[str, Any]

    def of(self, part: core.PyTree) -> tuple[Any, ...]:
        """Returns the values of the leaves that are present."""
        slots = core.tree_flatten(part, none_is_leaf=True)[0]
        return tuple(v for v, x in zip(self.says.values(), slots, strict=True) if x is not None)


def resolve_prefix(prefix: Any, params: core.PyTree, kind: type | tuple[type, ...], name: str) -> Any:
    """Returns `prefix` as a `Resolved`. None stays None.

    Args:
        prefix: see `resolve_per_leaf`.
        params: the tree of whole leaves. Only shapes and dtypes are used.
        kind: type of the values.
        name: name of the prefix, for errors.
    """
    if prefix is None:
        return None
    leaves, treedef = core.tree_flatten(params)
    values = iter(resolve_per_leaf(prefix, kind, name)(params, leaves, treedef))
    slots = core.tree_flatten(params, none_is_leaf=True)[0]
    paths = (
        core.tree_paths(params, "params", is_leaf=lambda x: x is None)
        if None in slots
        else core.tree_paths(params, "params")
    )
    pairs = zip(paths, slots, strict=True)
    return Resolved({path: None if x is None else next(values) for path, x in pairs})


class _ShapeTensor(Tensor):
    """Leaf as given to functions of the tree: a tensor with only a shape and a dtype."""

    _of: str
    _path: str

    @staticmethod
    def __new__(cls, x: Any, of: str, path: str) -> "_ShapeTensor":
        self = make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=torch.device("meta"))
        self._of, self._path = of, path
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name
        if name in _SEEN:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        x = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        with DisableTorchFunctionSubclass():
            like = f"{tuple(x.shape)} {x.dtype}"
        raise ValueError(
            f"the function that was passed as {x._of} looks at {name!r} of {x._path}, a leaf of {like}. It is asked"
            " once, about structure, shapes and dtypes of whole leaves. Decide by anything else beforehand, and pass"
            " the tree that the function would return."
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The leaf has no memory: any value would be wrong.
        raise AssertionError(f"{func} got past __torch_function__")


_SEEN = {
    "shape", "dtype", "ndim", "itemsize", "nbytes", "numel", "nelement", "size", "dim", "ndimension", "element_size",
    "is_floating_point", "is_complex", "is_signed", "__len__",
}  # fmt: skip


def _abstract_tree(name: str, tree: core.PyTree) -> core.PyTree:
    """Returns the tree as given to functions of the tree."""
    leaves, treedef = core.tree_flatten(tree)
    pairs = zip(leaves, core.tree_paths(tree, "params"), strict=True)
    return core.tree_unflatten(treedef, [_ShapeTensor(x, name, path) for x, path in pairs])


def check_whole(name: str, tree: core.PyTree, specs: Specs) -> None:
    """Refuses blocks where whole leaves are needed.

    Raises:
        ValueError: `specs` cut leaves. The message lists these leaves.
    """
    if specs is None:
        return
    mesh = current_mesh()
    rows = zip(core.tree_paths(tree, "params"), spec_leaves(specs, tree), strict=True)
    cut = [f"{path} is cut as {spec!r}" for path, spec in rows if mesh.axis_size(mesh.axes(spec.axes)) > 1]
    core.raise_all(
        ValueError,
        f"{name} is a function of whole leaves, but would be shown this rank's blocks: decide it first, by"
        " optim.resolve_masks(tx, whole) on a tree of whole leaves. A rule f(inner) of your own has"
        " needs=optim.join_needs([inner], f), by which a step does so:",
        cut,
    )
