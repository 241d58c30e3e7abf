"""A rank of a server: steps of an engine whose events come from the front.

The front numbers the events and sends each to all ranks. Before a step the ranks exchange how many they have received,
and take those that all of them have: so each event enters the same step everywhere. A rank without work sleeps in the
read of its own socket, and the others are never waited for then.
"""

import socket
from collections import deque

from shardfn.core import Mesh
from shardfn.engine import comms_of, losing_no_peer
from shardfn.inference import Add, Cancel, Drain, Engine, Token

from ._link import End, Inbox, Message, Ready, Report, packed


def run_rank(engine: Engine, end: socket.socket, ready: Ready) -> None:
    """Serves until the front has sent `End`. All ranks of the engine's mesh call it.

    Args:
        engine: idle.
        end: this rank's end of its pair of sockets; see `Front`.
        ready: the first rank sends it at once.

    Raises:
        EOFError: the front has ended.
        RankError: another rank has ended, or differs.
    """
    first, inbox, waiting, taken = engine.mesh.rank == 0, Inbox(end), deque[Message](), 0
    if first:
        end.sendall(packed(ready))
    while True:
        waiting.extend(inbox.take(wait=engine.idle and not waiting))
        tokens, stops = list[Token](), False
        for _ in range(_of_all(engine.mesh, len(waiting))):
            event = waiting.popleft()
            taken += 1
            stops = stops or isinstance(event, End)
            tokens += _enter(engine, event)
        tokens += engine.step()
        if first:
            end.sendall(packed(Report(tokens, engine.counts(), taken, engine.guesses)))
        if stops:
            return


def _of_all(mesh: Mesh, num: int) -> int:
    """The number of events that all ranks have."""
    if mesh.size == 1:
        return num
    comms = comms_of(mesh)
    with losing_no_peer(comms):
        comms.control.begin("events of a server")
        return min(comms.control.exchange(num))


def _enter(engine: Engine, event: Message) -> list[Token]:
    """Passes an event on; returns the ends of a request that the engine refuses."""
    match event:
        case Add(_, name, request):
            try:
                more = {"priority": request.priority, "salt": request.salt}
                engine.add(request.prompt, request.sampling, name=name, **more)
            except (TypeError, ValueError):
                return [Token(name, i, 0, None, None, 0, "refused") for i in range(request.sampling.n)]
        case Cancel(_, name):
            engine.cancel(name)
        case Drain():
            engine.drain()
    return []
