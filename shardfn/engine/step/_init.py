"""Makes the first state of a step: with values or as shapes, all at once or leaf by leaf.

If leaves are not kept on the device, each is moved to its memory before the next is drawn. `StepStates` makes all
states that a step begins with: of parameters, of the state of another step, or read back from its disk. A resumed state
is made as shapes and then filled from the disk.
"""

import dataclasses
import inspect
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
    deferred,
    draw_block,
    named_leaves,
    raise_all,
    tree_entries,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine.agreement import (
    Agreement,
    check_replicas,
    comms_of,
    losing_no_peer,
)
from shardfn.engine.execution import check_leaves_descend, rule_of, shard_rows, wrap
from shardfn.engine.loss import check_alike, check_params, function_name, is_abstract, module_name, told_before
from shardfn.engine.pipeline import first_kept
from shardfn.engine.plan import (
    Plan,
    Planner,
    check_phases,
    check_trains,
    warn_of_narrow_updates,
)
from shardfn.engine.transfers import StepParts, begin, pool_of, together
from shardfn.leaves import LeafLayout
from shardfn.optim import GradientTransformation
from shardfn.state import TrainState, copy_value, encode, state_owners, store

from ._resume import blocks_for, check_movable, merged, resumed

# Gives this rank's block of a leaf, on the device, in the dtype that the optimizer updates.
Draw = Callable[[int], Tensor]


def first_state(
    plan: Plan, optimizer: GradientTransformation, draw: Draw, key: Tensor | None, loss_scale: PyTree
) -> TrainState:
    """Returns the state before the first step. Leaves that are kept on disk are in memory one at a time.

    The mesh must be bound.

    Args:
        plan: the layout.
        optimizer: the rule. If leaves are not kept on the device, its `init` must treat each leaf independently.
        draw: gives a leaf.
        key: key from which each step's key is folded. None: steps have no key.
        loss_scale: the state of the loss scale.

    Raises:
        ValueError: the optimizer's state for a leaf depends on other leaves.
    """
    make = _init_at_once if all(leaf.ways.at_home for leaf in plan.leaves) else _init_one_by_one
    with torch.no_grad():
        params, opt_state = make(plan, optimizer, draw)
    return _make_state(params, opt_state, key, loss_scale)


def abstract_state(
    plan: Plan, optimizer: GradientTransformation, key: Tensor | None, loss_scale: PyTree = ()
) -> TrainState:
    """Returns the first state as shapes: this rank's blocks, without data."""
    with bind_mesh(plan.mesh), FakeTensorMode(allow_non_fake_inputs=True):  # where nothing takes memory
        params, opt_state = _init_at_once(plan, optimizer, _make_abstract(plan))
    return _make_state(params, opt_state, key, loss_scale)


def first_params(plan: Plan, draw: Draw) -> PyTree:
    """Parameters alone, each moved to its memory before the next is drawn."""
    pool = pool_of(plan)
    with torch.no_grad():
        return wrap(plan, [store(draw(i).to(x.dtypes.param), x.ways.kept, pool) for i, x in enumerate(plan.leaves)])


def abstract_params(plan: Plan) -> PyTree:
    """Parameters as shapes: this rank's blocks, without data."""
    draw = _make_abstract(plan)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return wrap(plan, _store_blocks(plan, [draw(i) for i in range(len(plan.leaves))]))


def drawn(planner: Planner, params: PyTree, args: tuple[Any, ...]) -> tuple[list[Any], Plan]:
    """Returns the leaves of a first tree of parameters, which need not be drawn yet, and their plan.

    Args:
        planner: the annotations.
        params: a tree of tensors, or a function that makes one, in which draws are deferred.
        args: the arguments of such a function.
    """
    if transforming():
        raise ValueError(
            "init agrees with the other ranks, and cannot be transformed. Make the states first, stack them."
        )
    params = made(params, args)
    leaves, treedef = tree_flatten(params)
    return leaves, planner.plan(treedef, leaves)


def own_blocks(plan: Plan, leaves: list[Any]) -> Draw:
    """Returns a function that returns this rank's block of each leaf, once; it drops the leaf then."""
    mesh = plan.mesh

    def draw(i: int) -> Tensor:
        leaf, whole = plan.leaves[i], leaves[i]
        leaves[i] = None
        where = block_slices(tuple(leaf.shape), leaf.param, mesh.shape, mesh.coords)
        return draw_block(whole, where).to(mesh.device).to(leaf.dtypes.master).contiguous()

    return draw


