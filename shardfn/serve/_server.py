"""The front: the process that clients reach. The front has no tensors, and goes on when a rank ends, to report the end.

clients -- HTTP -- front -- pairs of sockets -- ranks
"""

import asyncio
import contextlib
import functools
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from shardfn.inference import Compiler, detokenizer

from ._app import App
from ._connection import protocol
from ._errors import ApiError
from ._ipc import Message, Ready, StepReport, WorkerProcesses
from ._log import Log, reporting_records
from ._message_formats import find_reasoning_format, find_tool_format
from ._metrics import Metrics
from ._model import Model, Text, find_longest
from ._open_files import allow_connections
from ._request_tracker import RequestTracker
from ._settings import Settings

ENDING = "The server ends."
_LAST_WORDS = 3.0  # seconds in which clients read their error events
_WAITING = 1 << 16  # tokens in line, unless the settings have a number
_LAST_STEPS = 10.0  # seconds in which a process ends


class Workers(Protocol):
    """Ranks as a front sees them: `WorkerProcesses`, or stand-ins in tests."""

    async def start(self) -> None:
        """Starts all ranks."""

    def send(self, message: Message) -> None:
        """Sends a message to all ranks."""

    async def read(self, take: Mapping[type, Callable[[Any], None]]) -> None:
        """Passes on the messages of the first rank by their types, until the rank ends."""

    async def first_end(self) -> tuple[int, int]:
        """Returns the first rank that ends, and its status."""
        ...

    async def all_end(self, seconds: float) -> bool:
        """Returns whether all ranks end within some seconds."""
        ...

    async def end(self) -> None:
        """Ends all ranks."""


def _make_server(app: Any, settings: Settings) -> Any:
    """Returns a server of uvicorn whose signals the front takes."""
    import uvicorn

    class Quiet(uvicorn.Server):
        ended = asyncio.Event()

        def capture_signals(self) -> Any:
            return contextlib.nullcontext()

        async def main_loop(self) -> None:
            await self.ended.wait()  # uvicorn's default wakes ten times a second

    config = uvicorn.Config(
        app,
        http=protocol(settings),
        **{"ws": "none", "lifespan": "off", "log_config": None, "log_level": "warning", "access_log": False},
        **{"interface": "asgi3", "proxy_headers": False, "server_header": False, "date_header": False},
        timeout_graceful_shutdown=1,
        backlog=min(settings.max_connections, 2048),
    )
    return Quiet(config)


