"""Admission: whether a state may take a call of a step, under which plan, and the agreement of ranks before it runs.

A step, its gradients, its update and its loss ask the same questions, in this order:

    the state      is it alive, of this step's annotations, with this step's loss scale and model state
    the batch      does it fit its specs, has it rows and values
    the ranks      do all make this call, of this number of the step, built in this way
"""

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from shardfn.collectives import Agreed, AnyControl, Constant, GlobalTensor, bind_mesh
from shardfn.core import Mesh, PyTree, fold_in, raise_all, tree_leaves
from shardfn.engine.agreement import Agreement, Comms, comms_of, losing_no_peer
from shardfn.engine.execution import UpdateArgs, check_pure, check_scale
from shardfn.engine.loss import agree_on_step, check_kept, cut_ahead, told_before
from shardfn.engine.plan import Plan, Planner, check_has_rows, check_has_values, in_phase
from shardfn.engine.transfers import StepParts, check_gradients, describe_rows, forget
from shardfn.state import TrainState, check_alive, check_passed


class AdmittedBatch(NamedTuple):
    """A batch that fits its specs.

    Attributes:
        batch: this rank's rows.
        args: the arguments of the loss beyond the parameters: the batch, cut ahead if the loss accumulates, and a key.
        text: facts of the batch that must be equal on all ranks.
        sizes: those that may differ.
    """

    batch: PyTree
    args: tuple[Any, ...]
    text: str = ""
    sizes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Admission:
    """The facts that decide whether a state may take a call of a step.

    Attributes:
        parts: of the step.
        planner: of the step.
        agreement: of the step.
        key: the key of the step; None if the loss takes none.
        state_specs: of the model state.
    """

    parts: StepParts
    planner: Planner
    agreement: Agreement
    key: Tensor | None
    state_specs: PyTree

    def state(self, state: TrainState, other: Any = (), *, call: str = "step(state, batch)") -> Plan:
        """The plan of a call on a state.

        Args:
            state: the argument that should be one.
            other: the argument beside it.
            call: how to write the call.

        Raises:
            TypeError: it is not a state.
            DonatedError: a step has consumed it.
            ValueError: it was made under other annotations; every leaf is listed.
        """
        check_passed(state, other, call=call)
        check_alive(state)
        plan = in_phase(self.planner.plan_of(state), self.parts.optimizer, state.opt_state)
        self._check_kept(state)
        return plan

    def pure(self, state: TrainState) -> Plan:
        """The plan of a call inside a transform of torch.func, which makes no agreement of its own."""
        check_passed(state)
        check_pure(self.parts)
        self._check_kept(state)
        return self.planner.plan_of(state)

    def _check_kept(self, state: TrainState) -> None:
        check_scale(state, self.parts.loss_scale)
        check_kept(state.model_state, self.state_specs, has_state=self.parts.has_state)

    def rows(self, plan: Plan, state: TrainState, batch: PyTree) -> AdmittedBatch:
        """A batch, with the other arguments of the loss.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: a leaf does not fit its specs, or has no values; or the state has no key.
        """
        text, sizes = describe_rows(plan, batch)
        check_has_values(batch, self.planner.mesh.device)
        return AdmittedBatch(batch, self.args(state, cut_ahead(self.parts.loss, batch)), text, sizes)

    def args(self, state: TrainState, batch: PyTree) -> tuple[Any, ...]:
        """The arguments of the loss beyond the parameters.

        Raises:
            ValueError: the loss takes a key and the state does not hold one.
        """
        if self.key is None:
            return (batch,)
        if not isinstance(state.key, Tensor):
            raise ValueError("the step was built with a key, but the state has no key; make it with this step's init.")
        return batch, fold_in(state.key, state.step)

    def passed(self, plan: Plan, state: TrainState, passed: UpdateArgs) -> None:
        """Refuses gradients, or a model state beside them, that are not of a plan.

        Raises:
            TypeError: a gradient is not a `GlobalTensor`.
            DonatedError: an update has consumed the gradients.
            ValueError: they do not fit; every leaf is listed.
        """
        check_gradients(plan, passed.grads)
        if passed.model_state is not None:
            check_alive(passed.model_state, "model_state")
            check_kept(passed.model_state, self.state_specs, has_state=self.parts.has_state)
            _check_passed_state(passed.model_state, state.model_state)

    def constant(self, plan: Plan, state: TrainState) -> Constant:
        """The hashed description of the step that all calls with this plan share."""
        kept = (state.opt_state, state.model_state) if self.parts.has_state else state.opt_state
        return self.agreement.constant(plan, kept)


