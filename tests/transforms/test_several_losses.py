"""Covers steps over several losses, and losses in turn: GAN, distillation and penalty equal plain torch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn.engine.execution import _step_programs, signature
from shardfn.testing import distributed, shard_rows

ROWS, STEPS = 12, 3
TOL: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# A GAN: both losses use both branches, and each trains one.


def _gan() -> dict[str, Any]:
    return {
        "generator": {"w": _draw(3, 5, seed=1)},
        "critic": {"u": _draw(5, 7, seed=2) / 2, "v": _draw(7, 1, seed=3)},
    }


def _fake(params: Any, batch: Any) -> Tensor:
    return torch.tanh(batch["noise"] @ params["generator"]["w"])


def _judged(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["critic"]["u"]) @ params["critic"]["v"]


def _critic_loss(params: Any, batch: Any) -> Tensor:
    fake = _judged(params, _fake(params, batch).detach())
    return F.softplus(fake).mean() + F.softplus(-_judged(params, batch["real"])).mean()


def _generator_loss(params: Any, batch: Any) -> Tensor:
    return F.softplus(-_judged(params, _fake(params, batch))).mean()


def _penalized(params: Any, batch: Any) -> Tensor:
    """The critic's loss with the penalty of Gulrajani et al. (2017) on the gradient at points between."""
    between = (0.5 * batch["real"] + 0.5 * _fake(params, batch).detach()).requires_grad_()
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(_judged(params, between).sum(), between, create_graph=True)
    penalty = ((grad.norm(dim=1) - 1) ** 2).mean()
    return _critic_loss(params, batch) + 10 * penalty


def _gan_batch(n: int) -> dict[str, Tensor]:
    return {"real": _draw(ROWS, 5, seed=10 + n), "noise": _draw(ROWS, 3, seed=20 + n)}


GAN = {
    "critic": sf.Objective(_critic_loss, {"generator": False, "critic": True}),
    "generator": sf.Objective(_generator_loss, {"generator": True, "critic": False}),
}
PENALTY = GAN | {"critic": sf.Objective(_penalized, {"generator": False, "critic": True})}


# A distillation: the student learns from a teacher that is trained beside it, on other rows.


def _models() -> dict[str, Any]:
    teacher = {"u": _draw(6, 9, seed=4) / 2, "v": _draw(9, 4, seed=5) / 2}
    return {"student": _draw(6, 4, seed=6) / 2, "teacher": teacher, "shift": torch.zeros(4)}


def _logits(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["teacher"]["u"]) @ params["teacher"]["v"] + params["shift"]


def _taught(params: Any, batch: Any) -> Tensor:
    return F.cross_entropy(_logits(params, batch["x"]), batch["label"])


def _distilled(params: Any, batch: Any) -> sf.WeightedMean:
    target = _logits(params, batch["x"]).detach().softmax(1)
    each = F.cross_entropy(batch["x"] @ params["student"] + params["shift"], target, reduction="none")
    return sf.WeightedMean((each * batch["weight"]).sum(), batch["weight"].sum())


DISTILLATION = {
    "teacher": sf.Objective(_taught, {"student": False, "teacher": True, "shift": True}),
    "student": sf.Objective(_distilled, {"student": True, "teacher": False, "shift": True}),
}


def _lesson(n: int) -> dict[str, Any]:
    label = torch.randint(4, (ROWS,), generator=torch.Generator().manual_seed(30 + n))
    weight = torch.rand(ROWS, generator=torch.Generator().manual_seed(40 + n))
    return {
        "teacher": {"x": _draw(ROWS, 6, seed=50 + n), "label": label},
        "student": {"x": _draw(ROWS, 6, seed=60 + n), "weight": weight},
    }


def _twice(n: int) -> dict[str, Any]:
    return {"critic": _gan_batch(n), "generator": _gan_batch(n + 5)}


