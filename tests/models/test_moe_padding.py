"""Covers rows with padding in transformers with experts: it takes no expert, no capacity, and no balance loss."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import assert_parity, distributed

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "num_layers": 2,
    "d_model": 12,
    "num_heads": 2,
    "num_kv_heads": 2,
    "d_ff": 10,
}
Batch = dict[str, Tensor]


def config(exchange: Any = None, **changes: Any) -> gpt.Config:
    experts = moe.Experts(num=3, exchange=exchange or layers.Local(), **{"balance": 0.1, "z": 0.01, **changes})
    return moe.mixtral_like(**SIZES, max_len=16, experts=experts)


def params(c: gpt.Config) -> Any:
    return sf.core.tree_map(lambda x: x.double() * 3, gpt.init(c, sf.key(0)))


def padded(lengths: list[int], seed: int = 0) -> Batch:
    """Rows of up to 9 tokens; padding has tokens of its own in each batch."""
    tokens_BT = torch.randint(0, 31, (len(lengths), 9), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens_BT, "mask": torch.arange(9) < torch.tensor(lengths)[:, None]}


def value_and_grads(c: gpt.Config, loss: Any) -> tuple[Tensor, list[Tensor]]:
    leaves, tree = sf.core.tree_flatten(sf.core.tree_map(lambda x: x.requires_grad_(), params(c)))
    value = loss(sf.core.tree_unflatten(tree, leaves))
    return value.detach(), list(torch.autograd.grad(value, leaves))


@pytest.mark.day("0.7")
@pytest.mark.parametrize("capacity", [None, 0.7])
def test_a_padded_row_has_the_loss_and_gradients_of_its_tokens(capacity: float | None) -> None:
    c, batch = config(capacity=capacity), padded([6])
    assert not torch.equal(batch["mask"], torch.ones_like(batch["mask"]))

    def pair(p: Any, rows: Batch) -> Tensor:
        found = gpt.loss(c, p, rows)
        return found.total / found.weight if isinstance(found, sf.WeightedMean) else found

    want = value_and_grads(c, lambda p: pair(p, {"tokens": batch["tokens"][:, :6]}))
    # The short row gives the router five tokens, which have a target.
    got = value_and_grads(c, lambda p: pair(p, shortened(batch)))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def shortened(batch: Batch) -> Batch:
    """The batch as `gpt.shifted` has it, without the tokens that have no target."""
    made = gpt.shifted(batch)
    return made | {"mask": made["mask"] & (made["targets"] != -100)}


def test_padding_changes_nothing() -> None:
    c, batch = config(capacity=1.0), padded([6, 9, 3])
    other = batch | {"tokens": torch.where(batch["mask"], batch["tokens"], 7)}
    for f in (gpt.loss, moe.loss):
        one, two = f(c, params(c), batch), f(c, params(c), other)
        torch.testing.assert_close(sf.core.tree_leaves(one), sf.core.tree_leaves(two), rtol=0, atol=0)
    whole = batch | {"mask": torch.ones_like(batch["mask"])}
    plain = gpt.loss(c, params(c), {"tokens": batch["tokens"]})
    masked = gpt.loss(c, params(c), whole)
    torch.testing.assert_close(masked.total / masked.weight, plain, rtol=1e-12, atol=0)


@pytest.mark.day(1)
@distributed(world=2)
@pytest.mark.parametrize("exchange", [layers.AllToAll("ep"), layers.GatherExperts("ep")], ids=repr)
@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("stacked", [False, True])
def test_ranks_with_unequal_padding_equal_one_device(exchange: Any, jit: bool, stacked: bool) -> None:
    c = dataclasses.replace(config(exchange, axes="ep", capacity=0.8), stacked=stacked)
    loss = functools.partial(gpt.loss, c)
    batches = [padded([9, 2, 7, 5]), padded([3, 3, 9, 9], 1), padded([0, 0, 4, 1], 2)]
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        zero = sf.Zero(stage=3, axis="ep", persist_elements=0)
        options: dict[str, Any] = {"mesh": mesh, "specs": gpt.specs(c), "batch": sf.P("ep"), "zero": zero}
        wrapped = sf.jit(sf.remat(loss), backend="graph") if jit else loss
        assert_parity(wrapped, sf.optim.adamw(0.01), params(c), batches, reference=loss, **options)


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("sequence", [False, True])
def test_features_and_tokens_between_blocks_are_cut(sequence: bool) -> None:
    c = config(capacity=0.8)
    loss = functools.partial(gpt.loss, c, axis="tp", sequence=sequence)
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        options: dict[str, Any] = {"mesh": mesh, "specs": gpt.specs(c, tp="tp"), "batch": sf.P()}
        assert_parity(
            loss,
            sf.optim.adamw(0.01),
            params(c),
            [padded([9, 2, 7, 5])] * 2,
            reference=functools.partial(gpt.loss, c),
            **options,
        )


@distributed(world=2)
def test_a_pipeline_sends_the_mask_along() -> None:
    c = dataclasses.replace(config(balance=0.0, z=0.0), stacked=True)
    loss = sf.pipeline(*gpt.stages(c), num_microbatches=2)
    with sf.make_mesh({"pp": 2}, device="cpu") as mesh:
        options: dict[str, Any] = {"mesh": mesh, "specs": gpt.specs(c, pp="pp"), "batch": sf.P()}
        reference = functools.partial(gpt.loss, c)
        batches = [padded([9, 2, 7, 5])] * 2
        assert_parity(loss, sf.optim.adamw(0.01), params(c), batches, reference=reference, **options)


def test_an_encoder_needs_documents_beside_a_mask() -> None:
    c, batch = dataclasses.replace(config(), causal=False), padded([6, 9])
    batch |= {"targets": torch.where(batch["mask"], batch["tokens"], -100)}
    with pytest.raises(ValueError, match='"segment_ids", in which padding has a number of its own'):
        gpt.loss(c, params(c), batch)
    ids = batch | {"segment_ids": batch["mask"].long()}
    other = ids | {"tokens": torch.where(batch["mask"], batch["tokens"], 7)}
    assert torch.equal(gpt.loss(c, params(c), ids).total, gpt.loss(c, params(c), other).total)


def test_a_mask_that_does_not_fit_is_refused() -> None:
    c, batch = config(), padded([6, 9])
    for mask in (batch["mask"][:, :-1], batch["mask"].long()):
        with pytest.raises(ValueError, match=r"tokens have shape \(2, 9\). Give each token a bool"):
            gpt.loss(c, params(c), batch | {"mask": mask})
