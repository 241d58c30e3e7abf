"""Processes of the ranks, started, watched and ended by the front."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ._ipc import Message, pack_message, receive_message

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
    """Ranks of one machine, each a process with a pair of sockets to the front.

    Args:
        command: function from the number of an end of a pair of sockets to the program of a rank.
        ranks: number of ranks.
        threads: threads of each rank's computation. None leaves the number.
        report: function that takes the lines of ranks' stderr, so that no rank waits for a reader.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        ranks: int,
        threads: int | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        self._command, self._ranks, self._threads, self._report = command, ranks, threads, report
        self._running: list[asyncio.subprocess.Process] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._forwarding: list[asyncio.Future[None]] = []
        self._store: Any = None

    async def start(self) -> None:
        """Starts all processes."""
        environment = dict(os.environ)
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
        data = pack_message(message)
        for writer in self._writers:
            if not writer.is_closing():
                writer.write(data)

    async def next(self) -> Any:
        """Returns the next message of the first rank.

        Raises:
            EOFError: the rank has ended.
        """
        return await receive_message(self._reader)

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
