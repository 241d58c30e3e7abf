"""Runs any call of a step or of a sharded function: this rank admits it, the ranks agree, and then it runs."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from shardfn.collectives import Agreed, AnyControl, Constant, bind_mesh
from shardfn.core import Mesh, PyTree
from shardfn.engine.agreement import Comms, comms_of, losing_no_peer
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
