"""Covers replicas of other machines: keys, frames that were changed on their way, and processes in two networks."""

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

from shardfn import core, interop
from shardfn.checkpoint import save
from shardfn.models import gpt
from shardfn.serve import check_join_key
from shardfn.serve._join import JoinError, Joins, _JoinLink

ROOT = pathlib.Path(__file__).parents[2]
KEY = b"0123456789abcdef" * 2
LIMIT = float(os.environ.get("SHARDFN_LIMIT", "120"))
CONFIG = gpt.Config.llama_like(vocab_size=256, num_layers=1, d_model=32, num_heads=2, d_ff=None, max_len=512)


@contextlib.asynccontextmanager
async def connect(
    lines: list[str], key: bytes = KEY, change: Callable[[bytes], bytes] = bytes
) -> AsyncIterator[tuple[Joins, _JoinLink]]:
    """A front and a link to it, whose bytes to the front pass through `change`."""
    joins, writers = Joins(KEY, lines.append), list[asyncio.StreamWriter]()
    port = await joins.listen("127.0.0.1", 0)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, up_writer))

        async def copy(a: asyncio.StreamReader, b: asyncio.StreamWriter, f: Callable[[bytes], bytes]) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await a.read(1 << 16):
                    b.write(f(data))
            b.close()

        await asyncio.gather(copy(reader, up_writer, change), copy(up_reader, writer, bytes))

    relayed = await asyncio.start_server(relay, "127.0.0.1", 0)
    link = _JoinLink(*await asyncio.open_connection(*relayed.sockets[0].getsockname()), key, front=False)
    try:
        yield joins, link
    finally:
        link.close()
        joins.close()
        relayed.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.1)


def test_frames_arrive_as_they_were_sent() -> None:
    async def run() -> None:
        async with connect(lines := []) as (joins, link):
            await link.prove()
            front = await joins.get()
            for end in (front, link):  # so that a machine without power does not hold its requests for ever
                held = end._writer.get_extra_info("socket")
                assert held.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert held.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30
            for i in range(20):
                data = bytes([i]) * (i * 7000 + 1)
                link.send(data)
                front.send(data[::-1])
                assert await front.receive() == data and await link.receive() == data[::-1]
            link.close()
            assert await front.receive() == b"" and "127.0.0.1 has joined" in lines[0]
            front.close()

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("at", [0, 4, 40, -1])
def test_a_changed_frame_is_refused(at: int) -> None:
    proofs = [64]  # bytes of the joiner's nonce and proof, which are not changed

    def change(data: bytes) -> bytes:
        if proofs[0] > 0:
            proofs[0] -= len(data)
            return data
        made = bytearray(data)
        made[at] ^= 1
        return bytes(made)

    async def run() -> None:
        async with connect([], change=change) as (joins, link):
            await link.prove()
            front = await joins.get()
            link.send(b"x" * 100)
            link.close()
            if at == 0:  # the length becomes one more, and the last byte never arrives
                assert await front.receive() == b""
            else:
                with pytest.raises(JoinError, match="was changed, repeated or left out"):
                    await front.receive()
            front.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_repeated_frames_and_other_keys_are_refused() -> None:
    async def run() -> None:
        async with connect(lines := []) as (joins, link):
            await link.prove()
            front = await joins.get()
            link.send(b"one")
            link._sent = 0
            link.send(b"one")
            assert await front.receive() == b"one"
            with pytest.raises(JoinError, match="repeated"):
                await front.receive()
            front.close()
        async with connect(lines, b"another key of thirty-two bytes!") as (joins, link):
            with pytest.raises(JoinError, match="both key files equal"):
                await link.prove()
            assert "127.0.0.1 has not joined: the other end has another key" in lines[-1]
            assert joins._links.empty()

    asyncio.run(asyncio.wait_for(run(), 20))
    with pytest.raises(ValueError, match="must have at least 32 bytes, got 5"):
        check_join_key(b"short\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("joined") / "tiny"
    folder.mkdir()
    row = {"model": interop.hf_config(CONFIG), "per_head": False, "tokenizer": "bytes"}
    (folder / "model.json").write_text(json.dumps(row))
    save(folder / "checkpoints", gpt.init(CONFIG, core.key(0)), 3, at="params")
    (folder / "key").write_bytes(KEY)
    return folder


class Machine:
    """A command in a network."""

    def __init__(self, model: pathlib.Path, *args: str, network: str = "") -> None:
        small = "--budget 4 --running 3 --cache-gib 0.01".split()
        command = [sys.executable, "-m", "shardfn", "serve", str(model), *small]
        command += ["--join-key-file", str(model / "key"), *args]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = ["ip", "netns", "exec", network, *command] if network else command
        self.log = model / f"log{time.monotonic_ns()}"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stderr=out, env=environment)

    def wait_for(self, text: str) -> str:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            for line in self.log.read_text().splitlines():
                if text in line:
                    return line
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"no {text!r} in {self.log.read_text()}")

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(LIMIT)


