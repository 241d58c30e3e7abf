"""`step.adopt`: the state of another step, continued by this one."""

from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import (
    PyTree,
    is_disk,
    named_leaves,
    raise_all,
    tree_entries,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine.plan import Plan
from shardfn.engine.resharding import reshard
from shardfn.state import TrainState, widest


@torch.no_grad()
def blocks_for(plan: Plan, old: TrainState) -> list[Tensor]:
    """This rank's block of each parameter, as the plan keeps it and in memory of its own. Collective."""
    leaves = tree_leaves(widest(old))
    moved = reshard(leaves, [leaf.param for leaf in plan.leaves], mesh=plan.mesh)
    pairs = zip(moved, leaves, plan.leaves, strict=True)
    return [x.local.to(leaf.dtypes.master, copy=x is before) for x, before, leaf in pairs]


@torch.no_grad()
def merged(fresh: PyTree, old: TrainState, params: PyTree) -> PyTree:
    """The new optimizer's first state, with the values of the old one where both train a parameter. Collective.

    Raises:
        ValueError: the optimizers' states of a parameter that both train differ, or their counters; lists them.
    """
    was = dict(zip(tree_entries(old.opt_state), tree_leaves(old.opt_state), strict=True))
    now = dict(zip(tree_entries(fresh), tree_leaves(fresh), strict=True))
    names = dict(zip(tree_entries(fresh), tree_paths(fresh, "opt_state"), strict=True))
    names |= dict(zip(tree_entries(old.opt_state), tree_paths(old.opt_state, "opt_state"), strict=True))
    groups = _owners(old.opt_state, params) | _owners(fresh, params)
    trained, trains = ({groups[path] for path in side} - {None} for side in (was, now))
    problems = [f"{names[p]} is new" for p in now if p not in was and groups[p] in {None, *trained}]
    problems += [f"{names[p]} is not kept any more" for p in was if p not in now and groups[p] in {None, *trains}]
    both = [p for p in now if p in was]
    problems += [
        f"{names[p]} has shape {tuple(now[p].shape)}, and had {tuple(was[p].shape)}"
        for p in both
        if now[p].shape != was[p].shape
    ]
    raise_all(
        ValueError,
        "this step's optimizer is not that of the state; begin with a new state of it, adopt(state, opt_state='new'):",
        sorted(problems),
    )
    moved = reshard([was[p] for p in both], [now[p].placement for p in both], mesh=_mesh(now))
    values = now | dict(zip(both, moved, strict=True))
    return tree_unflatten(tree_flatten(fresh)[1], [values[p] for p in tree_entries(fresh)])


def _mesh(leaves: dict[Any, GlobalTensor]) -> Any:
    return next((x.mesh for x in leaves.values()), None)


def _owners(tree: PyTree, params: PyTree) -> dict[tuple[Any, ...], Any]:
    """By path, the parameter to which a leaf of an optimizer's state belongs; None of a counter for all of them."""
    paths, labels = tree_entries(params), tree_paths(params)
    out = dict[tuple[Any, ...], Any]()
    for path, x in zip(tree_entries(tree), tree_leaves(tree), strict=True):
        named = [p for p, label in zip(paths, labels, strict=True) if label in path]
        # By position a counter may be at the end of the path of a parameter; it is 0-d.
        ended = [p for p in paths if p and path[len(path) - len(p) :] == p and x.ndim]
        out[path] = next(iter([*named, *ended]), None)
    return out


def check_movable(state: TrainState) -> None:
    """Refuses a state with parts on disk.

    Raises:
        ValueError: lists the leaves.
    """
    pairs = named_leaves(state, "state")
    there = [path for path, x in pairs if isinstance(x, GlobalTensor) and is_disk(x.memory_kind)]
    raise_all(
        ValueError,
        "a state on disk is in the directory of its step; save it and restore the checkpoint into step.init(params):",
        there,
    )
