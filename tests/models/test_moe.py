"""Covers transformers with experts: parity over meshes, stages, exchanges and layouts; pipelines; biases."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import assert_parity, distributed

TINY: dict[str, Any] = {"vocab_size": 31, "num_layers": 2, "d_model": 12, "num_heads": 2, "num_kv_heads": 2, "d_ff": 10}
SETTINGS = {
    "mixtral": functools.partial(moe.mixtral_like, **TINY, max_len=16),
    "gpt": functools.partial(moe.gpt_moe, **TINY, max_len=16),
}


def config(setting: str, exchange: Any = None, *, stacked: bool = False, **changes: Any) -> gpt.Config:
    made = SETTINGS[setting](stacked=stacked)
    assert made.experts is not None
    experts = dataclasses.replace(made.experts, num=3, exchange=exchange or layers.Local(), balance=0.1, **changes)
    return dataclasses.replace(made, experts=experts)


def batches(rows: int = 4) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(0)
    return [{"tokens": torch.randint(0, 31, (rows, 8), generator=made)} for _ in range(2)]


def params(c: gpt.Config) -> Any:
    return sf.core.tree_map(lambda x: x.double() * 3, gpt.init(c, sf.key(0)))


def check(c: gpt.Config, mesh: Any, rows: int = 4, wrap: Any = lambda f: f, **options: Any) -> None:
    loss = wrap(functools.partial(gpt.loss, c, **options.pop("loss", {})))
    specs, start = gpt.specs(c, tp=options.pop("tp", None)), params(c)
    # The gradient of a bias of keys is 0, so only its rounding could be compared.
    paths, (leaves, tree) = sf.core.tree_paths(start), sf.core.tree_flatten(start)
    trainable = sf.core.tree_unflatten(tree, ["bk" not in path for path in paths[: len(leaves)]])
    options |= {"trainable": trainable}
    assert_parity(loss, sf.optim.adamw(0.01), start, batches(rows), mesh=mesh, specs=specs, **options)


EXCHANGES = {"tokens": layers.AllToAll("ep"), "weights": layers.GatherExperts("ep")}


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("stage", [0, 3])
def test_experts_on_an_axis_of_the_batch_equal_one_device(setting: str, exchange: str, stage: int) -> None:
    c = config(setting, EXCHANGES[exchange], axes="ep")
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        check(c, mesh, batch=sf.P("ep"), zero=sf.Zero(stage=stage, axis="ep", persist_elements=0))


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_that_all_ranks_have_alike_are_summed(setting: str) -> None:
    c = config(setting, layers.AllReduce("tp"))
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        check(c, mesh, batch=sf.P(), tp="tp", loss={"axis": "tp"})


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("sequence", [False, True])
def test_features_of_experts_are_cut(setting: str, sequence: bool) -> None:
    c = config(setting)
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        check(c, mesh, batch=sf.P(), tp="tp", loss={"axis": "tp", "sequence": sequence})


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("exchange", [layers.AllToAll("tp"), layers.GatherExperts("tp")], ids=repr)
def test_experts_lie_on_the_axis_that_cuts_features_and_tokens_elsewhere(exchange: Any) -> None:
    c = config("mixtral", exchange)
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        check(c, mesh, batch=sf.P(), tp="tp", loss={"axis": "tp", "sequence": True})


@pytest.mark.nightly
@distributed(world=4)
@pytest.mark.parametrize("jit", [False, True])
def test_tensor_parallel_experts_on_an_axis_of_the_batch_in_microbatches(jit: bool) -> None:
    c = config("gpt", layers.AllToAll("ep"))
    assert c.experts is not None
    c = dataclasses.replace(c, experts=dataclasses.replace(c.experts, balance=0.0))
    with sf.make_mesh({"ep": 2, "tp": 2}, device="cpu") as mesh:
        wrap = (
            (lambda f: sf.jit(sf.accumulate(sf.remat(f), 2), backend="graph")) if jit else lambda f: sf.accumulate(f, 2)
        )
        zero = sf.Zero(stage=3, axis="ep", persist_elements=0)
        check(
            c,
            mesh,
            rows=8,
            wrap=wrap,
            batch=sf.P("ep"),
            tp="tp",
            loss={"axis": "tp"},
            zero=zero,
            reference=functools.partial(gpt.loss, c),
        )


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("capacity", [None, 0.7])
@pytest.mark.parametrize("jit", [False, True])
def test_ranks_have_unequal_parts_of_a_sequence(capacity: float | None, jit: bool) -> None:
    """All seven tokens come to both ranks, also to that with three of its own."""
    alone = config("mixtral", capacity=capacity)
    assert alone.experts is not None
    alone = dataclasses.replace(alone, experts=dataclasses.replace(alone.experts, num=2))
    assert alone.experts is not None
    experts = dataclasses.replace(alone.experts, exchange=layers.AllToAll("sp"), axes="sp")
    c = dataclasses.replace(alone, experts=experts, attention=sf.nn.Ulysses("sp", 7))
    loss: Any = functools.partial(gpt.loss, c)
    with sf.make_mesh({"sp": 2}, device="cpu") as mesh:
        assert_parity(
            sf.jit(loss, backend="graph") if jit else loss,
            sf.optim.sgd(0.1),
            params(alone),
            [gpt.shifted(batch) for batch in batches(1)],
            mesh=mesh,
            specs=gpt.specs(c),
            batch=sf.P(None, "sp"),
            reference=functools.partial(gpt.loss, alone),
        )


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_stacked_layers_equal_separate_ones(setting: str) -> None:
    apart, stacked = config(setting), config(setting, stacked=True)
    batch = batches()[0]
    assert gpt.num_params(apart) == gpt.num_params(stacked)
    want = gpt.loss(apart, params(apart), batch)
    torch.testing.assert_close(gpt.loss(stacked, params(stacked), batch), want, rtol=0, atol=0)
    c = config(setting, layers.AllToAll("ep"), stacked=True, axes="ep")
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        check(
            c,
            mesh,
            batch=sf.P("ep"),
            wrap=sf.jit,
            zero=sf.Zero(stage=3, axis="ep", persist_elements=0),
            reference=functools.partial(gpt.loss, c),
        )


@pytest.mark.day("mixtral")
@distributed(world=2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_balance_losses_travel_through_a_pipeline(setting: str) -> None:
    made = config(setting, stacked=True)
    c = dataclasses.replace(made, num_layers=4)
    with sf.make_mesh({"pp": 2}, device="cpu") as mesh:
        loss = sf.pipeline(*gpt.stages(c), axis="pp")
        step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, specs=gpt.specs(c, pp="pp"), batch=sf.P())
        state, start = step.init(params(c)), params(c)
        state, metrics = step(state, batches()[0])
        leaves, tree = sf.core.tree_flatten(sf.core.tree_map(lambda x: x.requires_grad_(), start))
        value = gpt.loss(c, sf.core.tree_unflatten(tree, leaves), batches()[0])
        grads = torch.autograd.grad(value, leaves)
        torch.testing.assert_close(metrics["loss"].double(), value.detach(), rtol=1e-6, atol=0)
        wanted = [(x - 0.1 * g).detach() for x, g in zip(leaves, grads, strict=True)]
        for got, want in zip(sf.core.tree_leaves(state.params), wanted, strict=True):
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-13)


@pytest.mark.day("1-False")
@distributed(world=2)
@pytest.mark.parametrize(
    ("num", "jit"),
    [(1, False), (4, False)]
    + [pytest.param(*case, marks=pytest.mark.nightly) for case in ((1, True), (2, False), (2, True), (4, True))],
)
def test_biases_move_once_a_step_by_the_counts_of_all_its_tokens(num: int, jit: bool) -> None:
    """With four microbatches layers run again in the backward, and count once."""
    exchange = layers.AllToAll("ep")
    sizes = {**TINY, "num_layers": 3, "max_len": 16}
    experts = moe.Experts(
        num=4,
        route=functools.partial(layers.sigmoid_groups, groups=2, groups_kept=2),
        bias_rate=0.01,
        first=1,
        shared=True,
        balance=0.1,
        balance_loss=layers.balance.sequence,
        exchange=exchange,
    )
    c = moe.deepseek_v3_like(**sizes, experts=experts)
    wrap = sf.remat if num == 4 else lambda f: f
    loss: Any = sf.accumulate(functools.partial(moe.loss, c, axes="ep", wrap=wrap), num)
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh:
        step = sf.sharded_step(
            sf.jit(loss, backend="graph") if jit else loss,
            sf.optim.sgd(0.1),
            mesh=mesh,
            specs=gpt.specs(c),
            batch=sf.P("ep"),
            has_aux=True,
            has_state=True,
            finish=functools.partial(moe.finish, c),
        )
        state = step.init(params(c), model_state=moe.init_state(c))
        bias, batch = moe.init_state(c)["bias"], batches(8)[0]
        for _ in range(2):
            whole = sf.core.tree_map(lambda x: x.full_tensor(), state.params)
            value, _, found = moe.loss(c, whole, {"bias": bias, "counts": torch.zeros(2, 4, dtype=torch.int64)}, batch)
            counts = found["counts"]
            bias = layers.bias_update(bias, counts, 0.01)
            state, metrics = step(state, step_rows(step, batch))
            assert torch.equal(state.model_state["bias"].full_tensor(), bias)
            assert not state.model_state["counts"].full_tensor().any() and counts.sum() == 2 * 8 * 7 * 2
            torch.testing.assert_close(metrics["loss"].double(), value, rtol=1e-6, atol=0)
            assert {"balance", "max_load", "dead", "entropy", "dropped"} <= set(metrics)


@pytest.mark.nightly
@distributed(world=[2, 4])
@pytest.mark.parametrize("remat", [False, True])
def test_each_stage_of_a_pipeline_moves_the_biases_of_its_layers(world: int, remat: bool) -> None:
    experts = moe.Experts(
        num=4, d_ff=8, route=layers.sigmoid_groups, bias_rate=0.01, balance=0.0, exchange=layers.AllToAll("ep")
    )
    c = moe.deepseek_v3_like(**TINY, max_len=16, stacked=True, experts=experts)
    with pytest.raises(ValueError, match=r"bias_rate=0.01: these functions have no biases.*models\.moe\.stages"):
        gpt.stages(c)
    parts = moe.stages(c, axes="ep", wrap=sf.remat if remat else lambda f: f)
    with sf.make_mesh({"pp": 2, "ep": world // 2}, device="cpu") as mesh:
        step = sf.sharded_step(
            sf.pipeline(*parts, axis="pp", num_microbatches=2),
            sf.optim.sgd(0.1),
            mesh=mesh,
            specs=gpt.specs(c, pp="pp"),
            batch=sf.P("ep"),
            has_state=True,
            state_specs=sf.PipelineState(sf.P(), sf.P("pp"), sf.P()),
            finish=functools.partial(moe.finish, c),
        )
        state = step.init(params(c), model_state=sf.PipelineState(blocks=moe.init_state(c)))
        bias, batch = moe.init_state(c)["bias"], batches(8)[0]
        for _ in range(2):
            begun = {"bias": bias, "counts": torch.zeros(2, 4, dtype=torch.int64)}
            value, _, found = moe.loss(c, sf.unshard(state.params), begun, batch)
            bias = layers.bias_update(bias, found["counts"], 0.01)
            state, metrics = step(state, step_rows(step, batch))
            kept = sf.unshard(state.model_state.blocks)
            assert torch.equal(kept["bias"], bias) and not kept["counts"].any()
            torch.testing.assert_close(metrics["loss"].double(), value, rtol=1e-6, atol=0)


@distributed(world=2)
def test_the_load_is_computed_and_sent_where_it_is_asked_for() -> None:
    c = config("mixtral", axes="ep")
    with sf.make_mesh({"ep": 2}, device="cpu") as mesh, sf.collectives.bind_mesh(mesh):
        sent = []
        for load in (False, True):
            with sf.count_traffic() as traffic:
                _, seen = gpt.loss_and_seen(c, params(c), batches()[0], load=load)
            assert seen is not None
            assert set(seen.metrics) == ({"max_load", "dead", "entropy", "dropped"} if load else set())
            sent.append(sum(calls for calls, _ in traffic.by_op.values()))
        assert sent[1] == sent[0] + 2  # a message of each layer


def step_rows(step: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's rows of a batch."""
    return {name: x[step.rows(len(x))] for name, x in batch.items()}


