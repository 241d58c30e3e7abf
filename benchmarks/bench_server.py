"""The server beside its own engine on one trace, many streams at once, and its cost without requests.

    python benchmarks/bench_server.py --out benchmarks/results/server.md

Parts:

    ratio    tokens a second of clients, over those of `Engine.generate` on the same trace, all arriving at once. The
             server's front and the clients share the cores with the only rank. On a machine with other load the
             processor times are the better measure: the rank's over the engine's
    requests `--count` short requests, 64 at a time, to a server that guesses: lost answers, and memory, among it that
             of the texts from which drafts come
    streams  `--streams` at a time for `--seconds`: lost answers, equal requests with other texts, and memory
    idle     processor time of front and two ranks without requests, in parts of one core
    starts   seconds until a server of two ranks is ready, and processor seconds of its processes and compilers, with an
             empty cache of C++ and with the same cache, full
    replicas tokens a second of two replicas of one thread, over those of one, on one trace in turns; and the tokens of
             prompts that are found in the cache, on a trace of conversations with common beginnings. Each replica
             needs a core, and the clients and fronts share these
    rates    `shardfn bench serve --rates --slo` of `--model`, a GGUF file for example: latency against throughput, and
             the goodput
    kills    seconds from the end of one of two ranks, by `kill -9`, until the last of 50 streams has its error; for
             `--kills` servers

Engine and server take turns within a round; ratios are formed within it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from _report import publish, table

from shardfn import core, interop
from shardfn.checkpoint import save
from shardfn.data import ByteTokenizer
from shardfn.inference import Engine, Runner, Sampling, decoder, limits_of
from shardfn.models import gpt
from shardfn.serve import Arrival, measure, trace

SIZES = {
    "33.7M": {"vocab_size": 8192, "num_layers": 8, "d_model": 512, "num_heads": 8, "d_ff": 1408, "max_len": 512},
    "tiny": {"vocab_size": 256, "num_layers": 2, "d_model": 32, "num_heads": 2, "d_ff": None, "max_len": 512},
}
BUDGET, RUNNING = 128, 32
_KILLED = 50  # streams
_FEW = ("--running", "8", "--budget", "16")  # a server with few graphs starts soon
TICK = os.sysconf("SC_CLK_TCK")


class Server:
    """A server as a process."""

    def __init__(self, process: Any, url: str, pids: list[int]) -> None:
        self.process, self.url, self.pids = process, url, pids

    def seconds(self) -> list[float]:
        """The processor time of the front and each rank."""
        lines = [pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in self.pids]
        return [(int(line[11]) + int(line[12])) / TICK for line in lines]

    def memory(self) -> list[float]:
        """The memory of each, in MiB."""
        texts = [pathlib.Path(f"/proc/{pid}/status").read_text() for pid in self.pids]
        return [int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) / 1024 for text in texts]

    def metric(self, name: str) -> float:
        """The sum of a metric over replicas."""
        text = urllib.request.urlopen(self.url.removesuffix("/v1") + "/metrics").read().decode()
        return sum(float(x) for x in re.findall(rf"^{name}\S* (\S+)$", text, re.MULTILINE))

    def open_streams(self) -> int:
        """The number of streams that it serves."""
        text = urllib.request.urlopen(self.url.removesuffix("/v1") + "/metrics").read().decode()
        return int(float(re.findall(r"^shardfn:open_streams\S* (\S+)$", text, re.MULTILINE)[0]))


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["ratio", "streams", "requests", "idle"])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kills", type=int, default=2, help="servers that lose a rank, up to 4; %(default)s")
    parser.add_argument("--model", default="", help="of the rates (default: the model of 33.7M parameters)")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0], help="arrivals a second")
    parser.add_argument("--slo", nargs="+", default=["p95_ttft=1s", "p95_itl=100ms"])
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = {"ratio": ratio_part, "streams": streams_part, "requests": requests_part, "idle": idle_part}
    parts |= {"starts": starts_part, "kills": kills_part, "replicas": replicas_part, "rates": rates_part}
    load = f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    publish("The server", "\n\n".join([load, *(f"## {x}\n\n{parts[x](args)}" for x in args.parts)]), out=args.out)


@contextlib.contextmanager
def running(
    folder: pathlib.Path, ranks: int = 1, more: Sequence[str] = (), variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Server]:
    """A server of a run of train_gpt, with some environment variables."""
    sizes = ["--running", RUNNING, "--budget", BUDGET, "--cache-gib", 0.5, "--max-waiting-tokens", 10**9]
    command = [sys.executable, "-m", "shardfn", "serve", folder, "--port", 0, "--name", "it", "--mesh", f"tp={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    flat = [str(x) for x in [*command, *sizes, *more]]
    process = subprocess.Popen(flat, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    found = next((x for line in process.stderr if (x := re.search(r"ready at (\S+),", line))), None)
    assert found is not None, "the server has ended"
    children = _children(process.pid)
    assert not any(map(_children, children)), "a rank has processes of its own, which nothing here counts"
    try:
        yield Server(process, found[1], [process.pid, *children])
    finally:
        process.terminate()
        process.communicate()


def _children(pid: int) -> list[int]:
    """The processes that a process has started."""
    threads = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in threads for child in path.read_text().split()]


def made(size: str, folder: pathlib.Path) -> tuple[gpt.Config, Any]:
    """A model without training, written as train_gpt does."""
    config = gpt.Config.llama_like(**SIZES[size])  # pyright: ignore[reportArgumentType]
    params = gpt.init(config, core.key(0))
    row = {"model": interop.hf_config(config), "per_head": False, "tokenizer": "bytes"}
    (folder / "model.json").write_text(json.dumps(row))
    save(folder / "checkpoints", params, 1, at="params")
    return gpt.Config.llama_like(**SIZES[size], batch_invariant=True), params  # pyright: ignore[reportArgumentType]


def ratio_part(args: argparse.Namespace) -> str:
    """Tokens a second by the server and by its engine."""
    head = ["model", "engine, tokens/s", "server, tokens/s", "ratio", "quartiles"]
    head += [f"{x}, us a token" for x in ("engine", "front", "rank", "clients")]
    return table(head, [ratio_row(size, args) for size in args.sizes])


def ratio_row(size: str, args: argparse.Namespace) -> list[str]:
    """One model."""
    rates: dict[str, list[float]] = {"engine": [], "server": []}
    costs = list[list[float]]()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as held:
        config, params = made(size, pathlib.Path(place))
        model = decoder(config)
        limits = limits_of(model, running=RUNNING, buckets=(1, 2, 4, 8, 12, 16, 24, 32, 48, 64, BUDGET))
        runner = Runner(model, limits)
        Engine(model, params, limits=limits, runner=runner).warm_up()
        server = held.enter_context(running(pathlib.Path(place)))
        arrivals = trace(args.requests, None, prompt=64, drawn=48)
        drawn = sum(one.max_tokens for one in arrivals)
        samplings = [Sampling(max_tokens=one.max_tokens) for one in arrivals]
        for _ in range(args.rounds):
            engine = Engine(model, params, limits=limits, runner=runner, tokenizer=ByteTokenizer())
            start, alone = time.perf_counter(), time.process_time()
            engine.generate([one.prompt for one in arrivals], samplings)
            rates["engine"].append(drawn / (time.perf_counter() - start))
            alone = time.process_time() - alone
            before, client, start = server.seconds(), time.process_time(), time.perf_counter()
            _ask(server, arrivals)
            rates["server"].append(drawn / (time.perf_counter() - start))
            used = [b - a for a, b in zip(before, server.seconds(), strict=True)]
            costs.append([1e6 * x / drawn for x in [alone, *used, time.process_time() - client]])
    ratios = [b / a for a, b in zip(rates["engine"], rates["server"], strict=True)]
    low, mid, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    each = [f"{statistics.median(x):.0f}" for x in zip(*costs, strict=True)]
    medians = [f"{statistics.median(rate):.0f}" for rate in rates.values()]
    return [size, *medians, f"{mid:.2f}", f"{low:.2f} .. {high:.2f}", *each]


def streams_part(args: argparse.Namespace) -> str:
    """Streams that are open at one time, each followed by the next one; equal prompts must have equal texts."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as held:
        made("tiny", pathlib.Path(place))
        server = held.enter_context(running(pathlib.Path(place)))
        memory = [server.memory()]
        lost, count, texts = list[str](), list[int](), dict[tuple[int, int], set[str]]()

        async def one(i: int, end: float) -> None:
            while time.monotonic() < end:
                made = await measure(server.url, "it", [Arrival(0, [1 + i % 250, 2], 16 + i % 8)])
                lost.extend(x.error for x in made if x.error)
                texts.setdefault((i % 250, i % 8), set()).update(x.text for x in made)
                count.append(len(made))

        async def everything(seconds: float) -> None:
            await asyncio.gather(*(one(i, time.monotonic() + seconds) for i in range(args.streams)))

        for part in (0.1, 0.45, 0.45):
            asyncio.run(everything(part * args.seconds))
            memory.append(server.memory())
        mixed = sum(len(found) - 1 for found in texts.values())
    rows = [[name, *(f"{x[i]:.0f}" for x in memory)] for i, name in enumerate(("front", "rank"))]
    note = (
        f"{args.streams} at a time for {args.seconds:.0f} s: {sum(count)} requests, {len(lost)} failed, {mixed} texts"
    )
    note += " differ from those of equal requests"
    return note + "\n\n" + table(["MiB", "before", "after 10%", "after 55%", "after all"], rows)


