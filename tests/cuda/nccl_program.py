"""The program that `test_cuda_nccl.py` starts with torchrun: on ranks with a GPU each, steps equal one device."""

import functools
import os
from typing import Any

import torch

import shardfn as sf
from shardfn.core import tree_map
from shardfn.testing import ODD_TRAINABLE, Run, assert_same, odd_batch, odd_loss, odd_params, on_mesh, one_device

TX = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2))


def _double(tree: Any, device: str) -> Any:
    return tree_map(lambda x: x.to(device, torch.float64 if x.is_floating_point() else x.dtype), tree)


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = sf.make_mesh({"dp": -1})
    assert mesh.backend == "nccl"
    params = _double(odd_params(), "cpu")
    want = one_device(odd_loss, TX, params, [_double(odd_batch(n), "cpu") for n in range(2)], trainable=ODD_TRAINABLE)
    batches = [_double(odd_batch(n), "cuda") for n in range(2)]
    graph = functools.partial(sf.jit, backend="graph")
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("stage 0", odd_loss, {"stage": 0}),
        ("stage 1", odd_loss, {"stage": 1}),
        ("stage 2", odd_loss, {"stage": 2}),
        ("stage 3", odd_loss, {"stage": 3}),
        ("stage 3, params on the host", odd_loss, {"stage": 3, "params": "host"}),
        ("stage 3, captured", graph(odd_loss), {"stage": 3}),
        ("stage 3, accumulated", sf.accumulate(odd_loss, 2), {"stage": 3}),
    ]
    for name, loss, fields in cases:
        zero = sf.Zero.flat(persist_elements=0, bucket_bytes=64, **fields)
        run = on_mesh(loss, TX, params, batches, mesh=mesh, zero=zero, trainable=ODD_TRAINABLE)
        assert_same(Run(*tree_map(lambda x: x.cpu(), tuple(run))), want)
        if mesh.rank == 0:
            print("equal:", name, flush=True)


if __name__ == "__main__":
    main()
