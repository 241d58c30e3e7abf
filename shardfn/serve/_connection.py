"""Connections of HTTP, with limits that uvicorn leaves to a proxy: their number, and the time for the headers.

A client may close its writing half after a request, and still read the answer. A client that has left looks the same
until something is written. So every few seconds a note without meaning is written to a connection without a writing
half: an interim response 100, or a comment in a stream of events.
"""

import asyncio
import json
import select
import socket
from typing import Any

from ._errors import ApiError
from ._settings import Settings

_UNREAD = 1 << 18  # bytes that a connection keeps for a client that does not read, in the kernel
_NOTE_SECONDS = 2.0  # between notes to a client that may have left


def protocol(settings: Settings) -> type[asyncio.Protocol]:
    """Returns the class of a server's connections."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        """One connection of a client."""

        _deadline: asyncio.TimerHandle | None = None
        _half = False  # whether the client has closed its writing half

        def connection_made(self, transport: Any) -> None:
            """Refuses the connection above the limit, else starts the time limit for its first headers."""
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # `flow.drain` waits until nothing is left
            self.app_state = {**self.app_state, "transport": transport, "flow": self.flow}
            if len(self.connections) > settings.max_connections:
                transport.write(_make_refusal(settings.max_connections))
                transport.close()
                return
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD)
            self._await_headers(True)

        def data_received(self, data: bytes) -> None:
            """Starts the time limit for headers that have begun."""
            super().data_received(data)
            self._await_headers(self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))

        def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] # as asyncio has it
            """Keeps the connection for the answer to a request that has arrived."""
            self._half = self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)
            if self._half:
                self.loop.call_later(_NOTE_SECONDS, self._note_client)
            return self._half

        def on_response_complete(self) -> None:
            """Closes a connection from which no request can come any more."""
            super().on_response_complete()  # begins the next request, if it has arrived
            if self._half and self.cycle.response_complete:
                self.timeout_keep_alive_handler()

        def _note_client(self) -> None:
            """Finds out whether a client without a writing half has left: it answers a note by a reset."""
            if self.transport.is_closing():
                return
            poll = select.poll()
            poll.register(self.transport.get_extra_info("socket"), 0)  # a reset is reported unasked
            if poll.poll(0):
                self.transport.abort()
                return
            if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] == "1.1":
                note = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self.transport.write(self.conn.send(note) or b"")
            elif self.conn.our_state is h11.SEND_BODY and self.scope.get("state", {}).get("events"):
                self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
            self.loop.call_later(_NOTE_SECONDS, self._note_client)

        def connection_lost(self, exc: Exception | None) -> None:
            """No headers are due any more."""
            self._await_headers(False)
            super().connection_lost(exc)

        def _await_headers(self, due: bool) -> None:
            if due and self._deadline is None:
                self._deadline = self.loop.call_later(settings.header_seconds, self.transport.abort)
            elif not due and self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def send_400_response(self, msg: str) -> None:
            """Bytes that are not HTTP."""
            self.transport.write(_encode_error(ApiError(400, msg), "400 Bad Request"))
            self.transport.close()

    return Connection


def _make_refusal(most: int) -> bytes:
    error = ApiError(503, f"{most} connections are open, the most that this server takes.")
    return _encode_error(error, "503 Service Unavailable", "Retry-After: 1\r\n")


def _encode_error(error: ApiError, status: str, more: str = "") -> bytes:
    body = json.dumps(error.body)
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}"
    return f"{head}Connection: close\r\n\r\n{body}".encode()
