"""A server in this process, for tests: a front in one thread, and the only rank of a tiny GPT in another."""

import asyncio
import dataclasses
import functools
import http.client
import importlib.util
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardfn import core
from shardfn.data import ByteTokenizer
from shardfn.inference import Classes, Classifier, Engine, Runner, decoder, limits_of
from shardfn.models import gpt
from shardfn.serve import Ready, Server, Settings, Text, run_worker
from shardfn.serve._ipc import Message, pack_message, read_messages
from shardfn.serve._server import bind_socket
from tests.inference.stories import adapter

CONTEXT = 512
CONFIG = gpt.Config.llama_like(
    vocab_size=256, num_layers=1, d_model=32, num_heads=2, d_ff=None, max_len=CONTEXT, batch_invariant=True
)
END = 0  # a token that ends completions
NAME = "tiny"
ADAPTERS = {"tuned": [r"wq$"], "other/one": [r"w_down$", r"wv$"]}
LIMIT = float(os.environ.get("SHARDFN_LIMIT", "60"))  # seconds; a machine with other work needs more


def chat_text(messages: list[dict[str, Any]], **options: Any) -> str:
    if any(message["content"] == "forbidden" for message in messages):
        raise ValueError("the chat template refuses these messages: forbidden")
    text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
    if options.get("continue_final_message"):
        return text[:-1]
    return text + "assistant: " * options.get("add_generation_prompt", True) + "<think>" * options.get("thinks", False)


def tool_text(messages: list[dict[str, Any]], tools: Any = (), **options: Any) -> str:
    """As `chat_text`, with tools, and calls of tools."""
    shown = "".join(f"tool: {tool['function']['name']}\n" for tool in tools)
    for m in messages:
        calls = [one["function"] for one in m.get("tool_calls", ())]
        shown += "".join(f"call: {one['name']} {one['arguments'].get('a')}\n" for one in calls)
    return shown + chat_text(messages, **options)


# A tokenizer of bytes; its template has a line for each message.
WORDS = Text(lambda text: list(text.encode()), ByteTokenizer(), chat_text)
# A template with tools, and with reasoning that the prompt may begin.
TALKS = WORDS._replace(chat=tool_text, template="tools <tool_call> <think> thinks")


