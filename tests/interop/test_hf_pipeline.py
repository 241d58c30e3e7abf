"""Covers models of transformers in stages whose attention a body computes: losses, evaluation, and cut sequences."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, nn, optim
from shardfn.interop import causal_lm_batch, causal_lm_loss
from shardfn.testing import assert_parity, distributed, shard_rows

from .test_hf_sequence import BODIES, model_of, rows_of

PATH = "model.layers"


def _specs(params: dict[str, Any]) -> dict[str, P]:
    return {key: P("pp") if key == PATH else P() for key in params}


def _parity(body: Any, T: int, mesh: sf.Mesh, *, jit: bool = False, **how: Any) -> None:
    torch.set_num_threads(1)
    rate, tile = how.pop("rate", 0.0), how.pop("tile", None)
    model, plain = (model_of("llama", rate=rate).train() for _ in range(2))
    for one in (model, plain) if how.pop("twice", False) else ():
        one.model.layers.extend(copy.deepcopy(one.model.layers))
        one.config.num_hidden_layers = 4
    params, apply = sf.from_module(model, layers=PATH, attention=body)
    _, dense = sf.from_module(plain, layers=PATH, attention=nn.Dense())
    order = nn.sequence_order(body, T, mesh.axis_size("sp")) if getattr(body, "axes", ()) else torch.arange(T)
    index = {"index": torch.tensor([5, 3])} if rate else {}
    batches = [causal_lm_batch(nn.Dense(), rows_of(T, False, n), mesh) for n in range(2)]

    def reference(params: Any, batch: Any, *key: Tensor) -> Any:
        back = {k: x if k == "index" else x[:, order.argsort()] for k, x in batch.items()}
        return causal_lm_loss(dense)(params, back, *key)

    piped: Any = sf.pipeline_module(causal_lm_loss(apply, tile=tile), apply, num_microbatches=2)
    piped = sf.jit(piped, backend="graph") if jit else piped
    batch: Any = dict.fromkeys(batches[0], P(None, "sp")) | dict.fromkeys(index, P())
    cut = [{k: x[:, order] for k, x in b.items()} | index for b in batches]
    common: dict[str, Any] = {"mesh": mesh, "specs": _specs(params), "batch": batch}
    key = sf.key(3) if rate else None
    assert_parity(piped, optim.sgd(0.1, momentum=0.9), params, cut, reference=reference, key=key, **common, **how)
    if rate:
        return
    step = sf.sharded_step(piped, optim.sgd(0.1), **common)
    state = step.init(params)
    total, weight = reference(params, cut[0])
    own = shard_rows(cut[0], batch, mesh)
    found = [step.evaluate(state, [own])["loss"], float(step.loss(state.params, own))]
    torch.testing.assert_close(found, [float(total / weight)] * 2, rtol=1e-12, atol=0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "body", [nn.Blockwise(3), pytest.param(nn.Chunked(3), marks=pytest.mark.nightly)], ids=["blockwise", "chunked"]
)
@distributed(world=2)
def test_bodies_on_whole_rows(body: Any) -> None:
    _parity(body, 7, sf.make_mesh({"pp": 2}, device="cpu"))


@pytest.mark.nightly
@distributed(world=2)
def test_a_captured_pipeline_of_a_body() -> None:
    _parity(nn.Blockwise(3), 7, sf.make_mesh({"pp": 2}, device="cpu"), jit=True, tile=2)


@pytest.mark.nightly
@distributed(world=3)
def test_a_rank_without_layers_attends_to_nothing() -> None:
    """Four layers on three ranks: two, two and zero."""
    _parity(nn.Blockwise(3), 7, sf.make_mesh({"pp": 3}, device="cpu"), twice=True)


@pytest.mark.nightly
@distributed(world=2)
def test_dropout_has_the_masks_of_one_device() -> None:
    _parity(nn.Blockwise(3), 7, sf.make_mesh({"pp": 2}, device="cpu"), rate=0.25)


@pytest.mark.nightly
@pytest.mark.parametrize("body", ["ring", "ulysses", "chunked"])
@distributed(world=4, timeout=600)
def test_a_cut_sequence_in_stages(body: str) -> None:
    mesh = sf.make_mesh({"pp": 2, "sp": 2}, device="cpu")
    made: Any = nn.Chunked(3, "sp", 7) if body == "chunked" else BODIES[body](7)
    _parity(made, 7, mesh)
    _parity(made, 7, mesh, zero=sf.Zero(stage=3, axis="sp", persist_elements=0), tile=2)
    if body != "chunked":
        _parity(made, 7, mesh, jit=True)


@distributed(world=2)
def test_layers_that_do_not_ask_for_attention_are_refused() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    params, apply = sf.from_module(model_of("llama"), layers=PATH, attention=nn.Blockwise(3))
    for layer in apply.layers:
        layer.forward = lambda hidden_states, **_: hidden_states
    piped = sf.pipeline_module(causal_lm_loss(apply), apply)
    step = sf.sharded_step(piped, optim.sgd(0.1), mesh=mesh, specs=_specs(params), batch=P())
    batch = causal_lm_batch(nn.Dense(), rows_of(6, False), mesh)
    with pytest.raises((ValueError, sf.RankError), match="has not called the attention of transformers"):
        step(step.init(params), batch)
