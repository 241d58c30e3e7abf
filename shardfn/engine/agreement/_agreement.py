"""The communicators of a mesh's steps, on which ranks compare how a call was built before the first transfer."""

import contextlib
import functools
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardfn._torch import DisableFuncTorch, disable_current_modes
from shardfn.capture import capturing
from shardfn.collectives import (
    AnyChannels,
    AnyControl,
    AnyRounds,
    Channels,
    Constant,
    Control,
    absent_from,
    forget_loss_channels,
    gather_wires,
    set_loss_channels,
)
from shardfn.core import Mesh, PerMesh, PyTree, RankError, tree_structure
from shardfn.engine.loss import agree_on_step, told_before
from shardfn.engine.plan import Plan
from shardfn.memory import record_owner


class Comms:
    """Channels and control plane, and whether both can still be trusted.

    Attributes:
        mesh: the mesh.
        channels: asynchronous traffic.
        control: agreement between ranks.
        mark: function of the part of the step that begins: "forward", "backward", "update". Used only by captures.
        name: function of the pipeline's action that begins, in words, "" after the last action. Used only by captures.
        epoch: the number of these communicators in the life of the mesh, the same on all ranks.
        broken: set when a call has failed: transfers may be left over, so the next call begins another epoch.
        meets: whether a rank sends an error of the loss to the other ranks in the next round, because the backend
            cannot close a connection.
    """

    def __init__(
        self,
        mesh: Mesh,
        channels: AnyChannels,
        control: AnyControl,
        mark: Callable[[str], None] = lambda phase: None,
        name: Callable[[str], None] = lambda part: None,
        epoch: int = 0,
    ) -> None:
        self.mesh, self.channels, self.control, self.mark, self.name = mesh, channels, control, mark, name
        self.broken, self.meets, self.epoch = False, mesh.backend != "gloo", epoch


COMMS: PerMesh[Comms] = PerMesh()


def comms_of(mesh: Mesh) -> Comms:
    """Returns the communicators of a mesh, made on first use and again after a failure. Collective then.

    All steps on a mesh share the communicators, as steps run in sequence, in the same order on all ranks. No rank
    makes communicators again without the other ranks: an error that ends the communicators closes the rank's
    connections, and so ends the communicators of all ranks.
    """
    mesh.check_open()
    comms = COMMS.get(mesh)
    if comms is not None and not comms.broken and not _live_comms(comms)[1].lost:
        return comms
    epoch = 0 if comms is None else comms.epoch + 1
    limit = mesh.agreement_timeout.total_seconds()
    if absent := absent_from(mesh, epoch):
        raise _not_all(mesh, f"did not arrive within {limit:g} s: ", absent)
    try:
        control = Control(mesh)
    except RankError:
        raise
    except RuntimeError as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise _not_all(mesh, f"were lost meanwhile ({why}): ") from error
    if comms is not None:  # all ranks are here now, so transfers of earlier agreements have ended
        _close_comms(comms)
    meet = functools.partial(_meet_others, weakref.ref(control))
    channels = Channels(mesh, meet) if comms is None else _rebuild_channels(_live_comms(comms)[0], control, meet)
    fresh = COMMS.put(mesh, Comms(mesh, channels, control, epoch=epoch))
    this = weakref.ref(fresh)  # in a cycle, closed communicators would live on
    control.wake = lambda: None if (of := this()) is None else _close_comms(of)
    channels.loss_along_each()
    set_loss_channels(mesh, channels)
    return fresh


def _rebuild_channels(before: Channels, control: Control, meet: Callable[[], None]) -> Channels:
    """Returns the channels that all ranks had made. After a failure a rank may have more channels than another."""
    return before.anew(min(control.exchange(before.num_made)), meet)


def _meet_others(control: "weakref.ref[Control]") -> None:
    """Waits in `Control.meet`, without holding the control plane: plans remember channels."""
    live = control()
    if live is not None:
        live.meet()


def _not_all(mesh: Mesh, what: str, absent: Sequence[int] = ()) -> RankError:
    named = f"ranks {', '.join(map(str, absent))}" if absent else "some"
    return RankError(
        f"rank {mesh.rank} wanted to make the communicators of {mesh!r}, for which all ranks are needed, and {named}"
        f" {what}they are slow, at another call, or gone. All ranks make the same calls in the same order. If one is"
        f" slow, give it more time, make_mesh(agreement_timeout={mesh.agreement_timeout.total_seconds():g}) now; else"
        " restart the job."
    )


def open_channels(comms: Comms, plan: Plan, late_axes: tuple[str, ...] = ()) -> None:
    """Makes all channels that a step will use. Collective, and so done before a rank can fail.

    Args:
        comms: the communicators.
        plan: the layout.
        late_axes: axes along which ranks exchange activations.
    """
    rounds_of(comms, plan)
    if late_axes:
        comms.channels.between(late_axes)
    # In the order of the layout: making a group is collective, and all ranks must make the same groups.
    gather_wires(comms.channels, [(plan.layers[x.leaves[0]].ways.use, x.packing) for x in plan.gather_units])
    gather_wires(comms.channels, [(plan.layers[x.leaves[0]].ways.refresh, x.packing) for x in plan.refresh_units])
    if isinstance(comms.channels, Channels):  # other channels are of captures
        for axes in filter(None, plan.psum_axes):
            comms.channels.loss(axes)
        for owner, nbytes in [*comms.channels.shared(), *_live_comms(comms)[1].shared()]:
            record_owner(owner, "host", nbytes)


