"""Answers to clients that may leave or stall, sent in pieces. The client must take each piece in time."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx hands events on at once
]
_PIECE = 1 << 16  # bytes


class Disconnected(Exception):
    """The client has left."""


class Stalled(Exception):
    """The client does not read. Its connection was closed."""


class EventStream:
    """Sender of events. The events end when the client leaves, or does not take a piece in time.

    Args:
        events: pieces of the answer.
        ended: function called at the end, with "" or "disconnected".
    """

    def __init__(self, events: AsyncIterator[bytes], ended: Callable[[str], None]) -> None:
        self._events, self._ended = events, ended

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Sends the events of an answer to the client."""
        how = ""
        scope.setdefault("state", {})["events"] = True  # so that a connection may write comments
        try:
            await while_connected(self._send_events(send), receive)
        except Disconnected:
            how = "disconnected"
        finally:
            self._ended(how)

    async def _send_events(self, send: "Send") -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def pace_answer(send: "Send", scope: "Scope", seconds: float) -> "Send":
    """Returns a function that sends an answer piece by piece, and waits for the client to take each.

    Args:
        send: function that sends a message, or puts the message in the buffer of a connection.
        scope: scope of the request. The scope's state has the connection.
        seconds: time in which a client must take a piece.

    The function raises `Stalled` if a piece is not taken. The connection is closed then.
    """
    state = scope.get("state", {})
    if "flow" not in state:
        return send

    async def send_piece(message: "Message") -> None:
        await send(message)
        if state["flow"].write_paused:
            try:
                async with asyncio.timeout(seconds):
                    await state["flow"].drain()
            except TimeoutError as error:
                _drop_connection(state["transport"])
                raise Stalled from error

    async def send_pieces(message: "Message") -> None:
        body = message.get("body", b"")
        if len(body) <= _PIECE:
            return await send_piece(message)
        for at in range(0, len(body), _PIECE):
            more = message.get("more_body", False) or at + _PIECE < len(body)
            await send_piece({**message, "body": body[at : at + _PIECE], "more_body": more})

    return send_pieces


def _drop_connection(transport: asyncio.Transport) -> None:
    """Closes a connection and drops the bytes that the client has not read, also those in the kernel."""
    end = transport.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def while_connected(work: Coroutine[Any, Any, Any], receive: "Receive") -> Any:
    """Returns the result of some work, if the client is there until the work is done. The body must have been read.

    Raises:
        Disconnected: the client has left. The work was cancelled.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _wait_disconnect(receive: "Receive") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
