"""Messages between the front and the ranks: over a pair of sockets, each after its length.

Numbered events go down, the same events to all ranks. One `Ready` and then a `StepReport` for each step come up, only
from the first rank. Both ends are processes of one program on one machine, so messages are pickles.
"""

import asyncio
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardfn.inference import EngineStats, Event, Limits, Request, Token

_LENGTH = 8
_READ = 1 << 18


@dataclass(frozen=True)
class End:
    """Last event: the ranks end.

    Example:
        >>> End(7).number
        7
    """

    number: int


@dataclass(frozen=True)
class Embed:
    """Request whose prompt is embedded, in place of being continued.

    Attributes:
        number: number of the event.
        name: name of the request.
        request: request with the prompt.
        pooling: see `Engine.embed`.
    """

    number: int
    name: str
    request: Request
    pooling: str


Message = Event | End | Embed


class Ready(NamedTuple):
    """Message that the engine of the ranks is warm.

    Attributes:
        limits: sizes.
        ends: tokens that end a completion.
        size: number of the tokenizer's tokens.
        grammars: whether graphs of steps with grammars are captured, too.
        about: model and its memory, in words.
        width: width of embeddings, or 0 for a model without embeddings.
        processors: names of logits processors that requests may give.
    """

    limits: Limits
    ends: frozenset[int]
    size: int
    grammars: bool
    about: str
    width: int = 0
    processors: tuple[str, ...] = ()


class StepReport(NamedTuple):
    """Result of a step.

    Attributes:
        tokens: returned tokens, and ends of requests.
        stats: counts so far, as `Engine.stats`.
        taken: number of events that the engine has taken so far.
        refused: reasons by the names of requests that the engine has refused.
        vectors: vectors by name of a request whose prompt is embedded, float32 numbers.
        begun: names of requests that have blocks since this step, and had none before.
    """

    tokens: list[Token]
    stats: EngineStats
    taken: int
    refused: Mapping[str, str]
    vectors: Mapping[str, bytes]
    begun: Sequence[str] = ()


def pack_message(value: object) -> bytes:
    """Returns a message as bytes."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH, "little") + data


async def receive_message(reader: asyncio.StreamReader) -> Any:
    """Returns the next message.

    Raises:
        EOFError: the other end has closed.
    """
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "little")
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error


class Inbox:
    """Messages that have arrived at a rank.

    Args:
        end: end of the pair of sockets.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end, self._data = end, bytearray()

    def take(self, *, wait: bool) -> list[Message]:
        """Returns the messages that are there.

        Args:
            wait: whether to sleep until there is a message.

        Raises:
            EOFError: the front has ended.
        """
        self._fill_buffer(wait=False)
        found = self._take_whole()
        while wait and not found:
            self._fill_buffer(wait=True)
            found = self._take_whole()
        return found

    def _fill_buffer(self, *, wait: bool) -> None:
        """Reads all bytes that are there."""
        some = False
        while True:
            try:
                data = self._end.recv(_READ, 0 if wait and not some else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise EOFError from error
            if not data and some:
                return  # the next call finds the end again
            if not data:
                raise EOFError
            self._data += data
            some = True

    def _take_whole(self) -> list[Message]:
        found, at = list[Message](), 0
        while len(self._data) - at >= _LENGTH:
            end = at + _LENGTH + int.from_bytes(self._data[at : at + _LENGTH], "little")
            if len(self._data) < end:
                break
            found.append(pickle.loads(self._data[at + _LENGTH : end]))
            at = end
        del self._data[:at]
        return found
