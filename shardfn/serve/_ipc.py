"""Ranks of a server as the server sees them: processes, and messages over pairs of sockets, each after its length.

Numbered events go down, the same events to all ranks. One `Ready` and then a `StepReport` for each step come up, only
from the first rank. Both ends are processes of one program on a single machine, so messages are pickles.
"""

import asyncio
import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist

from shardfn.inference import Classes, EngineStats, Event, Limits, Request, Score, Token

_LENGTH = 8
_READ = 1 << 18


@dataclass(frozen=True)
class End:
    """Last event: the ranks end.

    Example:
        >>> End(7).number
        7
    """

    number: int


@dataclass(frozen=True)
class Embed:
    """Request whose prompt is embedded, in place of being continued.

    Attributes:
        number: number of the event.
        name: name of the request.
        request: request with the prompt.
        pooling: see `Engine.embed`.
    """

    number: int
    name: str
    request: Request
    pooling: str


@dataclass(frozen=True)
class Classify:
    """Request whose prompt is classified, in place of being continued.

    Attributes:
        number: number of the event.
        name: name of the request.
        request: request with the prompt.
    """

    number: int
    name: str
    request: Request


@dataclass(frozen=True)
class ScoreChoice:
    """Request whose prompt ends with a continuation that is scored. No token is drawn.

    Attributes:
        number: number of the event.
        name: name of the request.
        request: request with the sampling of `make_score_sampling`.
    """

    number: int
    name: str
    request: Request


@dataclass(frozen=True)
class Capture:
    """Event of an idle engine: the ranks capture a graph that their start has left.

    Attributes:
        number: number of the event.
    """

    number: int


@dataclass(frozen=True)
class LoadAdapter:
    """Event that adds an adapter to the engine, on all ranks or on none.

    Attributes:
        number: number of the event.
        name: name of the adapter for requests.
        path: directory of the adapter.
    """

    number: int
    name: str
    path: str


@dataclass(frozen=True)
class RemoveAdapter:
    """Event that removes an adapter from the engine.

    Attributes:
        number: number of the event.
        name: name of the adapter.
    """

    number: int
    name: str


@dataclass(frozen=True)
class Profile:
    """Event that starts a profile of the ranks, or ends it.

    Attributes:
        number: number of the event.
        path: beginning of the names of the files at the end of a profile, or empty for a start.
    """

    number: int
    path: str = ""


Change = LoadAdapter | RemoveAdapter | Profile
Message = Event | End | Embed | Classify | ScoreChoice | Capture | Change
# Result of a request in place of tokens: an embedding or the logits of classes, float32 numbers, or a score.
Result = bytes | Score


class Ready(NamedTuple):
    """Message that the engine of the ranks is warm.

    Attributes:
        limits: sizes.
        ends: tokens that end a completion.
        size: number of the tokenizer's tokens.
        grammars: whether graphs of steps with grammars are captured, too.
        about: model and its memory, in words.
        width: width of embeddings, or 0 for a model without embeddings.
        processors: names of logits processors that requests may give.
        graphs_left: number of graphs to capture while the engine is idle.
        classes: classes of the model, or None for a model without a classification head.
        generates: whether the model has logits of tokens.
        start: first token of the decoder's sequence of an encoder-decoder model, or None for a decoder.
        embed_size: width of the embeddings that prompts may have in place of tokens, or 0.
    """

    limits: Limits
    ends: frozenset[int]
    size: int
    grammars: bool
    about: str
    width: int = 0
    processors: tuple[str, ...] = ()
    graphs_left: int = 0
    classes: Classes | None = None
    generates: bool = True
    start: int | None = None
    embed_size: int = 0


class StepReport(NamedTuple):
    """Result of a step.

    Attributes:
        tokens: returned tokens, and ends of requests.
        stats: counts so far, as `Engine.stats`.
        taken: number of events that the engine has taken so far.
        refused: reasons by the names of requests that the engine has refused.
        changes: result of each `Change`, by the event's number: the reason of a refusal, or "" for a success.
        results: results by the names of requests that have a result in place of tokens.
        begun: names of requests that have blocks since this step, and had none before.
        graphs_left: as of `Ready`.
    """

    tokens: list[Token]
    stats: EngineStats
    taken: int
    refused: Mapping[str, str]
    results: Mapping[str, Result]
    begun: Sequence[str] = ()
    graphs_left: int = 0
    changes: Mapping[int, str] = MappingProxyType({})


