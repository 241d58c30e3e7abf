"""A training step, over one loss or several: both halves at once, and the two halves, `gradients` and `update`."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardfn.collectives import Agreed, bind_mesh
from shardfn.core import PyTree
from shardfn.engine.agreement import (
    Comms,
    comms_of,
    compare_first_batch,
    compare_first_end,
    compare_first_step,
    losing_no_peer,
    losing_no_peer_purely,
)
from shardfn.engine.execution import (
    StepCall,
    StepPrograms,
    UpdateArgs,
    pure_gradients,
    pure_step,
    pure_update,
    signature,
)
from shardfn.engine.loss import agree_on_step, naming_unequal, shapes_of, told_before
from shardfn.engine.plan import Plan, in_phase
from shardfn.engine.transfers import (
    Found,
    advanced,
    commit,
    forget,
    together,
)
from shardfn.state import TrainState

from ._admit import Admission, agree, named_call, refuse_own_averages
from ._several import (
    LossCall,
    StepLoss,
    agree_on_all,
    batches_of,
    combined,
)

CallOf = Callable[[Plan, TrainState, tuple[Any, ...]], StepCall[tuple[TrainState, dict[str, Tensor]]]]


@dataclasses.dataclass(frozen=True)
class Halves:
    """One step, its gradients and its update. All but the pure ones are collective.

    Attributes:
        admission: of the step.
        sources: by name, its losses; one loss has the name "".
    """

    admission: Admission
    sources: Mapping[str, StepLoss]

    @property
    def are_several(self) -> bool:
        """Whether the step has several losses, with a batch each."""
        return tuple(self.sources) != ("",)

    def fused(
        self, call_of: CallOf, only: Any, state: TrainState, batch: PyTree
    ) -> tuple[TrainState, dict[str, Tensor]]:
        """A step over one loss, by the call that `call_of` makes; with `only`, for that signature alone."""
        comms, admission = comms_of(self.admission.planner.mesh), self.admission
        with told_before(comms.control):
            plan = admission.state(state, batch)
            rows = admission.rows(plan, state, batch)
            constant = admission.constant(plan, state)
            if only is not None and (signature(plan, rows.args), shapes_of(state.model_state)) != only:
                raise ValueError(
                    "a compiled step takes the shapes it was lowered for; lower the step again for these, or jit the"
                    " loss."
                )
            call = call_of(plan, state, rows.args)
        agreed = agree(comms.control, named_call("step", plan, state), plan, rows, constant, call.known)
        with _running(comms, batch, admission.planner.batch, agreed):
            compare_first_batch(plan, batch, comms.control)
            new, metrics = call.run(comms, agreed, state)
        new = self._ended(comms, plan, new, state, metrics)
        with losing_no_peer(comms):
            compare_first_step(plan, new.model_state, metrics, comms.control)
        return new, metrics

    def gradients(self, state: TrainState, batch: PyTree) -> Found:
        """The first half, as `ShardedStep.gradients`."""
        comms = comms_of(self.admission.planner.mesh)
        plan, found = self._found(comms, state, batch, "the gradients of step", call="step.gradients(state, batch)")
        with losing_no_peer(comms):
            together(plan, comms.control)
        return found

    def update(self, state: TrainState, passed: UpdateArgs) -> tuple[TrainState, dict[str, Tensor]]:
        """The other half, as `ShardedStep.update`."""
        comms, admission = comms_of(self.admission.planner.mesh), self.admission
        with told_before(comms.control):
            plan = admission.state(state, passed.grads, call="step.update(state, grads)")
            refuse_own_averages(plan)
            admission.passed(plan, state, passed)
            passed = passed._replace(finite=bool(passed.finite))
            constant = admission.constant(plan, state)
            call = self.calls.update(plan, state, passed)
        # All ranks skip an update, or none does.
        text = f"finite: {passed.finite}", ()
        what = named_call("the update of step", plan, state)
        agreed = agree_on_step(comms.control, what, text, constant, call.known)
        forget(plan)
        with bind_mesh(plan.mesh), losing_no_peer(comms):
            new, metrics = call.run(comms, agreed, state)
            self._compare_end(comms, plan, new, passed, metrics)
        return self._ended(comms, plan, new, state, metrics), metrics

    def both(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        """A step over several losses: the one half and then the other, with one agreement."""
        comms = comms_of(self.admission.planner.mesh)
        plan, found = self._found(comms, state, batch, "step", call="step(state, batch)")
        kept = found.model_state if self.admission.parts.has_state else None
        with bind_mesh(plan.mesh), losing_no_peer(comms):
            passed = UpdateArgs(found.grads, kept, found.metrics["finite"])
            call = self.calls.update(plan, state, passed)
            # A graph for gradients that lie otherwise is captured by all ranks.
            ready = all(comms.control.exchange(int(call.known[0])))
            new, updated = call.run(comms, Agreed(known=(ready, ready)), state)
            self._compare_end(comms, plan, new, passed, updated)
        return self._ended(comms, plan, new, state, updated), found.metrics | {"skipped": updated["skipped"]}

    def pure_step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        """The step inside a transform of torch.func."""
        admission = self._pure_admission()
        plan, args = admission.pure(state), admission.args(state, batch)
        admission.agreement.agree_once(plan, "a step in a transform")
        with bind_mesh(plan.mesh), losing_no_peer_purely(plan.mesh, "a step in a transform"):
            return pure_step(plan, state, admission.parts, args)

    def pure_gradients(self, state: TrainState, batch: PyTree) -> Found:
        """The first half inside a transform of torch.func."""
        admission = self._pure_admission()
        plan, args = admission.pure(state), admission.args(state, batch)
        admission.agreement.agree_once(plan, "the gradients of a step in a transform")
        with bind_mesh(plan.mesh), losing_no_peer_purely(plan.mesh, "the gradients of a step in a transform"):
            return pure_gradients(plan, state, admission.parts, args)

    def pure_update(self, state: TrainState, passed: UpdateArgs) -> tuple[TrainState, dict[str, Tensor]]:
        """The other half inside a transform of torch.func."""
        admission = self._pure_admission()
        plan = admission.pure(state)
        admission.passed(plan, state, passed)
        admission.agreement.agree_once(plan, "the update of a step in a transform")
        with bind_mesh(plan.mesh), losing_no_peer_purely(plan.mesh, "the update of a step in a transform"):
            return pure_update(plan, state, admission.parts, passed)

    @property
    def calls(self) -> StepPrograms:
        """Those of the first loss, which update for all."""
        return next(iter(self.sources.values())).calls

    def _pure_admission(self) -> Admission:
        if self.are_several:
            raise ValueError(
                "a step over several losses runs in no transform of torch.func; add up the losses in one, or take"
                " torch.func.grad of step.loss of a step for each."
            )
        return self.admission

    def _found(self, comms: Comms, state: TrainState, batch: PyTree, name: str, *, call: str) -> tuple[Plan, Found]:
        """Admits a call, agrees on it, and differentiates; `name` is for the agreement, `call` for errors."""
        admission = self.admission
        with told_before(comms.control):
            plan = admission.state(state, batch, call=call)
            refuse_own_averages(plan)
            loss_calls = self._loss_calls(plan, state, batch)
            constant = admission.constant(plan, state)
        agreed = agree_on_all(comms.control, named_call(name, plan, state), plan, loss_calls, constant)
        return plan, self._differentiated(comms, plan, state, loss_calls, agreed)

    def _loss_calls(self, plan: Plan, state: TrainState, batch: PyTree) -> list[LossCall]:
        """The calls of the losses, each on its own batch."""
        loss_calls = []
        for name, own in batches_of(tuple(self.sources), batch).items():
            source, admission, mine = self.sources[name], self.admission, plan
            if self.are_several:
                admission = dataclasses.replace(admission, parts=source.parts, planner=source.planner)
                mine = in_phase(source.planner.plan_of(state), source.parts.optimizer, state.opt_state)
            rows = admission.rows(mine, state, own)
            loss_calls.append(LossCall(name, source, mine, rows, source.calls.gradients(mine, state, rows.args)))
        return loss_calls

    def _differentiated(
        self, comms: Comms, plan: Plan, state: TrainState, loss_calls: Sequence[LossCall], agreed: Sequence[Agreed]
    ) -> Found:
        """The gradients of all losses, one after another; a loss takes the model state that the one before has left."""
        found: dict[str, Found] = {}
        for one_call, which in zip(loss_calls, agreed, strict=True):
            with _running(comms, one_call.rows.batch, one_call.source.planner.batch, which):
                compare_first_batch(one_call.plan, one_call.rows.batch, comms.control)
                one = found[one_call.name] = one_call.call.run(comms, which, state)
                # Before the end of the step, ranks may hold parts of a sum that is made there.
                kept = one.model_state if one_call.source.parts.finish is None else ()
                compare_first_step(one_call.plan, kept, one.metrics, comms.control)
            state = state._replace(model_state=one.model_state)
        if not self.are_several:
            return found[""]
        with bind_mesh(plan.mesh), losing_no_peer(comms):
            return combined(plan, found, loss_calls, state)

    def _compare_end(
        self, comms: Comms, plan: Plan, new: TrainState, passed: UpdateArgs, metrics: Mapping[str, Tensor]
    ) -> None:
        """Compares model states that this update has finished, the first time."""
        if passed.finish(self.admission.parts) is not None and not bool(metrics["skipped"]):
            compare_first_end(plan, new.model_state, comms.control)

    def _ended(
        self, comms: Comms, plan: Plan, new: TrainState, old: TrainState, metrics: dict[str, Tensor]
    ) -> TrainState:
        new = advanced(new, old, self.admission.parts.loss_scale, metrics)
        with losing_no_peer(comms):
            commit(plan, new)
            together(plan, comms.control)
        return new


@contextlib.contextmanager
def _running(comms: Comms, batch: PyTree, specs: PyTree, agreed: Agreed) -> Iterator[None]:
    """The context in which a loss runs: its mesh is bound, and an error closes the communicators."""
    with naming_unequal(batch, specs, comms.mesh, agreed.sizes), bind_mesh(comms.mesh), losing_no_peer(comms):
        yield
