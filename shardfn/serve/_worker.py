"""A rank of a server: steps of an engine whose events come from the front.

The front numbers the events and sends each to all ranks. Before a step the ranks exchange the numbers of received
events, and take the events that all ranks have, for example 5 events where two ranks have 5 and 7. So each event enters
the same step on all ranks. A rank without work sleeps in the read of its socket, and no other rank is waited for then.
"""

import os
import pathlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardfn.core import Mesh
from shardfn.engine import comms_of, losing_no_peer
from shardfn.inference import Add, Cancel, Classifier, Drain, Engine, Sampling, Token, sum_tokens

from ._ipc import (
    Capture,
    Classify,
    Embed,
    End,
    Inbox,
    LoadAdapter,
    Message,
    Profile,
    Ready,
    RemoveAdapter,
    Result,
    ScoreChoice,
    StepReport,
    pack_message,
)

# From a directory to an adapter, as `Engine.adapters.add` takes it.
ReadAdapter = Callable[[str], Any]


def run_worker(
    engine: Engine,
    end: socket.socket,
    ready: Ready,
    classifier: Classifier | None = None,
    load: ReadAdapter | None = None,
) -> None:
    """Serves until the front has sent `End`. All ranks of the engine's mesh call the function.

    Args:
        engine: idle engine.
        end: this rank's end of its pair of sockets. See `Server`.
        ready: message that the first rank sends at once.
        classifier: classification head, or None. `ready` has its classes.
        load: function from a directory to the adapter of the directory, or None without adapters that are loaded later.

    Raises:
        EOFError: the front has ended.
        RankError: another rank has ended, or differs.
    """
    first, inbox, waiting, taken = engine.mesh.rank == 0, Inbox(end), deque[Message](), 0
    results = _Results(engine, classifier)
    running, profiler = list[str](), _Profiler(engine.mesh.rank)
    if first:
        end.sendall(pack_message(ready))
    while True:
        waiting.extend(inbox.take(wait=engine.core.idle and not waiting))
        refused, changes, removed, stops = dict[str, str](), dict[int, str](), list[RemoveAdapter](), False
        for _ in range(_count_events(engine.mesh, len(waiting))):
            event = waiting.popleft()
            taken += 1
            stops = stops or isinstance(event, End)
            if isinstance(event, LoadAdapter):
                changes[event.number] = _add_adapter(engine, event, load)
            elif isinstance(event, Profile):
                changes[event.number] = profiler.change(event.path)
            elif isinstance(event, RemoveAdapter):
                removed.append(event)  # after the step, which ends cancelled requests
            else:
                refused |= _enter_event(engine, event, results)
        tokens = engine.core.step()
        made = results.take(tokens)
        changes |= {event.number: _remove_adapter(engine, event) for event in removed}
        if first:
            before, running = set(running), engine.core.running
            begun = [name for name in running if name not in before]
            counts = engine.core.stats, taken, refused, made, begun, engine.graphs.num_left
            end.sendall(pack_message(StepReport(results.remove_inner(tokens), *counts, changes)))
        results.forget(tokens)
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


class _Results:
    """Requests in progress that have a result in place of tokens."""

    def __init__(self, engine: Engine, classifier: Classifier | None) -> None:
        self._engine, self._classifier = engine, classifier
        self._events: dict[str, Embed | Classify | ScoreChoice] = {}
        self._scored: dict[str, list[Token]] = {}  # tokens so far of continuations

    def choose_sampling(self, event: Embed | Classify | ScoreChoice) -> Sampling:
        """Returns the sampling of a request.

        Raises:
            ValueError: the decoder has no hidden states.
        """
        if isinstance(event, ScoreChoice):
            return event.request.sampling
        return self._engine.embeddings.sampling(_get_pooling(event))

    def begin(self, event: Embed | Classify | ScoreChoice) -> None:
        """Waits for the result of a request that the engine has begun."""
        self._events[event.name] = event
        if not isinstance(event, ScoreChoice):
            self._engine.embeddings.begin([event.name], _get_pooling(event))

    def take(self, tokens: Sequence[Token]) -> dict[str, Result]:
        """Returns the results that are done with these tokens."""
        for token in tokens:
            if isinstance(self._events.get(token.name), ScoreChoice):
                self._scored.setdefault(token.name, []).append(token)
        done = [token.name for token in tokens if token.name in self._events and token.finish_reason == "length"]
        return {name: self._make_result(self._events[name]) for name in done}

    def remove_inner(self, tokens: Sequence[Token]) -> list[Token]:
        """Returns the tokens for clients: of a request with a result only the end."""
        return [token for token in tokens if token.name not in self._events or token.finish_reason is not None]

    def forget(self, tokens: Sequence[Token]) -> None:
        """Forgets the requests that have ended."""
        for token in tokens:
            if token.finish_reason is not None:
                self._events.pop(token.name, None)
                self._scored.pop(token.name, None)

    def _make_result(self, event: Embed | Classify | ScoreChoice) -> Result:
        if isinstance(event, ScoreChoice):
            return sum_tokens(self._scored[event.name], event.request.sampling.prompt_logprobs_start)
        state_D = self._engine.embedding(event.name, normalize=isinstance(event, Embed))
        if isinstance(event, Embed):
            return state_D.numpy().tobytes()
        assert self._classifier is not None
        return self._classifier.compute_logits(state_D).numpy().tobytes()


