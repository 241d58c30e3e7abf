"""Makes the first state of a step: with values or as shapes, all at once or leaf by leaf.

If leaves are not kept on the device, each is moved to its memory before the next is drawn. A resumed state is one that
is made as shapes and then filled from the disk.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import FakeTensorMode
from shardfn.collectives import GlobalTensor, bind_mesh, transforming
from shardfn.core import (
    P,
    PyTree,
    StoredValue,
    block_slices,
    draw_block,
    is_device,
    raise_all,
    tree_entries,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine.execution import own_rows, rule_of, wrap
from shardfn.engine.plan import Plan, Planner
from shardfn.engine.transfers import pool_of
from shardfn.leaves import LeafLayout
from shardfn.optim import GradientTransformation
from shardfn.state import TrainState, encode, state_owners, store

from ._init_params import made

# Gives this rank's block of a leaf, on the device, in the dtype that the optimizer updates.
Draw = Callable[[int], Tensor]


def first_state(
    plan: Plan, optimizer: GradientTransformation, draw: Draw, key: Tensor | None, loss_scale: PyTree
) -> TrainState:
    """The state before the first step. Leaves that are kept on disk are in memory one at a time.

    The mesh must be bound.

    Args:
        plan: the layout.
        optimizer: the rule; if leaves are not kept on the device, its `init` must treat each leaf independently.
        draw: gives a leaf.
        key: from which each step's key is folded; None = steps have no key.
        loss_scale: the state of the loss scale.

    Raises:
        ValueError: the optimizer's state for a leaf depends on other leaves.
    """
    make = _at_once if all(leaf.ways.at_home for leaf in plan.leaves) else _one_by_one
    with torch.no_grad():
        params, opt_state = make(plan, optimizer, draw)
    return _complete(params, opt_state, key, loss_scale)


def abstract_state(
    plan: Plan, optimizer: GradientTransformation, key: Tensor | None, loss_scale: PyTree = ()
) -> TrainState:
    """The first state as shapes: this rank's blocks, without data."""
    with bind_mesh(plan.mesh), FakeTensorMode(allow_non_fake_inputs=True):  # where nothing takes memory
        params, opt_state = _at_once(plan, optimizer, _without_data(plan))
    return _complete(params, opt_state, key, loss_scale)


def first_params(plan: Plan, draw: Draw) -> PyTree:
    """Parameters alone, each moved to its memory before the next is drawn."""
    pool = pool_of(plan)
    with torch.no_grad():
        return wrap(plan, [store(draw(i).to(x.dtypes.param), x.ways.kept, pool) for i, x in enumerate(plan.leaves)])


def abstract_params(plan: Plan) -> PyTree:
    """Parameters as shapes: this rank's blocks, without data."""
    draw = _without_data(plan)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return wrap(plan, _as_kept(plan, [draw(i) for i in range(len(plan.leaves))]))


def drawn(planner: Planner, params: PyTree, args: tuple[Any, ...]) -> tuple[list[Any], Plan]:
    """The leaves of a first tree of parameters, which need not be drawn yet, and their plan.

    Args:
        planner: the annotations.
        params: a tree of tensors, or a function that makes one, in which draws are deferred.
        args: the arguments of such a function.
    """
    if transforming():
        raise ValueError(
            "init agrees with the other ranks, and cannot be transformed; make the states first, stack them."
        )
    params = made(params, args)
    leaves, treedef = tree_flatten(params)
    return leaves, planner.plan(treedef, leaves)


def own_blocks(plan: Plan, leaves: list[Any]) -> Draw:
    """A function that returns this rank's block of each leaf, once; it drops the leaf then."""
    mesh = plan.mesh

    def draw(i: int) -> Tensor:
        leaf, whole = plan.leaves[i], leaves[i]
        leaves[i] = None
        where = block_slices(tuple(leaf.shape), leaf.param, mesh.shape, mesh.coords)
        return draw_block(whole, where).to(mesh.device).to(leaf.dtypes.master).contiguous()

    return draw


def _without_data(plan: Plan) -> Draw:
    mesh = plan.mesh

    def draw(i: int) -> Tensor:
        leaf = plan.leaves[i]
        where = block_slices(tuple(leaf.shape), leaf.param, mesh.shape, mesh.coords)
        return torch.empty([s.stop - s.start for s in where], dtype=leaf.dtypes.master, device=mesh.device)

    return draw


def _complete(params: PyTree, opt_state: PyTree, key: Tensor | None, loss_scale: PyTree) -> TrainState:
    return TrainState(params, opt_state, torch.zeros((), dtype=torch.int64), () if key is None else key, loss_scale)


def _as_kept(plan: Plan, blocks: Sequence[Tensor]) -> list[StoredValue]:
    """Returns blocks in the form in which parameters are kept, if they have no data or need not move."""
    pairs = zip(plan.leaves, blocks, strict=True)
    return [encode(block.to(leaf.dtypes.param), leaf.ways.kept) for leaf, block in pairs]


