"""Compares the latencies that `shardfn plan --serve` predicts with those of a real engine.

A first trace runs on an engine with a log of decisions, from which the times of steps are fitted. A second trace runs
on the same engine in real time, and is predicted from the fit. A further column is fitted to the second run's own
steps, and has no error of a machine whose speed has changed. Run it on a quiet machine:

    python benchmarks/bench_plan_serve.py --requests 120 --rate 3
"""

import argparse
import dataclasses
import itertools
import random
import tempfile
import time

from shardfn.cli._bench_rates import find_percentile
from shardfn.cli._serve_times import fit_times
from shardfn.core import key
from shardfn.inference import (
    DecisionLog,
    Engine,
    Limits,
    Request,
    Sampling,
    SimulatedLatency,
    TimedRequest,
    decoder,
    replay_log,
    simulate,
)
from shardfn.models import gpt

CONFIG = gpt.Config.llama_like(
    vocab_size=4096, num_layers=8, d_model=384, num_heads=6, num_kv_heads=2, d_ff=1024, max_len=512
)
LIMITS = Limits(vocab=4096, context=512, blocks=400, buckets=(1, 2, 4, 8, 16, 32, 64), running=16)


def make_trace(num: int, rate: float, seed: int) -> list[TimedRequest]:
    draw, now, made = random.Random(seed), 0.0, []
    common = [draw.randrange(4096) for _ in range(64)]
    for i in range(num):
        now += draw.expovariate(rate)
        prompt = common * (i % 2) + [draw.randrange(4096) for _ in range(draw.randrange(16, 160))]
        sampling = Sampling(max_tokens=draw.randrange(8, 48), seed=i)
        made.append(TimedRequest(now, Request(tuple(prompt), sampling), (0,) * sampling.max_tokens))
    return made


def run_trace(engine: Engine, trace: list[TimedRequest], prefix: str) -> list[SimulatedLatency]:
    """Runs a trace in real time, and returns the latencies."""
    began, left, times = time.perf_counter(), list(trace), dict[str, list[float]]()
    while left or not engine.idle:
        if engine.idle:
            time.sleep(max(0.0, left[0].seconds - (time.perf_counter() - began)))
        while left and left[0].seconds <= time.perf_counter() - began:
            timed = left.pop(0)
            name = engine.add(timed.request.prompt, timed.request.sampling, name=f"{prefix}{len(times)}")
            times[name] = [timed.seconds]
        for token in engine.step():
            if token.token is not None:
                times[token.name].append(time.perf_counter() - began)
    return [
        SimulatedLatency(t[1] - t[0], tuple(b - a for a, b in itertools.pairwise(t[1:])), t[-1] - t[0])
        for t in times.values()
    ]


def print_rows(name: str, real: list[float], *planned: list[float]) -> None:
    for part in (50, 95, 99):
        a, *rest = (find_percentile([1e3 * t for t in x], part) for x in (real, *planned))
        print(f"p{part} {name:<6}{a:>10.2f} ms" + "".join(f"{b:>10.2f} ms{b / a - 1:>+9.1%}" for b in rest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=3.0, help="arrivals a second")
    parser.add_argument("--layers", type=int, default=CONFIG.num_layers)
    args = parser.parse_args()
    config = dataclasses.replace(CONFIG, num_layers=args.layers, batch_invariant=True)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        log = DecisionLog(file.name)
        engine = Engine(decoder(config), gpt.init(config, key(0)), limits=LIMITS, decisions=log)
        engine.warm_up()
        run_trace(engine, make_trace(args.requests, args.rate, seed=1), "first")
        num = len(replay_log(file.name).steps)
        trace = make_trace(args.requests, args.rate, seed=2)
        real = run_trace(engine, trace, "second")
        log.close()
        steps = replay_log(file.name).steps
    began = time.process_time()
    planned = [simulate(LIMITS, trace, fit_times(x).start()).latencies for x in (steps[:num], steps[num:])]
    took = time.process_time() - began
    print(f"{len(steps) - num} steps of {args.requests} requests, simulated in {took:.2f} s of a processor")
    print(f"{'':<10}{'real':>13}{'first log':>13}{'error':>9}{'own log':>13}{'error':>9}")
    print_rows("ttft", *[[x.first for x in found] for found in (real, *planned)])
    print_rows("itl", *[[gap for x in found for gap in x.gaps] for found in (real, *planned)])
    print_rows("e2e", *[[x.whole for x in found] for found in (real, *planned)])


if __name__ == "__main__":
    main()
