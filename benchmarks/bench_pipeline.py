"""Bubbles of pipelines whose stages sleep: what a step takes, against the schedule on paper.

Layers that sleep need no processor, so that four ranks on two cores are four ranks. What is idle is told from the time
of a whole step, agreement and update included.

    python benchmarks/bench_pipeline.py
"""

import argparse
import time
from typing import Any

import torch
from _report import publish, table
from torch import Tensor

import shardfn as sf
from shardfn import P, optim, schedules
from shardfn.testing import distributed

RANKS, MICROBATCHES = 4, 8
STEPS = 4


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_takes = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(ctx.backward_takes)
        return grads[0], None, None


def seconds(schedule: str, num_chunks: int, forward: float) -> float:
    """The shortest of a few steps; a backward takes twice as long as a forward."""
    mesh = sf.make_mesh({"pp": RANKS}, device="cpu")

    def block(p: Any, h: Tensor) -> Tensor:
        return _Sleep.apply(h * p, forward / num_chunks, 2 * forward / num_chunks)  # pyright: ignore[reportReturnType]

    stacks = [torch.ones(RANKS) for _ in range(num_chunks)]
    params = {"blocks": stacks if num_chunks > 1 else stacks[0], "scale": torch.ones(8)}
    loss = sf.pipeline(
        lambda p, x: x * p["scale"],
        block,
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


@distributed(world=RANKS)
def measured(forward: float) -> list[tuple[str, int, float]]:
    torch.set_num_threads(1)
    return [(name, v, seconds(name, v, forward)) for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))]


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
        made = {"gpipe": schedules.gpipe, "1f1b": schedules.one_f_one_b, "interleaved": schedules.interleaved}[name]
        run = schedules.timeline(made(RANKS, MICROBATCHES), costs)
        idle = 1 - MICROBATCHES * 3 * args.forward / took
        off = f"{took / run.makespan - 1:.1%}"
        rows.append(
            [f"{name}, {v} a rank", f"{run.makespan:.3f}", f"{took:.3f}", off, f"{run.bubble:.1%}", f"{idle:.1%}"]
        )
    what = f"{RANKS} ranks, {MICROBATCHES} microbatches; F takes {args.forward} s and B {2 * args.forward} s, asleep.\n"
    publish("Bubbles of pipelines", f"{what}The best of {STEPS - 1} whole steps.\n\n{table(head, rows)}", out=args.out)


if __name__ == "__main__":
    main()
