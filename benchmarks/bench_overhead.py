"""Microseconds of Python that stage 3 costs per leaf and step, under a process group that moves nothing.

The model is a chain of tiny leaves, each gathered for itself (`persist_elements=0`, `bucket_bytes=0`), on torch's fake
process group of two ranks. What remains after the plain step is taken away is the machinery: lazy leaves, hooks, the
schedule, the calls into the process group. The values computed are meaningless, since the fake group delivers nothing.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _model import ADAMW
from _report import publish, table
from torch import Tensor

WIDTH = 16


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    names = ("plain", *args.stages)
    steps = {name: _plain(args.leaves) if name == "plain" else _sharded(args.leaves, int(name)) for name in names}
    taken = _interleaved(steps, args.steps)
    rows = []
    for name, seconds in taken.items():
        low, mid, high = statistics.quantiles(seconds, n=4)
        extra = statistics.median(a - b for a, b in zip(seconds, taken["plain"], strict=True)) / args.leaves
        label = "plain step" if name == "plain" else f"stage {name}"
        best = f"{(min(seconds) - min(taken['plain'])) / args.leaves * 1e6:.1f}"
        rows.append([label, f"{mid * 1e3:.3f}", f"{low * 1e3:.3f} .. {high * 1e3:.3f}", f"{extra * 1e6:.1f}", best])
    head = ["step", "median ms", "quartiles", "us per leaf above plain", "of the best steps"]
    note = f"{args.leaves} leaves of {WIDTH} elements, fake group of 2 ranks, {args.steps} steps"
    publish("Overhead", f"{note}\n\n{table(head, rows)}", out=args.out, data={"seconds": taken}, as_json=args.json)


def loss(params: dict[str, list[Tensor]], batch: dict[str, Tensor]) -> Tensor:
    """x <- x * w for every leaf w; every product saves its leaf for the backward."""
    x = batch["x"]
    for w in params["w"]:
        x = x * w
    return x.sum()


def _plain(leaves: int) -> Callable[[], Any]:
    params = {"w": [torch.ones(WIDTH, requires_grad=True) for _ in range(leaves)]}
    optimizer = torch.optim.AdamW(params["w"], fused=True, **ADAMW)

    def step() -> None:
        loss(params, {"x": torch.ones(2, WIDTH)}).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _sharded(leaves: int, stage: int) -> Callable[[], Any]:
    import shardfn as sf

    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        real = sf.Mesh.new_group  # the control plane asks for gloo, which cannot run on a fake store
        sf.Mesh.new_group = lambda self, axes, backend=None: real(self, axes)
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    b1, b2 = ADAMW["betas"]
    optimizer = sf.optim.adamw(ADAMW["lr"], b1=b1, b2=b2, eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"])
    zero = sf.Zero(stage=stage, persist_elements=0, travel=sf.Travel(bucket_bytes=0))
    take = sf.sharded_step(loss, optimizer, mesh=mesh, batch=sf.P("dp"), zero=zero)
    state = take.init({"w": [torch.ones(WIDTH) for _ in range(leaves)]})

    def step() -> None:
        nonlocal state
        state, _ = take(state, {"x": torch.ones(2, WIDTH)})

    return step


def _interleaved(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step in every round; three rounds warm up."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 3:
                taken[name].append(time.perf_counter() - start)
    return taken


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=200)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw numbers")
    args = parser.parse_args()
    args.stages = args.stages.split(",")
    return args


if __name__ == "__main__":
    main()
