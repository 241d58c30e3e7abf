"""Covers leaves of experts wherever a state is placed: gradients, memory, offload, reshard, captures, 16 bits."""

import dataclasses
import functools
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.models import gpt, moe
from shardfn.nn import moe as layers
from shardfn.testing import assert_same, distributed, on_mesh, shard_rows

BATCH = ("dp", "ep")
ZERO = sf.Zero(stage=3, axis="ep", persist_elements=0)


def config(num: int = 4, *, alone: bool = False, **changes: Any) -> gpt.Config:
    """A model whose second layer has experts."""
    experts = moe.Experts(
        num=num,
        d_ff=8,
        every=2,
        balance=0.1,
        axes=None if alone else BATCH,
        exchange=layers.Local() if alone else layers.AllToAll("ep"),
    )
    sizes: dict[str, Any] = {"vocab_size": 20, "num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 12, "max_len": 8}
    return gpt.Config(
        **sizes, norm="rms", mlp="swiglu", position="rope", bias=False, experts=dataclasses.replace(experts, **changes)
    )


def params_of(c: gpt.Config, dtype: torch.dtype = torch.float64) -> Any:
    return sf.core.tree_map(lambda x: x.to(dtype) * 3, gpt.init(c, sf.key(0)))


def batch_of(n: int, rows: int) -> dict[str, Tensor]:
    """Rows; the k-th has k % 4 targets that do not count."""
    made = torch.Generator().manual_seed(n)
    batch = gpt.shifted({"tokens": torch.randint(20, (rows, 7), generator=made)})
    skipped = torch.arange(6)[None] < torch.arange(rows)[:, None] % 4
    return {**batch, "targets": batch["targets"].masked_fill(skipped, sf.data.IGNORED)}


def wanted(c: gpt.Config, params: Any, batch: dict[str, Tensor], ranks: int, num: int) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients on one device; microbatch m has the m-th rows of every rank."""
    leaves, tree = sf.core.tree_flatten(sf.core.tree_map(lambda x: x.clone().requires_grad_(), params))
    params = sf.core.tree_unflatten(tree, leaves)
    parts = [{k: x.unflatten(0, (ranks, num, -1))[:, m].flatten(0, 1) for k, x in batch.items()} for m in range(num)]
    pairs = [gpt.loss(c, params, part) for part in parts]
    loss = torch.stack([p.total for p in pairs]).sum() / torch.stack([p.weight for p in pairs]).sum()
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


def check_gradients(axes: dict[str, int], stage: int, num: int) -> None:
    """Compares the gradients of all leaves, and their norm, with one device."""
    with sf.make_mesh(axes, device="cpu") as mesh:
        c, ranks, rows = config(3), mesh.size, 12 * mesh.size
        loss: Any = functools.partial(gpt.loss, c)
        step = sf.sharded_step(
            sf.accumulate(loss, num) if num > 1 else loss,
            sf.optim.chain(sf.optim.clip_by_global_norm(0.01), sf.optim.sgd(1.0)),
            mesh=mesh,
            specs=gpt.specs(c),
            batch=sf.P(BATCH),
            zero=sf.Zero(stage=stage, axis=BATCH, persist_elements=0),
        )
        params, batch = params_of(c), batch_of(0, rows)
        value, grads = wanted(config(3, alone=True), params, batch, ranks, num)
        state = step.init(params)
        found, metrics = step.gradients(state, shard_rows(batch, sf.P(BATCH), mesh))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        for name, want in (("loss", value), ("grad_norm", norm)):
            torch.testing.assert_close(metrics[name].double(), want, rtol=1e-6, atol=0)
        whole = sf.unshard(found)
        for path, got, want in zip(sf.core.tree_paths(whole), sf.core.tree_leaves(whole), grads, strict=True):
            assert (got - want).abs().max() <= 1e-12 * want.abs().max().clamp(min=1e-3), path
        before = params_of(c)
        state, metrics = step.update(state, found, finite=metrics["finite"])
        after = sf.unshard(state.params)
        for x, y, g in zip(*map(sf.core.tree_leaves, (before, after)), grads, strict=True):
            torch.testing.assert_close(x - y, g * (0.01 / norm), rtol=1e-6, atol=1e-12)
        norms = [torch.zeros_like(metrics["grad_norm"]) for _ in range(ranks)]
        if ranks > 1:
            dist.all_gather(norms, metrics["grad_norm"])
            assert all(torch.equal(x, norms[0]) for x in norms)


MESHES = {1: [{"dp": 1, "ep": 1}], 2: [{"dp": 1, "ep": 2}], 4: [{"dp": 4, "ep": 1}, {"dp": 2, "ep": 2}, {"ep": 4}]}


@pytest.mark.day("3")
@distributed(world=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_each_leaf_are_those_of_one_device(stage: int) -> None:
    check_gradients({"dp": 1, "ep": 2}, stage, 3)


@pytest.mark.nightly
@distributed(world=[1, 2, 4], timeout=300)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num", [1, 3])
def test_no_mesh_or_stage_changes_a_gradient(world: int, stage: int, num: int) -> None:
    for axes in MESHES[world]:
        check_gradients({"dp": 1, **axes}, stage, num)


def optimizer_of() -> Any:
    return sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world=4)
def test_every_leaf_and_state_has_the_bytes_of_its_specs(stage: int) -> None:
    """The axis of experts is one of the batch: ZeRO cuts dense leaves over both, and experts over the other."""
    with sf.make_mesh({"dp": 2, "ep": 2}, device="cpu") as mesh:
        c = config()
        zero = sf.Zero(stage=stage, axis=BATCH, persist_elements=0)
        step = sf.sharded_step(
            functools.partial(gpt.loss, c), optimizer_of(), mesh=mesh, specs=gpt.specs(c), batch=sf.P(BATCH), zero=zero
        )
        state = step.init(params_of(c))
        found, _ = step.gradients(state, shard_rows(batch_of(0, 8), sf.P(BATCH), mesh))
        parts = {"params": 4 if stage == 3 else 1, "grads": 4, "optimizer": 4}
        for name, tree in {"params": state.params, "grads": found, "optimizer": state.opt_state}.items():
            for path, x in zip(sf.core.tree_paths(tree), sf.core.tree_leaves(tree), strict=True):
                ranks = 1 if not x.shape else max(parts[name], 2 if "e_" in path else 1)
                assert x.local.nbytes == x.shape.numel() * x.dtype.itemsize // ranks, (name, path)


PLACES = [("host", "host", "host"), ("disk", "device", "disk"), ("device", "host", "disk")]


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world=2)
def test_experts_on_the_host_and_on_disk_have_the_bits_of_the_device(stage: int, tmp_path: pathlib.Path) -> None:
    with sf.make_mesh({"dp": 1, "ep": 2}, device="cpu") as mesh:
        c = config(3)
        given: dict[str, Any] = {"mesh": mesh, "specs": gpt.specs(c), "batch": sf.P(BATCH)}
        batches = [batch_of(n, 8) for n in range(2)]

        def run(**fields: Any) -> Any:
            zero = sf.Zero.flat(stage=stage, axis=BATCH, persist_elements=0, **fields)
            loss = functools.partial(gpt.loss, c)
            return on_mesh(loss, optimizer_of(), params_of(c), batches, zero=zero, **given)

        want = run()
        for i, (params, grads, optimizer) in enumerate(PLACES):
            where: dict[str, Any] = {"params": params, "grads": grads, "optimizer": optimizer}
            if "disk" in where.values():
                where["directory"] = str(tmp_path / str(i))
            assert_same(run(**where), want, exact=True)


CODES: dict[str, Any] = {"gather": "int8", "secondary_axis": "ep", "reduce": "int4"}


def travelling(mesh: sf.Mesh, jit: bool = False, **travel: Any) -> dict[str, Any]:
    """A loss in microbatches with leaves that are gathered again, and the options of its step at stage 3."""
    c = config(3)
    loss: Any = sf.accumulate(sf.remat(functools.partial(gpt.loss, c)), 2)
    zero = sf.Zero.flat(stage=3, axis=BATCH, persist_elements=0, **travel)
    loss = sf.jit(loss, backend="graph") if jit else loss
    return {"loss": loss, "mesh": mesh, "batch": sf.P(BATCH), "specs": gpt.specs(c), "zero": zero}


@pytest.mark.nightly
@distributed(world=4, timeout=300)
@pytest.mark.parametrize("jit", [False, True])
def test_secondary_pieces_beside_experts_change_no_bit_and_captured_codes_neither(jit: bool) -> None:
    batches = [batch_of(n, 16) for n in range(2)]

    def run(mesh: sf.Mesh, jit: bool, **travel: Any) -> Any:
        given = travelling(mesh, jit, **travel)
        dtype = torch.float32 if "gather" in travel else torch.float64
        return on_mesh(given.pop("loss"), optimizer_of(), params_of(config(3), dtype), batches, **given)

    with sf.make_mesh({"dp": 2, "ep": 2}, device="cpu") as mesh:
        want = run(mesh, False)
        for near in BATCH:
            assert_same(run(mesh, jit, secondary_axis=near), want, exact=True)
        if jit:
            assert_same(run(mesh, jit, **CODES), run(mesh, False, **CODES), exact=True)


@pytest.mark.nightly
@distributed(world=4)
def test_leaves_beside_experts_travel_in_codes() -> None:
    """0 and the least number of a block have codes without rounding; gradients are rounded on each of their hops."""
    params = sf.core.tree_map(lambda x: torch.where(x < 0, -0.25, 0.0), params_of(config(3), torch.float32))
    # Weights of norms are not negative, and with zeros alone no leaf would have a gradient.
    params["norm_w"] -= 0.25
    for block in params["blocks"]:
        block["norm1_w"], block["norm2_w"] = block["norm1_w"] - 0.25, block["norm2_w"] - 0.25
    found, travels = [], list[dict[str, Any]]([{}, {"gather": "int8", "secondary_axis": "ep"}, CODES])
    with sf.make_mesh({"dp": 2, "ep": 2}, device="cpu") as mesh:
        for travel in travels:
            given = travelling(mesh, **travel)
            step = sf.sharded_step(given.pop("loss"), optimizer_of(), **given)
            grads, _ = step.gradients(step.init(params), shard_rows(batch_of(0, 16), sf.P(BATCH), mesh))
            found.append(sf.core.tree_leaves(sf.unshard(grads)))
    for path, x, gathered, reduced in zip(sf.core.tree_paths(params), *found, strict=True):
        assert (gathered - x).abs().max() <= 1e-6 * x.abs().max() and x.any(), path
        # Half a step of 15 codes on each of two hops, of sums that may be larger than the result.
        assert (reduced - x).abs().max() <= x.abs().max(), path
    assert not all(map(torch.equal, found[1], found[2]))


@pytest.mark.nightly
@distributed(world=2)
def test_experts_alone_lie_on_the_host(tmp_path: pathlib.Path) -> None:
    with sf.make_mesh({"dp": 1, "ep": 2}, device="cpu") as mesh:
        c = config(3)
        specs = gpt.specs(c)
        placed = {**specs, "blocks": [dict(block) for block in specs["blocks"]]}
        for name, spec in placed["blocks"][1].items():
            if name.startswith("e_"):
                placed["blocks"][1][name] = sf.Sharding(spec, "host")
        batches = [batch_of(n, 8) for n in range(2)]
        zero = sf.Zero(stage=3, axis=BATCH, persist_elements=0)
        runs = [
            on_mesh(
                functools.partial(gpt.loss, c),
                optimizer_of(),
                params_of(c),
                batches,
                mesh=mesh,
                specs=s,
                batch=sf.P(BATCH),
                zero=zero,
            )
            for s in (specs, placed)
        ]
        assert_same(runs[1], runs[0], exact=True)


@pytest.mark.nightly
@distributed(world=2, timeout=300)
@pytest.mark.parametrize("num", [8, 100])
def test_one_capture_serves_all_routings(num: int) -> None:
    """Tokens of one kind choose the same experts: each batch has other kinds, some have one alone."""
    with sf.make_mesh({"dp": 1, "ep": 2}, device="cpu") as mesh:
        c = config(3, alone=True, exchange=layers.AllToAll("ep"))
        loss = functools.partial(gpt.loss, c)
        made = torch.Generator().manual_seed(3)
        batches = []
        for n in range(num):
            kinds = torch.randint(20, (1 + n % 7,), generator=made)
            batches.append({"tokens": kinds[torch.randint(len(kinds), (4, 7), generator=made)]})
        steps, losses, found = {}, {}, []
        for name, f in (("eager", loss), ("captured", sf.jit(loss, backend="graph"))):
            step = sf.sharded_step(f, sf.optim.sgd(0.01), mesh=mesh, specs=gpt.specs(c), batch=sf.P("ep"), zero=ZERO)
            state = step.init(params_of(c))
            losses[name] = []
            for batch in batches:
                state, metrics = step(state, {k: x[step.rows(4)] for k, x in batch.items()})
                losses[name].append(metrics["loss"])
            steps[name] = step
            found.append(sf.unshard(state.params))
        info = steps["captured"].cache_info()
        assert (info.misses, info.hits) == (1, num - 1)
        torch.testing.assert_close(
            torch.stack(losses["captured"]), torch.stack(losses["eager"]), rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.nightly
@distributed(world=2)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_the_router_computes_in_32_bits_of_a_model_of_16(policy: str) -> None:
    seen = []

    def route(logits: Tensor, k: int, **options: Any) -> layers.Routing:
        routing = layers.top_k(logits, k, **options)
        seen.append((logits.dtype, routing.weights.dtype))
        return routing

    with sf.make_mesh({"dp": 1, "ep": 2}, device="cpu") as mesh:
        c = config(alone=True, route=route, exchange=layers.AllToAll("ep"))
        scale = sf.optim.dynamic_loss_scale() if policy == "fp16" else None
        loss = sf.mixed_precision(functools.partial(gpt.loss, c), getattr(sf.Policy, policy)(), scale)
        step = sf.sharded_step(loss, optimizer_of(), mesh=mesh, specs=gpt.specs(c), batch=sf.P("ep"), zero=ZERO)
        state = step.init(params_of(c, torch.float32))
        batch = {k: x[step.rows(8)] for k, x in batch_of(0, 8).items()}
        losses = []
        for _ in range(8):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
        assert set(seen) == {(torch.float32, torch.float32)} and losses[-1] < losses[0]
        whole = sf.core.tree_map(lambda x: x.float(), sf.unshard(step.init(params_of(c, torch.float32)).params))
        alone = config(alone=True, route=route)
        value = gpt.loss(alone, whole, batch_of(0, 8)).mean()
        assert losses[0] == pytest.approx(value.item(), rel=1.6e-2)
