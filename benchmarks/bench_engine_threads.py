"""Steps of the engine on one thread and on two: decoding, and chunks of prompts.

    python benchmarks/bench_engine_threads.py --out benchmarks/results/engine_threads.md

Two models in float32, exact: a Llama of 34M parameters, and one of 0.5M, whose steps have little work to share. Threads
take turns, a few steps each, and ratios are formed between neighbours; a ratio above 1 means that two are faster. On a
busy machine the fastest turns are those that were hardly interrupted.
"""

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable

import torch
from _report import publish, table

from shardfn import core
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

SIZES = {
    "34M": {"vocab_size": 8192, "num_layers": 8, "d_model": 512, "num_heads": 8, "d_ff": 1408},
    "0.5M": {"vocab_size": 1024, "num_layers": 2, "d_model": 128, "num_heads": 4, "d_ff": 352},
}
DECODES, PROMPTS = (1, 2, 4, 8, 16, 32), (16, 64, 256)
CONTEXT, STEPS = 1024, 4
Times = dict[int, list[float]]


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    head = ["model", "step", "one thread, ms", "two, ms", "ratio", "quartiles", "fastest: one", "two", "ratio"]
    lines = list(itertools.chain.from_iterable(_lines(name, args.rounds) for name in args.models))
    body = [
        f"{args.rounds} rounds; medians, and the fastest; decodes are turns of {STEPS} steps, from 100 tokens on",
        table(head, lines),
        f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
    ]
    publish("Threads of the inference engine", "\n\n".join(body), out=args.out)


def _lines(name: str, rounds: int) -> list[list[str]]:
    config = gpt.Config.llama_like(**SIZES[name], max_len=CONTEXT, batch_invariant=True)
    made = decoder(config)
    limits = limits_of(made, context=CONTEXT, running=32, buckets=(1, 2, 4, 8, 16, 32, 64, 256), cache_bytes=1 << 29)
    torch.set_num_threads(2)  # programs plan memory for each thread
    engine = Engine(made, gpt.init(config, core.key(0)), limits=limits)
    engine.warm_up()
    lines = [_line(name, f"decode of {num}", _decode(engine, num, rounds), STEPS) for num in DECODES]
    return lines + [_line(name, f"prompt of {num}", _prefill(engine, num, rounds), 1) for num in PROMPTS]


def _decode(engine: Engine, num: int, rounds: int) -> Times:
    # No sequence ends before the last turn: they begin one after another, while the first ones decode already.
    most = 2 * STEPS * (rounds + 2) + 2 * num
    names = [engine.add([7 + i] * 100, Sampling(max_tokens=most, temperature=0.0)) for i in range(num)]
    while len({token.name for token in engine.step()}) < num:
        pass  # until all of them decode
    times = _turns(lambda: [engine.step() for _ in range(STEPS)], rounds)
    for one in names:
        engine.cancel(one)
    while not engine.idle:
        engine.step()
    return times


def _prefill(engine: Engine, num: int, rounds: int) -> Times:
    draw = random.Random(num)

    def run() -> None:
        engine.add([draw.randrange(1000) for _ in range(num)], Sampling(max_tokens=1, temperature=0.0))
        while not engine.idle:
            engine.step()

    return _turns(run, rounds)


def _turns(run: Callable[[], object], rounds: int) -> Times:
    times: Times = {1: [], 2: []}
    for turn in range(rounds + 1):
        for threads in (1, 2) if turn % 2 else (2, 1):
            torch.set_num_threads(threads)
            start = time.perf_counter()
            run()
            if turn:
                times[threads].append(time.perf_counter() - start)
    return times


def _line(model: str, step: str, times: Times, steps: int) -> list[str]:
    one, two = ([1e3 * t / steps for t in times[threads]] for threads in (1, 2))
    low, middle, high = statistics.quantiles([a / b for a, b in zip(one, two, strict=True)], n=4)
    out = [model, step, f"{statistics.median(one):.3f}", f"{statistics.median(two):.3f}", f"{middle:.2f}"]
    return [*out, f"{low:.2f} to {high:.2f}", f"{min(one):.3f}", f"{min(two):.3f}", f"{min(one) / min(two):.2f}"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda x: x.split(","), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
