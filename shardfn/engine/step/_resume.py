"""Restores the state that a step has left on disk, and continues the state of another step."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import AnyChannels, AnyControl, GlobalTensor
from shardfn.core import (
    PyTree,
    StoredValue,
    load,
    named_leaves,
    raise_all,
    tree_entries,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine.execution import shard_rows, wrap
from shardfn.engine.plan import Plan
from shardfn.engine.resharding import reshard
from shardfn.engine.transfers import cut_parts, pool_of, refresh, reopen
from shardfn.memory import on_host
from shardfn.optim import MasterState
from shardfn.state import TrainState, codes_of, cuts_of, lies_on_disk, start_move, widest, with_codes


def resumed(plan: Plan, channels: AnyChannels, control: AnyControl, like: TrainState) -> TrainState:
    """Returns the last state that all ranks have committed. Collective.

    Args:
        plan: the layout.
        channels: the step's communicators.
        control: agreement between ranks.
        like: the state as shapes.

    Raises:
        ValueError: the commit is of another model, optimizer or mesh. Every leaf is listed.
    """
    values, told = reopen(plan, control)
    problems = _cut_otherwise(plan, like, told)
    opt_state = _fill_part(plan, "opt_state", like.opt_state, values, problems)
    rest = _fill_part(plan, "state", like._replace(params=(), opt_state=()), values, problems)
    casts = _cast_masters(plan, opt_state, values)
    raise_all(ValueError, "the commit on disk is not this step's state:", problems)
    params = tree_leaves(_fill_part(plan, "params", like.params, values | casts, problems, {*casts}))
    raise_all(ValueError, "the commit on disk is not this step's state:", problems)
    blocks = _gather_blocks(plan, channels, [x.held for x in params], casts)
    return rest._replace(params=wrap(plan, blocks), opt_state=opt_state)


def _cut_otherwise(plan: Plan, like: TrainState, told: dict[str, Any]) -> list[str]:
    """Returns the leaves that were written with cuts along other axes.

    Their blocks may have equal shapes all the same.
    """
    if "cut" not in told:
        return []
    here, there = cuts_of(plan.mesh, *cut_parts(like)), told["cut"]
    return [
        f"{path} is cut along {here.get(path, [])} here, but along {there.get(path, [])} on disk"
        for path in sorted({*here, *there})
        if here.get(path, []) != there.get(path, [])
    ]


def _fill_part(
    plan: Plan, name: str, like: PyTree, values: dict[str, Any], problems: list[str], rows: Collection[str] = ()
) -> Any:
    """Returns a part of the state, from its values.

    For leaves in `rows`, this rank's rows do: they are gathered later.
    """
    leaves, treedef = tree_flatten(like)
    return tree_unflatten(
        treedef,
        [
            _read_leaf(plan, path, x, values.get(path), problems, path in rows)
            for path, x in zip(tree_paths(like, name), leaves, strict=True)
        ],
    )


def _read_leaf(plan: Plan, path: str, like: Any, value: Any, problems: list[str], rows: bool) -> Any:
    held = like.held if isinstance(like, GlobalTensor) else like
    own = codes_of(held)
    if value is None:
        problems.append(f"{path} is missing")
        return like
    if (value.shape != own.shape and not rows) or value.dtype != own.dtype:
        here, there = f"{tuple(own.shape)} {own.dtype}", f"{tuple(value.shape)} {value.dtype}"
        problems.append(f"{path} is {here} here, but {there} on disk")
        return like
    if not isinstance(like, GlobalTensor):
        return value
    block = _place_value(plan, value, like)
    return like.with_block(block if own is held else with_codes(held, block, like.memory_kind))


def _place_value(plan: Plan, value: StoredValue, like: GlobalTensor) -> StoredValue:
    if lies_on_disk(like) and not isinstance(value, Tensor):
        return value
    with on_host():
        here = load(value)
    return start_move(here, "host", like.memory_kind, plan.mesh.device, pool_of(plan)).result()


def _cast_masters(plan: Plan, opt_state: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the parameters that the commit does not hold, as casts of their master copies."""
    if not isinstance(opt_state, MasterState):
        return {}
    paths = dict(named_leaves(opt_state.master, "params"))
    missing = [leaf for leaf in plan.leaves if leaf.path not in values and leaf.path in paths]
    with torch.no_grad():
        return {leaf.path: paths[leaf.path].local.to(leaf.dtypes.param) for leaf in missing}


