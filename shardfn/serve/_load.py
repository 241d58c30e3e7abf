"""Load for a server: a trace of requests drawn by a seed, sent at its times, and the delays that clients see."""

import asyncio
import itertools
import json
import random
import time
import urllib.parse
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

_READ = 1 << 16


class Arrival(NamedTuple):
    """A request of a trace.

    Attributes:
        seconds: seconds after the beginning.
        prompt: token ids.
        max_tokens: number of tokens that are drawn.
    """

    seconds: float
    prompt: list[int]
    max_tokens: int


class Delays(NamedTuple):
    """Answer to a single request.

    Attributes:
        first: seconds until the first piece.
        gaps: seconds between pieces.
        whole: seconds until the end.
        tokens: tokens that were drawn.
        text: text of all pieces.
        error: error, empty for a success.
    """

    first: float
    gaps: list[float]
    whole: float
    tokens: int
    text: str = ""
    error: str = ""


def trace(
    num: int, rate: float | None, *, prompt: int = 64, drawn: int = 32, vocab: int = 256, seed: int = 0
) -> list[Arrival]:
    """Returns requests whose arrivals are independent of one another, with lengths that vary as in chats.

    Args:
        num: number of requests.
        rate: arrivals a second. None lets all arrive at once.
        prompt: median length of a prompt.
        drawn: median number of drawn tokens.
        vocab: number of ids plus 1. Ids are 1 to `vocab - 1`.
        seed: seed of the trace. Equal seeds draw equal traces.

    Example:
        >>> trace(2, None, seed=1) == trace(2, None, seed=1)
        True
    """
    draw, now, made = random.Random(seed), 0.0, []
    for _ in range(num):
        gap = draw.expovariate(1.0)
        now += gap / rate if rate else 0.0
        lengths = [max(1, min(4 * mean, round(mean * draw.lognormvariate(0, 0.7)))) for mean in (prompt, drawn)]
        made.append(Arrival(now, [draw.randrange(1, vocab) for _ in range(lengths[0])], lengths[1]))
    return made


async def measure(url: str, model: str, arrivals: Sequence[Arrival], key: str = "none") -> list[Delays]:
    """Sends a trace to a server, and returns the delays of each request, in order.

    Args:
        url: url of the interface, such as `http://127.0.0.1:8000/v1`.
        model: name of the model.
        arrivals: arrivals from `trace`.
        key: key of the client.
    """
    began = time.monotonic()

    async def measure_arrival(arrival: Arrival) -> Delays:
        await asyncio.sleep(max(0.0, began + arrival.seconds - time.monotonic()))
        return await _send_arrival(url, model, arrival, key)

    return list(await asyncio.gather(*map(measure_arrival, arrivals)))


async def _send_arrival(url: str, model: str, arrival: Arrival, key: str) -> Delays:
    body: dict[str, Any] = {"model": model, "prompt": arrival.prompt, "max_tokens": arrival.max_tokens, "seed": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    import h11

    begin, times, texts, tokens, rest = time.monotonic(), list[float](), list[str](), 0, b""
    try:
        async for data in _read_answer(url, key, json.dumps(body).encode()):
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    continue
                found = json.loads(event.removeprefix(b"data: "))
                if "error" in found:
                    return Delays(0, [], 0, 0, error=found["error"]["message"])
                if found["choices"]:
                    times.append(time.monotonic())
                    texts += [choice["text"] for choice in found["choices"]]
                tokens = found["usage"]["completion_tokens"] if found.get("usage") else tokens
    except (OSError, ValueError, h11.ProtocolError) as error:
        return Delays(0, [], 0, 0, error=f"{type(error).__name__}: {error}")
    if not times:
        return Delays(0, [], 0, 0, error=f"the server answered: {rest[:200].decode(errors='replace')}")
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return Delays(times[0] - begin, gaps, time.monotonic() - begin, tokens, "".join(texts))


async def _read_answer(url: str, key: str, body: bytes) -> AsyncGenerator[bytes, None]:
    """Yields the pieces of an answer's body, over a separate connection."""
    import h11

    parts = urllib.parse.urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        wire = h11.Connection(h11.CLIENT)
        headers = [("Host", parts.netloc), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        headers += [("Authorization", f"Bearer {key}"), ("Connection", "close")]
        target = f"{parts.path.rstrip('/')}/completions"
        request = wire.send(h11.Request(method="POST", target=target, headers=headers))
        writer.write(
            (request or b"") + (wire.send(h11.Data(data=body)) or b"") + (wire.send(h11.EndOfMessage()) or b"")
        )
        await writer.drain()
        while True:
            event = wire.next_event()
            if event is h11.NEED_DATA:
                wire.receive_data(await reader.read(_READ))
            elif isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return
    finally:
        writer.close()
