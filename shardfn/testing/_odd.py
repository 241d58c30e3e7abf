"""The odd tree: a small model with every kind of leaf known to break sharding, such as a leaf of 7 rows."""

from typing import Any

import torch
from torch import Tensor

ROWS = 12

# Every leaf but one gets gradients.
ODD_TRAINABLE = {
    "bias7": True,
    "blocks": [{"w": True}, {"w": True}],
    "empty": True,
    "frozen": False,
    "one": True,
    "scalar": True,
    "tied": True,
    "unused": True,
    "wide": True,
}


def odd_params() -> dict[str, Any]:
    """Returns leaves of shapes [7], [1], [] and [0], and small, tied, frozen and unused leaves."""
    g = torch.Generator().manual_seed(1)

    def draw_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    return {
        "bias7": draw_tensor(7),
        "blocks": [{"w": draw_tensor(7, 5) / 2}, {"w": draw_tensor(7, 7) / 2}],
        "empty": torch.zeros(0, 3),
        "frozen": draw_tensor(3, 3),
        "one": draw_tensor(1),
        "scalar": draw_tensor(),
        "tied": draw_tensor(5, 5) / 2,
        "unused": draw_tensor(6, 2),
        "wide": draw_tensor(3, 7),
    }


def odd_loss(params: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    """Returns a loss with two uses of `tied`, no use of `unused`, and a sum over `empty`."""
    x = batch["x"] @ params["tied"].t()
    h = torch.tanh(x @ params["blocks"][0]["w"].t() + params["bias7"]) * params["scalar"]
    h = h + torch.tanh(h @ params["blocks"][1]["w"])
    h = h + (x @ params["tied"]).sum(1, keepdim=True) * params["one"] + params["empty"].sum()
    return ((h @ params["wide"].t() @ params["frozen"] - batch["y"]) ** 2).mean()


def odd_batch(n: int) -> dict[str, Any]:
    """Returns global batch n, of 12 rows."""
    g = torch.Generator().manual_seed(100 + n)
    return {"x": torch.randn(ROWS, 5, generator=g), "y": torch.randn(ROWS, 3, generator=g)}