def _make_abstract(plan: Plan) -> Draw:
    mesh = plan.mesh

    def draw(i: int) -> Tensor:
        leaf = plan.leaves[i]
        where = block_slices(tuple(leaf.shape), leaf.param, mesh.shape, mesh.coords)
        return torch.empty([s.stop - s.start for s in where], dtype=leaf.dtypes.master, device=mesh.device)

    return draw


def _make_state(params: PyTree, opt_state: PyTree, key: Tensor | None, loss_scale: PyTree) -> TrainState:
    return TrainState(params, opt_state, torch.zeros((), dtype=torch.int64), () if key is None else key, loss_scale)


def _store_blocks(plan: Plan, blocks: Sequence[Tensor]) -> list[StoredValue]:
    """Returns blocks in the form in which parameters are kept, if they have no data or need not move."""
    pairs = zip(plan.leaves, blocks, strict=True)
    return [encode(block.to(leaf.dtypes.param), leaf.ways.kept) for leaf, block in pairs]


def _init_at_once(plan: Plan, optimizer: GradientTransformation, draw: Draw) -> tuple[PyTree, PyTree]:
    here = [draw(i) for i in range(len(plan.leaves))]
    params = wrap(plan, _store_blocks(plan, here))
    rows = [shard_rows(plan, leaf, b) if leaf.trainable else None for leaf, b in zip(plan.leaves, here, strict=True)]
    tree = tree_unflatten(plan.treedef, rows)
    # A state may start as the parameters themselves (such as a moving average). It gets separate memory.
    held = {x.untyped_storage()._cdata for x in tree_leaves(tree)}

    def own(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) and x.untyped_storage()._cdata in held else x

    opt_state = tree_map(own, rule_of(plan, optimizer).init(tree))
    return params, _wrap_state(plan, opt_state, tree_leaves(opt_state), state_owners(opt_state, tree))


def _init_one_by_one(plan: Plan, optimizer: GradientTransformation, draw: Draw) -> tuple[PyTree, PyTree]:
    first, pool = _OneByOne(plan, optimizer), pool_of(plan)
    blocks: list[StoredValue] = []
    for i, leaf in enumerate(plan.leaves):
        block = draw(i)
        if leaf.trainable:
            first.add(i, shard_rows(plan, leaf, block))
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
            rows = [_make_empty_rows(plan, i) if leaf.trainable else None for i, leaf in enumerate(plan.leaves)]
            self._like = self._optimizer.init(tree_unflatten(plan.treedef, rows))
        self._owners = state_owners(self._like, tree_unflatten(plan.treedef, rows), self._optimizer)
        self._entries = tree_entries(self._like)
        none = tree_unflatten(plan.treedef, [None] * len(plan.leaves))
        self._found: dict[Any, StoredValue] = self._name_leaves(self._optimizer.init(none))

    def add(self, leaf: int, rows: Tensor) -> None:
        """Makes the state of a single leaf, and moves it to its memory."""
        only: list[Tensor | None] = [None] * len(self._plan.leaves)
        only[leaf] = rows
        found = self._name_leaves(self._optimizer.init(tree_unflatten(self._plan.treedef, only)))
        at = self._plan.leaves[leaf].ways.state
        storage = rows.untyped_storage()._cdata
        for entry, owner in zip(self._entries, self._owners, strict=True):
            if entry not in found:
                continue
            if owner is None:
                # A counter of all leaves is there already; another is of this leaf, as factored moments, and whole.
                self._found.setdefault(entry, found[entry])
            elif self._train[owner] == leaf:
                # A state may start as the parameters themselves. It gets separate memory.
                x = store(found[entry], at, self._pool)
                shared = isinstance(x, Tensor) and x.untyped_storage()._cdata == storage
                self._found[entry] = copy_value(x, at.memory_kind) if shared else x

    def state(self) -> PyTree:
        """Returns the whole state.

        Raises:
            ValueError: leaves of it appear only where the rule sees several parameters.
        """
        paths = tree_paths(self._like, "opt_state")
        lost = [path for path, entry in zip(paths, self._entries, strict=True) if entry not in self._found]
        raise_all(
            ValueError, "an optimizer whose state is kept on host or disk is initialised leaf by leaf; missing:", lost
        )
        return _wrap_state(self._plan, self._like, [self._found[e] for e in self._entries], self._owners)

    def _name_leaves(self, tree: PyTree) -> dict[Any, Any]:
        return dict(zip(tree_entries(tree), tree_leaves(tree), strict=True))