class Server:
    """Server without its ranks.

    Args:
        settings: settings of the server.
        load_text: function that returns the tokenizer, called in a thread while the ranks start.
        ranks: ranks, not started yet.
        report: function that takes lines for the user.
    """

    def __init__(
        self,
        settings: Settings,
        load_text: Callable[[], Text],
        ranks: Workers,
        report: Callable[[str], None] = print,
    ) -> None:
        self.settings, self._load_text, self._ranks, self._report = settings, load_text, ranks, report
        self.metrics = Metrics(settings.name)
        self.calls = RequestTracker(ranks.send, self.metrics, settings.max_waiting or _WAITING)
        self.app = App(settings, self.calls, self.metrics)
        self.signals = 0
        self._signal = asyncio.Event()

    async def run(self, listener: socket.socket) -> int:
        """Serves until a signal, or until a rank ends.

        Args:
            listener: bound socket. Clients are answered from the start, before the model is loaded.

        Returns:
            The exit status: 0 after a signal, or 1 if a rank has ended. If a rank ended before the model was ready, the
            rank's status.
        """
        server = _make_server(self.app.asgi(), self.settings)
        serving = asyncio.ensure_future(server.serve([listener]))
        try:
            await self._ranks.start()
            return await self._until_the_end(serving, await asyncio.to_thread(self._load_text))
        finally:
            server.ended.set()
            await serving
            await self._ranks.end()

    def take_signal(self) -> None:
        """Takes a signal. The first ends the server once its requests are done, and the second at once."""
        self.signals += 1
        self._signal.set()

    async def _until_the_end(self, serving: asyncio.Future[None], text: Text) -> int:
        begin = functools.partial(self._begin_serving, text)
        reading = asyncio.ensure_future(self._ranks.read({StepReport: self.calls.report, Ready: begin}))
        ended = asyncio.ensure_future(self._ranks.first_end())
        signalled = asyncio.ensure_future(self._signal.wait())
        try:
            await asyncio.wait({reading, ended, signalled, serving}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and (error := reading.exception()) is not None:
                self._report(f"shardfn serve: error: the front has failed: {type(error).__name__}: {error}")
            if not signalled.done() or reading.done() or ended.done():
                return await self._end_lost(ended)
            return await self._drain_calls(ended)
        finally:
            for task in (reading, ended, signalled):
                task.cancel()

    def _begin_serving(self, text: Text, ready: Ready) -> None:
        settings = self.settings
        spelling, texts = detokenizer(text.tokenizer, special=True), detokenizer(text.tokenizer)
        compiler = Compiler(texts, ready.limits.vocab) if ready.grammars else None
        fixed = settings.name, text, spelling
        more = {"texts": texts, "adapters": settings.adapters, "defaults": settings.defaults}
        template = text.template
        more |= {"tools": find_tool_format(settings.tool_call_parser, template)}
        more |= {"reasoning": find_reasoning_format(settings.reasoning_parser, template)}
        more |= {"pooling": settings.pooling, "classes": ready.classes, "generates": ready.generates}
        more |= {"width": ready.width, "processors": ready.processors, "longest": find_longest(spelling)}
        self.app.model = Model(*fixed, ready.limits, ready.ends, settings.max_choices, compiler, **more)
        self.calls.max_waiting = settings.max_waiting or max(_WAITING, ready.limits.context)
        self._report(ready.about)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._report(f"shardfn serve: ready at http://{host}:{settings.port}/v1, model {settings.name!r}")
        self.calls.capture_next(ready.graphs_left)

    async def _end_lost(self, ended: asyncio.Future[tuple[int, int]]) -> int:
        """Sends an error to each stream, and ends the server."""
        # A process closes its sockets before its status is known. A server that has not begun has no waiting clients.
        patience = 1.0 if self.app.model is not None else _LAST_STEPS
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ended), patience)
        rank, status = ended.result() if ended.done() else (0, 1)
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        begun = self.app.model is not None
        self.app.closed = f"Rank {rank} of the engine has ended, {how}; the server ends."
        self.calls.fail_all(ApiError(503, self.app.closed, code="engine_dead"))
        self._report(f"shardfn serve: error: rank {rank} has ended {how}")
        await self._wait_quiet(_LAST_WORDS)
        return 1 if begun or status <= 0 else status

    async def _drain_calls(self, ended: asyncio.Future[tuple[int, int]]) -> int:
        """Lets requests in progress end, for a limited time."""
        self.app.closed = ENDING
        self._report(f"shardfn serve: ends when {len(self.calls)} requests in progress are done")
        self.calls.drain()
        waiting = asyncio.ensure_future(self._wait_quiet(self.settings.drain_seconds))
        again = asyncio.ensure_future(self._wait_signals())
        await asyncio.wait({waiting, again, ended}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        again.cancel()
        if ended.done():
            return await self._end_lost(ended)
        self.calls.fail_all(ApiError(503, "The server ends; this request was cancelled.", code="server_ends"))
        await self._wait_quiet(_LAST_WORDS)
        if self.app.model is not None:
            self.calls.stop()
            await self._ranks.all_end(_LAST_STEPS)
        return 0

    async def _wait_signals(self) -> None:
        while self.signals < 2:
            self._signal.clear()
            await self._signal.wait()

    async def _wait_quiet(self, seconds: float) -> None:
        """Waits until no call is in progress, no longer than some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self.calls):
                    await asyncio.sleep(0.02)


def bind_socket(settings: Settings) -> socket.socket:
    """Returns a socket that listens at a server's address. Port 0 becomes a free port.

    Raises:
        OSError: the address is in use, or is not of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(min(settings.max_connections, 2048))
    except OSError:
        listener.close()
        raise
    return listener


def serve(
    settings: Settings,
    load_text: Callable[[], Text],
    command: Callable[[int], Sequence[str]],
    *,
    ranks: int = 1,
    threads: int | None = None,
    report: Callable[[str], None] = print,
) -> int:
    """Starts ranks and serves their model until SIGTERM, SIGINT, or the end of a rank.

    Args:
        settings: settings of the server.
        load_text: function that returns the tokenizer of the model, called in a thread while the ranks start.
        command: function from the number of a rank's end of the pair of sockets to the rank's program, such as a
            program that calls `run_worker`.
        ranks: number of ranks.
        threads: threads of each rank's computation. None leaves the number.
        report: function that takes lines for the user, also lines that the ranks write to stderr. The function is
            called in a thread. It may wait or fail, and the server goes on.

    Returns:
        The exit status.

    Raises:
        OSError: the address cannot be listened at.
        ValueError: this process may open fewer files than `settings.max_connections` needs.
    """
    allow_connections(settings)
    listener = bind_socket(settings)
    settings = replace(settings, port=listener.getsockname()[1])

    log = Log(report)

    async def run_front() -> int:
        front = Server(settings, load_text, WorkerProcesses(command, ranks, threads, log), log)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, front.take_signal)
        return await front.run(listener)

    try:
        with reporting_records(log):
            return asyncio.run(run_front())
    finally:
        log.close()
