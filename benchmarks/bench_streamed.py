"""Weights on disk: the time of a step beside its roof, the longer of reading the same bytes and of its arithmetic.

    python benchmarks/bench_streamed.py --directory DIR --out FILE

    reading     all weights, by the threads of the engine, and nothing else
    files       the same files from end to end by plain system calls, `--readers` threads, past the page cache
    arithmetic  the same step of an engine whose weights are resident

They alternate with the streamed steps, and ratios are formed within a round: above 1 the step takes less time than its
roof. `--quantization` quantizes weights, so that fewer bytes are read for the same arithmetic.
"""

import argparse
import concurrent.futures
import mmap
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _report import publish, table

import shardfn as sf
from shardfn.core import tree_leaves, tree_map
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False, "batch_invariant": True}
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "num_layers": 8,
    "d_model": 768,
    "num_heads": 12,
    "d_ff": 2048,
    "max_len": 2048,
}
# Bytes of one plain reading.
AT_ONCE = 4 << 20


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    place = pathlib.Path(tempfile.mkdtemp(dir=args.directory))
    streamed = _engine(args, weights="disk", disk=sf.Disk(str(place)))
    resident = _engine(args)
    away = [x.held for x in tree_leaves(streamed.weights) if x.memory_kind == "disk"]
    nbytes = sum(x.nbytes for x in away)
    runs: dict[str, Callable[[int], float]] = {
        "reading": lambda _: _timed(lambda: [pending.result() for pending in [x.read() for x in away]]),
        "files": lambda _: _plain(place, nbytes, args.readers),
    }
    for rows in args.rows:
        runs[f"arithmetic, {rows}"] = lambda turn, rows=rows: _step(resident, rows, turn)
        runs[f"step, {rows}"] = lambda turn, rows=rows: _step(streamed, rows, turn)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(args.rounds + 1):
        found = {name: run(turn) for name, run in runs.items()}
        if turn:  # the first round warms up
            for name, seconds in found.items():
                times[name].append(seconds)
    publish("Weights on disk", "\n\n".join(_body(args, times, nbytes, away[0].pool.info().direct)), out=args.out)


def _body(args: argparse.Namespace, times: dict[str, list[float]], nbytes: int, direct: bool) -> list[str]:
    read = [(name, *_rate(times[name], nbytes)) for name in ("reading", "files")]
    threads, kind = torch.get_num_threads(), args.quantization or "float32"
    return [
        f"{args.rounds} rounds; {nbytes / 1e6:.0f} MB of weights in {kind} a step; {threads} threads of arithmetic; "
        f"direct I/O: {direct}",
        table(("read alone", "s", "GB/s"), read),
        table(
            ("rows", "reading, s", "arithmetic, s", "step, s", "roof / step", "quartiles", "reading / step"),
            [_line(rows, times) for rows in args.rows],
        ),
        f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
    ]


def _engine(args: argparse.Namespace, **how: Any) -> Engine:
    config = gpt.Config(**LLAMA, **SIZES)
    made = decoder(config, quantization=args.quantization)
    shapes = sf.eval_shape(lambda: gpt.init(config, sf.key(0)))
    params = tree_map(lambda x: torch.randn(x.shape) * 0.02, shapes)
    most = max(args.rows)
    limits = limits_of(made, running=1, buckets=tuple(sorted({1, *args.rows})), block=most)
    return Engine(made, params, limits=limits, **how)


def _step(engine: Engine, rows: int, turn: int) -> float:
    """The seconds of a step of a prompt with this number of rows, whose tokens are not in the cache."""
    prompt = [(turn * 31 + i) % 4000 for i in range(rows)]
    engine.add(prompt, Sampling(max_tokens=1))
    seconds = _timed(engine.step)
    engine.step()
    return seconds


def _plain(place: pathlib.Path, nbytes: int, readers: int) -> float:
    """The seconds of reading files of this many bytes, with direct I/O where the system has it."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    files = [(os.open(path, flags), path.stat().st_size) for path in sorted(place.rglob("*")) if path.is_file()]
    parts = [(file, start) for file, size in files for start in range(0, size, AT_ONCE)][: -(-nbytes // AT_ONCE)]

    def read(own: Sequence[tuple[int, int]]) -> None:
        with mmap.mmap(-1, AT_ONCE) as buffer:
            for file, start in own:
                os.preadv(file, [buffer], start)

    try:
        with concurrent.futures.ThreadPoolExecutor(readers) as pool:
            return _timed(lambda: list(pool.map(read, [parts[k::readers] for k in range(readers)])))
    finally:
        for file, _ in files:
            os.close(file)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _rate(seconds: Sequence[float], nbytes: int) -> tuple[str, str]:
    middle = statistics.median(seconds)
    return f"{middle:.3f}", f"{nbytes / middle / 1e9:.2f}"


def _line(rows: int, times: dict[str, list[float]]) -> tuple[str, ...]:
    reading, alone, step = times["reading"], times[f"arithmetic, {rows}"], times[f"step, {rows}"]
    ratios = [max(a, b) / c for a, b, c in zip(reading, alone, step, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    of_disk = statistics.median(a / c for a, c in zip(reading, step, strict=True))
    seconds = (f"{statistics.median(x):.3f}" for x in (reading, alone, step))
    return str(rows), *seconds, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", f"{of_disk:.2f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="on the disk to measure; default the temporary directory")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--readers", type=int, default=4, help="threads that read plain files")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