def _wrap_state(plan: Plan, like: PyTree, leaves: Sequence[Any], owners: Sequence[int | None]) -> PyTree:
    """Returns an optimizer state with these leaves. `owners` has the trainable leaf that each belongs to, or None."""
    train = [leaf for leaf in plan.leaves if leaf.trainable]
    of = [None if k is None else train[k] for k in owners]
    return tree_unflatten(
        tree_flatten(like)[1], [_make_global(plan, x, leaf) for x, leaf in zip(leaves, of, strict=True)]
    )


def _make_global(plan: Plan, x: Any, leaf: LeafLayout | None) -> GlobalTensor:
    if isinstance(x, GlobalTensor):
        return x
    if leaf is None:
        return GlobalTensor(x, torch.Size(x.shape), P(), plan.mesh)
    return GlobalTensor(x, leaf.shape, leaf.shard, plan.mesh, leaf.ways.state.memory_kind)


def _make_empty_rows(plan: Plan, i: int) -> Tensor:
    """Returns the rows of a leaf that the optimizer gets, without data."""
    leaf = plan.leaves[i]
    shape: Sequence[int] = leaf.block if leaf.dim is None else leaf.pieces.shapes[plan.zero_rank(leaf)]
    return torch.empty(shape, dtype=leaf.dtypes.master, device=plan.mesh.device)


def made(params: PyTree, args: tuple[Any, ...]) -> PyTree:
    """Returns the tree itself, or the one that the function makes of `args`, with its draws deferred.

    Raises:
        TypeError: there is no such tree. The message names the value that was passed, and the remedy.
    """
    _refuse_module(params)
    if callable(params):
        _check_arguments(params, args)
        with deferred():
            params = params(*args)
        _refuse_module(params)
    elif args:
        raise TypeError(
            f"init(params, ...) got a tree of parameters and {len(args)} argument{'s' * (len(args) > 1)} more, which"
            " nothing takes. Write step.init(params), and step.init(params, model_state=...) for a step with has_state."
            " Parameters are drawn by a function: step.init(f, sf.key(0)), for f(sf.key(0))."
        )
    check_params(params)
    _refuse_mixture(params)
    return params


def _refuse_module(params: Any) -> None:
    if name := module_name(params):
        raise TypeError(
            f"init takes a tree of tensors, or a function that makes one, and {name} is a module. Take its parameters"
            " out: params, apply = sf.from_module(module). Call apply(params, ...) in the loss, and step.init(params)."
        )


def _refuse_mixture(params: PyTree) -> None:
    """Refuses trees in which some leaves have values and others do not. A tree without values is for `step.lower`."""
    named = named_leaves(params, "params")
    without = [path for path, x in named if x.device.type == "meta"]
    if 0 < len(without) < len(named):
        raise_all(
            ValueError,
            "some parameters are on 'meta', where they have no values, and others are not; load or draw these first"
            " (of a module: module.to_empty(device='cpu'), and then its weights):",
            without,
        )


