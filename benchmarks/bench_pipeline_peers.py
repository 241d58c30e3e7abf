"""A pipelined step beside torch.distributed.pipelining's: the same stages, in the same processes, by turns.

Each rank has equal layers, a residual MLP each, and no data-parallel axis. The time is that of a whole step: forwards,
backwards, transfers, and an SGD update in place. Before it is timed, both are compared after a step.

    python benchmarks/bench_pipeline_peers.py
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from _report import publish, table
from _turns import in_turns
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import shardfn as sf
from shardfn import P, Sharding, optim
from shardfn.testing import distributed

RANKS, LAYERS, MICROBATCHES, RATE = 2, 6, 8, 0.1


class _Layer(nn.Module):
    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(h @ self.up) @ self.down


def _params(dim: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    up, down = torch.randn(LAYERS, dim, 4 * dim, generator=g), torch.randn(LAYERS, 4 * dim, dim, generator=g)
    return {"up": up / dim**0.5, "down": down / (16 * dim) ** 0.5}


def _mse(h: Tensor, y: Tensor) -> Tensor:
    return (h - y).square().mean()


def _ours(
    schedule: str, layerwise: bool, params: Any, x: Tensor, y: Tensor
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    loss = sf.pipeline(
        lambda p, batch: batch["x"],
        lambda p, h: h + torch.tanh(h @ p["up"]) @ p["down"],
        lambda p, h, batch: _mse(h, batch["y"]),
        num_microbatches=MICROBATCHES,
        schedule=schedule,
    )
    mesh = sf.make_mesh({"pp": RANKS}, device="cpu")
    specs = {"blocks": Sharding(P("pp"), stacked=layerwise)}
    step = sf.sharded_step(loss, optim.sgd(RATE), mesh=mesh, specs=specs, batch=P())
    state = step.init({"blocks": params})

    def run() -> None:
        nonlocal state
        state, _ = step(state, {"x": x, "y": y})

    return run, lambda: state.params["blocks"]["up"].local


def _torchs(schedule: Any, params: Any, x: Tensor, y: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    rank, each = dist.get_rank(), LAYERS // RANKS
    own = range(rank * each, (rank + 1) * each)
    module = nn.Sequential(*(_Layer(params["up"][i], params["down"][i]) for i in own))
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    runs = schedule(stage, MICROBATCHES, loss_fn=_mse)
    sgd = torch.optim.SGD(module.parameters(), lr=RATE)

    def run() -> None:
        sgd.zero_grad()
        losses: list[Tensor] = []
        # In place of None, which torch's would take for an argument, the first stage alone is given anything.
        runs.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == RANKS - 1 else {}))
        sgd.step()

    return run, lambda: torch.stack([layer.up for layer in module])  # pyright: ignore


@distributed(world=RANKS, timeout=580)
def measured(dim: int, rows: int, turns: int) -> dict[str, list[tuple[float, float]]]:
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(rows, dim, generator=g), torch.randn(rows, dim, generator=g)
    params = _params(dim)
    runs = {
        "shardfn, 1f1b": _ours("1f1b", True, params, x, y),
        "shardfn, 1f1b, stacks whole": _ours("1f1b", False, params, x, y),
        "torch, Schedule1F1B": _torchs(Schedule1F1B, params, x, y),
        "shardfn, gpipe": _ours("gpipe", True, params, x, y),
        "torch, ScheduleGPipe": _torchs(ScheduleGPipe, params, x, y),
    }
    for run, _ in runs.values():
        run()
    first, *others = [weights().detach() for _, weights in runs.values()]
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-6)
    return in_turns(runs, turns)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rows", type=int, default=1024)
    args = parser.parse_args()
    load, rows = os.getloadavg()[0], []
    pairs = (
        ("shardfn, 1f1b", "torch, Schedule1F1B"),
        ("shardfn, 1f1b, stacks whole", "torch, Schedule1F1B"),
        ("shardfn, gpipe", "torch, ScheduleGPipe"),
    )
    for dim in args.dims:
        found = measured(dim, args.rows, args.turns) or []
        for ours, theirs in pairs:
            # By turn: the wall time of a rank, and the CPU time of all ranks.
            walls = [[x[0] for x in found[0][name]] for name in (ours, theirs)]
            used = [
                [sum(x) for x in zip(*([t[1] for t in r[name]] for r in found), strict=True)] for name in (ours, theirs)
            ]
            rows.append([f"{dim}", ours.partition(", ")[2], *_compared(*walls), *_compared(*used)])
    head = ["width", "schedule"]
    head += [f"{what} {x}" for x in ("wall", "CPU") for what in ("shardfn, ms,", "torch, ms,", "ratio,", "ratios,")]
    what = (
        f"{RANKS} ranks, {LAYERS} layers, {MICROBATCHES} microbatches of {args.rows // MICROBATCHES} rows; medians of"
        f" {args.turns} steps each, by turns; CPU time is that of all ranks. Load of the machine before: {load:.2f}.\n"
    )
    publish("Pipelines beside torch.distributed.pipelining", f"{what}\n{table(head, rows)}", out=args.out)


def _compared(ours: Sequence[float], theirs: Sequence[float]) -> list[str]:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    return [
        f"{statistics.median(ours) * 1e3:.1f}",
        f"{statistics.median(theirs) * 1e3:.1f}",
        f"{statistics.median(ratios):.3f}",
        f"{quarters[0]:.3f} ... {quarters[2]:.3f}",
    ]


if __name__ == "__main__":
    main()
