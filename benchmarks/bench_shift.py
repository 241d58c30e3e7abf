"""Compares steps and a trace of bursts under shift parallelism with the fixed layouts, by the cost model.

Steps of 2 and of 3 layers are captured over an abstract mesh of 4 ranks. Bytes, operations and times of more layers
follow from both, as each further layer adds the same. The engine's own schedule then plays a trace of bursts:

    python benchmarks/bench_shift.py --devices h200 rtx4090

"tp" cuts heads and features over all ranks. "sp x tp" cuts them over 2 ranks, and tokens over 2. The shift has the
second from a number of rows on, chosen from the table.
"""

import argparse
import dataclasses
import random
from collections.abc import Sequence
from typing import NamedTuple

from shardfn.cli._arguments import device_cluster
from shardfn.core import deferred, key, make_mesh
from shardfn.inference import Limits, Request, Runner, Sampling, StepPlan, TimedRequest, decoder, limits_of, simulate
from shardfn.models import gpt

MESH = {"tp": 2, "sp": 2}
BUCKETS = (1, 8, 32, 256, 2048)
Times = dict[tuple[str, int], float]


class StepCost(NamedTuple):
    """Cost of a step on a rank: seconds, bytes sent and floating-point operations."""

    seconds: float
    sent: float
    flops: float


def lower_steps(layers: int, devices: Sequence[str]) -> dict[tuple[str, str, int], StepCost]:
    """Returns the cost on each device, in each layout and bucket."""
    config = gpt.Config.llama_like(
        vocab_size=32000, num_layers=layers, d_model=4096, num_heads=32, num_kv_heads=8, d_ff=14336, max_len=4096
    )
    config = dataclasses.replace(config, batch_invariant=True)
    with deferred():
        params = gpt.init(config, key(0))
    mesh, one = make_mesh(MESH, device="cpu", abstract=True), decoder(config, tp="tp", sp="sp")
    limits = limits_of(one, running=32, buckets=BUCKETS, layouts=(("tp", 1), ("sp", BUCKETS[-1])))
    runner, found = Runner(one, limits, mesh=mesh), {}
    for layout in ("tp", "sp"):
        for bucket in BUCKETS:
            lowered = runner.lower_step(params, bucket, layout)
            cost = lowered.cost_analysis()
            for device in devices:
                seconds = lowered.estimate(device_cluster(device, MESH)).seconds
                found[device, layout, bucket] = StepCost(seconds, cost.sent, cost.flops)
    return found


def find_costs(layers: int, devices: Sequence[str]) -> dict[tuple[str, str, int], StepCost]:
    """Returns the costs of steps of many layers."""
    two, three = (lower_steps(n, devices) for n in (2, 3))
    return {at: StepCost(*(a + (layers - 2) * (b - a) for a, b in zip(two[at], three[at], strict=True))) for at in two}


def make_trace(seconds: float, seed: int) -> list[TimedRequest]:
    """Returns bursts of long prompts with short answers, between requests with long answers."""
    draw, made, now = random.Random(seed), [], 0.0
    while now < seconds:
        for _ in range(16):
            prompt, answer = (
                tuple(draw.randrange(32000) for _ in range(draw.randrange(512, 1536))),
                draw.randrange(16, 64),
            )
            made.append(TimedRequest(now, Request(prompt, Sampling(max_tokens=answer)), (0,) * answer))
        for i in range(8):
            prompt, answer = tuple(draw.randrange(32000) for _ in range(64)), draw.randrange(200, 400)
            made.append(TimedRequest(now + 0.01 * i, Request(prompt, Sampling(max_tokens=answer)), (0,) * answer))
        now += seconds / 4
    return made


def find_mean(layouts: tuple[tuple[str, int], ...], seconds: Times, trace: list[TimedRequest]) -> float:
    """Returns the mean time from arrival to the last token."""
    limits = Limits(vocab=32000, context=4096, blocks=32 * 256 + 1, buckets=BUCKETS, running=32, layouts=layouts)

    def find_seconds(plan: StepPlan | None) -> float:
        return 1e-5 if plan is None else seconds[plan.layout, plan.bucket]

    done = simulate(limits, trace, find_seconds).latencies
    return sum(x.whole for x in done) / len(done)


def print_device(device: str, costs: dict[tuple[str, str, int], StepCost], layers: int, load: float) -> None:
    times = {at[1:]: cost.seconds for at, cost in costs.items() if at[0] == device}
    first = next((b for b in BUCKETS if times["sp", b] < times["tp", b]), BUCKETS[-1])
    print(f"\n{layers} layers of Llama 8B in float32 on 4 x {device}; shift from {first} rows on\n")
    print("| rows | tp ms | sp x tp ms | shift / better | tp MB sent | sp x tp MB sent | tp GFLOP | sp x tp GFLOP |")
    print("|---|---|---|---|---|---|---|---|")
    for b in BUCKETS:
        one, two = costs[device, "tp", b], costs[device, "sp", b]
        ratio = (two if b >= first else one).seconds / min(one.seconds, two.seconds)
        print(
            f"| {b} | {1e3 * one.seconds:.2f} | {1e3 * two.seconds:.2f} | {ratio:.2f} | {one.sent / 1e6:.1f} |"
            f" {two.sent / 1e6:.1f} | {one.flops / 1e9:.1f} | {two.flops / 1e9:.1f} |"
        )
    trace = make_trace(load * times["tp", 32], 0)
    kinds = {"tp": (("tp", 1),), "sp x tp": (("sp", 1),), "shift": (("tp", 1), ("sp", first))}
    means = {name: find_mean(layouts, times, trace) for name, layouts in kinds.items()}
    print(f"\nBursts, {len(trace)} requests: mean completion " + ", ".join(f"{k} {v:.2f} s" for k, v in means.items()))
    print(", ".join(f"{k} / shift {v / means['shift']:.2f}" for k, v in means.items() if k != "shift"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--devices", nargs="+", default=["h200", "rtx4090"])
    parser.add_argument("--load", type=float, default=2000.0, help="steps of 32 rows that the trace lasts")
    args = parser.parse_args()
    costs = find_costs(args.layers, args.devices)
    for device in args.devices:
        print_device(device, costs, args.layers, args.load)


if __name__ == "__main__":
    main()