def test_biases_take_part_in_logits_losses_and_choices() -> None:
    experts = moe.Experts(num=4, d_ff=8, route=layers.sigmoid_groups, bias_rate=0.01, balance=0.0)
    c = moe.deepseek_v3_like(**TINY, max_len=16, experts=experts)
    p, batch, state = params(c), batches()[0], moe.init_state(c)
    tokens = batch["tokens"][:, :-1]
    # Far above any score: all tokens choose the last two.
    state["bias"][:, 2:] = 5.0
    chosen = gpt.choices(c, p, tokens, bias=state["bias"])
    assert (
        set(chosen.flatten().tolist())
        == {2, 3}
        != set(gpt.choices(c, p, tokens, bias=state["bias"] * 0).flatten().tolist())
    )
    want = gpt.apply(c, p, tokens, chosen=chosen, bias=state["bias"] * 0)
    assert torch.equal(gpt.apply(c, p, tokens, bias=state["bias"]), want)
    assert torch.equal(gpt.loss(c, p, batch, bias=state["bias"]), moe.loss(c, p, state, batch)[0])
    greedy = gpt.generate(c, p, tokens, 1, sf.key(0), temperature=0, bias=state["bias"])
    assert torch.equal(greedy[:, -1], want[:, -1].argmax(-1))


def test_biases_that_are_missing_or_of_other_experts_are_refused() -> None:
    experts = moe.Experts(num=4, d_ff=8, route=layers.sigmoid_groups, bias_rate=0.01, balance=0.0)
    c = moe.deepseek_v3_like(**TINY, max_len=16, experts=experts)
    p, batch = params(c), batches()[0]
    tokens = batch["tokens"][:, :-1]
    dense = dataclasses.replace(c, experts=None)
    calls: list[Any] = [
        lambda **rest: gpt.apply(c, p, tokens, **rest),
        lambda **rest: gpt.loss(c, p, batch, **rest),
        lambda **rest: gpt.choices(c, p, tokens, **rest),
        lambda **rest: gpt.generate(c, p, tokens, 1, sf.key(0), **rest),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r'bias_rate=0\.01.*bias is missing. Pass bias=model_state\["bias"\]'):
            call()
        with pytest.raises(ValueError, match=r"bias has shape \(2, 3\).*need \(2, 4\)"):
            call(bias=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"bias has shape \(2, 4\).*need None.*without experts takes None"):
        gpt.loss(dense, params(dense), batch, bias=torch.zeros(2, 4))