def rounds_of(comms: Comms, plan: Plan) -> AnyRounds:
    """Returns the rounds in which the ranks that share leaves agree on an order of use.

    Other ranks may have another order.

    Where connections cannot be closed, the rounds also carry failures, so all ranks of the mesh take part.
    """
    return comms.control if comms.meets else comms.control.along(plan.sharing_axes)


@contextlib.contextmanager
def losing_no_peer(comms: Comms) -> Iterator[None]:
    """Sends an error to the other ranks at once, and turns another rank's error into a `RankError`.

    After any error, communicators are made again. The error is written to the store. Then all connections where another
    rank may wait are closed, to wake the rank: see `Control.failure`. Only ranks that differ at the beginning of a
    call, as found by all ranks in the same message, keep their communicators.
    """
    calls = comms.control.calls
    calls.inside += 1
    try:
        yield
    except BaseException as error:
        _tell_error(comms, error)
        raise
    finally:
        calls.inside -= 1


def has_peers(mesh: Mesh) -> bool:
    """Returns whether other ranks wait for this rank's messages. A capture sends no messages."""
    return mesh.size > 1 and not mesh.abstract and mesh.is_member and not capturing()


@contextlib.contextmanager
def losing_no_peer_purely(mesh: Mesh, call: str) -> Iterator[None]:
    """Does the same around a function that torch may transform, or record. Does nothing where no peer waits.

    Args:
        mesh: the mesh.
        call: the call in words, or "" if not all ranks need to make the call.
    """
    if not has_peers(mesh):
        yield
        return
    with untransformed():
        comms = comms_of(mesh)
    calls = comms.control.calls
    if call:
        calls.begin(call)
    calls.inside += 1
    try:
        yield
    except BaseException as error:
        with untransformed():
            _tell_error(comms, error)
        raise
    finally:
        calls.inside -= 1


@contextlib.contextmanager
def untransformed() -> Iterator[None]:
    """Hides messages between ranks from torch's transforms."""
    with DisableFuncTorch(), disable_current_modes():
        yield


def _tell_error(comms: Comms, error: BaseException) -> None:
    """Sends an error to the other ranks, unless an inner call has sent the error."""
    # Ranks that differ in their calls raise the same error, in any blocks, and keep their communicators.
    if comms.mesh.size == 1 or comms.broken or (isinstance(error, RankError) and error.before_transfers):
        return
    comms.broken = True
    _, control = _live_comms(comms)
    try:
        if not isinstance(error, RankError) and control.is_theirs(error):
            raise control.failure(error) from error
        # A `RankError`, too: most are raised by all ranks, but a rank at another place waits to be woken.
        if not control.lost:
            control.tell(f"raised {described(error)}")
            # The same name as in other ranks' errors, for a reader of only this rank's error.
            error.add_note(f"on rank {control.rank} of {control.size}")
    finally:
        _close_comms(comms)


def described(error: BaseException) -> str:
    """Returns the text of an error, and the line of the raise."""
    where = traceback.extract_tb(error.__traceback__)
    line = f" at {where[-1].filename}:{where[-1].lineno}" if where else ""
    return "; ".join([f"{type(error).__name__}: {error}{line}", *getattr(error, "__notes__", ())])


def _live_comms(comms: Comms) -> tuple[Channels, Control]:
    """Returns the communicators of running steps. A capture has other communicators."""
    channels, control = comms.channels, comms.control
    assert isinstance(channels, Channels) and isinstance(control, Control)
    return channels, control


def _close_comms(comms: Comms) -> None:
    """Closes everything at which a rank may wait in a step, but not the program's groups."""
    channels, control = _live_comms(comms)
    with control.closing:
        control.close()
        channels.close()
        forget_loss_channels(comms.mesh, channels)
        comms.mesh.made.forget_ended()


class Agreement:
    """Description of how a step or function was built, hashed once per plan, and compared in each call.

    Every call is collective and agrees, since the hash is part of a message that ranks exchange anyway. Only pure
    functions exchange no such message, and agree before the first call with each plan.

    Args:
        lines: facts that must be equal on all ranks that run one plan, besides the plan itself.
    """

    def __init__(self, lines: Callable[[Plan], Sequence[str]]) -> None:
        self._lines = lines
        # By id, never used again: the step's planner keeps all plans, and plans of phases, as long as this object
        # lives.
        self._constants: dict[Any, Constant] = {}
        self._agreed: set[tuple[int, str]] = set()

    def agree(self, comms: Comms, what: str, plan: Plan) -> None:
        """Compares the description, and the results of the optimizer's functions of the tree (such as masks, labels).

        Raises:
            RankError: ranks disagree, or run another call.
        """
        # The user's functions are asked about the tree here, and may raise only on this rank.
        with told_before(comms.control):
            constant = self.constant(plan)
        agree_on_step(comms.control, what, constant=constant)

    def agree_once(self, plan: Plan, what: str) -> None:
        """Compares the description, before the first of several calls of a pure function."""
        mesh = plan.mesh
        if not has_peers(mesh) or (id(plan), what) in self._agreed:
            return
        constant = self.constant(plan)
        with untransformed():
            agree_on_step(comms_of(mesh).control, what, constant=constant)
        # Only after success: else the next call compares again.
        self._agreed.add((id(plan), what))

    def constant(self, plan: Plan, opt_state: PyTree = None) -> Constant:
        """Returns the hashed description that all calls with this plan share.

        With an optimizer state, the description has the state's layout, too.
        """
        treedef = None if opt_state is None else tree_structure(opt_state)
        key = id(plan), treedef
        if key not in self._constants:
            kept = [] if treedef is None else [f"the state of the optimizer: {treedef}"]
            self._constants[key] = Constant.of("\n".join([*self._lines(plan), plan.describe(), *kept]))
        return self._constants[key]
