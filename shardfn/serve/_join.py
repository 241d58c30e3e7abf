"""Replicas on other machines: a group of ranks that joins a front by an address and a key.

front -- one connection -- joiner -- pairs of sockets -- ranks

Both ends prove that they have the key before anything else is read, and the key itself is never sent. Each frame then
has a number and a code by the key (HMAC), so that no message that another program has written, changed, repeated or
left out is ever unpickled. Frames are not encrypted.

    front -> joiner     nonce                           joiner -> front     nonce, proof
    front -> joiner     proof, frames                   joiner -> front     frames
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._ipc import Message, WorkerProcesses, pack_message, read_messages

_NONCE, _CODE, _LENGTH = 32, 32, 4
_MOST = 1 << 28  # bytes of a frame
_CHUNK = 1 << 16
_SECONDS = 10.0  # for a proof
_LEAST_KEY = 32  # bytes
# A machine that is gone without a word ends its connection within these seconds, also between two requests.
_SILENCE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


class JoinError(ConnectionError):
    """The other end has not proved that it has the key, or a frame is not its own."""


class _JoinLink:
    """A connection whose ends have proved that they have the key.

    Args:
        reader: reader of the connection.
        writer: writer of the connection.
        key: key of both ends.
        front: whether this end is the front.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, front: bool) -> None:
        self._reader, self._writer, self._key, self._front = reader, writer, key, front
        self._own, self._other = (b"front", b"joiner") if front else (b"joiner", b"front")
        self._sent = self._received = 0
        self.closed = asyncio.Event()
        end = writer.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _SILENCE.items():
            if hasattr(socket, name):  # of Linux
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    async def prove(self) -> None:
        """Proves that this end has the key, and checks the other end's proof.

        Raises:
            JoinError: the other end does not have the key, or takes longer than 10 s.
        """
        try:
            async with asyncio.timeout(_SECONDS):
                mine = os.urandom(_NONCE)
                if self._front:
                    self._writer.write(mine)
                    theirs, proof = await self._reader.readexactly(_NONCE), await self._reader.readexactly(_CODE)
                    both = mine + theirs
                else:
                    theirs = await self._reader.readexactly(_NONCE)
                    both = theirs + mine
                    self._writer.write(mine + _sign(self._key, self._own, both))
                    proof = await self._reader.readexactly(_CODE)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            raise JoinError("the other end has sent no proof that it has the key. Are both key files equal?") from error
        if not hmac.compare_digest(proof, _sign(self._key, self._other, both)):
            raise JoinError("the other end has another key. Give both ends the same file.")
        if self._front:
            self._writer.write(_sign(self._key, self._own, both))
        self._key = _sign(self._key, b"frames", both)

    def send(self, data: bytes) -> None:
        """Sends some bytes."""
        if self._writer.is_closing():
            return
        code = self._sign_frame(self._own, self._sent, data)
        self._sent += 1
        self._writer.write(len(data).to_bytes(_LENGTH, "little") + code + data)

    async def receive(self) -> bytes:
        """Returns the bytes of the next frame, or none at the end.

        Raises:
            JoinError: the frame is not the other end's next one.
        """
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH), "little")
            if length > _MOST:
                raise JoinError(f"a frame must have at most {_MOST} bytes, got {length}.")
            code, data = await self._reader.readexactly(_CODE), await self._reader.readexactly(length)
        except JoinError:
            raise
        except (asyncio.IncompleteReadError, OSError):
            return b""
        if not hmac.compare_digest(code, self._sign_frame(self._other, self._received, data)):
            raise JoinError("a frame was changed, repeated or left out on its way.")
        self._received += 1
        return data

    def _sign_frame(self, sender: bytes, number: int, data: bytes) -> bytes:
        return _sign(self._key, sender + number.to_bytes(8, "little"), data)

    def close(self) -> None:
        """Closes the connection."""
        self.closed.set()
        with contextlib.suppress(Exception):
            self._writer.close()


def _sign(key: bytes, name: bytes, data: bytes) -> bytes:
    return hmac.digest(key, name + b":" + data, hashlib.sha256)


def check_join_key(key: bytes) -> bytes:
    r"""Returns a key without its end of line.

    Raises:
        ValueError: the key is too short to be secret.

    Example:
        >>> check_join_key(b"0123456789" * 4 + b"\n")[-2:]
        b'89'
    """
    key = key.strip()
    if len(key) < _LEAST_KEY:
        raise ValueError(
            f"a key must have at least {_LEAST_KEY} bytes, got {len(key)}. Make it by openssl rand -hex 32"
        )
    return key


