"""Bubbles of pipelines whose stages sleep: the time of a step, against the schedule on paper.

Layers that sleep need no processor, so that four ranks on two cores are four ranks. Idle times are derived from the
time of a whole step, agreement and update included.

    python benchmarks/bench_pipeline.py
"""

import argparse
import time

import torch
from _report import publish, table
from torch import Tensor

import shardfn as sf
from shardfn import P, optim, schedules
from shardfn.testing import distributed

RANKS, MICROBATCHES = 4, 8
STEPS = 4


def asleep(seconds: float, x: Tensor) -> Tensor:
    time.sleep(seconds)
    return x


def seconds(schedule: str, num_chunks: int, forward: float) -> float:
    """The shortest of a few steps; the gradients of activations and those of weights take as long as a forward each."""
    mesh, took = sf.make_mesh({"pp": RANKS}, device="cpu"), forward / num_chunks
    layer = sf.nn.Product(
        lambda h, w: asleep(took, h * w),
        (lambda dy, w, _: asleep(took, dy * w), lambda dy, h, _: asleep(took, (dy * h).sum())),
    )
    stacks = [torch.ones(RANKS) for _ in range(num_chunks)]
    params = {"blocks": stacks if num_chunks > 1 else stacks[0], "scale": torch.ones(8)}
    loss = sf.pipeline(
        lambda p, x: x * p["scale"],
        lambda p, h: layer(h, p),
        lambda p, h, x: h.mean(),
        num_microbatches=MICROBATCHES,
        schedule=schedule,
        num_chunks=num_chunks,
    )
    specs = {"blocks": P("pp"), "scale": P()}
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, specs=specs, batch=P("dp"))
    state, taken = step.init(params), []
    for _ in range(STEPS):
        start = time.monotonic()
        state, _ = step(state, torch.ones(MICROBATCHES, 8))
        taken.append(time.monotonic() - start)
    return min(taken[1:])


@distributed(world=RANKS, timeout=1500)
def measured(forward: float) -> list[tuple[str, int, float]]:
    torch.set_num_threads(1)
    chunks = {name: 2 if name in ("interleaved", "zb-v", "dualpipe-v") else 1 for name in schedules.SCHEDULES}
    return [(name, v, seconds(name, v, forward)) for name, v in chunks.items()]


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="")
    parser.add_argument("--forward", type=float, default=0.1, help="seconds of a rank's layers and a microbatch")
    args = parser.parse_args()
    costs = schedules.Costs(args.forward, args.forward, args.forward)
    head = ["schedule", "on paper, s", "measured, s", "off by", "idle on paper", "idle measured"]
    rows, found = [], measured(args.forward) or []
    for name, v, took in found[0]:
        run = schedules.timeline(schedules.SCHEDULES[name](RANKS, MICROBATCHES), costs)
        idle = 1 - MICROBATCHES * 3 * args.forward / took
        off = f"{took / run.makespan - 1:.1%}"
        rows.append(
            [f"{name}, {v} a rank", f"{run.makespan:.3f}", f"{took:.3f}", off, f"{run.bubble:.1%}", f"{idle:.1%}"]
        )
    what = f"{RANKS} ranks, {MICROBATCHES} microbatches; F, B and W take {args.forward} s each, asleep.\n"
    publish("Bubbles of pipelines", f"{what}The best of {STEPS - 1} whole steps.\n\n{table(head, rows)}", out=args.out)


if __name__ == "__main__":
    main()