def pack_message(value: object) -> bytes:
    """Returns a message as bytes."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH, "little") + data


async def read_messages(reader: asyncio.StreamReader, take: Mapping[type, Callable[[Any], None]]) -> None:
    """Passes each message on, until the other end closes.

    Args:
        reader: end of the pair of sockets.
        take: functions by the types of messages.
    """
    while True:
        try:
            length = int.from_bytes(await reader.readexactly(_LENGTH), "little")
            data = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        message = pickle.loads(data)
        take[type(message)](message)


class Inbox:
    """Messages that have arrived at a rank.

    Args:
        end: end of the pair of sockets.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end, self._data = end, bytearray()

    def take(self, *, wait: bool) -> list[Message]:
        """Returns the messages that are there.

        Args:
            wait: whether to sleep until there is a message.

        Raises:
            EOFError: the front has ended.
        """
        self._fill_buffer(wait=False)
        found = self._take_whole()
        while wait and not found:
            self._fill_buffer(wait=True)
            found = self._take_whole()
        return found

    def _fill_buffer(self, *, wait: bool) -> None:
        """Reads all bytes that are there."""
        some = False
        while True:
            try:
                data = self._end.recv(_READ, 0 if wait and not some else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise EOFError from error
            if not data and some:
                return  # the next call finds the end again
            if not data:
                raise EOFError
            self._data += data
            some = True

    def _take_whole(self) -> list[Message]:
        found, at = list[Message](), 0
        while len(self._data) - at >= _LENGTH:
            end = at + _LENGTH + int.from_bytes(self._data[at : at + _LENGTH], "little")
            if len(self._data) < end:
                break
            found.append(pickle.loads(self._data[at + _LENGTH : end]))
            at = end
        del self._data[:at]
        return found


# The processes of the ranks.

_CHUNK = 1 << 16
_PATIENCE = 1.0  # seconds in which a process ends by itself, before a kill: a loading process does not listen


_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def _store_at_loopback() -> dist.TCPStore:
    """Returns the store by which ranks meet. A store that torch binds takes connections of other machines, too."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    more = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore("127.0.0.1", port, is_master=True, **more)


class WorkerProcesses:
    """Ranks of a single machine, each a process with a pair of sockets to the front.

    Args:
        command: function from the number of an end of a pair of sockets to the program of a rank.
        ranks: number of ranks.
        threads: threads of each rank's computation. None leaves the number.
        report: function that takes the lines of ranks' stderr, so that no rank waits for a reader.
        environment: further variables of the ranks' environment.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        ranks: int,
        threads: int | None = None,
        report: Callable[[str], None] = print,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._environment = environment
        self._command, self._ranks, self._threads, self._report = command, ranks, threads, report
        self._running: list[asyncio.subprocess.Process] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._forwarding: list[asyncio.Future[None]] = []
        self._store: Any = None

    async def start(self) -> None:
        """Starts all processes."""
        environment = {**os.environ, **self._environment}
        if self._threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._threads)
        if self._ranks > 1:
            # Kept here, so that the end of a rank takes the store from no other rank.
            self._store = _store_at_loopback()
            port = str(self._store.port)
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            environment.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
            environment |= {"WORLD_SIZE": str(self._ranks), "LOCAL_WORLD_SIZE": str(self._ranks)}
        for rank in range(self._ranks):
            mine, theirs = socket.socketpair()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self._ranks > 1 else {}
            errors, into = os.pipe()
            self._forwarding.append(asyncio.ensure_future(_forward_lines(errors, self._report)))
            with theirs, open(into, "wb") as stderr:
                process = await asyncio.create_subprocess_exec(
                    *self._command(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=environment | own,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C at a terminal reaches only the front
                )
            self._running.append(process)
            reader, writer = await asyncio.open_connection(sock=mine)
            self._writers.append(writer)
            if rank == 0:
                self._reader = reader

    @property
    def pids(self) -> list[int]:
        """Returns the numbers of the processes."""
        return [process.pid for process in self._running]

    def send(self, message: Message) -> None:
        """Sends a message to all ranks."""
        self.send_bytes(pack_message(message))

    async def receive_bytes(self, most: int) -> bytes:
        """Returns some bytes of the first rank's messages, none at its end."""
        return await self._reader.read(most)

    def send_bytes(self, data: bytes) -> None:
        """Sends bytes of messages to all ranks."""
        for writer in self._writers:
            if not writer.is_closing():
                writer.write(data)

    async def read(self, take: Mapping[type, Callable[[Any], None]]) -> None:
        """Passes on the messages of the first rank, until the rank ends. See `read_messages`."""
        await read_messages(self._reader, take)

    async def first_end(self) -> tuple[int, int]:
        """Returns the first rank that ends, and its status."""
        waits = {asyncio.ensure_future(p.wait()): rank for rank, p in enumerate(self._running)}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            task = min(done, key=lambda task: (task.result() >= 0, waits[task]))  # a signal is a cause, not an effect
            return waits[task], task.result()
        finally:
            for task in waits:
                task.cancel()

    async def end(self) -> None:
        """Ends the remaining ranks, and reports their last lines."""
        for writer in self._writers:
            with contextlib.suppress(Exception):
                writer.close()
        await asyncio.gather(*map(_end_process, self._running))
        if self._forwarding:
            await asyncio.wait(self._forwarding, timeout=_PATIENCE)  # a process of a rank's own may keep its stderr
        for task in self._forwarding:
            task.cancel()

    async def all_end(self, seconds: float) -> bool:
        """Returns whether all ranks end within some seconds."""
        waits = [asyncio.ensure_future(process.wait()) for process in self._running]
        _, left = await asyncio.wait(waits, timeout=seconds)
        for task in left:
            task.cancel()
        return not left


async def _forward_lines(end: int, report: Callable[[str], None]) -> None:
    """Reports the lines of a pipe until it is closed. A bar that is drawn over itself is reported in its last state."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), open(end, "rb"))
    rest = b""
    try:
        while data := await reader.read(_CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-_CHUNK:]
            for line in lines:
                report(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))
        if rest:
            report(rest.rpartition(b"\r")[2].decode(errors="replace"))
    finally:
        transport.close()


async def _end_process(process: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), _PATIENCE)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