class Joins:
    """The front's listener for groups of ranks of other machines.

    Args:
        key: key of both ends.
        report: function that takes lines for the user.
    """

    def __init__(self, key: bytes, report: Callable[[str], None]) -> None:
        self._key, self._report = key, report
        self._links = asyncio.Queue[_JoinLink]()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Listens at an address, and returns the port."""
        self._server = await asyncio.start_server(self._take, host, port)
        return self._server.sockets[0].getsockname()[1]

    async def get(self) -> _JoinLink:
        """Returns the next group's connection."""
        while (link := await self._links.get()).closed.is_set():
            pass
        return link

    def close(self) -> None:
        """Takes no further groups."""
        if self._server is not None:
            self._server.close()
        while not self._links.empty():
            self._links.get_nowait().close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link, peer = _JoinLink(reader, writer, self._key, front=True), writer.get_extra_info("peername")
        try:
            await link.prove()
        except JoinError as error:
            self._report(f"shardfn serve: {peer[0]} has not joined: {error}")
            link.close()
            return
        self._report(f"shardfn serve: {peer[0]} has joined")
        self._links.put_nowait(link)


class JoinedWorkers:
    """Ranks of another machine, as `WorkerProcesses` for a front.

    Args:
        joins: listener of the front.
        report: function that takes lines for the user.
    """

    def __init__(self, joins: Joins, report: Callable[[str], None]) -> None:
        self._joins, self._report = joins, report
        self._link: _JoinLink | None = None
        self._stream = asyncio.StreamReader()
        self._pump: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Waits until a group joins."""
        self._link = await self._joins.get()
        self._pump = asyncio.ensure_future(self._feed(self._link))

    async def _feed(self, link: _JoinLink) -> None:
        try:
            while data := await link.receive():
                self._stream.feed_data(data)
        except JoinError as error:
            self._report(f"shardfn serve: error: a group of ranks is lost: {error}")
        finally:
            self._stream.feed_eof()
            link.close()

    def send(self, message: Message) -> None:
        """Sends a message to all ranks."""
        if self._link is not None:
            self._link.send(pack_message(message))

    async def read(self, take: Mapping[type, Callable[[Any], None]]) -> None:
        """Passes on the messages of the first rank, until the group ends. See `read_messages`."""
        await read_messages(self._stream, take)

    async def first_end(self) -> tuple[int, int]:
        """Returns rank 0, and status 1, once the connection has ended."""
        assert self._link is not None
        await self._link.closed.wait()
        return 0, 1

    async def all_end(self, seconds: float) -> bool:
        """Returns whether the connection ends within some seconds."""
        if self._link is None:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._link.closed.wait(), seconds)
        return self._link.closed.is_set()

    async def end(self) -> None:
        """Closes the connection, at which the ranks end."""
        if self._link is not None:
            self._link.close()
        if self._pump is not None:
            self._pump.cancel()


async def join_front(host: str, port: int, key: bytes, workers: WorkerProcesses, report: Callable[[str], None]) -> int:
    """Starts ranks of this machine as a replica of a front, until the front or a rank ends.

    Args:
        host: host of the front.
        port: port at which the front awaits groups.
        key: key of both ends.
        workers: ranks, not started yet.
        report: function that takes lines for the user.

    Returns:
        The exit status: 0 after the front's end, or the status of a rank that has ended.

    Raises:
        OSError: the front cannot be reached, or has another key.
    """
    link = _JoinLink(*await asyncio.open_connection(host, port), key, front=False)
    try:
        await link.prove()
        report(f"shardfn serve: has joined {host}:{port}")
        await workers.start()

        async def pass_down() -> None:
            while data := await link.receive():
                workers.send_bytes(data)

        async def pass_up() -> None:
            while data := await workers.receive_bytes(_CHUNK):
                link.send(data)

        down, up = asyncio.ensure_future(pass_down()), asyncio.ensure_future(pass_up())
        ended = asyncio.ensure_future(workers.first_end())
        try:
            await asyncio.wait({down, up, ended}, return_when=asyncio.FIRST_COMPLETED)
            if down.done():
                down.result()
                return 0
            with contextlib.suppress(TimeoutError):
                _, status = await asyncio.wait_for(asyncio.shield(ended), 1.0)
                return status if status >= 0 else 1
            return 1
        finally:
            for task in (down, up, ended):
                task.cancel()
    finally:
        link.close()
        await workers.end()


def run_joiner(
    host: str,
    port: int,
    key: bytes,
    command: Callable[[int], Sequence[str]],
    *,
    ranks: int = 1,
    threads: int | None = None,
    report: Callable[[str], None] = print,
) -> int:
    """Runs ranks of this machine as a replica of a front on another machine, until SIGTERM or SIGINT, or an end.

    Args:
        host: host of the front.
        port: port at which the front awaits groups.
        key: key of both ends.
        command: function from the number of a rank's end of the pair of sockets to the rank's program.
        ranks: number of ranks.
        threads: threads of each rank's computation. None leaves the number.
        report: function that takes lines for the user.

    Returns:
        The exit status: 0 after a signal or the front's end, or the status of a rank that has ended.

    Raises:
        OSError: the front cannot be reached, or has another key.
    """

    async def run() -> int:
        workers = WorkerProcesses(command, ranks, threads, report)
        joining = asyncio.ensure_future(join_front(host, port, key, workers, report))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, joining.cancel)
        try:
            return await joining
        except asyncio.CancelledError:
            return 0

    return asyncio.run(run())