def refuse_own_averages(plan: Plan) -> None:
    """Refuses to open a step whose optimizer averages gradients itself in the phase of the plan.

    Raises:
        ValueError: names the phase and the axes.
    """
    if plan.num_left > 1:
        phase = "" if plan.phase is None else f" in its phase {plan.phase.name!r}"
        raise ValueError(
            f"the optimizer averages gradients over {plan.left_axes} itself{phase}, so each rank would get gradients of"
            " its own rows. Call step(state, batch) in this phase, or use an optimizer that does not average."
        )


def named_call(name: str, plan: Plan, state: TrainState) -> str:
    """A call in words: its name, the number of the step, and the phase of the optimizer.

    Example:
        >>> import torch
        >>> import shardfn as sf
        >>> step = sf.sharded_step(lambda w, x: (w * x).mean(), sf.optim.sgd(0.1))
        >>> state = step.init(torch.ones(2))
        >>> named_call("step", step._planner.plan_of(state), state)
        'step 0'
    """
    text = f"{name} {int(state.step)}"
    return text if plan.phase is None else f"{text}, {plan.phase.name}"


class AdmittedCall(NamedTuple):
    """A call that this rank has admitted, and that the ranks are about to agree on.

    Attributes:
        agree: agreement of all ranks on the call, which is its first message.
        run: runs the call, given communicators and the agreement. The mesh is bound, and an error ends the
            communicators.
        end: finishes the result afterwards.
        around: makes a further context of `run` from the agreement, outside of the others.
    """

    agree: Callable[[AnyControl], Any]
    run: Callable[[Comms, Any], Any]
    end: Callable[[Comms, Any], Any] = lambda comms, result: result
    around: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext


def run_call(mesh: Mesh, admit: Callable[[], AdmittedCall]) -> Any:
    """Runs a call of a step or of a sharded function. Collective.

    Args:
        mesh: mesh of the call.
        admit: admits the call on this rank; its errors are sent to the other ranks, which wait in the agreement.
    """
    comms = comms_of(mesh)
    with told_before(comms.control):
        call = admit()
    agreed = call.agree(comms.control)
    with call.around(agreed), bind_mesh(mesh), losing_no_peer(comms):
        result = call.run(comms, agreed)
    return call.end(comms, result)


def agreement(
    what: str,
    constant: Constant,
    known: bool | tuple[bool, bool],
    facts: tuple[str, tuple[int, ...]] = ("", ()),
    then: Callable[[Agreed], None] = lambda agreed: None,
) -> Callable[[AnyControl], Agreed]:
    """Returns the agreement of all ranks on a call.

    Args:
        what: the call, in words.
        constant: facts that are equal in all calls.
        known: whether this rank has the results of a first call; see `Agreed`.
        facts: facts of this call that must be equal on all ranks, and sizes that may differ.
        then: further check of this rank after the agreement.
    """
    both = (known, known) if isinstance(known, bool) else known

    def agree(control: AnyControl) -> Agreed:
        agreed = agree_on_step(control, what, facts, constant, both)
        then(agreed)
        return agreed

    return agree


def agreement_on_rows(
    what: str, plan: Plan, rows: AdmittedBatch, constant: Constant, known: tuple[bool, bool]
) -> Callable[[AnyControl], Agreed]:
    """Returns the agreement of all ranks on a call with rows, which raises `ValueError` if no rank has rows."""

    def then(agreed: Agreed) -> None:
        check_has_rows(rows.batch, even=agreed.even)
        # All ranks have begun this step, and so have committed the one before.
        forget(plan)

    return agreement(what, constant, known, (rows.text, rows.sizes), then)


def _check_passed_state(new: PyTree, old: PyTree) -> None:
    """Refuses a model state whose leaves are not like those of the state.

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
