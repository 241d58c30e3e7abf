"""Guessing in the inference engine: time of a trace with each drafter over the time without, and accepted drafts.

    python benchmarks/bench_guessing.py --out benchmarks/results/guessing.md

A Llama of 8 layers, width 512 and 33.7M parameters, float32, exact, not trained. Traces:

    repetitive  prompts that are each asked several times, in a random order, greedy: texts repeat earlier ones, and
                themselves, as this model's greedy texts end in cycles
    new         sampled texts, in which no tokens follow each other twice but by chance

with one sequence at a time, and with 16. Times are the processor's, of one thread. Drafters take turns within a round;
ratios are formed within it. All tokens and log probabilities are compared with those without a drafter.
"""

import argparse
import os
import random
import statistics
import time
from typing import Any, NamedTuple

import torch
from _report import publish, table

from shardfn import core
from shardfn.inference import Drafter, Engine, Ngram, Runner, Sampling, SpeculationStats, Suffix, decoder, limits_of
from shardfn.models import gpt

CONFIG = gpt.Config.llama_like(
    vocab_size=8192, num_layers=8, d_model=512, num_heads=8, d_ff=1408, max_len=2048, batch_invariant=True
)
MODEL = decoder(CONFIG)
LIMITS = limits_of(MODEL, context=256, running=16, buckets=(1, 2, 4, 8, 16, 64), drafts=15)
DRAFTERS: dict[str, Drafter | None] = {"none": None, "ngram": Ngram(), "suffix": Suffix()}
Request = tuple[list[int], Sampling]


class Run(NamedTuple):
    """A run of a trace: seconds, the engine's steps and drafts, and all results."""

    seconds: float
    steps: int
    guesses: SpeculationStats
    made: list[Any]


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    params, runner = gpt.init(CONFIG, core.key(0)), Runner(MODEL, LIMITS)
    warm = Engine(MODEL, params, limits=LIMITS, runner=runner)
    warm.warm_up()
    body = [
        f"one thread, {args.rounds} rounds, five times more of those with 16, float32, exact, processor time",
        _rows(warm),
    ]
    for name, trace in {"repetitive": repetitive(args.prompts, args.times), "new": new(args.prompts)}.items():
        for at_once in (1, 16):
            title = f"## {name}, {at_once} at a time\n\n{len(trace)} requests\n\n"
            rounds = args.rounds * (1 if at_once == 1 else 5)  # these take less
            body.append(title + _compared(trace, at_once, params, runner, rounds))
    body.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    publish("Guessing in an engine", "\n\n".join(body), out=args.out)


def repetitive(prompts: int, times: int) -> list[Request]:
    """Each prompt this number of times, in a random order."""
    rng = random.Random(0)
    trace = [(prompt, Sampling(max_tokens=96, temperature=0.0)) for prompt in _prompts(prompts)] * times
    rng.shuffle(trace)
    return trace


def new(prompts: int) -> list[Request]:
    """Sampled texts."""
    return [(prompt, Sampling(max_tokens=96, seed=i)) for i, prompt in enumerate(_prompts(2 * prompts))]


def _prompts(num: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(10, 8000) for _ in range(rng.randint(16, 96))] for _ in range(num)]


def _rows(engine: Engine) -> str:
    """The time of a step by its rows, each of another sequence."""
    found = []
    for num in (1, 2, 4, 8, 16):
        names = [engine.add([7 + i] * 20, Sampling(max_tokens=60, temperature=0.0)) for i in range(num)]
        while engine.stats.counts["waiting"]:
            engine.step()
        times = []
        for _ in range(25):
            start = time.process_time()
            engine.step()
            times.append(time.process_time() - start)
        found.append((num, min(times[5:])))
        for name in names:
            engine.cancel(name)
        while not engine.idle:
            engine.step()
    rows = [(num, f"{1e3 * seconds:.2f}", f"{seconds / found[0][1]:.2f}") for num, seconds in found]
    return table(("rows of a step", "ms, least", "over one row"), rows)


def _run(trace: list[Request], at_once: int, params: Any, runner: Runner, drafter: Drafter | None) -> Run:
    engine = Engine(MODEL, params, limits=LIMITS, runner=runner, drafter=drafter)
    start, made = time.process_time(), []
    for at in range(0, len(trace), at_once):
        part = trace[at : at + at_once]
        made += engine.generate([prompt for prompt, _ in part], [how for _, how in part])
    return Run(time.process_time() - start, engine.core._state.step, engine.stats.speculation, made)


def _compared(trace: list[Request], at_once: int, params: Any, runner: Runner, rounds: int) -> str:
    runs: dict[str, list[Run]] = {name: [] for name in DRAFTERS}
    for _ in range(rounds):
        for name, drafter in DRAFTERS.items():
            runs[name].append(_run(trace, at_once, params, runner, drafter))
            assert runs[name][-1].made == runs["none"][0].made, name
    plain, lines = runs["none"], []
    for name, mine in runs.items():
        ratios = sorted(one.seconds / other.seconds for one, other in zip(plain, mine, strict=True))
        low, mid, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
        steps, drafted, accepted = mine[0].speculation
        each = (f"{drafted / steps:.2f}", f"{accepted / steps:.2f}") if steps else ("", "")
        least = f"{min(one.seconds for one in mine):.2f}"
        lines.append((name, least, f"{mid:.2f}", f"{low:.2f} .. {high:.2f}", mine[0].steps, steps, *each))
    head = ("drafter", "s, least", "speed over none", "quartiles", "steps", "with drafts", "drafted", "accepted")
    return table(head, lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="different prompts of the repetitive trace")
    parser.add_argument("--times", type=int, default=4, help="times that each is asked")
    parser.add_argument("--out", help="write the table there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
