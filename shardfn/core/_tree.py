"""Pytrees: the package's only import of optree, and the paths that errors print.

A missing subtree is `None` and has no leaves, as in JAX. Paths read as Python: `params['blocks'][0]['wq']`.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import optree

from ._texts import did_you_mean, raise_all

# jaxtyping has a PyTree too, but requires JAX.
PyTree = Any

# optree's signatures are generic in optree's PyTree type. Signatures here use Any.
_optree: Any = optree
IsLeaf = Callable[[Any], bool] | None
# A named tuple, such as a TrainState: mapping keeps the fields.
N = TypeVar("N", bound=tuple[Any, ...])


@overload
def tree_map(f: Callable[..., Any], tree: N, *rest: PyTree, is_leaf: IsLeaf = ..., none_is_leaf: bool = ...) -> N: ...
@overload
def tree_map(
    f: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: IsLeaf = ..., none_is_leaf: bool = ...
) -> Any: ...
def tree_map(
    f: Callable[..., Any], tree: Any, *rest: PyTree, is_leaf: IsLeaf = None, none_is_leaf: bool = False
) -> Any:
    """Returns the tree of `f(leaf, *leaves of rest)`: for example of a `TrainState` a `TrainState`.

    Args:
        f: function of a leaf of each tree.
        tree: dicts, lists, tuples and named tuples of leaves. None is a subtree without leaves.
        *rest: trees with the structure of `tree`, perhaps with subtrees at leaves of `tree`.
        is_leaf: predicate of nodes that are treated as leaves.
        none_is_leaf: whether None is a leaf.

    Raises:
        ValueError: the trees have different structures.

    Example:
        >>> tree_map(lambda x, y: x + y, {"a": 1, "b": [2]}, {"a": 10, "b": [20]})
        {'a': 11, 'b': [22]}
    """
    return _optree.tree_map(f, tree, *rest, is_leaf=is_leaf, none_is_leaf=none_is_leaf)


def tree_flatten(tree: PyTree, is_leaf: IsLeaf = None, *, none_is_leaf: bool = False) -> tuple[list[Any], Any]:
    """Returns the leaves of a tree and the structure, for `tree_unflatten`.

    Example:
        >>> leaves, structure = tree_flatten({"b": 2, "a": [1]})
        >>> leaves, tree_unflatten(structure, [10, 20])
        ([1, 2], {'b': 20, 'a': [10]})
    """
    return _optree.tree_flatten(tree, is_leaf, none_is_leaf=none_is_leaf)


def tree_unflatten(structure: Any, leaves: Iterable[Any]) -> Any:
    """Returns the tree of a structure with these leaves.

    Raises:
        ValueError: there are more leaves, or fewer.

    Example:
        >>> tree_unflatten(tree_structure([0, (0, 0)]), "abc")
        ['a', ('b', 'c')]
    """
    return _optree.tree_unflatten(structure, leaves)


def tree_leaves(tree: PyTree, is_leaf: IsLeaf = None, *, none_is_leaf: bool = False) -> list[Any]:
    """Returns the leaves of a tree, in the order of sorted keys.

    Example:
        >>> tree_leaves({"b": 2, "a": [1, None]})
        [1, 2]
    """
    return _optree.tree_leaves(tree, is_leaf, none_is_leaf=none_is_leaf)


def tree_structure(tree: PyTree, is_leaf: IsLeaf = None, *, none_is_leaf: bool = False) -> Any:
    """Returns the structure of a tree without leaves, equal for trees of the same shape.

    Example:
        >>> tree_structure({"a": 1}) == tree_structure({"a": "x"})
        True
    """
    return _optree.tree_structure(tree, is_leaf, none_is_leaf=none_is_leaf)


def register_pytree_node(
    cls: type, flatten: Callable[[Any], tuple[Any, Any, Any]], unflatten: Callable[[Any, Any], Any]
) -> None:
    """Makes a class an inner node of pytrees everywhere.

    Args:
        cls: the class itself, no subclass of it.
        flatten: (children, the rest of the object, the children's names).
        unflatten: `unflatten(rest, children)`. Children may be anything.
    """
    # optree has no public name for "in every namespace".
    _optree.register_pytree_node(cls, flatten, unflatten, namespace=_optree.registry.__GLOBAL_NAMESPACE)


def tree_paths(tree: PyTree, root: str = "", is_leaf: IsLeaf = None) -> list[str]:
    """Returns the path of each leaf, in flattening order, as Python from `root`, such as `params['w'][0]`.

    Example:
        >>> tree_paths({"w": [1, 2]}, "params")
        ["params['w'][0]", "params['w'][1]"]
    """
    return [a.codify(root) for a in optree.tree_accessors(tree, is_leaf=is_leaf)]


def named_leaves(tree: PyTree, root: str = "", is_leaf: IsLeaf = None) -> list[tuple[str, Any]]:
    """Returns each leaf with its path, in flattening order.

    Example:
        >>> named_leaves({"w": 1, "b": 2}, "params")
        [("params['b']", 2), ("params['w']", 1)]
    """
    return list(zip(tree_paths(tree, root, is_leaf), tree_leaves(tree, is_leaf), strict=True))


def tree_path_parts(tree: PyTree) -> list[tuple[str, ...]]:
    """Returns the path of each leaf, entry by entry, as Python. Joined parts are the result of `tree_paths`.

    Example:
        >>> tree_path_parts({"w": [1, 2]})
        [("['w']", '[0]'), ("['w']", '[1]')]
    """
    return [tuple(entry.codify("") for entry in a) for a in optree.tree_accessors(tree)]


def tree_entries(tree: PyTree) -> list[tuple[Any, ...]]:
    """Returns the keys, indices and field positions that lead to each leaf."""
    return list(optree.tree_paths(tree))


def broadcast_prefix(
    prefix: PyTree, tree: PyTree, is_leaf: Callable[[Any], bool], *, names: tuple[str, str]
) -> list[Any]:
    """Returns the leaf of `prefix` for each leaf of `tree`. A leaf of `prefix` covers the whole subtree below.

    Args:
        prefix: a tree with leaves (by `is_leaf`) at or above the leaves of `tree`.
        tree: the full tree.
        is_leaf: whether a node of `prefix` is a leaf.
        names: the names of `prefix` and `tree` in messages.

    Returns:
        One leaf of `prefix` for each leaf of `tree`, in flattening order.

    Raises:
        ValueError: lists every path that only one of the two trees has, with near misses.

    Example:
        >>> broadcast_prefix({"a": 1, "b": 2}, {"a": [10, 20], "b": 30}, lambda x: isinstance(x, int), names=("s", "t"))
        [1, 1, 2]
    """
    out: list[Any] = []
    problems: list[str] = []

    def walk_prefix(pre: Any, sub: Any, path_pre: str, path_sub: str) -> None:
        if is_leaf(pre):
            out.extend([pre] * len(tree_leaves(sub)))
            return
        if pre is None and sub is None:
            return
        if pre is None:
            problems.append(f"{path_pre} is None, but {path_sub} has leaves. Instead of `None`, did you mean `P()`?")
            return
        if _is_leaf(pre):
            problems.append(
                f"{path_pre} is {_show_leaf(pre)}, which is not a leaf of {names[0]}.{_example_remedy(names)}"
            )
            return
        if _is_leaf(sub):
            problems.append(f"{path_pre} is a {type(pre).__name__}, but {path_sub} is a leaf.")
            return
        pre_kids, sub_kids = _children_of(pre), _children_of(sub)
        missing = [k for k in sub_kids if k not in pre_kids and tree_leaves(sub_kids[k])]
        extra = [k for k in pre_kids if k not in sub_kids]
        # First the wrong names, each with the nearest missing name.
        for k in extra:
            hint = did_you_mean(str(k), [str(m) for m in missing])
            problems.append(f"{_join_path(path_pre, pre, k)} has no leaf in {names[1]}.{hint}")
        problems.extend(f"{_join_path(path_sub, sub, k)} has no entry in {names[0]}." for k in missing)
        for k in sub_kids:
            if k in pre_kids:
                walk_prefix(pre_kids[k], sub_kids[k], _join_path(path_pre, pre, k), _join_path(path_sub, sub, k))

    walk_prefix(prefix, tree, names[0], names[1])
    raise_all(ValueError, f"{names[0]} does not match {names[1]}:", problems)
    return out


def _show_leaf(x: Any) -> str:
    """Returns a leaf that should not be there as text: the value if short, and the type."""
    text = repr(x)
    return f"{text}, a {type(x).__name__}" if len(text) <= 40 else f"a {type(x).__name__}"


def _example_remedy(names: tuple[str, str]) -> str:
    """Returns the remedy where a prefix of bools is expected."""
    prefix, tree = names
    if prefix not in ("trainable", "mask", "exact"):
        return ""
    return f" Write True or False, or one for each leaf: {{name: 'norm' in name for name in {tree}}}."


def _is_leaf(x: Any) -> bool:
    return optree.tree_is_leaf(x)


def _children_of(node: Any) -> dict[Any, Any]:
    level = optree.tree_flatten_one_level(node)
    return dict(zip(level[2], level[0], strict=True))


def _join_path(path: str, node: Any, key: Any) -> str:
    fields = getattr(node, "_fields", None)
    return f"{path}.{fields[key]}" if fields and isinstance(key, int) else f"{path}[{key!r}]"