def _plain(losses: Any, params: Any, batches: Sequence[Any], rate: float) -> tuple[Any, list[dict[str, Tensor]]]:
    """Plain torch on one device: autograd on each loss with respect to its own leaves, SGD by the sum."""
    metrics = []
    for batch in batches:
        leaves, treedef = sf.tree_flatten(params)
        total = [torch.zeros_like(x) for x in leaves]
        found = {}
        for name, (loss, mask) in losses.items():
            train = sf.core.broadcast_prefix(mask, params, lambda x: isinstance(x, bool), names=("mask", "params"))
            handles = [x.clone().requires_grad_(t) for x, t in zip(leaves, train, strict=True)]
            value = loss(sf.tree_unflatten(treedef, handles), batch[name])
            value = value.total / value.weight if isinstance(value, sf.WeightedMean) else value
            grads = iter(torch.autograd.grad(value, [h for h, t in zip(handles, train, strict=True) if t]))
            for x, t in zip(total, train, strict=True):
                if t:
                    x += next(grads)
            found[f"{name}/loss"] = value.detach()
        params = sf.tree_unflatten(treedef, [x - rate * g for x, g in zip(leaves, total, strict=True)])
        metrics.append(found)
    return params, metrics


CASES: dict[str, tuple[Any, Callable[[], Any], Callable[[int], Any]]] = {
    "gan": (GAN, _gan, _twice),
    "penalty": (PENALTY, _gan, _twice),
    "distillation": (DISTILLATION, _models, _lesson),
}


def _compare(case: str, world: int, zero: sf.Zero, wrap: Callable[[Any], Any] = lambda loss: loss) -> None:
    losses, params, batch = CASES[case]
    batches = [batch(n) for n in range(STEPS)]
    want, metrics = _plain(losses, params(), batches, 0.1)
    mesh = sf.make_mesh({"dp": world})
    wrapped = {name: x._replace(loss=wrap(x.loss)) for name, x in losses.items()}
    step = sf.sharded_step(wrapped, sf.optim.sgd(0.1), mesh=mesh, zero=zero)
    # By its halves, too: the same bits.
    apart = sf.sharded_step(wrapped, sf.optim.sgd(0.1), mesh=mesh, zero=zero)
    state, other = step.init(params()), apart.init(params())
    for n, whole in enumerate(batches):
        own = shard_rows(whole, sf.P("dp"), mesh)
        state, measured = step(state, own)
        grads, found = apart.gradients(other, own)
        other, _ = apart.update(other, grads, finite=found["finite"])
        for name, x in metrics[n].items():
            torch.testing.assert_close(measured[name], x, **TOL)
            assert torch.equal(measured[name], found[name])
        torch.testing.assert_close(measured["loss"], sum(metrics[n].values()), **TOL)
    for a, b, c in zip(
        *(sf.tree_leaves(x) for x in (sf.unshard(state.params), want, sf.unshard(other.params))), strict=True
    ):
        torch.testing.assert_close(a, b, **TOL)
        assert torch.equal(a, c)


@pytest.mark.parametrize("case", [x if x == "penalty" else pytest.param(x, marks=pytest.mark.nightly) for x in CASES])
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly), 3])
def test_the_sum_of_losses_is_that_of_plain_torch(world: int, case: str) -> None:
    for stage in (0, 3):
        _compare(case, world, sf.Zero(stage=stage, persist_elements=0))


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["gan", "distillation"])
@distributed(world=[2])
def test_jitted_losses(world: int, case: str) -> None:
    _compare(case, world, sf.Zero(stage=2), lambda loss: sf.jit(loss, backend="graph"))


@pytest.mark.nightly
@distributed(world=[2])
def test_accumulated_losses_with_gradients_on_the_host(world: int) -> None:
    zero = sf.Zero(stage=2, persist_elements=0, grads="host", optimizer="host")
    _compare("distillation", world, zero, lambda loss: sf.accumulate(loss, 2) if loss is _taught else loss)


