"""A step on dp x tp x pp = 2 x 2 x 2 ranks beside DeepSpeed's: the same model, in the same processes, by turns.

Residual MLPs whose features are cut over tp by columns and rows, stages of equal layers, 1F1B, Adam, ZeRO 1 along dp.
DeepSpeed's side is its `PipelineModule` under a pipe-data-model topology; it has no tensor-parallel layers for this, so
they are written here with the two all-reduces of Megatron's. Both are compared after a step. It needs a Python that has
DeepSpeed 0.19.8 besides the requirements of shardfn. DeepSpeed compiles an extension once; a run that is killed
meanwhile leaves a file `lock` in its folder under TORCH_EXTENSIONS_DIR, for which all later runs wait: remove it.

    $DEEPSPEED_PYTHON benchmarks/bench_3d_peers.py [--turns 10] [--dim 128]
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _turns import in_turns
from torch import Tensor, nn

PP, DP, TP, LAYERS, MICROBATCHES, RATE = 2, 2, 2, 4, 4, 1e-3
# DeepSpeed's ranks are pipe major, then data, then model; so are the mesh's.
AXES = {"pp": PP, "dp": DP, "tp": TP}


def params_of(dim: int) -> dict[str, Tensor]:
    """The layers' weights, stacked."""
    g = torch.Generator().manual_seed(0)
    up, down = torch.randn(LAYERS, dim, 4 * dim, generator=g), torch.randn(LAYERS, 4 * dim, dim, generator=g)
    return {"up": up / dim**0.5, "down": down / (16 * dim) ** 0.5}


class _Enter(torch.autograd.Function):
    """The identity, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """The sum over a group, whose gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Layer(nn.Module):
    """A residual MLP; this rank has a block of the features."""

    def __init__(self, up: Tensor, down: Tensor, group: Any) -> None:
        super().__init__()
        self.up, self.down, self.group = nn.Parameter(up.clone()), nn.Parameter(down.clone()), group

    def forward(self, h: Tensor) -> Tensor:
        """A layer."""
        return h + _Leave.apply(torch.tanh(_Enter.apply(h, self.group) @ self.up) @ self.down, self.group)


def deepspeeds(dim: int, x: Tensor, y: Tensor) -> tuple[Callable[[], Any], Callable[[], Tensor]]:
    """DeepSpeed's step on this rank's rows, and its first layer's block."""
    import deepspeed as ds  # pyright: ignore[reportMissingImports]
    from deepspeed.pipe import LayerSpec, PipelineModule  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.pipe.topology import (  # pyright: ignore[reportMissingImports]
        PipeModelDataParallelTopology,
    )

    rank, params = dist.get_rank(), params_of(dim)
    groups = [dist.new_group([TP * i + j for j in range(TP)]) for i in range(PP * DP)]
    group, own = groups[rank // TP], rank % TP
    ups, downs = params["up"].chunk(TP, 2)[own], params["down"].chunk(TP, 1)[own]
    module = PipelineModule(
        [LayerSpec(Layer, ups[i], downs[i], group) for i in range(LAYERS)],
        topology=PipeModelDataParallelTopology(num_pp=PP, num_mp=TP, num_dp=DP),
        loss_fn=lambda h, y: (h - y).square().mean(),
        partition_method="uniform",
    )
    rows = len(x) // MICROBATCHES
    config = {
        "train_batch_size": len(x) * DP,
        "train_micro_batch_size_per_gpu": rows,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.Adam(module.parameters(), lr=RATE, fused=True)
    engine, *_ = ds.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    pairs = list(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True))
    first = next(p for p in module.parameters() if p.shape == ups[0].shape)
    return lambda: engine.train_batch(iter(pairs)), lambda: first.detach()


def ours(dim: int, x: Tensor, y: Tensor) -> tuple[Callable[[], Any], Callable[[], Tensor]]:
    """The same of shardfn."""
    import shardfn as sf
    from shardfn import P, Sharding

    def block(p: Any, h: Tensor) -> Tensor:
        return h + sf.psum(torch.tanh(sf.pvary(h, "tp") @ p["up"]) @ p["down"], "tp")

    loss = sf.pipeline(
        lambda p, batch: batch["x"],
        block,
        lambda p, h, batch: (h - batch["y"]).square().mean(),
        num_microbatches=MICROBATCHES,
    )
    specs = {"up": Sharding(P("pp", None, "tp"), stacked=True), "down": Sharding(P("pp", "tp"), stacked=True)}
    zero = sf.Zero(stage=1, pace=sf.Pace(accumulate="once"))
    step = sf.sharded_step(
        loss,
        sf.optim.adam(RATE),
        mesh=sf.make_mesh(AXES, device="cpu"),
        specs={"blocks": specs},
        batch=P("dp"),
        zero=zero,
    )
    state = step.init({"blocks": params_of(dim)})

    def run() -> None:
        nonlocal state
        state, _ = step(state, {"x": x, "y": y})

    return run, lambda: state.params["blocks"]["up"].local[0]


def measured(rank: int, store: str, dim: int, rows: int, turns: int, out: Any) -> None:
    """One rank: by turns, the wall and CPU seconds of each step."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_SIZE": "8"}
    os.environ |= {"WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}
    import deepspeed as ds  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    how = {"rank": rank, "world_size": PP * DP * TP, "auto_mpi_discovery": False}
    ds.init_distributed("gloo", init_method=f"file://{store}", **how)
    g, replica = torch.Generator().manual_seed(1), rank // TP % DP
    x, y = (torch.randn(DP * rows, dim, generator=g).chunk(DP)[replica] for _ in range(2))
    runs = {"shardfn": ours(dim, x, y), "deepspeed": deepspeeds(dim, x, y)}
    for run, _ in runs.values():
        run()
    torch.testing.assert_close(runs["shardfn"][1](), runs["deepspeed"][1](), rtol=1e-4, atol=1e-6)
    out.put((rank, in_turns(runs, turns)))
    dist.barrier()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=256, help="of a replica, in all its microbatches")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        out = mp.get_context("spawn").SimpleQueue()
        given = f"{directory}/store", args.dim, args.rows, args.turns, out
        ranks: Any = mp.spawn(measured, given, nprocs=PP * DP * TP, join=False)  # pyright: ignore[reportPrivateImportUsage]
        found = dict(out.get() for _ in range(PP * DP * TP))
        while not ranks.join():
            pass
    walls = {name: [t[0] for t in found[0][name]] for name in ("shardfn", "deepspeed")}
    used = {n: [sum(x) for x in zip(*([t[1] for t in r[n]] for r in found.values()), strict=True)] for n in walls}
    print(f"{PP} x {DP} x {TP} ranks, {LAYERS} layers of width {args.dim}, {MICROBATCHES} microbatches of a replica's")
    print(f"{args.rows} rows; medians of {args.turns} steps, by turns; load of the machine {os.getloadavg()[0]:.1f}")
    for what, by in (("wall", walls), ("CPU of all ranks", used)):
        ratios = sorted(a / b for a, b in zip(by["shardfn"], by["deepspeed"], strict=True))
        a, b = (statistics.median(by[n]) * 1e3 for n in ("shardfn", "deepspeed"))
        print(
            f"{what}: shardfn {a:.1f} ms, DeepSpeed {b:.1f} ms, ratio {statistics.median(ratios):.3f}"
            f" ({ratios[0]:.3f} ... {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
