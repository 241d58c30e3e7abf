"""The states that a training step begins with: made of parameters, read back from its disk, or shapes alone."""

import dataclasses
from typing import Any

from torch import Tensor

from shardfn.collectives import GlobalTensor, bind_mesh
from shardfn.core import PyTree, tree_leaves, tree_map, tree_paths
from shardfn.engine.agreement import (
    Agreement,
    check_replicas,
    comms_of,
    losing_no_peer,
)
from shardfn.engine.loss import check_alike, is_abstract, told_before
from shardfn.engine.pipeline import first_kept
from shardfn.engine.plan import (
    Plan,
    Planner,
    check_phases,
    check_trains,
    warn_of_narrow_updates,
)
from shardfn.engine.transfers import StepParts, begin, together
from shardfn.state import TrainState

from ._adopt import blocks_for, check_movable, merged
from ._check_learning_rate import check_leaves_descend
from ._first import abstract_state, first_state, own_blocks
from ._resume import resumed


@dataclasses.dataclass(frozen=True)
class StepStates:
    """Makes the states of one step. `first` and `resume` are collective.

    Attributes:
        parts: of the step.
        planner: of the step.
        agreement: of the step.
        key: that states hold; None: none.
        specs: of the model state.
    """

    parts: StepParts
    planner: Planner
    agreement: Agreement
    key: Tensor | None
    specs: PyTree

    def first(self, plan: Plan, leaves: list[Any], model_state: PyTree) -> TrainState:
        """The first state, from parameters; see `ShardedStep.init`.

        Lets go of each leaf when this rank has its block.
        """
        optimizer, mesh = self.parts.optimizer, self.planner.mesh
        check_trains(plan, self.planner.trainable)
        check_phases(plan, optimizer)
        check_leaves_descend(plan, optimizer)
        kept = first_kept(plan, self.parts, model_state, self.specs)
        if mesh.abstract or is_abstract(leaves):
            state = self.abstract(plan)._replace(model_state=kept)
            self._warn(plan, state)
            return state
        comms = comms_of(mesh)
        self.agreement.agree(comms, "init", plan)
        check_replicas([leaf.path for leaf in plan.leaves], leaves, comms.control)
        if self.parts.has_state:
            check_alike(model_state, comms.control)
            check_replicas(tree_paths(model_state, "model_state"), tree_leaves(model_state), comms.control)
        with bind_mesh(mesh), losing_no_peer(comms):
            state = first_state(plan, optimizer, own_blocks(plan, leaves), self.key, self._scale())
            state = state._replace(model_state=kept)
            begin(plan, state, comms.control)
            together(plan, comms.control)
        self._warn(plan, state)
        return state

    def adopted(self, plan: Plan, old: TrainState, *, fresh: bool) -> TrainState:
        """The state from that of another step; see `ShardedStep.adopt`."""
        mesh, comms = self.planner.mesh, comms_of(self.planner.mesh)
        with told_before(comms.control):
            check_movable(old)
            check_trains(plan, self.planner.trainable)
            check_phases(plan, self.parts.optimizer)
            check_leaves_descend(plan, self.parts.optimizer)
        self.agreement.agree(comms, "adopt", plan)
        blocks = blocks_for(plan, old)
        with bind_mesh(mesh), losing_no_peer(comms):
            state = first_state(plan, self.parts.optimizer, blocks.__getitem__, self.key, self._scale())
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
        """The state after the last step that all ranks finished, from their files; see `ShardedStep.resume`."""
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
        """The first one as shapes, but for the model state."""
        return abstract_state(plan, self.parts.optimizer, self.key, self._scale())

    def _warn(self, plan: Plan, state: TrainState) -> None:
        warn_of_narrow_updates(plan, state.opt_state, has_policy=self.planner.policy is not None)

    def _scale(self) -> PyTree:
        return () if self.parts.loss_scale is None else self.parts.loss_scale.init()