def _at_once(plan: Plan, optimizer: GradientTransformation, draw: Draw) -> tuple[PyTree, PyTree]:
    here = [draw(i) for i in range(len(plan.leaves))]
    params = wrap(plan, _as_kept(plan, here))
    rows = [own_rows(plan, leaf, b) if leaf.trainable else None for leaf, b in zip(plan.leaves, here, strict=True)]
    tree = tree_unflatten(plan.treedef, rows)
    # A state may start as the parameters themselves (such as a moving average); it gets memory of its own.
    held = {x.untyped_storage()._cdata for x in tree_leaves(tree)}

    def own(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) and x.untyped_storage()._cdata in held else x

    opt_state = tree_map(own, rule_of(plan, optimizer).init(tree))
    return params, _wrapped(plan, opt_state, tree_leaves(opt_state), state_owners(opt_state, tree))


def _one_by_one(plan: Plan, optimizer: GradientTransformation, draw: Draw) -> tuple[PyTree, PyTree]:
    first, pool = _OneByOne(plan, optimizer), pool_of(plan)
    blocks: list[StoredValue] = []
    for i, leaf in enumerate(plan.leaves):
        block = draw(i)
        if leaf.trainable:
            first.add(i, own_rows(plan, leaf, block))
        blocks.append(store(block.to(leaf.dtypes.param), leaf.ways.kept, pool))
    return wrap(plan, blocks), first.state()


class _OneByOne:
    """An optimizer's first state, joined from the states of single leaves: `add` each once, then `state`.

    The structure of the state is known from the start, from the rule's `init` of all leaves without data.
    """

    def __init__(self, plan: Plan, optimizer: GradientTransformation) -> None:
        self._plan, self._optimizer, self._pool = plan, rule_of(plan, optimizer), pool_of(plan)
        self._train = [i for i, leaf in enumerate(plan.leaves) if leaf.trainable]
        with FakeTensorMode(allow_non_fake_inputs=True):
            rows = [_no_rows(plan, i) if leaf.trainable else None for i, leaf in enumerate(plan.leaves)]
            self._like = self._optimizer.init(tree_unflatten(plan.treedef, rows))
        self._owners = state_owners(self._like, tree_unflatten(plan.treedef, rows), self._optimizer)
        self._entries = tree_entries(self._like)
        none = tree_unflatten(plan.treedef, [None] * len(plan.leaves))
        self._found: dict[Any, StoredValue] = self._named(self._optimizer.init(none))

    def add(self, leaf: int, rows: Tensor) -> None:
        """Makes the state of one leaf, and moves it to its memory."""
        only: list[Tensor | None] = [None] * len(self._plan.leaves)
        only[leaf] = rows
        found = self._named(self._optimizer.init(tree_unflatten(self._plan.treedef, only)))
        at = self._plan.leaves[leaf].ways.state
        storage = rows.untyped_storage()._cdata
        for entry, owner in zip(self._entries, self._owners, strict=True):
            if entry not in found:
                continue
            if owner is None:
                # A counter of all leaves is there already; another is of this leaf, as factored moments, and whole.
                self._found.setdefault(entry, found[entry])
            elif self._train[owner] == leaf:
                # A state may start as the parameters themselves; it gets memory of its own.
                x = found[entry]
                own = x.clone() if is_device(at.memory_kind) and x.untyped_storage()._cdata == storage else x
                self._found[entry] = store(own, at, self._pool)

    def state(self) -> PyTree:
        """The whole state.

        Raises:
            ValueError: leaves of it appear only where the rule sees several parameters.
        """
        paths = tree_paths(self._like, "opt_state")
        lost = [path for path, entry in zip(paths, self._entries, strict=True) if entry not in self._found]
        raise_all(
            ValueError, "an optimizer whose state is kept on host or disk is initialised leaf by leaf; missing:", lost
        )
        return _wrapped(self._plan, self._like, [self._found[e] for e in self._entries], self._owners)

    def _named(self, tree: PyTree) -> dict[Any, Any]:
        return dict(zip(tree_entries(tree), tree_leaves(tree), strict=True))


def _wrapped(plan: Plan, like: PyTree, leaves: Sequence[Any], owners: Sequence[int | None]) -> PyTree:
    """An optimizer state with these leaves; `owners` has the trainable leaf that each belongs to, or None."""
    train = [leaf for leaf in plan.leaves if leaf.trainable]
    of = [None if k is None else train[k] for k in owners]
    return tree_unflatten(tree_flatten(like)[1], [_global(plan, x, leaf) for x, leaf in zip(leaves, of, strict=True)])


def _global(plan: Plan, x: Any, leaf: LeafLayout | None) -> GlobalTensor:
    if isinstance(x, GlobalTensor):
        return x
    if leaf is None:
        return GlobalTensor(x, torch.Size(x.shape), P(), plan.mesh)
    return GlobalTensor(x, leaf.shape, leaf.shard, plan.mesh, leaf.ways.state.memory_kind)


def _no_rows(plan: Plan, i: int) -> Tensor:
    """The rows of a leaf that the optimizer gets, without data."""
    leaf = plan.leaves[i]
    shape: Sequence[int] = leaf.block if leaf.dim is None else leaf.pieces.shapes[plan.zero_rank(leaf)]
    return torch.empty(shape, dtype=leaf.dtypes.master, device=plan.mesh.device)
