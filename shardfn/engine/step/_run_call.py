"""Runs any call of a step or of a sharded function: this rank admits it, the ranks agree, and then it runs.

run_call      a call that is eager or captured: ranks agree each time
run_purely    a call inside a transform of torch.func, or inside a capture: ranks agree once
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from shardfn.collectives import Agreed, AnyControl, Constant, bind_mesh
from shardfn.core import Mesh, PyTree
from shardfn.engine.agreement import Agreement, Comms, comms_of, losing_no_peer, losing_no_peer_purely, traced_call
from shardfn.engine.loss import agree_on_step, told_before
from shardfn.engine.plan import Plan, check_has_rows
from shardfn.engine.transfers import forget


class AdmittedBatch(NamedTuple):
    """A batch that fits its specs.

    Attributes:
        batch: rows of this rank.
        args: arguments of the loss beyond the parameters: the batch, cut ahead if the loss accumulates, and a key.
        text: facts of the batch that must be equal on all ranks.
        sizes: sizes that may differ between ranks.
    """

    batch: PyTree
    args: tuple[Any, ...]
    text: str = ""
    sizes: tuple[int, ...] = ()


_NOTHING = contextlib.nullcontext()
Result = TypeVar("Result")


class AdmittedCall(NamedTuple):
    """A call that this rank has admitted, and that the ranks are about to agree on.

    Attributes:
        what: the call, in words.
        constant: facts that are equal in all calls.
        run: runs the call, given communicators and the agreement. The mesh is bound, and an error ends the
            communicators.
        known: whether this rank has the results of a first call. See `Agreed`.
        facts: facts of this call that must be equal on all ranks, and sizes that may differ.
        then: checks after the agreement, and returns the agreement that `run` gets.
        end: finishes the result afterwards.
        around: makes a further context of `run` from the agreement, outside of the others.
    """

    what: str
    constant: Constant
    run: Callable[[Comms, Any], Any]
    known: tuple[bool, bool] = (True, True)
    facts: tuple[str, tuple[int, ...]] = ("", ())
    then: Callable[[AnyControl, Agreed], Any] = lambda control, agreed: agreed
    end: Callable[[Comms, Any], Any] = lambda comms, result: result
    around: Callable[[Any], AbstractContextManager[Any]] = lambda agreed: _NOTHING


def run_call(mesh: Mesh, admit: Callable[[], AdmittedCall]) -> Any:
    """Runs a call of a step or of a sharded function. Collective.

    Args:
        mesh: mesh of the call.
        admit: admits the call on this rank. Errors are sent to the other ranks, which wait in the agreement.
    """
    comms = comms_of(mesh)
    control = comms.control
    with told_before(control):
        call = admit()
    with traced_call(call.what):
        agreed = call.then(control, agree_on_step(control, call.what, call.facts, call.constant, call.known))
        with call.around(agreed), bind_mesh(mesh), losing_no_peer(comms):
            result = call.run(comms, agreed)
        return call.end(comms, result)


def run_purely(
    mesh: Mesh, what: str, agreement: Agreement, admit: Callable[[], tuple[Plan, Callable[[], Result]]]
) -> Result:
    """Runs a call that torch transforms or records, which exchanges messages only in its first calls.

    Args:
        mesh: mesh of the call.
        what: the call, in words.
        agreement: facts that ranks compare before the first call of a plan.
        admit: admits the call on this rank: the plan, and the function to run. Errors are sent to the other ranks.
    """
    what = f"{what} in a transform"
    with losing_no_peer_purely(mesh, what):
        plan, run = admit()
        agreement.agree_once(plan, what)
        with bind_mesh(mesh):
            return run()


def begun(plan: Plan, batch: PyTree, agreed: Agreed) -> Agreed:
    """Returns the agreement on a call after all ranks have begun the call. The previous commit is then dropped.

    Raises:
        ValueError: no rank has rows in its batch.
    """
    check_has_rows(batch, even=agreed.even)
    # All ranks have begun this step, and so have committed the one before.
    forget(plan)
    return agreed
