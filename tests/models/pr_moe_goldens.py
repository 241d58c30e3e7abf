"""Writes pr_moe_goldens.json: outputs and gradients of a pyramid of DeepSpeed 0.19.8's own PR-MoE layers in float32.

DS_ACCELERATOR=cpu PYTHON_WITH_DEEPSPEED tests/models/pr_moe_goldens.py
"""

import copy
import json
import os
import pathlib
import sys
from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
from deepspeed.moe.layer import MoE  # pyright: ignore[reportMissingImports]

OUT = pathlib.Path(__file__).with_suffix(".json")
WIDTH, ROWS, BALANCE = 4, 9, 0.1
PYRAMID = (2, 3)


def main() -> None:
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29577",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    # An extension to compile, which only several ranks use.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    cases = [case(residual=True), case(residual=False)]
    OUT.write_text(json.dumps({"deepspeed": deepspeed.__version__, "cases": cases}) + "\n", encoding="utf-8")


def case(*, residual: bool) -> dict[str, Any]:
    """Two layers on a stream, and the gradients of a sum of the stream and the weighted balance losses."""
    mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 5), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(5, WIDTH))
    how: dict[str, Any] = {"k": 1, "drop_tokens": False, "use_rts": False, "use_residual": residual}
    layers = torch.nn.ModuleList(MoE(WIDTH, copy.deepcopy(mlp), n, **how) for n in PYRAMID)
    for layer in layers:
        layer.set_deepspeed_parallelism()  # pyright: ignore[reportCallIssue]
    for p in layers.parameters():
        torch.nn.init.normal_(p, std=0.7)
    x, cotangent = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    h, balance, counts = x, torch.zeros(()), []
    for layer in layers:
        y, aux, count = layer(h)
        h, balance = h + y, balance + aux
        counts.append(count.tolist())
    loss = (h * cotangent).sum() + BALANCE * balance
    named = dict(layers.named_parameters())
    grads = torch.autograd.grad(loss, [x, *named.values()])
    return {
        "residual": residual,
        "x": x.tolist(),
        "cotangent": cotangent.tolist(),
        "params": {name: p.tolist() for name, p in named.items()},
        "out": h.tolist(),
        "balance": balance.item(),
        "counts": counts,
        "gradients": dict(zip(["x", *named], (g.tolist() for g in grads), strict=True)),
    }


if __name__ == "__main__":
    main()
