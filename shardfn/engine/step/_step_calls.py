"""A training step, over one loss or several: both halves at once, and the two halves, `gradients` and `update`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor

from shardfn.collectives import Agreed, AnyControl, bind_mesh
from shardfn.core import PyTree
from shardfn.engine.agreement import (
    Comms,
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
    signature,
)
from shardfn.engine.loss import naming_unequal, shapes_of
from shardfn.engine.plan import Plan, Planner, in_phase
from shardfn.engine.transfers import (
    Found,
    StepParts,
    advanced,
    commit,
    forget,
    together,
)
from shardfn.state import TrainState

from ._admission import (
    Admission,
    AdmittedCall,
    agreement,
    agreement_on_rows,
    named_call,
    refuse_own_averages,
    run_call,
)
from ._multi_loss import (
    LossCall,
    StepLoss,
    agree_on_all,
    batches_of,
    combined,
)

CallOf = Callable[[Plan, TrainState, tuple[Any, ...]], StepCall[tuple[TrainState, dict[str, Tensor]]]]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class StepCalls:
    """The calls of one step, of its gradients and of its update. All but the pure calls are collective.

    Attributes:
        admission: admission of the step.
        sources: losses of the step by name; one loss has the name "".
    """

    admission: Admission
    sources: Mapping[str, StepLoss]

    @property
    def are_several(self) -> bool:
        """Whether the step has several losses, with a batch each."""
        return tuple(self.sources) != ("",)

    def step(
        self, call_of: CallOf, only: Any, state: TrainState, batch: PyTree
    ) -> tuple[TrainState, dict[str, Tensor]]:
        """Makes a step over one loss, by the call of `call_of`; if `only` is not None, for that signature only."""
        admission = self.admission

        def admit() -> AdmittedCall:
            plan = admission.state(state, batch)
            rows = admission.rows(plan, state, batch)
            constant = admission.constant(plan, state)
            if only is not None and (signature(plan, rows.args), shapes_of(state.model_state)) != only:
                raise ValueError(
                    "a compiled step takes the shapes it was lowered for; lower the step again for these, or jit the"
                    " loss."
                )
            call = call_of(plan, state, rows.args)

            def run(comms: Comms, agreed: Agreed) -> tuple[TrainState, dict[str, Tensor]]:
                compare_first_batch(plan, batch, comms.control)
                return call.run(comms, agreed, state)

            def end(comms: Comms, result: tuple[TrainState, dict[str, Tensor]]) -> Any:
                new, metrics = self._ended(comms, plan, state, *result)
                with losing_no_peer(comms):
                    compare_first_step(plan, new.model_state, metrics, comms.control)
                return new, metrics

            agree = agreement_on_rows(named_call("step", plan, state), plan, rows, constant, call.known)
            return AdmittedCall(agree, run, end, functools.partial(self._naming, batch, admission.planner))

        return run_call(admission.planner.mesh, admit)

    def gradients(self, state: TrainState, batch: PyTree) -> Found:
        """Computes the gradients of a step, as `ShardedStep.gradients`."""

        def then(comms: Comms, plan: Plan, found: Found) -> Found:
            together(plan, comms.control)
            return found

        name, call = "the gradients of step", "step.gradients(state, batch)"
        return self._differentiate(state, batch, name, call, then, lambda comms, plan, found: found)

    def step_of_losses(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        """Makes a step over several losses: gradients, and then the update, with one agreement."""

        def update(comms: Comms, plan: Plan, found: Found) -> tuple[TrainState, dict[str, Tensor], Found]:
            kept = found.model_state if self.admission.parts.has_state else None
            passed = UpdateArgs(found.grads, kept, found.metrics["finite"])
            call = self.programs.update(plan, state, passed)
            # A graph for gradients that lie otherwise is captured by all ranks.
            ready = all(comms.control.exchange(int(call.known[0])))
            new, updated = call.run(comms, Agreed(known=(ready, ready)), state)
            self._compare_end(comms, plan, new, passed, updated)
            return new, updated, found

        def end(comms: Comms, plan: Plan, result: tuple[TrainState, dict[str, Tensor], Found]) -> Any:
            new, updated, found = result
            new, _ = self._ended(comms, plan, state, new, updated)
            return new, found.metrics | {"skipped": updated["skipped"]}

        return self._differentiate(state, batch, "step", "step(state, batch)", update, end)

    def update(self, state: TrainState, passed: UpdateArgs) -> tuple[TrainState, dict[str, Tensor]]:
        """Makes the update of a step, as `ShardedStep.update`."""
        admission = self.admission

        def admit() -> AdmittedCall:
            plan = admission.state(state, passed.grads, call="step.update(state, grads)")
            refuse_own_averages(plan)
            admission.passed(plan, state, passed)
            given = passed._replace(finite=bool(passed.finite))
            constant = admission.constant(plan, state)
            call = self.programs.update(plan, state, given)

            def run(comms: Comms, agreed: Agreed) -> tuple[TrainState, dict[str, Tensor]]:
                new, metrics = call.run(comms, agreed, state)
                self._compare_end(comms, plan, new, given, metrics)
                return new, metrics

            # All ranks skip an update, or none does.
            facts, what = (f"finite: {given.finite}", ()), named_call("the update of step", plan, state)
            agree = agreement(what, constant, call.known, facts, lambda agreed: forget(plan))
            return AdmittedCall(agree, run, lambda comms, result: self._ended(comms, plan, state, *result))

        return run_call(admission.planner.mesh, admit)

    def pure(
        self,
        what: str,
        run: Callable[[Plan, TrainState, StepParts, Any], Result],
        state: TrainState,
        prepare: Callable[[Admission, Plan], Any],
    ) -> Result:
        """Makes a call inside a transform of torch.func.

        Args:
            what: the call, in words.
            run: pure function of plan, state, parts of the step, and the other arguments.
            state: state.
            prepare: checks the other arguments, and returns them.
        """
        if self.are_several:
            raise ValueError(
                "a step over several losses runs in no transform of torch.func; add up the losses in one, or take"
                " torch.func.grad of step.loss of a step for each."
            )
        plan, what = self.admission.pure(state), f"{what} in a transform"
        given = prepare(self.admission, plan)
        self.admission.agreement.agree_once(plan, what)
        with bind_mesh(plan.mesh), losing_no_peer_purely(plan.mesh, what):
            return run(plan, state, self.admission.parts, given)

    @property
    def programs(self) -> StepPrograms:
        """The calls of the first loss, which update for all losses."""
        return next(iter(self.sources.values())).calls

    def _differentiate(
        self,
        state: TrainState,
        batch: PyTree,
        name: str,
        call: str,
        then: Callable[[Comms, Plan, Found], Any],
        end: Callable[[Comms, Plan, Any], Any],
    ) -> Any:
        """Makes a call that begins with the gradients of all losses, and goes on with `then` and `end`.

        Args:
            state: state.
            batch: batch, or the batches of the losses.
            name: the call in the agreement of ranks.
            call: the call in errors.
            then: function of the gradients, which runs like the gradients.
            end: function of the result of `then`, which runs after the call.
        """
        admission = self.admission

        def admit() -> AdmittedCall:
            plan = admission.state(state, batch, call=call)
            refuse_own_averages(plan)
            calls = self._loss_calls(plan, state, batch)
            constant, what = admission.constant(plan, state), named_call(name, plan, state)

            def run(comms: Comms, agreed: Sequence[Agreed]) -> Any:
                return then(comms, plan, self._found(comms, plan, state, calls, agreed))

            def agree(control: AnyControl) -> list[Agreed]:
                return agree_on_all(control, what, plan, calls, constant)

            return AdmittedCall(agree, run, lambda comms, result: end(comms, plan, result))

        return run_call(admission.planner.mesh, admit)

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

    def _found(
        self, comms: Comms, plan: Plan, state: TrainState, calls: Sequence[LossCall], agreed: Sequence[Agreed]
    ) -> Found:
        """Computes the gradients of all losses in turn; a loss takes the model state that the one before has left."""
        found: dict[str, Found] = {}
        for one, which in zip(calls, agreed, strict=True):
            # The error is sent to the other ranks as it is, and then names the leaves.
            with self._naming(one.rows.batch, one.source.planner, which), losing_no_peer(comms):
                compare_first_batch(one.plan, one.rows.batch, comms.control)
                own = found[one.name] = one.call.run(comms, which, state)
                # Before the end of the step, ranks may hold parts of a sum that is made there.
                kept = own.model_state if one.source.parts.finish is None else ()
                compare_first_step(one.plan, kept, own.metrics, comms.control)
            state = state._replace(model_state=own.model_state)
        return combined(plan, found, calls, state) if self.are_several else found[""]

    def _naming(self, batch: PyTree, planner: Planner, agreed: Agreed) -> AbstractContextManager[None]:
        return naming_unequal(batch, planner.batch, planner.mesh, agreed.sizes)

    def _compare_end(
        self, comms: Comms, plan: Plan, new: TrainState, passed: UpdateArgs, metrics: Mapping[str, Tensor]
    ) -> None:
        """Compares model states that this update has finished, the first time."""
        if passed.finish(self.admission.parts) is not None and not bool(metrics["skipped"]):
            compare_first_end(plan, new.model_state, comms.control)

    def _ended(
        self, comms: Comms, plan: Plan, old: TrainState, new: TrainState, metrics: dict[str, Tensor]
    ) -> tuple[TrainState, dict[str, Tensor]]:
        """Advances the loss scale of the new state, and commits the state where it is on disk."""
        new = advanced(new, old, self.admission.parts.loss_scale, metrics)
        with losing_no_peer(comms):
            commit(plan, new)
            together(plan, comms.control)
        return new, metrics