@distributed(world=[2])
def test_one_agreement_before_the_first_transfer(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    step = sf.sharded_step(GAN, sf.optim.sgd(0.1), mesh=mesh, zero=1)
    state = step.init(_gan())
    rows = {name: shard_rows(x, sf.P("dp"), mesh) for name, x in _twice(0).items()}
    if mesh.rank == 1:  # a rank that differs in the second loss alone
        rows["generator"]["noise"] = rows["generator"]["noise"].double()
    with pytest.raises(sf.RankError, match=r"of 'generator'|torch.float64"):
        step(state, rows)
    rows = {name: shard_rows(x, sf.P("dp"), mesh) for name, x in _twice(0).items()}
    state, _ = step(state, rows)
    assert int(state.step) == 1


@pytest.mark.nightly
@distributed(world=[2])
def test_one_loss_with_uneven_rows_beside_one_with_even_rows(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    losses, params, batch = DISTILLATION, _models(), _lesson(0)
    batch["student"] = {k: x[:11] for k, x in batch["student"].items()}
    want, _ = _plain(losses, params, [batch], 0.1)
    for wrap in (lambda x: x, lambda x: x._replace(loss=sf.jit(x.loss, backend="graph"))):
        step = sf.sharded_step({k: wrap(x) for k, x in losses.items()}, sf.optim.sgd(0.1), mesh=mesh, zero=1)
        state, _ = step(step.init(_models()), shard_rows(batch, sf.P("dp"), mesh))
        for a, b in zip(sf.tree_leaves(sf.unshard(state.params)), sf.tree_leaves(want), strict=True):
            torch.testing.assert_close(a, b, **TOL)


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_updates_in_turn_with_two_optimizers(world: int) -> None:
    """A GAN by two steps, opened: each gets the other's parameters before it takes its gradients."""
    mesh = sf.make_mesh({"dp": world})
    made = {
        name: sf.sharded_step(x.loss, sf.optim.sgd(rate), mesh=mesh, zero=2, trainable=x.trainable)
        for (name, x), rate in zip(GAN.items(), (0.1, 0.05), strict=True)
    }
    states, want = {name: step.init(_gan()) for name, step in made.items()}, _gan()
    params = states["critic"].params
    for n in range(STEPS):
        for name, rate in (("critic", 0.1), ("generator", 0.05)):
            batch = _gan_batch(n)
            state = states[name]._replace(params=params)
            grads, _ = made[name].gradients(state, shard_rows(batch, sf.P("dp"), mesh))
            state, _ = made[name].update(state, grads)
            states[name], params = state, state.params
            want, _ = _plain({name: GAN[name]}, want, [{name: batch}], rate)
    for a, b in zip(sf.tree_leaves(sf.unshard(params)), sf.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, **TOL)


# Bad input.


def _step(**options: Any) -> Any:
    return sf.sharded_step(GAN, sf.optim.sgd(0.1), **options)


def test_a_loss_that_trains_a_leaf_that_the_step_freezes() -> None:
    step = _step(trainable={"generator": False, "critic": True})
    with pytest.raises(ValueError, match=r"params\['generator'\]\['w'\] is trained by 'generator', and trainable= of"):
        step.init(_gan())


def test_a_leaf_that_no_loss_trains() -> None:
    losses = {"critic": GAN["critic"]}
    with pytest.raises(ValueError, match=r"no loss trains.*\n.*params\['generator'\]\['w'\]"):
        sf.sharded_step(losses, sf.optim.sgd(0.1), trainable=True).init(_gan())
    sf.sharded_step(losses, sf.optim.sgd(0.1)).init(_gan())


def test_a_loss_that_trains_nothing() -> None:
    losses = GAN | {"generator": GAN["generator"]._replace(trainable=False)}
    with pytest.raises(ValueError, match="'generator' trains none"):
        sf.sharded_step(losses, sf.optim.sgd(0.1)).init(_gan())


def test_batches_that_are_not_those_of_the_losses() -> None:
    step = _step()
    state = step.init(_gan())
    with pytest.raises(ValueError, match=r"'generator' has no batch\n.*'other' is not a loss; there are"):
        step(state, {"critic": _gan_batch(0), "other": _gan_batch(0)})
    with pytest.raises(ValueError, match="takes a dict with a batch for each"):
        step.gradients(state, torch.ones(3))
    with pytest.raises(ValueError, match="a dict with an entry for each"):
        _step(batch={"real": sf.P("dp"), "noise": sf.P("dp")})


def test_losses_that_keep_the_state_in_other_ways() -> None:
    mixed = GAN | {"critic": sf.mixed_precision(_critic_loss, sf.Policy.bf16())}
    with pytest.raises(ValueError, match="'generator' has another precision policy"):
        sf.sharded_step(mixed, sf.optim.sgd(0.1))
    with pytest.raises(ValueError, match="'generator' is eager, unlike 'critic'"):
        sf.sharded_step(GAN | {"critic": sf.jit(_critic_loss)}, sf.optim.sgd(0.1))
    with pytest.raises(ValueError, match="empty"):
        sf.sharded_step({}, sf.optim.sgd(0.1))
    with pytest.raises(TypeError, match="named by strings"):
        sf.sharded_step({"": _critic_loss}, sf.optim.sgd(0.1))


def test_calls_of_one_loss_alone() -> None:
    step = _step()
    assert repr(step).startswith("ShardedStep(critic, generator: ZeRO stage 0")
    state = step.init(_gan())
    with pytest.raises(ValueError, match="lower is of a step of one loss"):
        step.lower(state, _twice(0))
    with pytest.raises(ValueError, match=r"inside a transform of torch[.]func is of a step of one loss"):
        torch.func.vmap(step, in_dims=(0, None))(sf.stack([state, state]), _twice(0))
    with pytest.raises(ValueError, match=r"runs in no transform of torch[.]func"):
        torch.func.vmap(step.gradients, in_dims=(0, None))(sf.stack([state, state]), _twice(0))
    with pytest.raises(ValueError, match="without metrics= is of a step of one loss"):
        step.evaluate(state, [_twice(0)])
    value = step.loss(state.params, _twice(0))
    torch.testing.assert_close(value, step.gradients(state, _twice(0))[1]["loss"], **TOL)


def test_a_loss_scale_is_that_of_all_losses() -> None:
    scale = sf.optim.dynamic_loss_scale(2.0**127, hysteresis=1)
    policy = sf.Policy.bf16()
    losses = {k: x._replace(loss=sf.mixed_precision(x.loss, policy, loss_scale=scale)) for k, x in GAN.items()}
    step = sf.sharded_step(losses, sf.optim.sgd(0.1))
    state = step.init(_gan())
    new, metrics = step(state, _twice(0))
    assert bool(metrics["skipped"]) != bool(metrics["finite"])
    assert bool(metrics["skipped"])
    assert new.loss_scale.scale < state.loss_scale.scale
    assert not new.params["generator"]["w"].donated


@pytest.mark.nightly
def test_losses_of_a_model_state_keep_one_graph_each_and_compute_one_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(p: Any, kept: Any, x: Tensor) -> Any:
        return (p["w"] * x).mean(), {"m": kept["m"] / 2 + x.mean()}

    def uses(p: Any, kept: Any, x: Tensor) -> Any:
        return (p["w"] * kept["m"].sum() * x).mean(), {"m": kept["m"].t().contiguous().t()}

    computed = []
    monkeypatch.setattr(_step_programs, "signature", lambda *x: computed.append(x) or signature(*x))
    losses = {f.__name__: sf.jit(f, backend="graph") for f in (halves, uses)}
    step = sf.sharded_step(losses, sf.optim.sgd(0.1), has_state=True)
    state, x = step.init({"w": torch.ones(3)}, model_state={"m": torch.ones(3, 2)}), torch.ones(3)
    for n in range(1, 4):
        state, _ = step(state, {"halves": x, "uses": x})
        assert len(computed) == 2 * n
    assert step.cache_info().misses == 3  # two gradients and the update
    torch.testing.assert_close(sf.unshard(state.model_state)["m"], torch.full((3, 2), 1.875))
