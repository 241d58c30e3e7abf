"""The two halves of a training step, `gradients` and `update`, over one loss or several."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from shardfn.collectives import Agreed, bind_mesh
from shardfn.core import PyTree
from shardfn.engine.agreement import (
    Comms,
    comms_of,
    compare_first_batch,
    compare_first_step,
    losing_no_peer,
    losing_no_peer_purely,
)
from shardfn.engine.execution import (
    CapturedSteps,
    EagerSteps,
    Passed,
    pure_gradients,
    pure_update,
    refuse_own_averages,
)
from shardfn.engine.loss import agree_on_step, naming_unequal, told_before
from shardfn.engine.plan import Plan, in_phase
from shardfn.engine.transfers import (
    Found,
    advanced,
    commit,
    forget,
    together,
)
from shardfn.state import TrainState

from ._admit import Admission, named_call
from ._several import (
    Share,
    Source,
    agree_on_all,
    batches_of,
    combined,
)


@dataclasses.dataclass(frozen=True)
class Halves:
    """The gradients and the update of one step. All but the pure ones are collective.

    Attributes:
        admission: of the step.
        sources: by name, its losses; one loss has the name "".
    """

    admission: Admission
    sources: Mapping[str, Source]

    @property
    def are_several(self) -> bool:
        """Whether the step has several losses, with a batch each."""
        return tuple(self.sources) != ("",)

    def gradients(self, state: TrainState, batch: PyTree) -> Found:
        """The first half, as `ShardedStep.gradients`."""
        comms = comms_of(self.admission.planner.mesh)
        plan, found = self._found(comms, state, batch, "the gradients of step", call="step.gradients(state, batch)")
        with losing_no_peer(comms):
            together(plan, comms.control)
        return found

    def update(self, state: TrainState, passed: Passed) -> tuple[TrainState, dict[str, Tensor]]:
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
        told = f"finite: {passed.finite}", ()
        what = named_call("the update of step", plan, state)
        agreed = agree_on_step(comms.control, what, told, constant, call.known)
        forget(plan)
        with bind_mesh(plan.mesh), losing_no_peer(comms):
            new, metrics = call.run(comms, agreed)
        return self._ended(comms, plan, new, state, metrics), metrics

    def both(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        """A step over several losses: the one half and then the other, with one agreement."""
        comms = comms_of(self.admission.planner.mesh)
        plan, found = self._found(comms, state, batch, "step", call="step(state, batch)")
        kept = found.model_state if self.admission.parts.has_state else None
        with bind_mesh(plan.mesh), losing_no_peer(comms):
            call = self.calls.update(plan, state, Passed(found.grads, kept, found.metrics["finite"]))
            # A graph for gradients that lie otherwise is captured by all ranks.
            ready = all(comms.control.exchange(int(call.known[0])))
            new, updated = call.run(comms, Agreed(known=(ready, ready)))
        return self._ended(comms, plan, new, state, updated), found.metrics | {"skipped": updated["skipped"]}

    def pure_gradients(self, state: TrainState, batch: PyTree) -> Found:
        """The first half inside a transform of torch.func."""
        admission = self._pure_admission()
        plan, args = admission.pure(state), admission.args(state, batch)
        admission.agreement.agree_once(plan, "the gradients of a step in a transform")
        with bind_mesh(plan.mesh), losing_no_peer_purely(plan.mesh, "the gradients of a step in a transform"):
            return pure_gradients(plan, state, admission.parts, args)

    def pure_update(self, state: TrainState, passed: Passed) -> tuple[TrainState, dict[str, Tensor]]:
        """The other half inside a transform of torch.func."""
        admission = self._pure_admission()
        plan = admission.pure(state)
        admission.passed(plan, state, passed)
        admission.agreement.agree_once(plan, "the update of a step in a transform")
        with bind_mesh(plan.mesh), losing_no_peer_purely(plan.mesh, "the update of a step in a transform"):
            return pure_update(plan, state, admission.parts, passed)

    @property
    def calls(self) -> EagerSteps | CapturedSteps:
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
            shares = self._shares(plan, state, batch)
            constant = admission.constant(plan, state)
        agreed = agree_on_all(comms.control, named_call(name, plan, state), plan, shares, constant)
        return plan, self._differentiated(comms, plan, state, shares, agreed)

    def _shares(self, plan: Plan, state: TrainState, batch: PyTree) -> list[Share]:
        """The calls of the losses, each on its own batch."""
        shares = []
        for name, own in batches_of(tuple(self.sources), batch).items():
            source, admission, mine = self.sources[name], self.admission, plan
            if self.are_several:
                admission = dataclasses.replace(admission, parts=source.parts, planner=source.planner)
                mine = in_phase(source.planner.plan_of(state), source.parts.optimizer, state.opt_state)
            rows = admission.rows(mine, state, own)
            known = source.calls.gradients(mine, state, rows.args).known
            shares.append(Share(name, source, mine, rows, known))
        return shares

    def _differentiated(
        self, comms: Comms, plan: Plan, state: TrainState, shares: Sequence[Share], agreed: Sequence[Agreed]
    ) -> Found:
        """The gradients of all losses, one after another; a loss takes the model state that the one before has left."""
        found: dict[str, Found] = {}
        for share, which in zip(shares, agreed, strict=True):
            with self._running(comms, share, which):
                compare_first_batch(share.plan, share.rows.batch, comms.control)
                call = share.source.calls.gradients(share.plan, state, share.rows.args)
                one = found[share.name] = call.run(comms, which)
                compare_first_step(share.plan, one.model_state, one.metrics, comms.control)
            state = state._replace(model_state=one.model_state)
        if not self.are_several:
            return found[""]
        with bind_mesh(plan.mesh), losing_no_peer(comms):
            return combined(plan, found, shares, state)

    @contextlib.contextmanager
    def _running(self, comms: Comms, share: Share, agreed: Agreed) -> Iterator[None]:
        unequal = naming_unequal(share.rows.batch, share.source.planner.batch, comms.mesh, agreed.sizes)
        with unequal, bind_mesh(comms.mesh), losing_no_peer(comms):
            yield

    def _ended(
        self, comms: Comms, plan: Plan, new: TrainState, old: TrainState, metrics: dict[str, Tensor]
    ) -> TrainState:
        new = advanced(new, old, self.admission.parts.loss_scale, metrics)
        with losing_no_peer(comms):
            commit(plan, new)
            together(plan, comms.control)
        return new