def requests_part(args: argparse.Namespace) -> str:
    """Many short requests, 64 at a time; memory is read after a tenth of them, and after each further fifth or so."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as held:
        made("tiny", pathlib.Path(place))
        server = held.enter_context(running(pathlib.Path(place), more=["--drafter", "suffix"]))
        marks, memory, failed, done = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0), [server.memory()], list[str](), 0
        began = time.monotonic()

        async def some(numbers: Iterator[int]) -> None:
            for i in numbers:
                [found] = await measure(server.url, "it", [Arrival(0, [1 + i % 250, 1 + i // 250 % 250, 3], 2 + i % 5)])
                failed.extend([found.error] if found.error else [])

        async def everything(begin: int, end: int) -> None:
            numbers = iter(range(begin, end))
            await asyncio.gather(*(some(numbers) for _ in range(64)))

        for mark in marks:
            asyncio.run(everything(done, done := round(mark * args.count)))
            memory.append(server.memory())
        seconds = time.monotonic() - began
    rows = [[name, *(f"{x[i]:.1f}" for x in memory)] for i, name in enumerate(("front", "rank"))]
    note = (
        f"{args.count} requests in {seconds:.0f} s, {len(failed)} failed{': ' if failed else ''}{'; '.join(failed[:3])}"
    )
    return note + "\n\n" + table(["MiB", "before", *(f"after {mark:.0%}" for mark in marks)], rows)


def idle_part(args: argparse.Namespace) -> str:
    """Processor time without requests."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as held:
        made("tiny", pathlib.Path(place))
        server = held.enter_context(running(pathlib.Path(place), ranks=2))
        asyncio.run(measure(server.url, "it", [Arrival(0, [1, 2], 4)]))
        time.sleep(2)
        before = server.seconds()
        time.sleep(args.seconds)
        parts = [100 * (b - a) / args.seconds for a, b in zip(before, server.seconds(), strict=True)]
    each = ", ".join(f"{x:.2f}%" for x in parts)
    return f"{sum(parts):.2f}% of a core over {args.seconds:.0f} s (front, rank 0, rank 1: {each})"


