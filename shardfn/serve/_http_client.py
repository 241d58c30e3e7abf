"""A client of HTTP/1.1, for requests of JSON: each has a connection of its own."""

import asyncio
import urllib.parse
from collections.abc import AsyncGenerator

_READ = 1 << 16


async def read_answer(url: str, key: str, body: bytes) -> "AsyncGenerator[tuple[int, dict[str, str]] | bytes, None]":
    """Yields the status and the headers of an answer, then the pieces of the answer's body.

    Args:
        url: whole address, for example "http://127.0.0.1:8000/v1/completions".
        key: key of the client.
        body: JSON to send.

    Raises:
        OSError: the server cannot be reached.
        h11.ProtocolError: the answer is not valid HTTP.
    """
    import h11

    parts = urllib.parse.urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        wire = h11.Connection(h11.CLIENT)
        headers = [("Host", parts.netloc), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        headers += [("Authorization", f"Bearer {key}"), ("Connection", "close")]
        request = wire.send(h11.Request(method="POST", target=parts.path, headers=headers))
        writer.write(
            (request or b"") + (wire.send(h11.Data(data=body)) or b"") + (wire.send(h11.EndOfMessage()) or b"")
        )
        await writer.drain()
        while True:
            event = wire.next_event()
            if event is h11.NEED_DATA:
                wire.receive_data(await reader.read(_READ))
            elif isinstance(event, h11.Response):
                yield event.status_code, {name.decode(): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return
    finally:
        writer.close()


async def open_answer(url: str, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Returns the status, the headers and the whole body of an answer. See `read_answer`."""
    status, headers, data = 0, dict[str, str](), bytearray()
    async for piece in read_answer(url, key, body):
        if isinstance(piece, bytes):
            data += piece
        else:
            status, headers = piece
    return status, headers, bytes(data)
