"""A training job on disk, for the tests of faults: python _offload_job.py DIRECTORY STEPS RANK WORLD PORT."""

import os
import sys

import torch

import shardfn as sf

RATE = 1e-2


def params() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(37, 37, generator=draw) / 6 for _ in range(6)]


def loss(p: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in p:
        x = torch.tanh(x @ w)
    return x.square().mean()


def batch(n: int) -> torch.Tensor:
    return torch.randn(4, 37, generator=torch.Generator().manual_seed(n))


def make(directory: str | None, mesh: sf.Mesh, **fields) -> "sf.transforms.ShardedStep":
    kinds = {} if directory is None else {"params": "disk", "grads": "disk", "optimizer": "disk", "directory": directory}
    zero = sf.Zero(3, persist=0, bucket=0, chunk=1 << 13, **kinds, **fields)
    return sf.sharded_step(loss, sf.optim.adamw(RATE), mesh=mesh, zero=zero)


def main(directory: str, steps: int) -> None:
    torch.set_num_threads(1)
    mesh = sf.make_mesh({"dp": -1})
    step = make(directory, mesh)
    state = step.init(params()) if not os.path.isdir(f"{directory}/rank{mesh.rank}") else step.resume(params())
    while int(state.step) < steps:
        rows = batch(int(state.step)).chunk(mesh.size)[mesh.rank]
        state, _ = step(state, rows)
        print(int(state.step), flush=True)


if __name__ == "__main__":
    where, steps, rank, world, port = sys.argv[1:]
    if int(world) > 1:
        os.environ |= {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        torch.distributed.init_process_group("gloo")
    main(where, int(steps))