def starts_part(args: argparse.Namespace) -> str:
    """The start of servers of two ranks, with and without built C++."""
    rows = list[list[str]]()
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as cache:
        made("tiny", pathlib.Path(place))
        for name in ("empty", *["full"] * args.rounds):
            before, began = _seconds_of_children(), time.monotonic()
            with running(pathlib.Path(place), ranks=2, more=_FEW, variables={"XDG_CACHE_HOME": cache}):
                ready = time.monotonic() - began
            files = sum(path.suffix == ".so" for path in pathlib.Path(cache, "shardfn").iterdir())
            rows.append([name, f"{ready:.1f}", f"{_seconds_of_children() - before:.1f}", str(files)])
    return table(["cache", "ready after, s", "processor, s", "built files then"], rows)


def replicas_part(args: argparse.Namespace) -> str:
    """Two replicas beside one."""
    rates, hits = {1: list[float](), 2: list[float]()}, dict[int, float]()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as held:
        made(args.sizes[0], pathlib.Path(place))
        few = ("--running", "8", "--budget", "32")  # a server with few graphs starts soon
        more = {1: few, 2: (*few, "--replicas", "2", "--oversubscribe")}
        servers = {n: held.enter_context(running(pathlib.Path(place), more=more[n])) for n in more}
        for server in servers.values():
            _ask(server, _talks(0, 8))
        while servers[2].metric("shardfn:replica_up") < 2:
            time.sleep(0.1)
        arrivals = trace(args.requests, None, prompt=64, drawn=48)
        drawn = sum(one.max_tokens for one in arrivals)
        for _ in range(args.rounds):
            for n, server in servers.items():
                start = time.perf_counter()
                _ask(server, arrivals)
                rates[n].append(drawn / (time.perf_counter() - start))
        for n, server in servers.items():
            before = [server.metric(f"vllm:prefix_cache_{x}_total") for x in ("hits", "queries")]
            for turn in range(3):
                _ask(server, _talks(turn, 16))  # fits the cache of one
            after = [server.metric(f"vllm:prefix_cache_{x}_total") for x in ("hits", "queries")]
            hits[n] = (after[0] - before[0]) / (after[1] - before[1])
    ratios = [b / a for a, b in zip(rates[1], rates[2], strict=True)]
    low, mid, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    rows = [[str(n), f"{statistics.median(rates[n]):.0f}", f"{hits[n]:.1%}"] for n in rates]
    note = f"ratio of tokens/s {mid:.2f} ({low:.2f} .. {high:.2f}), of hits {hits[2] / hits[1]:.3f}"
    return table(["replicas", "tokens/s", "tokens of prompts found"], rows) + f"\n\n{note}"


