"""Weights on disk: the time of a step beside that of reading the same files alone, past the page cache.

    python benchmarks/bench_streamed.py --directory DIR --out FILE

The floor is a reading of all weights by the same threads, with direct I/O, and nothing else. Readings and steps of
1 and of `--rows` rows alternate; the ratio is that of a reading to the step after it.
"""

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from _report import publish, table

import shardfn as sf
from shardfn.core import tree_leaves, tree_map
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False, "exact": True}
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "num_layers": 8,
    "d_model": 768,
    "num_heads": 12,
    "d_ff": 2048,
    "max_len": 512,
}


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    engine = _engine(args.directory, args.rows)
    away = [x.held for x in tree_leaves(engine.weights) if x.memory_kind == "disk"]
    nbytes, info = sum(x.nbytes for x in away), away[0].pool.info()
    times: dict[str, list[float]] = {"reading": [], "1 row": [], f"{args.rows} rows": []}
    for turn in range(args.rounds + 1):
        found = {"reading": _timed(lambda: [pending.result() for pending in [x.read() for x in away]])}
        found["1 row"] = _step(engine, 1, turn)
        found[f"{args.rows} rows"] = _step(engine, args.rows, turn)
        if turn:
            for name, seconds in found.items():
                times[name].append(seconds)
    lines = [_line(name, times, nbytes) for name in times]
    body = [
        f"{args.rounds} rounds; {nbytes / 1e6:.0f} MB of float32 weights a step; direct I/O: {info.direct}",
        table(("read by", "s", "GB/s", "reading / it", "quartiles"), lines),
        f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
    ]
    publish("Weights on disk", "\n\n".join(body), out=args.out)


def _engine(directory: str | None, rows: int) -> Engine:
    place = tempfile.mkdtemp(dir=directory)
    config = gpt.Config(**LLAMA, **SIZES)
    made = decoder(config)
    shapes = sf.eval_shape(lambda: gpt.init(config, sf.key(0)))
    params = tree_map(lambda x: torch.randn(x.shape) * 0.02, shapes)
    limits = limits_of(made, running=1, buckets=(1, 2, rows), block=rows)
    return Engine(made, params, limits=limits, weights="disk", disk=sf.Disk(place))


def _step(engine: Engine, rows: int, turn: int) -> float:
    """The seconds of a step of a prompt with this number of rows, whose tokens are not in the cache."""
    prompt = [(turn * 31 + i) % 4000 for i in range(rows)]
    engine.add(prompt, Sampling(max_tokens=1))
    seconds = _timed(engine.step)
    engine.step()
    return seconds


def _timed(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _line(name: str, times: dict[str, list[float]], nbytes: int) -> tuple[str, ...]:
    own = times[name]
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times["reading"], own, strict=True)], n=4)
    seconds = statistics.median(own)
    return name, f"{seconds:.3f}", f"{nbytes / seconds / 1e9:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="on the disk to measure; default the temporary directory")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
