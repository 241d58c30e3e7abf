"""The schedule of inference: time a step, padding on a trace of 200 requests, and memory after many tiny requests.

    python benchmarks/bench_schedule.py

One process, no tensors. A step is all of `advance`: the drawn tokens taken, events, blocks, the plan, and the chain
that ranks compare. Drawn tokens are random. Times are the processor's, so that other processes count less.
"""

import argparse
import gc
import os
import pathlib
import random
import statistics
import time
import tracemalloc

from shardfn.inference import Add, Limits, Request, Sampling, State, StepPlan, advance, digest, start

ROUNDS, STEPS = 15, 100


def trace(num: int = 200, seed: int = 0) -> list[tuple[float, Request]]:
    """Arrival in seconds, and request: prompts of 16 to 256 tokens, 16 to 128 drawn, about 20 arrivals a second."""
    rng = random.Random(seed)
    now, requests = 0.0, []
    for i in range(num):
        now += rng.expovariate(20.0)
        prompt = tuple(rng.randrange(8192) for _ in range(rng.randint(16, 256)))
        requests.append((now, Request(prompt, Sampling(max_tokens=rng.randint(16, 128), seed=i))))
    return requests


def drawn(plan: StepPlan | None, rng: random.Random) -> list[int]:
    return [rng.randrange(8192) for _ in range(plan.num_rows)] if plan else []


def full(running: int, context: int) -> tuple[State, list[int]]:
    """A state in which this number of sequences decodes, each beyond this context."""
    limits = Limits(vocab=8192, context=2048, blocks=1 + running * 128, running=running)
    state, rng = start(limits), random.Random(0)
    adds = []
    for i in range(running):
        prompt = tuple(rng.randrange(8192) for _ in range(context + i))
        adds.append(Add(i, f"r{i}", Request(prompt, Sampling(max_tokens=2048 - context - i))))
    state, plan, _ = advance(state, adds)
    while plan is None or plan.num_tokens != running:
        state, plan, _ = advance(state, (), drawn(plan, rng))
    return state, drawn(plan, rng)


def step_times(running: int, context: int) -> dict[str, list[float]]:
    """Milliseconds a step and of a digest of the whole state, a number for each round."""
    state, tokens = full(running, context)
    found: dict[str, list[float]] = {"advance": [], "digest": []}
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(STEPS // 2):
            state, _, _ = advance(state, (), tokens)
        middle = time.process_time()
        for _ in range(5):
            digest(state)
        found["advance"].append((middle - begin) / (STEPS // 2) * 1e3)
        found["digest"].append((time.process_time() - middle) / 5 * 1e3)
    return found


def padding(rate: float, blocks: int) -> dict[str, float]:
    """The trace under a clock of `rate` tokens a second, rows of padding counted as tokens."""
    limits = Limits(vocab=8192, context=512, blocks=blocks)
    state, rng, requests = start(limits), random.Random(1), trace()
    now, at, plan, waits = 0.0, 0, None, []
    rows = tokens = steps = preempted = 0
    while at < len(requests) or not state.idle:
        events = []
        while at < len(requests) and requests[at][0] <= now:
            events.append(Add(state.number + len(events), f"r{at}", requests[at][1]))
            at += 1
        begin = time.process_time()
        state, plan, _ = advance(state, events, drawn(plan, rng))
        waits.append(time.process_time() - begin)
        if plan is None:
            now = max(now, requests[at][0]) if at < len(requests) else now
            continue
        rows, tokens, steps = rows + plan.bucket, tokens + plan.num_tokens, steps + 1
        preempted += sum(s.preempted == state.step - 1 for s in state.sequences.values())
        now += 0.002 + plan.bucket / rate
    least = sum(len(r.prompt) + r.sampling.max_tokens - 1 for _, r in requests)
    return {
        **{"steps": steps, "tokens": tokens, "padding": 1 - tokens / rows, "recomputed": tokens / least - 1},
        **{"preempted": preempted, "ms": statistics.mean(waits) * 1e3, "seconds": now},
    }


def resident() -> float:
    """KiB of the process that are in memory now."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


def growth(num: int) -> dict[str, float]:
    """KiB that remain after this number of tiny requests, by tracemalloc, and of the process, after a warm-up."""

    def serve(state: State, count: int) -> State:
        tokens: list[int] = []
        sent = 0
        while sent < count or not state.idle:
            new = min(8, count - sent)
            base = state.number
            request = [Request((1, 2, (base + i) % 8192), Sampling(max_tokens=1)) for i in range(new)]
            state, plan, _ = advance(state, [Add(base + i, f"{base + i}", r) for i, r in enumerate(request)], tokens)
            sent, tokens = sent + new, [5] * plan.num_rows if plan else []
        return state

    limits = Limits(vocab=8192, context=64, blocks=65)
    state = serve(start(limits), 5000)
    before = resident()
    state = serve(state, num)
    process = resident() - before
    tracemalloc.start()
    state = serve(state, 1000)
    gc.collect()
    first = tracemalloc.get_traced_memory()[0]
    state = serve(state, num)
    gc.collect()
    kept = (tracemalloc.get_traced_memory()[0] - first) / 1024
    tracemalloc.stop()
    assert state.idle
    return {"objects": kept, "process": process}


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    arguments = parser.parse_args()
    print("| running | context | advance, ms | digest of the whole state, ms |\n|---|---|---|---|")
    for running, context in ((1, 256), (8, 256), (32, 64), (32, 256), (32, 1024)):
        times = step_times(running, context)
        print(f"| {running} | {context} | {quartiles(times['advance'])} | {quartiles(times['digest'])} |", flush=True)
    print("\n| tokens a second | blocks | steps | padding | recomputed | preempted | advance, mean ms |")
    print("|---|---|---|---|---|---|---|")
    for rate, blocks in ((2000, 1025), (4000, 1025), (8000, 1025), (4000, 257), (4000, 129)):
        r = padding(rate, blocks)
        print(
            f"| {rate} | {blocks - 1} | {r['steps']:.0f} | {r['padding']:.1%} | {r['recomputed']:.1%} |"
            f" {r['preempted']:.0f} | {r['ms']:.3f} |",
            flush=True,
        )
    grown = growth(arguments.requests)
    print(f"\n{arguments.requests} requests: {grown['objects']:.1f} KiB of objects, {grown['process']:.0f} KiB of RSS")


if __name__ == "__main__":
    main()
