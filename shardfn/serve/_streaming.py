"""Answers that are sent while they are made, to clients that may leave or stall."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx hands events on at once
]


class Disconnected(Exception):
    """The client has left."""


class EventStream:
    """Sends events; the client's leaving, or a piece that it does not take in time, ends them.

    Args:
        events: the pieces.
        stall_seconds: that the client may leave a piece in the server.
        ended: is called at the end, with "", "disconnected" or "stalled".
    """

    def __init__(self, events: AsyncIterator[bytes], stall_seconds: float, ended: Callable[[str], None]) -> None:
        self._events, self._stall_seconds, self._ended = events, stall_seconds, ended

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Sends them."""
        how = "disconnected"
        try:
            await while_connected(self._send(send), receive)
            how = ""
        except Disconnected:
            pass
        except TimeoutError:
            how = "stalled"
            if (transport := scope.get("state", {}).get("transport")) is not None:
                # Pieces that the client has not read are dropped, also those in the kernel, which would keep them.
                end = transport.get_extra_info("socket")
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                transport.abort()
        finally:
            self._ended(how)

    async def _send(self, send: "Send") -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async for data in self._events:
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        async with asyncio.timeout(self._stall_seconds):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(work: Coroutine[Any, Any, Any], receive: "Receive") -> Any:
    """The result of some work, if the client is there until it is done; the body must have been read.

    Raises:
        Disconnected: the client has left; the work was cancelled.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
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


async def _left(receive: "Receive") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
