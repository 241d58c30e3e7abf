"""Covers `pipeline`: stages on ranks equal one device, for schedules x ZeRO stages x what a loss may return."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, WeightedMean, Zero, optim
from shardfn.testing import assert_parity, distributed

V, D, B, T = 11, 6, 12, 3
ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}


def _params(layers: int, dtype: torch.dtype = torch.float64, chunks: int = 1) -> Any:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) / 2

    def stack(n: int) -> dict[str, Tensor]:
        return {"w": draw(n, D, D), "b": draw(n, D), "g": draw(n)}

    stacks = [stack(layers // chunks + (c < layers % chunks)) for c in range(chunks)]
    return {"embed": draw(V, D), "blocks": stacks[0] if chunks == 1 else stacks, "scale": draw(D), "unused": draw(2)}


def _specs(params: Any) -> Any:
    return sf.core.tree_map(lambda _: P(), params) | {
        "blocks": sf.core.tree_map(lambda _: P("pp"), params["blocks"])
    }


def _batches(num: int = 3, rows: int = B) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    made = []
    for _ in range(num):
        tokens = torch.randint(V, (rows, T), generator=g)
        made.append({"tokens": tokens, "weight": torch.rand(rows, generator=g, dtype=torch.float64)})
    return made


def _first(p: Any, batch: Any) -> Any:
    return {"h": p["embed"][batch["tokens"]], "tokens": batch["tokens"], "even": batch["tokens"] % 2 == 0}


def _block(p: Any, x: Any) -> Any:
    shift = torch.where(x["even"], 0.5, -0.5).to(x["h"].dtype)[..., None] * p["g"]
    return {**x, "h": x["h"] + torch.tanh(x["h"] @ p["w"] + p["b"] + shift)}


def _scores(p: Any, x: Any) -> Tensor:
    logits = (x["h"] * p["scale"]) @ p["embed"].t()  # tied
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x["tokens"].flatten(), reduction="none")


def _last(p: Any, x: Any, batch: Any) -> Tensor:
    del batch
    return _scores(p, x).mean()


def _weighted(p: Any, x: Any, batch: Any) -> WeightedMean:
    by = batch["weight"].repeat_interleave(T).to(p["scale"].dtype)
    return WeightedMean((_scores(p, x) * by).sum(), by.sum())


def _plain(last: Any = _last) -> Any:
    """The same loss, written without any of the pipeline's means."""

    def loss(p: Any, batch: Any) -> Any:
        x, stacks = _first(p, batch), p["blocks"]
        for stack in stacks if isinstance(stacks, list) else [stacks]:
            for l in range(stack["g"].shape[0]):
                x = _block({k: v[l] for k, v in stack.items()}, x)
        return last(p, x, batch)

    return loss


def _loss(last: Any = _last, *, m: int = 4, block: Any = _block, **options: Any) -> Any:
    return sf.pipeline(_first, block, last, num_microbatches=m, **options)


def _parity(mesh: sf.Mesh, layers: int = 5, loss: Any = None, last: Any = _last, **options: Any) -> Any:
    chunks, dtype = options.pop("chunks", 1), options.pop("dtype", torch.float64)
    params = _params(layers, dtype, chunks)
    options = {"optimizer": optim.adamw(1e-2), "reference": _plain(last), "specs": _specs(params), **options}
    return assert_parity(
        _loss(last) if loss is None else loss, params=params, batches=_batches(), mesh=mesh, batch=P("dp"), **options
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@distributed(world=[2, 3])
def test_stages_equal_one_device(world: int, schedule: str) -> None:
    mesh = sf.make_mesh({"pp": world}, device="cpu")
    for dtype in (torch.float32, torch.float64):
        _parity(mesh, loss=_loss(schedule=schedule), dtype=dtype)
    _parity(mesh, loss=_loss(m=1, schedule=schedule))
    _parity(mesh, loss=_loss(m=6, schedule=schedule), layers=3)
