"""The front: the process that clients connect to. It has no tensors, and outlives the ranks, to report their end.

clients -- HTTP -- front -- pairs of sockets -- ranks
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from shardfn.inference import Compiler, detokenizer

from ._app import App
from ._connection import protocol
from ._errors import ApiError
from ._ipc import Ready, WorkerProcesses
from ._join import JoinedWorkers, Joins
from ._log import Log, reporting_records
from ._message_formats import find_reasoning_format, find_tool_format
from ._metrics import Metrics, RequestTraces, make_trace_provider
from ._model import Model, Text, find_longest
from ._replicas import ReplicaEnd, ReplicaSet, Workers
from ._request_tracker import RequestTracker
from ._settings import Settings

ENDING = "The server ends."
Work = Callable[[str], Coroutine[Any, Any, int]]
_LAST_WORDS = 3.0  # seconds in which clients read their error events
_WAITING = 1 << 16  # tokens in line, unless the settings have a number
_LAST_STEPS = 10.0  # seconds in which a process ends


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
        make_workers: function from the number of a replica to its ranks, not started yet.
        report: function that takes lines for the user.
        provider: provider of OpenTelemetry's tracers for spans of requests, or None.
    """

    def __init__(
        self,
        settings: Settings,
        load_text: Callable[[], Text],
        make_workers: Callable[[int], Workers],
        report: Callable[[str], None] = print,
        provider: Any = None,
    ) -> None:
        self.settings, self._load_text, self._report = settings, load_text, report
        self.metrics = Metrics(settings.name, settings.replicas)
        traces = None if provider is None else RequestTraces(provider, settings.name)
        self.calls = RequestTracker(settings.replicas, self.metrics, settings.max_waiting or _WAITING, traces)
        self.replicas = ReplicaSet(settings, make_workers, self.calls, self.metrics, report)
        self.app = App(settings, self.calls, self.metrics)
        self.signals = 0
        self._signal, self._ready = asyncio.Event(), asyncio.Event()
        self._first: Ready | None = None

    async def run(self, listener: socket.socket, work: Work | None = None) -> int:
        """Serves until a signal, until the end of `work`, or until a replica ends that is not started again.

        Args:
            listener: bound socket. Clients are answered from the start, before the model is loaded.
            work: function from the server's address to work that begins when the model is ready.

        Returns:
            The exit status: 0 after a signal, the result of `work` after its end, or 1 if a rank has ended. If a rank
            ended before the model was ready, the rank's status.
        """
        server = _make_server(self.app.asgi(), self.settings)
        serving = asyncio.ensure_future(server.serve([listener]))
        text = asyncio.ensure_future(asyncio.to_thread(self._load_text))

        def begin(replica: int, ready: Ready) -> str:
            if self._first is None:
                self._first = ready
                self._begin_serving(text.result(), ready)
            elif wrong := _find_difference(self._first, ready):
                return wrong
            if self.settings.replicas > 1:
                self._report(f"shardfn serve: replica {replica} is ready")
            return ""

        running = asyncio.ensure_future(self.replicas.run(begin, text))
        signalled = asyncio.ensure_future(self._signal.wait())
        working = {asyncio.ensure_future(self._do_work(work))} if work is not None else set[asyncio.Future[int]]()
        try:
            await asyncio.wait({running, signalled, serving, *working}, return_when=asyncio.FIRST_COMPLETED)
            if running.done() or serving.done():
                return await self._end_lost(running)
            status = await self._drain_calls(running)
            return status or sum([await task for task in working])
        finally:
            server.ended.set()
            await serving
            for task in (running, signalled, *working):
                task.cancel()
            await self.replicas.close()

    @property
    def _url(self) -> str:
        host, port = self.settings.host, self.settings.port
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _do_work(self, work: Work) -> int:
        """Does the work of the server's process itself, once the model is ready."""
        await self._ready.wait()
        return await work(self._url)

    def take_signal(self) -> None:
        """Takes a signal. The first ends the server once its requests are done, and the second at once."""
        self.signals += 1
        self._signal.set()

    def _begin_serving(self, text: Text, ready: Ready) -> None:
        settings = self.settings
        spelling, texts = detokenizer(text.tokenizer, special=True), detokenizer(text.tokenizer)
        compiler = Compiler(texts, ready.limits.vocab) if ready.grammars else None
        fixed = settings.name, text, spelling
        more = {"texts": texts, "adapters": settings.adapters, "defaults": settings.defaults}
        template = text.template
        more |= {"tools": find_tool_format(settings.tool_call_parser, template)}
        more |= {"reasoning": find_reasoning_format(settings.reasoning_parser, template)}
        more |= {
            "pooling": settings.pooling,
            "classes": ready.classes,
            "generates": ready.generates,
            "start": ready.start,
            "embed_size": ready.embed_size if settings.prompt_embeds else 0,
        }
        more |= {"width": ready.width, "processors": ready.processors, "longest": find_longest(spelling)}
        self.app.model = Model(*fixed, ready.limits, ready.ends, settings.max_choices, compiler, **more)
        self.calls.max_waiting = settings.max_waiting or max(_WAITING, ready.limits.context)
        self._report(ready.about)
        self._report(f"shardfn serve: ready at {self._url}/v1, model {settings.name!r}")
        self._ready.set()

    async def _end_lost(self, running: asyncio.Future[ReplicaEnd]) -> int:
        """Sends an error to each stream, and ends the server."""
        if not running.done():  # the front itself has ended
            return 1
        end = running.result()
        text = self.replicas.describe(end)
        self.app.closed = f"{text}; the server ends."
        self.calls.fail_all(ApiError(503, self.app.closed, code="engine_dead"))
        again = f", after {self.settings.restarts} restarts in a row" if self.settings.restarts else ""
        self._report(f"shardfn serve: error: {text[0].lower()}{text[1:]}{again}")
        await self._wait_quiet(_LAST_WORDS)
        return 1 if self.app.model is not None or end.status <= 0 else end.status

    async def _drain_calls(self, running: asyncio.Future[ReplicaEnd]) -> int:
        """Lets requests in progress end, for a limited time."""
        self.app.closed, self.replicas.ending = ENDING, True
        self._report(f"shardfn serve: ends when {len(self.calls)} requests in progress are done")
        self.calls.drain()
        waiting = asyncio.ensure_future(self._wait_quiet(self.settings.drain_seconds))
        again = asyncio.ensure_future(self._wait_signals())
        await asyncio.wait({waiting, again, running}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        again.cancel()
        if running.done():
            return await self._end_lost(running)
        self.calls.fail_all(ApiError(503, "The server ends; this request was cancelled.", code="server_ends"))
        await self._wait_quiet(_LAST_WORDS)
        if self.app.model is not None:
            self.calls.stop()
            await self.replicas.all_end(_LAST_STEPS)
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


def _find_difference(first: Ready, other: Ready) -> str:
    """Returns the difference of two replicas that are to give equal answers, or ""."""
    names = [name for name in Ready._fields if name not in ("about", "graphs_left")]
    wrong = [name for name in names if getattr(first, name) != getattr(other, name)]
    if not wrong:
        return ""
    pairs = (f"{name} {getattr(other, name)!s:.80} in place of {getattr(first, name)!s:.80}" for name in wrong)
    return f"a replica must have the model and the options of the first one, got {'; '.join(pairs)}"


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
    environment: Callable[[int], Mapping[str, str]] = lambda replica: MappingProxyType({}),
    report: Callable[[str], None] = print,
    work: Work | None = None,
) -> int:
    """Starts ranks and serves their model until SIGTERM, SIGINT, or the end of a rank that is not started again.

    Args:
        settings: settings of the server.
        load_text: function that returns the tokenizer of the model, called in a thread while the ranks start.
        command: function from the number of a rank's end of the pair of sockets to the rank's program, such as a
            program that calls `run_worker`.
        ranks: number of ranks of each replica.
        threads: threads of each rank's computation. None leaves the number.
        environment: function from the number of a replica to variables of its ranks' environment.
        report: function that takes lines for the user, also lines that the ranks write to stderr. The function is
            called in a thread. It may wait or fail, and the server continues.
        work: function from the server's address to work of this process, which begins when the model is ready, and
            whose end is the server's end.

    Returns:
        The exit status.

    Raises:
        OSError: the address cannot be listened at.
        ImportError: the settings have traces, and OpenTelemetry is missing.
        ValueError: this process may open fewer files than `settings.max_connections` needs.
    """
    allow_connections(settings)
    listener = bind_socket(settings)
    settings = replace(settings, port=listener.getsockname()[1])

    provider, log = None if settings.traces is None else make_trace_provider(settings.traces), Log(report)

    joins = Joins(settings.join_key, log)

    def make_workers(replica: int) -> Workers:
        def report_line(line: str) -> None:
            log(f"replica {replica}: {line}" if settings.replicas > 1 else line)

        if replica >= settings.replicas - settings.joined:
            return JoinedWorkers(joins, report_line)
        return WorkerProcesses(command, ranks, threads, report_line, environment(replica))

    async def run_front() -> int:
        front = Server(settings, load_text, make_workers, log, provider)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, front.take_signal)
        if settings.joined:
            host = settings.join_at[0]
            log(f"shardfn serve: {settings.joined} groups may join at {host}:{await joins.listen(*settings.join_at)}")
        try:
            return await front.run(listener, work)
        finally:
            joins.close()

    try:
        with reporting_records(log):
            return asyncio.run(run_front())
    finally:
        if provider is not None:
            provider.shutdown()
        log.close()


_OWN = 64  # files of the front: its sockets, the ranks' sockets, and files that a tokenizer reads


def allow_connections(settings: Settings) -> None:
    """Raises this process's limit on open files where it is below the number of connections.

    Otherwise connections beyond the limit would wait without an answer, instead of being refused by an answer.

    Raises:
        ValueError: the system does not permit so many files.

    Example:
        >>> allow_connections(Settings("gpt", max_connections=8))
    """
    import resource  # systems other than Unix lack it

    needed = settings.max_connections + _OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return
    if hard != unlimited and hard < needed:
        raise ValueError(
            f"max_connections is {settings.max_connections}, and this process may open {hard} files, with {_OWN} for"
            f" the server itself. Use at most {max(0, hard - _OWN)}, or raise the limit: ulimit -n {needed}."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
