"""Removal of groups at 0: the same function with smaller leaves.

Law: a model without its groups at 0 has the outputs of the model with the zeros. It holds where each reader of a unit
belongs to the unit's group, and a unit with zero weights puts out 0.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn import collectives, core

from ._groups import WeightGroups, leaf_names
from ._lasso import group_norms

# Numbers of the groups that are kept, by family.
Alive = Mapping[str, Int64[Tensor, " kept"]]


def find_alive(groups: WeightGroups, params: core.PyTree, threshold: float = 0.0) -> dict[str, Int64[Tensor, " kept"]]:
    """Returns the numbers of the groups with a norm above a threshold. Collective, where leaves are `GlobalTensor`s.

    Args:
        groups: groups of the leaves.
        params: tree of whole tensors, or a state's params.
        threshold: largest norm of a group that is removed.

    Raises:
        ValueError: no group of a family is alive, so a whole layer would be removed, or as `group_norms`.

    Example:
        >>> from shardfn.sparse import GroupFamily, LeafIndices
        >>> groups = WeightGroups({"units": GroupFamily(3, (LeafIndices("w", 0),))}, {"w": (3, 1)})
        >>> find_alive(groups, {"w": torch.tensor([[1.0], [0.0], [2.0]])})
        {'units': tensor([0, 2])}
    """
    some = next((x for x in core.tree_flatten(params)[0] if isinstance(x, collectives.GlobalTensor)), None)
    specs = None if some is None else core.tree_map(lambda x: x.spec, params)
    with contextlib.nullcontext() if some is None else collectives.bind_mesh(some.mesh), torch.no_grad():
        norms = group_norms(groups, collectives.local(params), specs)
    alive = {name: (norm > threshold).nonzero()[:, 0].cpu() for name, norm in norms.items()}
    core.raise_all(
        ValueError,
        "a family must keep a group:",
        [
            f"all {len(norms[name])} groups of {name!r} are at {threshold} or below, and a whole layer would be"
            " removed; train with a smaller strength"
            for name, kept in alive.items()
            if not len(kept)
        ],
    )
    return alive


def compact(groups: WeightGroups, tree: core.PyTree, alive: Alive) -> core.PyTree:
    """Returns a tree in which the leaves of the groups have only the indices of groups that are alive.

    The tree is params, an optimizer's state, or a whole state: a leaf counts as the leaf of the groups if its path ends
    with the leaf's path, such as "mu.layers.0.w_x" for "layers.0.w_x". Collective, where leaves are `GlobalTensor`s.

    Args:
        groups: groups of the leaves.
        tree: tree of whole tensors or `GlobalTensor`s.
        alive: numbers of the groups that are kept, by family.

    Returns:
        A tree of the same structure, with the leaves of `tree` where a leaf has no group. `GlobalTensor`s keep mesh and
        spec, on the device. So a state continues in a step of the smaller model.

    Raises:
        ValueError: lists leaves with the path of a leaf of the groups and with another shape, such as factored moments,
            and families without a group.

    Example:
        >>> from shardfn.sparse import GroupFamily, LeafIndices
        >>> groups = WeightGroups({"units": GroupFamily(3, (LeafIndices("w", 0),))}, {"w": (3, 1)})
        >>> compact(groups, {"mu": {"w": torch.tensor([[1.0], [0.0], [2.0]])}}, {"units": torch.tensor([0, 2])})
        {'mu': {'w': tensor([[1.],
                [2.]])}}
    """
    core.raise_all(
        ValueError,
        "compact:",
        [
            f"{name!r} would keep no group; a whole layer cannot be removed"
            for name in groups.families
            if name not in alive or not len(alive[name])
        ],
    )
    paths = sorted(groups.shapes, key=len, reverse=True)
    (leaves, treedef), problems, new = core.tree_flatten(tree), [], []
    for name, x in zip(leaf_names(tree), leaves, strict=True):
        path = next((p for p in paths if name == p or name.endswith(f".{p}")), None)
        if path is None or not groups.list_places(path) or not isinstance(x, Tensor | collectives.GlobalTensor):
            new.append(x)
        elif tuple(x.shape) != tuple(groups.shapes[path]):
            problems.append(f"{name} is {tuple(x.shape)}, and its parameter {tuple(groups.shapes[path])}")
        else:
            new.append(_keep(groups, path, x, alive))
    core.raise_all(ValueError, "compact takes leaves of the shapes of parameters:", problems)
    return core.tree_unflatten(treedef, new)


def _keep(groups: WeightGroups, path: str, x: Any, alive: Alive) -> Any:
    """Returns the kept indices of a leaf."""
    whole = x.full_tensor() if isinstance(x, collectives.GlobalTensor) else x
    for dim, size in enumerate(whole.shape):
        places = [(name, at) for name, _, at in groups.list_places(path) if at.dim == dim]
        if places:
            kept = torch.zeros(size, dtype=torch.bool)
            free = torch.ones(size, dtype=torch.bool)
            for name, at in places:
                free[at.start : at.start + groups.families[name].size] = False
                kept[at.start + alive[name].cpu()] = True
            whole = whole.index_select(dim, (kept | free).nonzero()[:, 0].to(whole.device))
    return collectives.shard(whole, x.spec, x.mesh) if isinstance(x, collectives.GlobalTensor) else whole
