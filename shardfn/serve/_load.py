"""Load for a server: a trace of requests drawn by a seed, sent at its times, and the delays that clients see."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ._http_client import read_answer


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
        async for data in read_answer(f"{url.rstrip('/')}/completions", key, json.dumps(body).encode()):
            if not isinstance(data, bytes):
                continue
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
