"""A rank of a server: steps of an engine whose events come from the front.

The front numbers the events and sends each to all ranks. Before a step the ranks exchange the numbers of received
events, and take the events that all ranks have, for example 5 events where two ranks have 5 and 7. So each event enters
the same step on all ranks. A rank without work sleeps in the read of its socket, and no other rank is waited for then.
"""

import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from shardfn.core import Mesh
from shardfn.engine import comms_of, losing_no_peer
from shardfn.inference import Add, Cancel, Drain, Engine, Token

from ._ipc import Capture, Embed, End, Inbox, Message, Ready, StepReport, pack_message


def run_worker(engine: Engine, end: socket.socket, ready: Ready) -> None:
    """Serves until the front has sent `End`. All ranks of the engine's mesh call the function.

    Args:
        engine: idle engine.
        end: this rank's end of its pair of sockets. See `Server`.
        ready: message that the first rank sends at once.

    Raises:
        EOFError: the front has ended.
        RankError: another rank has ended, or differs.
    """
    first, inbox, waiting, taken = engine.mesh.rank == 0, Inbox(end), deque[Message](), 0
    embeds = set[str]()  # names of requests whose prompts are embedded
    running = list[str]()
    if first:
        end.sendall(pack_message(ready))
    while True:
        waiting.extend(inbox.take(wait=engine.core.idle and not waiting))
        refused, stops = dict[str, str](), False
        for _ in range(_count_events(engine.mesh, len(waiting))):
            event = waiting.popleft()
            taken += 1
            stops = stops or isinstance(event, End)
            refused |= _enter_event(engine, event, embeds)
        tokens = engine.core.step()
        vectors = _take_vectors(engine, tokens, embeds)
        if first:
            tokens = [token for token in tokens if token.name not in embeds or token.finish_reason is not None]
            before, running = set(running), engine.core.running
            begun = [name for name in running if name not in before]
            counts = engine.core.stats, taken, refused, vectors, begun, engine.graphs.num_left
            end.sendall(pack_message(StepReport(tokens, *counts)))
        embeds -= {token.name for token in tokens if token.finish_reason is not None}
        if stops:
            return


def _count_events(mesh: Mesh, num: int) -> int:
    """Returns the number of events that all ranks have."""
    if mesh.size == 1:
        return num
    comms = comms_of(mesh)
    with losing_no_peer(comms):
        comms.control.begin("events of a server")
        return min(comms.control.exchange(num))


def _enter_event(engine: Engine, event: Message, embeds: set[str]) -> dict[str, str]:
    """Passes an event on, and returns the reason if the engine refuses a request, by the request's name."""
    match event:
        case Add(_, name, request) | Embed(_, name, request, _):
            pooling = event.pooling if isinstance(event, Embed) else None
            try:  # the server has checked the request, but has names of adapters in place of digests
                request = replace(request, adapter=engine.adapters.digest(request.adapter.decode() or None))
                if pooling is not None:
                    request = replace(request, sampling=engine.embeddings.sampling(pooling))
                engine.core.begin(name, engine.core.admit(request))
            except (TypeError, ValueError, ImportError) as error:
                return {name: str(error)}
            if pooling is not None:
                engine.embeddings.begin([name], pooling)
                embeds.add(name)
        case Cancel(_, name):
            engine.core.cancel(name)
        case Drain():
            engine.core.drain()
        case Capture():
            engine.graphs.capture_next()
    return {}


def _take_vectors(engine: Engine, tokens: Sequence[Token], embeds: set[str]) -> dict[str, bytes]:
    """Returns the embeddings that are done with these tokens."""
    done = [token.name for token in tokens if token.name in embeds and token.finish_reason == "length"]
    return {name: engine.embedding(name, normalize=True).numpy().tobytes() for name in done}