def say(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Draws the text after the last SAY: of the prompt, up to the last line."""
    text = bytes(prompt).rpartition(b"SAY:")[2].rpartition(b"\nassistant: ")[0]
    made = torch.zeros_like(logits)
    made[text[len(output)] if len(output) < len(text) else END] = 1000.0
    return made


PROCESSORS = {"even": lambda output, logits: logits + (torch.arange(len(logits)) % 2 == 0) * 2.0, "say": say}


@functools.cache
def parts(context: int = CONTEXT) -> tuple[Any, Any, Any, Runner]:
    """The model, and its graphs, which all servers of this process share."""
    config = dataclasses.replace(CONFIG, max_len=context)
    made = decoder(config)
    limits = limits_of(made, running=3, buckets=(1, 4), cache_bytes=context << 11)
    return made, gpt.init(config, core.key(0)), limits, Runner(made, limits)


@functools.cache
def adapters() -> dict[str, Any]:
    """Two adapters that change tokens."""
    params = parts()[1]
    return {name: adapter(params, targets, 2, seed) for seed, (name, targets) in enumerate(ADAPTERS.items())}


def read_adapter(path: str) -> Any:
    """The adapter of a directory, whose file has the names of the changed leaves."""
    text = pathlib.Path(path, "adapter_config.json").read_text()
    if not text:
        raise ValueError(f"{path} has no adapter")
    return adapter(parts()[1], text.split(), 2, seed=5)


def new_engine(context: int = CONTEXT) -> Engine:
    made, params, limits, runner = parts(context)
    return Engine(
        made,
        params,
        limits=limits,
        runner=runner,
        tokenizer=ByteTokenizer(),
        adapters=adapters(),
        logits_processors=PROCESSORS,
    )


def classifier_of(*labels: str) -> Classifier:
    """A classification head for the tiny GPT."""
    weight = torch.randn(len(labels), CONFIG.d_model, generator=torch.Generator().manual_seed(len(labels)))
    return Classifier(weight, Classes(labels, "sigmoid" if len(labels) == 1 else "softmax"))


class OneThread:
    """The ranks of a `Front`: one, in a thread of this process.

    Args:
        slow: seconds that each step takes beside its own time.
    """

    def __init__(self, engine: Engine, slow: float = 0.0, classifier: Classifier | None = None) -> None:
        self.engine, self.slow, self.classifier = engine, slow, classifier
        self.grammars = importlib.util.find_spec("llguidance") is not None
        self._mine, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ended = threading.Event()

    def _run(self) -> None:
        step = self.engine.core.step

        def slowed() -> Any:
            time.sleep(self.slow)
            return step()

        self.engine.core.step = slowed
        ready = Ready(self.engine.limits, frozenset([END]), 256, self.grammars, "tiny", CONFIG.d_model, (*PROCESSORS,))
        if self.classifier is not None:
            ready = ready._replace(classes=self.classifier.classes)
        ready = ready._replace(embed_size=CONFIG.d_model)
        if (sources := self.engine._sources) is not None:
            ready = ready._replace(start=sources.start, width=0, embed_size=0)
        try:
            run_worker(self.engine, self._theirs, ready, self.classifier, read_adapter)
        except (EOFError, BrokenPipeError):
            pass
        finally:
            self._theirs.close()
            self._ended.set()

    async def start(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._mine)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._writer.write(pack_message(message))

    async def read(self, take: Mapping[type, Callable[[Any], None]]) -> None:
        await read_messages(self._reader, take)

    async def first_end(self) -> tuple[int, int]:
        while not self._ended.is_set():
            await asyncio.sleep(0.01)
        return 0, 1

    async def all_end(self, seconds: float) -> bool:
        return await asyncio.to_thread(self._ended.wait, seconds)

    async def end(self) -> None:
        self._writer.close()

    def die(self) -> None:
        """As a process that is killed: its end of the pair closes."""
        self.slow = 0.0
        self._theirs.shutdown(socket.SHUT_RDWR)


class Running:
    """A server until `close`, at a port of its own."""

    front: Server
    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        *,
        slow: float = 0.0,
        text: Any = None,
        classifier: Classifier | None = None,
        provider: Any = None,
        engine: Callable[[], Engine] = new_engine,
        **settings: Any,
    ) -> None:
        listener = bind_socket(Settings(NAME, port=0))
        self.port = listener.getsockname()[1]
        given: dict[str, Any] = {"adapters": tuple(ADAPTERS)} | settings
        self.settings = Settings(NAME, port=self.port, **given)
        self.made = dict[int, OneThread]()  # the last ranks of each replica
        self._parts, self._provider, self._new_engine = (slow, classifier), provider, engine
        self.status: int | None = None
        self.lines = list[str]()
        self.held = list[Any]()  # is closed with it
        self._thread = threading.Thread(target=self._run, args=(listener, WORDS if text is None else text))
        self._made = threading.Event()
        self._thread.start()
        assert self._made.wait(LIMIT)
        self.wait_for(lambda: self.front.app.model is not None)

    def _run(self, listener: socket.socket, text: Any) -> None:
        async def main() -> int:
            self.loop = asyncio.get_running_loop()
            self.front = Server(self.settings, lambda: text, self._make_ranks, self.lines.append, self._provider)
            self._made.set()
            return await self.front.run(listener)

        self.status = asyncio.run(main())

    def _make_ranks(self, replica: int) -> OneThread:
        self.made[replica] = OneThread(self._new_engine(), *self._parts)
        return self.made[replica]

    @property
    def ranks(self) -> OneThread:
        return self.made[0]

    @property
    def engine(self) -> Engine:
        return self.ranks.engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def signal(self) -> None:
        """As SIGTERM."""
        self.loop.call_soon_threadsafe(self.front.take_signal)

    def close(self) -> int:
        """Ends it; returns the exit status."""
        if self._thread.is_alive():
            self.signal()
            self.signal()
        for one in self.held:
            one.close()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive() and self.status is not None
        return self.status

    def join(self, seconds: float = LIMIT) -> int:
        """Waits for its end; returns the exit status."""
        self._thread.join(seconds)
        assert self.status is not None
        return self.status

    def wait_for(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not holds():
            assert time.monotonic() < end and self.status is None
            time.sleep(0.005)

    def wait_idle(self) -> None:
        """Waits until no request is in progress; no block is held then."""
        self.wait_for(lambda: not len(self.front.calls) and self.front.calls.behind == 0 and self.engine.idle)
        counts = self.engine.stats.counts
        assert (counts["held"], counts["running"], counts["waiting"], self.front.calls.waiting) == (0, 0, 0, 0)
        assert counts["free"] + counts["cached"] == self.engine.limits.blocks - 1

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)

    def send(self, path: str, body: Any = None, headers: Any = None, method: str = "POST") -> "Received":
        """One request by a connection of its own."""
        connection = self.connect()
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            given = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, data, {k: v for k, v in given.items() if v is not None})
            response = connection.getresponse()
            return Received(response.status, response.read(), {k.lower(): v for k, v in response.getheaders()})
        finally:
            connection.close()

    def get(self, path: str, headers: Any = None) -> "Received":
        return self.send(path, None, headers, "GET")


@dataclasses.dataclass
class Received:
    """An answer."""

    status: int
    data: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> Any:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def metric(server: Running, name: str) -> float:
    """The value of the first line of a metric."""
    lines = server.get("/metrics").data.decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + "{")).rsplit(" ", 1)[1])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
