"""Covers mixed precision: a policy's step equals one device's, for stages x worlds x transforms; scales; errors."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.collectives import member, stack, unshard
from shardfn.core import named_leaves, tree_leaves
from shardfn.models import gpt
from shardfn.testing import (
    ODD_TRAINABLE,
    assert_same,
    distributed,
    odd_batch,
    odd_loss,
    odd_params,
    on_mesh,
    one_device,
    shard_rows,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}
# 0-d and empty leaves: where a wide one meets a narrow tensor, the result is narrow.
EXCEPT = sf.Policy.bf16(exceptions={"scalar|empty": FP32})
KEPT_WIDE = sf.Policy(compute=BF16)
graph = functools.partial(sf.jit, backend="graph")


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_stages_equal_one_device_and_one_another(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    batches = [odd_batch(n) for n in range(2)]
    clipped = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))
    for policy, tx, cut, remat in (
        (sf.Policy.bf16(), optim.sgd(1e-2, momentum=0.9), 1, False),
        (EXCEPT, clipped, 3, True),
        (KEPT_WIDE, optim.adamw(1e-2), 1, False),
    ):
        want = one_device(
            sf.mixed_precision(odd_loss, policy), tx, odd_params(), batches, trainable=ODD_TRAINABLE, parts=world * cut
        )
        mixed = sf.mixed_precision(sf.remat(odd_loss) if remat else odd_loss, policy)
        loss = sf.accumulate(mixed, cut) if cut > 1 else mixed
        options: dict[str, Any] = {"mesh": mesh, "trainable": ODD_TRAINABLE}
        runs = [
            on_mesh(loss, tx, odd_params(), batches, zero=sf.Zero.flat(stage=stage, **ODD), **options)
            for stage in ((0, 3) if world == 1 else range(4))
        ]
        for run in runs:
            assert_same(run, want)
        for run in runs[2:]:
            assert_same(run, runs[1], exact=True)
        assert {x.dtype for x in tree_leaves(want.params)} == {policy.param, *policy.exceptions.values()}


@pytest.mark.nightly
@distributed(world=2)
def test_narrow_sums_travel_narrow_and_orders_of_nesting_mean_the_same() -> None:
    mesh = sf.make_mesh({"dp": 2})
    batches, tx = [odd_batch(0)], optim.sgd(1e-2)
    policy = sf.Policy.bf16(reduce=BF16)
    runs = {}
    for accumulate in ("each", "once"):
        want: Any = None
        for stage in (3, 2, 0):
            zero = sf.Zero.flat(stage=stage, accumulate=accumulate, **ODD)
            for loss in (
                sf.accumulate(sf.mixed_precision(odd_loss, policy), 3),
                sf.mixed_precision(sf.accumulate(odd_loss, 3), policy),
            ):
                run = on_mesh(loss, tx, odd_params(), batches, mesh=mesh, zero=zero)
                want = want or run
                # Stage 0 adds up the squares of the norm in another order.
                assert_same(run if stage else run._replace(metrics=want.metrics), want, exact=True)
        runs[accumulate] = want
    plain = one_device(sf.mixed_precision(odd_loss, policy), tx, odd_params(), batches, parts=6)
    for run in runs.values():
        assert_same(run, plain, computed=BF16)
    moved = {}
    for policy in (sf.Policy.full(), sf.Policy.bf16(reduce=BF16), sf.Policy.bf16()):
        step = sf.sharded_step(
            sf.mixed_precision(odd_loss, policy), tx, mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0)
        )
        state = step.init(odd_params())
        with sf.count_traffic() as sent:
            step(state, shard_rows(batches[0], sf.P("dp"), mesh))
        moved[policy] = [sent.by_dtype.get(dtype, 0) for dtype in (BF16, FP32)]
    full, narrow, mixed = moved.values()
    assert full[0] == 0 and narrow == [full[1] // 2, 0]  # gathers and gradients, all of them
    assert 0 < mixed[0] < narrow[0] and mixed[1] == 2 * (narrow[0] - mixed[0])  # gradients in float32


def _tp_loss(params: dict, batch: dict) -> Tensor:
    h = sf.pvary(batch["x"], "tp") @ params["up"].t()
    h = torch.tanh(h * params["norm"]).to(h.dtype)
    return ((sf.psum(h @ params["down"].t(), "tp").float() - batch["y"]) ** 2).mean()


@pytest.mark.nightly
@distributed(world=4)
def test_tensor_parallel_leaves(world: int) -> None:
    g = torch.Generator().manual_seed(3)
    params = {
        "up": torch.randn(6, 5, generator=g),
        "norm": torch.randn(6, generator=g),
        "down": torch.randn(3, 6, generator=g),
    }
    specs = {"up": sf.P("tp"), "norm": sf.P("tp"), "down": sf.P(None, "tp")}
    mesh = sf.make_mesh({"dp": world // 2, "tp": 2})
    loss = sf.mixed_precision(_tp_loss, sf.Policy.bf16(exceptions={"norm": FP32}))
    batches, tx = [odd_batch(n) for n in range(2)], optim.sgd(1e-2)
    want = one_device(loss, tx, params, batches, parts=2)
    runs = [
        on_mesh(loss, tx, params, batches, mesh=mesh, specs=specs, zero=sf.Zero.flat(stage=stage, **ODD))
        for stage in (0, 1, 3)
    ]
    for run in runs:
        assert_same(run, want, computed=BF16)
    assert_same(runs[2], runs[1], exact=True)


def _half(params: dict, batch: dict) -> Tensor:
    """Its gradient overflows float16 where a row is large."""
    return ((batch["x"] @ params["w"]).float() ** 2).mean()


def _rows(n: int, large: bool, world: int) -> dict:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(n)) / 64
    if large:
        x[0] = 2000.0  # rank 0's row
    return {"x": x}


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    w = {"w": torch.randn(4, 3, generator=torch.Generator().manual_seed(9))}
    rule = optim.dynamic_loss_scale(init=2.0**12, window=2, hysteresis=1)
    tx = optim.chain(optim.clip_by_global_norm(1e-2), optim.adamw(1e-2))
    loss = sf.mixed_precision(_half, sf.Policy.fp16(), rule)
    batches = [_rows(n, n in (1, 5), world) for n in range(6)]
    want = one_device(loss, tx, w, batches, parts=world)
    for stage, jit in ((0, graph), (3, graph), (2, lambda f: f), (3, lambda f: f)):
        step = sf.sharded_step(jit(loss), tx, mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0))
        state = step.init(w)
        scales, measured = [], []
        for n, batch in enumerate(batches):
            before = [x.clone() for x in tree_leaves(unshard((state.params, state.opt_state, state.step)))]
            state, metrics = step(state, shard_rows(batch, sf.P("dp"), mesh))
            after = tree_leaves(unshard((state.params, state.opt_state, state.step)))
            same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            assert bool(metrics["skipped"]) == (n in (1, 5))
            assert all(same) if n in (1, 5) else not any(same)
            scales.append(metrics["loss_scale"].item())
            measured.append({k: metrics[k] for k in ("loss", "grad_norm")})
        # The scale that was used: it falls after the overflow, and grows after the third finite step since.
        assert scales == [2.0**12, 2.0**12, 2.0**11, 2.0**11, 2.0**11, 2.0**12]
        assert int(state.step) == 4 and state.loss_scale.scale == 2.0**11
        for n in (0, 2, 3, 4):
            for name, x in measured[n].items():
                torch.testing.assert_close(x, want.metrics[n][name], rtol=1e-6, atol=0.0)
        got = sf.testing._parity.Run(unshard(state.params), unshard(state.opt_state), [])
        assert_same(got, want._replace(metrics=[]))


def _sum_loss(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).sum()


def test_the_scale_that_was_used_divides_before_clipping() -> None:
    rule = optim.dynamic_loss_scale(init=4.0, window=1, hysteresis=1)  # grows after every step but the first
    loss = sf.mixed_precision(_sum_loss, sf.Policy.fp16(), rule)
    step = sf.sharded_step(loss, optim.chain(optim.clip_by_global_norm(5.0), optim.sgd(1.0)))
    state = step.init(torch.zeros(2))
    norms = []
    for _ in range(4):
        state, metrics = step(state, torch.tensor([3.0, 4.0]))
        norms.append((metrics["grad_norm"].item(), metrics["loss_scale"].item()))
    assert norms == [(5.0, 4.0), (5.0, 4.0), (5.0, 8.0), (5.0, 16.0)]
    assert torch.equal(unshard(state.opt_state.master), torch.tensor([-12.0, -16.0]))
    floor = optim.dynamic_loss_scale(init=1.0, hysteresis=1)
    step = sf.sharded_step(sf.mixed_precision(_sum_loss, sf.Policy.fp16(), floor), optim.sgd(1.0))
    state = step.init(torch.zeros(2))
    with pytest.raises(FloatingPointError, match="at its floor"):
        step(state, torch.tensor([float("inf"), 0.0]))
    step(state, torch.ones(2))  # the given state is unchanged


def test_sixty_four_microbatches_add_up_in_float32() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(64, 256, generator=g).to(BF16).float()
    exact = x.double().mean(0)
    errors = {}
    for name, accum in (("float32", FP32), ("bfloat16", BF16)):
        policy = sf.Policy(compute=BF16, accum=accum)
        loss = sf.accumulate(sf.mixed_precision(_sum_loss, policy), 64)
        step = sf.sharded_step(loss, optim.sgd(1.0))
        state, _ = step(step.init(torch.zeros(256)), x)
        errors[name] = float((-unshard(state.params).double() - exact).norm() / exact.norm())
    assert errors["float32"] <= 1e-6 and errors["bfloat16"] >= 1e-3, errors


@distributed(world=2)
def test_averages_over_ranks_and_microbatches_are_exact_integers(world: int) -> None:
    x = torch.tensor([[1.0, 3.0, 5.0, 7.0], [11.0, 13.0, 15.0, 17.0]])
    mesh = sf.make_mesh({"dp": world})
    for stage in (0, 1, 3):
        loss = sf.accumulate(sf.mixed_precision(_sum_loss, sf.Policy.bf16()), 2)
        step = sf.sharded_step(loss, optim.sgd(1.0), mesh=mesh, zero=sf.Zero(stage=stage, persist_elements=0))
        state, metrics = step(step.init(torch.ones(4)), x + 18.0 * mesh.axis_index("dp"))
        want = torch.tensor([15.0, 17.0, 19.0, 21.0])
        assert torch.equal(unshard(state.opt_state.master), 1.0 - want)
        torch.testing.assert_close(metrics["grad_norm"], want.norm(), rtol=1e-6, atol=0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [3, 0, 2])
@distributed(world=2)
def test_jit_has_the_bits_of_eager(stage: int) -> None:
    mesh = sf.make_mesh({"dp": 2})
    batches, tx = [odd_batch(n) for n in range(3)], optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))
    loss = sf.accumulate(sf.mixed_precision(odd_loss, EXCEPT), 2)
    options: dict[str, Any] = {
        "mesh": mesh,
        "trainable": ODD_TRAINABLE,
        "zero": sf.Zero.flat(stage=stage, **ODD),
    }
    eager = on_mesh(loss, tx, odd_params(), batches, **options)
    assert_same(on_mesh(graph(loss), tx, odd_params(), batches, **options), eager, exact=True)
    inside = sf.mixed_precision(graph(sf.accumulate(odd_loss, 2)), EXCEPT)
    assert_same(on_mesh(inside, tx, odd_params(), batches, **options), eager, exact=True)


@pytest.mark.nightly
def test_inductor_is_within_tolerance_and_steps_are_lowered() -> None:
    w, x = {"w": torch.randn(16, 8), "norm": torch.ones(8)}, torch.randn(4, 16)
    policy = sf.Policy.fp16(exceptions={"norm": FP32})

    def loss(params: dict, batch: Tensor) -> Tensor:
        return ((torch.tanh(batch @ params["w"]) * params["norm"]).float() ** 2).mean()

    mixed = sf.mixed_precision(loss, policy, optim.static_loss_scale(256.0))
    eager = on_mesh(mixed, optim.sgd(0.1), w, [x, x], mesh=None)
    compiled = on_mesh(sf.jit(mixed), optim.sgd(0.1), w, [x, x], mesh=None)
    assert_same(compiled, eager, computed=FP16)
    step = sf.sharded_step(mixed, optim.sgd(0.1))
    lowered = step.lower(sf.eval_shape(step.init, w), x)
    state, metrics = lowered.compile("graph")(step.init(w), x)
    assert metrics["loss_scale"] == 256.0 and state.params["w"].dtype == FP16
    assert "convert" in lowered.as_text() or "_to_copy" in lowered.as_text()


def test_under_torch_func_a_population_overflows_member_by_member() -> None:
    w = {"w": torch.randn(4, 3, generator=torch.Generator().manual_seed(9))}
    rule = optim.dynamic_loss_scale(init=2.0**12, window=2, hysteresis=1)
    loss = sf.accumulate(sf.mixed_precision(_half, sf.Policy.fp16(), rule), 2)
    step = sf.sharded_step(loss, optim.adamw(1e-2))
    batches = [_rows(1, False, 1), _rows(2, True, 1)]
    many = stack([step.init(w), step.init(w)])
    rows = {"x": torch.stack([b["x"] for b in batches])}
    both, metrics = torch.func.vmap(step)(many, rows)
    assert metrics["skipped"].tolist() == [False, True]
    for i, batch in enumerate(batches):
        state, _ = step(step.init(w), batch)
        one = member(both, i)
        assert one.loss_scale.scale == state.loss_scale.scale and one.step == state.step
        got = sf.testing._parity.Run(unshard(one.params), unshard(one.opt_state), [])
        assert_same(got, sf.testing._parity.Run(unshard(state.params), unshard(state.opt_state), []))
    plain = sf.sharded_step(sf.mixed_precision(_half, sf.Policy.bf16()), optim.sgd(0.1))
    state = plain.init(w)
    slope = torch.func.grad(plain.loss)(state.params, batches[0])
    assert slope["w"].dtype == BF16 and plain.loss(state.params, batches[0]).dtype == FP32


@pytest.mark.day("llama_like")
@pytest.mark.parametrize("kind", ["llama_like", "gpt2_like"])
def test_a_gpt_keeps_its_norms_in_float32(kind: str) -> None:
    size = {"num_layers": 2, "d_model": 16, "num_heads": 2, "max_len": 8}
    config = getattr(gpt.Config, kind)(vocab_size=32, d_ff=None, **size)
    rule = optim.dynamic_loss_scale(init=2.0**10)
    policy = sf.Policy.fp16(exceptions={"norm": FP32})
    step = sf.sharded_step(
        sf.accumulate(sf.mixed_precision(functools.partial(gpt.loss, config), policy, rule), 2),
        optim.adamw(1e-2),
        zero=sf.Zero(stage=3),
    )
    state = step.init(functools.partial(gpt.init, config), sf.key(0))
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        state, metrics = step(state, {"tokens": tokens})
        assert not metrics["skipped"]
        losses.append(metrics["loss"].item())
    assert losses[-1] < losses[0] - 0.3
    kept = {"norm" in path: x.dtype for path, x in named_leaves(state.params)}
    assert kept == {True: FP32, False: FP16}


def test_alone_it_casts_in_and_out() -> None:
    seen: list[Any] = []

    def loss(params: dict, batch: dict) -> tuple:
        seen.extend([params["w"].dtype, params["norm"].dtype, params["n"].dtype, batch["x"].dtype, batch["i"].dtype])
        return sf.WeightedMean((params["w"] * batch["x"]).sum(), 2), {"x": params["w"].sum()}

    policy = sf.Policy(BF16, BF16, output=torch.float64, exceptions={"norm": FP32})
    params = {"w": torch.ones(2), "norm": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}
    (mean, aux) = sf.mixed_precision(loss, policy)(params, {"x": torch.ones(2), "i": torch.zeros(2).long()})
    assert seen == [BF16, FP32, torch.int64, BF16, torch.int64]
    assert mean.total.dtype == torch.float64 and aux["x"].dtype == BF16
    small = {"w": torch.ones(2), "norm": torch.ones(2)}
    value, grads = sf.value_and_grad(sf.mixed_precision(lambda p, b: (p["w"] * b).sum(), sf.Policy.bf16()))(
        small, torch.ones(2)
    )
    assert value.dtype == FP32 and grads["w"].dtype == FP32


def test_errors_give_the_remedy() -> None:
    with pytest.raises(ValueError, match="Policy's dtypes"):
        sf.Policy(compute=torch.int8)
    with pytest.raises(ValueError, match="not a regular expression"):
        sf.Policy(exceptions={"(": FP32})
    mixed = sf.mixed_precision(_sum_loss, sf.Policy.bf16(exceptions={"nrom": FP32}))
    with pytest.raises(ValueError, match=r"'nrom'.*drop it"):
        sf.sharded_step(mixed, optim.sgd(0.1)).init({"norm": torch.ones(2)})
    with pytest.raises(ValueError, match="one policy"):
        sf.mixed_precision(sf.accumulate(mixed, 2), sf.Policy.bf16())
    with pytest.raises(ValueError, match=r"mixed_precision\(remat\(f\)"):
        sf.remat(mixed)
    with pytest.raises(ValueError, match="without a loss scale"):
        sf.sharded_step(sf.mixed_precision(_sum_loss, sf.Policy.fp16()), optim.sgd(0.1))
    with pytest.raises(ValueError, match="become 0 again"):
        sf.mixed_precision(_sum_loss, sf.Policy.fp16(accum=FP16), optim.static_loss_scale(2.0))
    narrow = sf.sharded_step(sf.mixed_precision(_sum_loss, sf.Policy.bf16()), optim.sgd(0.1))
    plain = sf.sharded_step(_sum_loss, optim.sgd(0.1))
    scaled = sf.sharded_step(
        sf.mixed_precision(_sum_loss, sf.Policy.fp16(), optim.static_loss_scale(2.0)), optim.sgd(0.1)
    )
    with pytest.raises(ValueError, match=r"params is torch\.float32; here it is kept in torch\.bfloat16"):
        narrow(plain.init(torch.ones(2)), torch.ones(2))
    state = scaled.init(torch.ones(2))
    with pytest.raises(ValueError, match="no loss scale"):
        scaled(state._replace(loss_scale=()), torch.ones(2))


@pytest.mark.day("False")
@pytest.mark.parametrize("jit", [False, True])
@distributed(world=2)
def test_autocast_around_a_step_is_that_of_the_loss_alone(jit: bool) -> None:
    def loss(params: dict, x: Tensor) -> Tensor:
        return (x @ params["w"]).float().square().mean()

    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    w, x = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(-1, 2, 16).view(4, 4)
    whole = w.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        # Each rank's rows apart: torch keeps one cast of the parameter, and adds up its gradients in bfloat16.
        parts = [torch.autograd.grad(loss({"w": whole}, rows), whole)[0] for rows in x.chunk(2)]
    grad = (parts[0] + parts[1]) / 2
    assert not torch.equal(grad, torch.autograd.grad(loss({"w": whole}, x), whole)[0])
    for optimizer in (sf.optim.sgd(0.1), sf.optim.muon(0.1)):
        updates, _ = optimizer.update({"w": grad}, optimizer.init({"w": w}), {"w": w})
        for stage in (0, 2, 3):
            taken = sf.jit(loss, backend="graph") if jit else loss
            zero = sf.Zero(stage, persist_elements=0)
            step = sf.sharded_step(taken, optimizer, mesh=mesh, zero=zero)
            state = step.init({"w": w.clone()})
            with torch.autocast("cpu", torch.bfloat16):
                state, _ = step(state, x.chunk(2)[mesh.rank])
            torch.testing.assert_close(sf.unshard(state.params)["w"], w + updates["w"], rtol=1e-5, atol=1e-6)