def rates_part(args: argparse.Namespace) -> str:
    """Latency against throughput."""
    from shardfn.cli._bench_rates import parse_slo, run_rates, write_rates

    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as held:
        folder = pathlib.Path(args.model or place)
        if not args.model:
            made("33.7M", folder)
        server = held.enter_context(running(folder, more=["--context", "512"]))
        slos = [parse_slo(text) for text in args.slo]

        def make_trace(rate: float | None) -> list[Arrival]:
            return trace(args.requests, rate, prompt=64, drawn=32, vocab=8192)

        async def send(arrivals: list[Arrival]) -> Any:
            return await measure(server.url, "it", arrivals)

        rows, _ = run_rates(args.rates, make_trace, send, slos)
    name = folder.name if args.model else "33.7M"
    about = f"{name}, {args.requests} requests a rate, prompts of 64 and answers of 32 tokens in the median"
    return f"{about}\n\n```text\n{write_rates(rows, slos)}\n```"


def _talks(turn: int, num: int) -> list[Arrival]:
    """A turn of some conversations: 8 common beginnings of 128 tokens, and 48 tokens for each turn."""
    made = list[Arrival]()
    for i in range(num):
        begin, own = random.Random(i % 8), random.Random(1000 + i)
        prompt = [begin.randrange(256) for _ in range(128)] + [own.randrange(256) for _ in range(48 * (turn + 1))]
        made.append(Arrival(0.05 * i, prompt, 8))
    return made


def _seconds_of_children() -> float:
    """Processor time of all processes that have ended, among them those that these have started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kills_part(args: argparse.Namespace) -> str:
    """The delay of errors, for each rank, at the first tokens and later."""
    rows = list[list[str]]()
    for rank, after in [(rank, after) for after in (0.0, 0.5) for rank in (0, 1)][: args.kills]:
        with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as held:
            made("tiny", pathlib.Path(place))
            server = held.enter_context(running(pathlib.Path(place), ranks=2, more=_FEW))
            seconds, errors = asyncio.run(_killed(server, rank, after))
            status = server.process.wait()
        rows.append([str(rank), f"{after:.1f}", f"{seconds:.2f}", f"{errors} of {_KILLED}", str(status)])
    return table(["rank", "killed after, s", "last error after, s", "streams with the error", "exit status"], rows)


async def _killed(server: Server, rank: int, after: float) -> tuple[float, int]:
    """Kills a rank once all streams are open, and some seconds later; the delay of the last error, and their number."""
    asking = asyncio.ensure_future(measure(server.url, "it", [Arrival(0, [1, 2], 500)] * _KILLED))
    while await asyncio.to_thread(server.open_streams) < _KILLED:
        assert not asking.done(), asking.result()
        await asyncio.sleep(0.05)
    await asyncio.sleep(after)
    os.kill(server.pids[1 + rank], signal.SIGKILL)
    began = time.monotonic()
    found = await asking
    return time.monotonic() - began, sum(f"Rank {rank} of the engine" in x.error for x in found)


def _ask(server: Server, arrivals: list[Arrival]) -> None:
    found = asyncio.run(measure(server.url, "it", arrivals))
    assert not any(one.error for one in found), found
    assert [one.tokens for one in found] == [one.max_tokens for one in arrivals]


if __name__ == "__main__":
    main()