@contextlib.contextmanager
def machines() -> Iterator[list[Machine]]:
    made = list[Machine]()
    try:
        yield made
    finally:
        for one in made:
            if one.process.poll() is None:
                one.process.kill()
                one.process.wait(LIMIT)


def ask(url: str, network: str, **more: Any) -> dict[str, Any]:
    body = json.dumps({"model": "tiny", "prompt": "ab", "max_tokens": 9, "seed": 7, "ignore_eos": True} | more)
    if network:
        command = ["ip", "netns", "exec", network, sys.executable, "-c", _ASK, url, body]
        return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=LIMIT).stdout)
    request = urllib.request.Request(f"{url}/completions", body.encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=LIMIT))


_ASK = """
import sys, urllib.request
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1] + "/completions", sys.argv[2].encode(), headers)
print(urllib.request.urlopen(request).read().decode())
"""


def run_two_machines(model: pathlib.Path, place: str, networks: Sequence[str] = ("", "")) -> None:
    """A front, a replica that joins, is killed, and joins again; equal answers, also without the front's own rank."""
    with machines() as made:
        front = Machine(model, "--port", "0", "--joined", "1", "--join-at", place, network=networks[0])
        made.append(front)
        at = front.wait_for("groups may join at ").rpartition(" ")[2]
        url = front.wait_for("ready at ").partition("ready at ")[2].partition(",")[0]
        want = ask(url, networks[0])["choices"][0]["text"]
        for turn in range(2):
            ranks = ["--mesh", "tp=2"] if turn else []  # equal bits
            joined = Machine(model, "--join", at, *ranks, network=networks[1])
            made.append(joined)
            joined.wait_for("has joined")
            front.wait_for("replica 1 is ready")
            while front.log.read_text().count("replica 1 is ready") < turn + 1:
                time.sleep(0.05)
            assert [ask(url, networks[0])["choices"][0]["text"] for _ in range(4)] == [want] * 4
            joined.process.kill()
            joined.process.wait(LIMIT)
            front.wait_for("it may join again")
            assert ask(url, networks[0])["choices"][0]["text"] == want
        other = Machine(model, "--join", at, "--context", "64", network=networks[1])
        made.append(other)
        front.wait_for("replica 1 is refused: a replica must have the model and the options of the first one")
        assert other.process.wait(LIMIT) == 0
        assert front.end() == 0


@pytest.mark.nightly
def test_a_machine_joins_and_leaves(model: pathlib.Path) -> None:
    run_two_machines(model, "127.0.0.1:0")


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two networks with a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("networks need root and ip")
    names, ends = [f"shardfn{os.getpid()}{x}" for x in "ab"], [f"sf{os.getpid() % 10**6}{x}" for x in "ab"]

    def call(*args: str) -> None:
        subprocess.run(["ip", *args], check=True, capture_output=True)

    try:
        call("netns", "add", names[0])
    except subprocess.CalledProcessError:
        pytest.skip("this system has no networks")
    try:
        call("netns", "add", names[1])
        call("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for i, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            call("-n", name, "addr", "add", f"10.213.7.{i}/24", "dev", end)
            call("-n", name, "link", "set", end, "up")
            call("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.nightly
def test_machines_in_two_networks(model: pathlib.Path, networks: list[str]) -> None:
    run_two_machines(model, "10.213.7.1:0", networks)
