"""The calls of a training step, over one loss or several: a step, its gradients, its update, and their admission.

All calls ask the same questions before they run, in this order:

    the state      is it alive, of this step's annotations, with this step's loss scale and model state
    the batch      does it fit its specs, has it rows and values
    the ranks      do all make this call, of this number of the step, built in this way
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor

from shardfn.collectives import Agreed, AnyControl, Constant, GlobalTensor
from shardfn.core import PyTree, fold_in, raise_all, tree_leaves
from shardfn.engine.agreement import (
    Agreement,
    Comms,
    compare_first_batch,
    compare_first_end,
    compare_first_step,
    losing_no_peer,
)
from shardfn.engine.execution import ProgramCall, StepPrograms, UpdateArgs, signature
from shardfn.engine.loss import check_kept, cut_ahead, naming_unequal, shapes_of
from shardfn.engine.plan import Plan, Planner, check_has_values, phase_of, reduced_for
from shardfn.engine.transfers import (
    FoundGradients,
    StepParts,
    advanced,
    check_chunk_states,
    check_gradients,
    commit,
    describe_rows,
    forget,
    together,
)
from shardfn.optim import LossScale
from shardfn.state import TrainState, check_alive, check_passed, scale_of

from ._multi_loss import LossCall, StepLoss, agreed_on_each, batches_of, combined, facts_of
from ._run_call import AdmittedBatch, AdmittedCall, begun, run_call, run_purely


@dataclasses.dataclass(frozen=True)
class Admission:
    """The facts that decide whether a state may take a call of a step.

    Attributes:
        parts: loss, optimizer and flags of the step.
        planner: annotations of the step.
        agreement: facts that ranks compare before a call.
        key: key of the step, or None if the loss takes no key.
        state_specs: specs of the model state.
    """

    parts: StepParts
    planner: Planner
    agreement: Agreement
    key: Tensor | None
    state_specs: PyTree

    def state(self, state: TrainState, other: Any = (), *, call: str = "step(state, batch)") -> Plan:
        """Returns the plan of a call on a state.

        Args:
            state: first argument of the call.
            other: second argument, to detect swapped arguments.
            call: the call as shown in errors.

        Raises:
            TypeError: the first argument is not a state.
            DonatedError: a step has consumed the state.
            ValueError: the state was made under other annotations. Every leaf is listed.
        """
        check_passed(state, other, call=call)
        check_alive(state)
        plan = reduced_for(self.planner.plan_of(state), self.parts.optimizer, state.opt_state)
        self._check_kept(state)
        if plan.chunks is not None:
            check_chunk_states(state.model_state, plan.batch_axes)
        return plan

    def pure(self, state: TrainState) -> Plan:
        """Returns the plan of a call inside a transform of torch.func, which makes no agreement on each call."""
        check_passed(state)
        check_pure(self.parts)
        self._check_kept(state)
        return self.planner.plan_of(state)

    def _check_kept(self, state: TrainState) -> None:
        check_scale(state, self.parts.loss_scale)
        check_kept(state.model_state, self.state_specs, has_state=self.parts.has_state)

    def rows(self, plan: Plan, state: TrainState, batch: PyTree) -> AdmittedBatch:
        """Returns a batch, with the other arguments of the loss.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: a leaf does not fit its specs, or has no values, or the state has no key.
        """
        text, sizes = describe_rows(plan, batch)
        check_has_values(batch, self.planner.mesh.device)
        return AdmittedBatch(batch, self.args(state, cut_ahead(self.parts.loss, batch)), text, sizes)

    def args(self, state: TrainState, batch: PyTree) -> tuple[Any, ...]:
        """Returns the arguments of the loss beyond the parameters.

        Raises:
            ValueError: the loss takes a key, but the state does not hold a key.
        """
        # A copy, as a loss may write to its arguments.
        number = [state.step.to(self.planner.mesh.device, copy=True)] if self.parts.count else []
        if self.key is None:
            return batch, *number
        if not isinstance(state.key, Tensor):
            raise ValueError("the step was built with a key, but the state has no key. Make it with this step's init.")
        return batch, fold_in(state.key, state.step), *number

    def passed(self, plan: Plan, state: TrainState, passed: UpdateArgs) -> None:
        """Refuses gradients, or a model state passed with them, that do not fit a plan.

        Raises:
            TypeError: a gradient is not a `GlobalTensor`.
            DonatedError: an update has consumed the gradients.
            ValueError: leaves do not fit. Every such leaf is listed.
        """
        check_gradients(plan, passed.grads)
        if passed.model_state is not None:
            check_alive(passed.model_state, "model_state")
            check_kept(passed.model_state, self.state_specs, has_state=self.parts.has_state)
            _check_passed_state(passed.model_state, state.model_state)

    def constant(self, plan: Plan, state: TrainState) -> Constant:
        """Returns the hashed description of the step that all calls with this plan share."""
        kept = (state.opt_state, state.model_state) if self.parts.has_state else state.opt_state
        return self.agreement.constant(plan, kept)


CallOf = Callable[[Plan, TrainState, tuple[Any, ...]], ProgramCall[tuple[TrainState, dict[str, Tensor]]]]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class StepCalls:
    """The calls of a single step, of its gradients and of its update. All but the pure calls are collective.

    Attributes:
        admission: admission of the step.
        sources: losses of the step by name. One loss has the name "".
    """

    admission: Admission
    sources: Mapping[str, StepLoss]

    @property
    def are_several(self) -> bool:
        """Returns whether the step has several losses, with a batch each."""
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
            phase = phase_of(self.programs.parts.optimizer, state.opt_state) if only is not None else None
            if only is not None and (signature(plan, rows.args), shapes_of(state.model_state), phase) != only:
                raise ValueError(
                    "a compiled step takes the shapes it was lowered for. Lower the step again for these, or jit the"
                    " loss."
                )
            call = call_of(plan, state, rows.args)

            def run(comms: Comms, agreed: Agreed) -> tuple[TrainState, dict[str, Tensor]]:
                compare_first_batch(plan, batch, comms.control)
                return call.run(comms, agreed, state)

            def end(comms: Comms, result: tuple[TrainState, dict[str, Tensor]]) -> Any:
                new, metrics = self._end_step(comms, plan, state, *result)
                with losing_no_peer(comms):
                    compare_first_step(plan, new.model_state, metrics, comms.control)
                return new, metrics

            return AdmittedCall(
                named_call("step", plan, state),
                constant,
                run,
                call.known,
                (rows.text, rows.sizes),
                lambda control, agreed: begun(plan, batch, agreed),
                end,
                lambda agreed: self._name_call(batch, admission.planner, agreed),
            )

        return run_call(admission.planner.mesh, admit)

    def gradients(self, state: TrainState, batch: PyTree) -> FoundGradients:
        """Computes the gradients of a step, as `ShardedStep.gradients`."""

        def then(comms: Comms, plan: Plan, found: FoundGradients) -> FoundGradients:
            together(plan, comms.control)
            return found

        name, call = "the gradients of step", "step.gradients(state, batch)"
        return self._call_with_gradients(state, batch, name, call, then, lambda comms, plan, found: found)

    def step_of_losses(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Tensor]]:
        """Makes a step over several losses: gradients, and then the update, with one agreement."""

        def update(
            comms: Comms, plan: Plan, found: FoundGradients
        ) -> tuple[TrainState, dict[str, Tensor], FoundGradients]:
            kept = found.model_state if self.admission.parts.has_state else None
            passed = UpdateArgs(found.grads, kept, found.metrics["finite"])
            call = self.programs.update(plan, state, passed)
            # A graph for gradients that lie otherwise is captured by all ranks.
            ready = all(comms.control.exchange(int(call.known[0])))
            new, updated = call.run(comms, Agreed(known=(ready, ready)), state)
            self._compare_end(comms, plan, new, passed, updated)
            return new, updated, found

        def end(comms: Comms, plan: Plan, result: tuple[TrainState, dict[str, Tensor], FoundGradients]) -> Any:
            new, updated, found = result
            new, _ = self._end_step(comms, plan, state, new, updated)
            return new, found.metrics | {"skipped": updated["skipped"]}

        return self._call_with_gradients(state, batch, "step", "step(state, batch)", update, end)

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

            def then(control: AnyControl, agreed: Agreed) -> Agreed:
                forget(plan)
                return agreed

            def end(comms: Comms, result: tuple[TrainState, dict[str, Tensor]]) -> Any:
                return self._end_step(comms, plan, state, *result)

            # All ranks skip an update, or none does.
            facts, what = (f"finite: {given.finite}", ()), named_call("the update of step", plan, state)
            return AdmittedCall(what, constant, run, call.known, facts, then, end)

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
                "a step over several losses runs in no transform of torch.func. Add up the losses in one, or take"
                " torch.func.grad of step.loss of a step for each."
            )

        def admit() -> tuple[Plan, Callable[[], Result]]:
            plan = self.admission.pure(state)
            return plan, functools.partial(run, plan, state, self.admission.parts, prepare(self.admission, plan))

        return run_purely(self.admission.planner.mesh, what, self.admission.agreement, admit)

    @property
    def programs(self) -> StepPrograms:
        """Returns the calls of the first loss, which update for all losses."""
        return next(iter(self.sources.values())).programs

    def _call_with_gradients(
        self,
        state: TrainState,
        batch: PyTree,
        name: str,
        call: str,
        then: Callable[[Comms, Plan, FoundGradients], Any],
        end: Callable[[Comms, Plan, Any], Any],
    ) -> Any:
        """Makes a call that begins with the gradients of all losses, and continues with `then` and `end`.

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
                return then(comms, plan, self._compute_gradients(comms, plan, state, calls, agreed))

            def on_each(control: AnyControl, agreed: Agreed) -> list[Agreed]:
                rows = {x.name: x.rows.batch for x in calls} if self.are_several else calls[0].rows.batch
                return agreed_on_each(control, calls, begun(plan, rows, agreed))

            known, facts = facts_of(calls)
            return AdmittedCall(
                what, constant, run, known, facts, on_each, lambda comms, found: end(comms, plan, found)
            )

        return run_call(admission.planner.mesh, admit)

    def _loss_calls(self, plan: Plan, state: TrainState, batch: PyTree) -> list[LossCall]:
        """Returns the gradient call of each loss on its batch."""
        loss_calls = []
        for name, own in batches_of(tuple(self.sources), batch).items():
            source, admission, mine = self.sources[name], self.admission, plan
            if self.are_several:
                admission = dataclasses.replace(admission, parts=source.parts, planner=source.planner)
                mine = reduced_for(source.planner.plan_of(state), source.parts.optimizer, state.opt_state)
            rows = admission.rows(mine, state, own)
            loss_calls.append(LossCall(name, source, mine, rows, source.programs.gradients(mine, state, rows.args)))
        return loss_calls

    def _compute_gradients(
        self, comms: Comms, plan: Plan, state: TrainState, calls: Sequence[LossCall], agreed: Sequence[Agreed]
    ) -> FoundGradients:
        """Computes the gradients of all losses in turn. A loss takes the model state that the one before has left."""
        found: dict[str, FoundGradients] = {}
        for one, which in zip(calls, agreed, strict=True):
            # The error is sent to the other ranks as it is, and then names the leaves.
            with self._name_call(one.rows.batch, one.source.planner, which), losing_no_peer(comms):
                compare_first_batch(one.plan, one.rows.batch, comms.control)
                own = found[one.name] = one.call.run(comms, which, state)
                # Before the end of the step, ranks may hold parts of a sum that is made there.
                kept = own.model_state if one.source.parts.finish is None else ()
                compare_first_step(one.plan, kept, own.metrics, comms.control)
            state = state._replace(model_state=own.model_state)
        return combined(plan, found, calls, state) if self.are_several else found[""]

    def _name_call(self, batch: PyTree, planner: Planner, agreed: Agreed) -> AbstractContextManager[None]:
        return naming_unequal(batch, planner.batch, planner.mesh, agreed.sizes)

    def _compare_end(
        self, comms: Comms, plan: Plan, new: TrainState, passed: UpdateArgs, metrics: Mapping[str, Tensor]
    ) -> None:
        """Checks in the first update that `finish=` returned equal model states on all ranks."""
        if passed.finish(self.admission.parts) is not None and not bool(metrics["skipped"]):
            compare_first_end(plan, new.model_state, comms.control)

    def _end_step(
        self, comms: Comms, plan: Plan, old: TrainState, new: TrainState, metrics: dict[str, Tensor]
    ) -> tuple[TrainState, dict[str, Tensor]]:
        """Advances the loss scale of the new state, and commits the state where it is on disk."""
        new = advanced(new, old, self.admission.parts.loss_scale, metrics)
        with losing_no_peer(comms):
            commit(plan, new)
            together(plan, comms.control)
        return new, metrics