def _check_arguments(f: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        takes = inspect.signature(f)
    except (TypeError, ValueError):  # builtins may have no signature
        return
    try:
        takes.bind(*args)
    except TypeError as error:
        name = function_name(f)
        raise TypeError(
            f"init({name}, ...) calls {name}{takes} with {len(args)} arguments: {error}. Pass them after it, as in"
            f" step.init({name}, sf.key(0)); or pass the parameters themselves."
        ) from error


@dataclasses.dataclass(frozen=True)
class StepStates:
    """Makes the states of a single step. `first` and `resume` are collective.

    Attributes:
        parts: parts of the step.
        planner: planner of the step.
        agreement: agreement of the step.
        key: key that states hold; None: none.
        specs: specs of the model state.
    """

    parts: StepParts
    planner: Planner
    agreement: Agreement
    key: Tensor | None
    specs: PyTree

    def first(self, plan: Plan, leaves: list[Any], model_state: PyTree) -> TrainState:
        """Returns the first state, from parameters. See `ShardedStep.init`.

        Lets go of each leaf when this rank has its block.
        """
        optimizer, mesh = self.parts.optimizer, self.planner.mesh
        check_trains(plan, self.planner.trainable)
        check_phases(plan, optimizer)
        check_leaves_descend(plan, optimizer)
        kept = first_kept(plan, self.parts, model_state, self.specs)
        if mesh.abstract or is_abstract(leaves):
            state = self.abstract(plan)._replace(model_state=kept)
            self._warn_about_state(plan, state)
            return state
        comms = comms_of(mesh)
        self.agreement.agree(comms, "init", plan)
        check_replicas([leaf.path for leaf in plan.leaves], leaves, comms.control)
        if self.parts.has_state:
            check_alike(model_state, comms.control)
            check_replicas(tree_paths(model_state, "model_state"), tree_leaves(model_state), comms.control)
        with bind_mesh(mesh), losing_no_peer(comms):
            state = first_state(plan, optimizer, own_blocks(plan, leaves), self.key, self._make_scale())
            state = state._replace(model_state=kept)
            begin(plan, state, comms.control)
            together(plan, comms.control)
        self._warn_about_state(plan, state)
        return state

    def adopted(self, plan: Plan, old: TrainState, *, fresh: bool) -> TrainState:
        """Returns the state from the state of another step. See `ShardedStep.adopt`."""
        mesh, comms = self.planner.mesh, comms_of(self.planner.mesh)
        with told_before(comms.control):
            check_movable(old)
            check_trains(plan, self.planner.trainable)
            check_phases(plan, self.parts.optimizer)
            check_leaves_descend(plan, self.parts.optimizer)
        self.agreement.agree(comms, "adopt", plan)
        blocks = blocks_for(plan, old)
        with bind_mesh(mesh), losing_no_peer(comms):
            state = first_state(plan, self.parts.optimizer, blocks.__getitem__, self.key, self._make_scale())
        if not fresh:
            with told_before(comms.control):
                opt_state = merged(state.opt_state, old, state.params)
            state = state._replace(opt_state=opt_state)
        state = state._replace(step=old.step.clone(), model_state=old.model_state)
        state = state._replace(key=old.key if isinstance(old.key, Tensor) and self.key is not None else state.key)
        state = state._replace(loss_scale=old.loss_scale if state.loss_scale and old.loss_scale else state.loss_scale)
        # Leaves that stay where they are have new names: the old ones are consumed.
        kept = {id(x): x.with_block(x.held) for x in tree_leaves(state) if isinstance(x, GlobalTensor)}
        state = tree_map(lambda x: kept.get(id(x), x), state)
        for x in tree_leaves(old):
            if isinstance(x, GlobalTensor):
                x.donate()
        with bind_mesh(mesh), losing_no_peer(comms):
            begin(plan, state, comms.control)
            together(plan, comms.control)
        return state

    def resume(self, plan: Plan, model_state: PyTree) -> TrainState:
        """Returns the state after the last step that all ranks finished, from their files. See `ShardedStep.resume`."""
        comms = comms_of(self.planner.mesh)
        with told_before(comms.control):
            kept = first_kept(plan, self.parts, model_state, self.specs)
        self.agreement.agree(comms, "resume", plan)
        if self.parts.has_state:
            check_alike(model_state, comms.control)
        like = self.abstract(plan)._replace(model_state=kept)
        with losing_no_peer(comms):
            state = resumed(plan, comms.channels, comms.control, like)
            together(plan, comms.control)
        return state

    def abstract(self, plan: Plan) -> TrainState:
        """Returns the first one as shapes, but for the model state."""
        return abstract_state(plan, self.parts.optimizer, self.key, self._make_scale())

    def _warn_about_state(self, plan: Plan, state: TrainState) -> None:
        warn_of_narrow_updates(plan, state.opt_state, has_policy=self.planner.policy is not None)

    def _make_scale(self) -> PyTree:
        return () if self.parts.loss_scale is None else self.parts.loss_scale.init()