def _gather_blocks(
    plan: Plan, channels: AnyChannels, blocks: list[StoredValue], casts: dict[str, Tensor]
) -> list[StoredValue]:
    """Gathers blocks where this rank has only its rows."""
    if not casts:
        return blocks
    rows: list[Any] = [None] * len(blocks)
    for i, leaf in enumerate(plan.leaves):
        if not (leaf.refreshed and leaf.trainable):
            continue
        if leaf.path in casts:
            rows[i], blocks[i] = blocks[i], torch.empty(leaf.block, dtype=leaf.dtypes.param, device=plan.mesh.device)
        else:
            # All ranks refresh the same units: a block that was committed whole takes part with its rows.
            rows[i] = shard_rows(plan, leaf, load(blocks[i]))
    return refresh(plan, channels, blocks, rows, pool_of(plan))


@torch.no_grad()
def blocks_for(plan: Plan, old: TrainState) -> list[Tensor]:
    """This rank's block of each parameter, as the plan keeps it, in separate memory. Collective."""
    leaves = tree_leaves(widest(old))
    moved = reshard(leaves, [leaf.param for leaf in plan.leaves], mesh=plan.mesh)
    pairs = zip(moved, leaves, plan.leaves, strict=True)
    return [x.local.to(leaf.dtypes.master, copy=x is before) for x, before, leaf in pairs]


@torch.no_grad()
def merged(fresh: PyTree, old: TrainState, params: PyTree) -> PyTree:
    """Returns the new optimizer's first state, with the values of the old one where both train a parameter. Collective.

    Raises:
        ValueError: the optimizers' states of a parameter that both train differ, or their counters. The message lists
            them.
    """
    was = dict(zip(tree_entries(old.opt_state), tree_leaves(old.opt_state), strict=True))
    now = dict(zip(tree_entries(fresh), tree_leaves(fresh), strict=True))
    names = dict(zip(tree_entries(fresh), tree_paths(fresh, "opt_state"), strict=True))
    names |= dict(zip(tree_entries(old.opt_state), tree_paths(old.opt_state, "opt_state"), strict=True))
    groups = _find_owners(old.opt_state, params) | _find_owners(fresh, params)
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
    moved = reshard(
        [was[p] for p in both], [now[p].placement for p in both], mesh=next((x.mesh for x in now.values()), None)
    )
    values = now | dict(zip(both, moved, strict=True))
    return tree_unflatten(tree_flatten(fresh)[1], [values[p] for p in tree_entries(fresh)])


def _find_owners(tree: PyTree, params: PyTree) -> dict[tuple[Any, ...], Any]:
    """Returns the parameter to which a leaf of an optimizer's state belongs, by path.

    None of a counter for all of them.
    """
    paths, labels = tree_entries(params), tree_paths(params)
    out = dict[tuple[Any, ...], Any]()
    for path, x in zip(tree_entries(tree), tree_leaves(tree), strict=True):
        named = [p for p, label in zip(paths, labels, strict=True) if label in path]
        # By position a counter may be at the end of the path of a parameter. It is 0-d.
        ended = [p for p in paths if p and path[len(path) - len(p) :] == p and x.ndim]
        out[path] = next(iter([*named, *ended]), None)
    return out


def check_movable(state: TrainState) -> None:
    """Refuses a state with parts on disk.

    Raises:
        ValueError: lists the leaves.
    """
    pairs = named_leaves(state, "state")
    there = [path for path, x in pairs if lies_on_disk(x)]
    raise_all(
        ValueError,
        "a state on disk is in the directory of its step; save it and restore the checkpoint into step.init(params):",
        there,
    )