def named_call(name: str, plan: Plan, state: TrainState) -> str:
    """Returns a call in words: its name, the number of the step, and the axes that the optimizer reduces.

    Example:
        >>> import torch
        >>> import shardfn as sf
        >>> step = sf.sharded_step(lambda w, x: (w * x).mean(), sf.optim.sgd(0.1))
        >>> state = step.init(torch.ones(2))
        >>> named_call("step", step._planner.plan_of(state), state)
        'step 0'
    """
    text = f"{name} {int(state.step)}"
    return f"{text}, unreduced along {plan.unreduced_axes}" if plan.unreduced_axes else text


def check_scale(state: TrainState, rule: LossScale | None) -> None:
    """Refuses a state with a loss scale in a step without one, and the reverse.

    Raises:
        ValueError: names the step or the state that has the loss scale.
    """
    if (scale_of(state) is None) != (rule is None):
        has, built = ("a", "without one") if rule is None else ("no", "with one")
        raise ValueError(
            f"the state has {has} loss scale, but the step was built {built}. Make it with this step's init."
        )


def check_pure(parts: StepParts) -> None:
    """Refuses a step that cannot be a pure function.

    Raises:
        ValueError: the step decides something on the host.
    """
    if parts.skip_nonfinite:
        raise ValueError(
            "skip_nonfinite=True decides on the host, which a step inside a torch.func transform cannot. Build it"
            " without, and choose by torch.where on metrics['finite']."
        )
    if parts.optimizer.needs.phases is not None:
        raise ValueError(
            "the optimizer decides by counters of its state which values it averages, which a step inside a torch.func"
            " transform cannot read. Use an optimizer without phases."
        )


def refuse_own_averages(plan: Plan) -> None:
    """Refuses to open a step whose optimizer averages gradients itself.

    Raises:
        ValueError: names the axes.
    """
    if plan.mesh.axis_size(plan.unreduced_axes) > 1:
        raise ValueError(
            f"the optimizer averages gradients over {plan.unreduced_axes} itself in this step, so each rank would get"
            " gradients of its own rows. Call step(state, batch), or use an optimizer that does not average."
        )


def _check_passed_state(new: PyTree, old: PyTree) -> None:
    """Refuses a model state with other leaves than the state's.

    Raises:
        ValueError: lists every such leaf.
    """
    pairs = list(zip(tree_leaves(new), tree_leaves(old), strict=True))
    raise_all(
        ValueError,
        "the model state is not like that of the state:",
        [
            f"leaf {k} is {tuple(x.shape)} {x.dtype}; in the state it is {tuple(y.shape)} {y.dtype}"
            for k, (x, y) in enumerate(pairs)
            if not isinstance(x, GlobalTensor) or x.shape != y.shape or x.dtype != y.dtype
        ],
    )
