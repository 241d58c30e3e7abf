"""Connections of HTTP, with limits that uvicorn leaves to a proxy: their number, and the time for the headers."""

import asyncio
import json
import socket
from typing import Any

from ._errors import ApiError
from ._settings import Settings

_UNREAD = 1 << 18  # bytes that a connection keeps for a client that does not read, in the kernel


def protocol(settings: Settings) -> type[asyncio.Protocol]:
    """The class of a server's connections."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        """One connection."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Refuses it above the limit; else the headers of its first request are due."""
            super().connection_made(transport)
            self.app_state = {**self.app_state, "transport": transport}
            if len(self.connections) > settings.max_connections:
                transport.write(_refusal(settings.max_connections))
                transport.close()
                return
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD)
            self._await_headers(True)

        def data_received(self, data: bytes) -> None:
            """Headers that have begun are due."""
            super().data_received(data)
            self._await_headers(self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))

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
            self.transport.write(_raw(ApiError(400, msg), "400 Bad Request"))
            self.transport.close()

    return Connection


def _refusal(most: int) -> bytes:
    error = ApiError(503, f"{most} connections are open, the most that this server takes.")
    return _raw(error, "503 Service Unavailable", "Retry-After: 1\r\n")


def _raw(error: ApiError, status: str, more: str = "") -> bytes:
    body = json.dumps(error.body)
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}"
    return f"{head}Connection: close\r\n\r\n{body}".encode()