def _get_pooling(event: Embed | Classify) -> str:
    return event.pooling if isinstance(event, Embed) else "last"


class _Profiler:
    """Profiles of this rank by torch's profiler.

    Args:
        rank: number of the rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profile: Any = None

    def change(self, path: str) -> str:
        """Starts a profile, or ends it and writes its file. Returns "" or the reason of a refusal.

        Args:
            path: beginning of the file's name, or empty for a start.
        """
        if bool(path) != (self._profile is not None):
            return "no profile has been started" if path else "a profile has been started before"
        try:
            if not path:
                self._profile = torch.profiler.profile()
                self._profile.start()
                return ""
            profile, self._profile = self._profile, None
            profile.stop()
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(f"{path}.pid{os.getpid()}.rank{self._rank}.json.gz")
        except (OSError, RuntimeError) as error:
            return f"the profile has failed: {error}"
        return ""


def _add_adapter(engine: Engine, event: LoadAdapter, load: ReadAdapter | None) -> str:
    """Adds an adapter, and returns "", or the reason why no rank has added the adapter."""
    try:
        given, wrong = _load_adapter(event, load)
        if errors := [text for text in _gather_texts(engine.mesh, wrong) if text]:
            return errors[0]  # files that a single rank cannot read
        engine.adapters.add(event.name, given)
    except ValueError as error:
        return str(error)
    return ""


def _remove_adapter(engine: Engine, event: RemoveAdapter) -> str:
    """Removes an adapter, if the engine has the adapter. Returns "" or the reason of a refusal."""
    try:
        if event.name in engine.adapters.names:
            engine.adapters.remove(event.name)
    except ValueError as error:
        return str(error)
    return ""


def _load_adapter(event: LoadAdapter, load: ReadAdapter | None) -> tuple[Any, str]:
    """Returns the adapter of a directory, or the reason why there is none."""
    assert load is not None
    try:
        return load(event.path), ""
    except (OSError, ValueError) as error:
        return None, str(error)


def _gather_texts(mesh: Mesh, text: str) -> list[Any]:
    """Returns the texts of all ranks."""
    if mesh.size == 1:
        return [text]
    comms = comms_of(mesh)
    with losing_no_peer(comms):
        comms.control.begin("adapter of a server")
        return comms.control.gather(text)


def _enter_event(engine: Engine, event: Message, results: _Results) -> dict[str, str]:
    """Passes an event on, and returns the reason if the engine refuses a request, by the request's name."""
    match event:
        case Add() | Embed() | Classify() | ScoreChoice():
            return _begin_request(engine, event, results)
        case Cancel(_, name):
            engine.core.cancel(name)
        case Drain():
            engine.core.drain()
        case Capture():
            engine.graphs.capture_next()
    return {}


def _begin_request(engine: Engine, event: Add | Embed | Classify | ScoreChoice, results: _Results) -> dict[str, str]:
    name, request = event.name, event.request
    try:  # the server has checked the request, but has names of adapters in place of digests
        request = replace(request, adapter=engine.adapters.digest(request.adapter.decode() or None))
        if not isinstance(event, Add):
            request = replace(request, sampling=results.choose_sampling(event))
        engine.core.begin(name, engine.core.admit(request))
    except (TypeError, ValueError, ImportError) as error:
        return {name: str(error)}
    if not isinstance(event, Add):
        results.begin(event)
    return {}
