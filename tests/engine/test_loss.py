"""Covers results of losses: weights that require a gradient, and losses without one, on all ranks or some."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import RTOL, assert_parity, distributed, one_device

BATCHES = [torch.randn(8, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(2)]


def _params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    return {k: torch.randn(3, generator=draw, dtype=torch.float64) for k in ("gate", "w")}


def _sums(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over rows whose weights are learnt."""
    weights = torch.sigmoid(x @ params["gate"])
    return (weights * (x @ params["w"]).square()).sum(), weights.sum()


def _learnt(params: dict[str, Tensor], x: Tensor) -> sf.WeightedMean:
    return sf.WeightedMean(*_sums(params, x))


def _ratio(params: dict[str, Tensor], x: Tensor) -> Tensor:
    total, weight = _sums(params, x)
    return total / weight


def _constant_weight(params: dict[str, Tensor], x: Tensor) -> sf.WeightedMean:
    total, weight = _sums(params, x)
    return sf.WeightedMean(total, weight.detach())


def _differentiated_weight(params: dict[str, Tensor], x: Tensor) -> Tensor:
    total, weight = _sums(params, x)
    return 2 * total / sf.pvary(sf.psum(weight, "dp"), "dp")


def _in_aux(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, sf.WeightedMean]]:
    return (x @ params["w"]).square().mean(), {"gated": _learnt(params, x)}


def _mine(x: Tensor, mesh: sf.core.Mesh) -> Tensor:
    return x.chunk(mesh.size)[mesh.rank]


def _said(step: Any, x: Tensor) -> str:
    """The error of a step, which must not change the state."""
    state = step.init(_params())
    try:
        step(state, x)
    except Exception as error:
        assert torch.equal(sf.unshard(state.params)["w"], _params()["w"])
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.nightly
@distributed(world=2)
def test_a_weight_that_requires_a_gradient_is_refused_and_both_remedies_work() -> None:
    mesh = sf.make_mesh({"dp": 2})
    for wrap in (lambda f: f, lambda f: sf.jit(f, backend="graph"), lambda f: sf.accumulate(f, 2)):
        step = sf.sharded_step(wrap(_learnt), sf.optim.sgd(0.5), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
        said = _said(step, _mine(BATCHES[0], mesh))
        assert "weight.detach()" in said and "sf.pvary(sf.psum(weight, 'dp'), 'dp')" in said, said
    assert_parity(_constant_weight, sf.optim.sgd(0.5), _params(), BATCHES, mesh=mesh)
    assert_parity(_differentiated_weight, sf.optim.sgd(0.5), _params(), BATCHES, mesh=mesh, reference=_ratio)


@distributed(world=2)
def test_a_weight_on_one_rank_alone_stops_all() -> None:
    mesh = sf.make_mesh({"dp": 2})
    own = _learnt if mesh.rank else _constant_weight
    said = _said(sf.sharded_step(own, sf.optim.sgd(0.5), mesh=mesh), _mine(BATCHES[0], mesh))
    assert "weight.detach()" in said and said.startswith("ValueError" if mesh.rank else "RankError"), said


@distributed(world=2)
def test_the_loss_of_a_step_differentiates_its_weight() -> None:
    mesh = sf.make_mesh({"dp": 2})
    step = sf.sharded_step(_learnt, sf.optim.sgd(0.5), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
    got = torch.func.grad(step.loss)(step.init(_params()).params, _mine(BATCHES[0], mesh))
    want = torch.func.grad(_ratio)(_params(), BATCHES[0])
    for name, x in want.items():
        assert (got[name].full_tensor() - x).abs().max() <= RTOL[torch.float64] * x.abs().max()


def test_a_step_in_a_transform_refuses_a_weight_of_its_parameters_alone() -> None:
    step = sf.sharded_step(_learnt, sf.optim.sgd(0.5))
    state = step.init(_params())
    with pytest.raises(ValueError, match=r"weight\.detach"):
        torch.func.vmap(lambda x: step(state, x)[1]["loss"])(torch.stack(BATCHES))

    def weighted(params: dict[str, Tensor], batch: dict[str, Tensor]) -> sf.WeightedMean:
        return sf.WeightedMean((batch["weight"] * (batch["x"] @ params["w"]).square()).sum(), batch["weight"].sum())

    step = sf.sharded_step(weighted, sf.optim.sgd(0.5))
    state = step.init(_params())

    def after(weight: Tensor) -> Tensor:
        return step(state, {"x": BATCHES[0], "weight": weight})[0].params["w"].local.square().sum()

    def plain(weight: Tensor) -> Tensor:
        loss = lambda w: (weight * (BATCHES[0] @ w).square()).sum() / weight.sum()  # noqa: E731
        return (_params()["w"] - 0.5 * torch.func.grad(loss)(_params()["w"])).square().sum()

    weight = torch.linspace(0.1, 1, 8, dtype=torch.float64)
    got, want = torch.func.grad(after)(weight), torch.func.grad(plain)(weight)
    assert (got - want).abs().max() <= RTOL[torch.float64] * want.abs().max()


def test_value_and_grad_refuses_the_weight_and_takes_aux_as_constants() -> None:
    with pytest.raises(ValueError, match=r"weight\.detach"):
        sf.value_and_grad(_learnt)(_params(), BATCHES[0])
    (_, aux), grads = sf.value_and_grad(_in_aux, has_aux=True)(_params(), BATCHES[0])
    assert torch.equal(aux["gated"], _ratio(_params(), BATCHES[0])) and not grads["gate"].any()


# Losses without a gradient.


def _fixed(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x.square().mean()


def _detached(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean().detach()


def _mean(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


def _elsewhere(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x.clone().requires_grad_().sum()  # requires a gradient, and none of a parameter's


def _on_first_rows(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Without a gradient where the rows are zeros; so one microbatch may have a gradient and another not."""
    return _mean(params, x) if x.any() else _detached(params, x)


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [None, sf.Zero(stage=3, persist_elements=0)])
@distributed(world=[1, 2])
def test_a_loss_without_a_gradient_is_refused_on_all_ranks(world: int, zero: sf.Zero | None) -> None:
    mesh = sf.make_mesh({"dp": world})
    jitted: Callable[..., Any] = lambda f: sf.jit(f, backend="graph")  # noqa: E731
    for loss in (_fixed, _detached, _elsewhere, jitted(_detached), sf.accumulate(_detached, 2)):
        said = _said(sf.sharded_step(loss, sf.optim.adamw(0.1), mesh=mesh, zero=zero), _mine(BATCHES[0], mesh))
        assert said.startswith("NoGradientError") and "params['gate'], params['w']" in said, said
        assert "element 0 of tensors does not require grad" in said and "trainable=False" in said
    step = sf.sharded_step(_fixed, sf.optim.adamw(0.1), mesh=mesh, zero=zero, trainable=False)
    assert not _said(step, _mine(BATCHES[0], mesh))  # the remedy


@distributed(world=2)
def test_a_rank_or_a_microbatch_without_a_gradient_counts_as_zeros() -> None:
    mesh = sf.make_mesh({"dp": 2})
    halves = torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)
    for rows, wrap in (
        (torch.cat([halves, halves])[:, None], lambda f: sf.accumulate(f, 2)),  # one microbatch of each rank
        (halves.repeat_interleave(2)[:, None], lambda f: f),  # one rank
        (halves.repeat_interleave(2)[:, None], lambda f: sf.accumulate(f, 2)),
    ):
        batches = [x * rows for x in BATCHES]
        for stage in (0, 3):
            zero = sf.Zero(stage=stage, persist_elements=0)
            loss = wrap(_on_first_rows)
            assert_parity(loss, sf.optim.adamw(0.1), _params(), batches, mesh=mesh, reference=_mean, zero=zero)


@distributed(world=2)
def test_a_captured_rank_without_a_gradient_counts_as_zeros() -> None:
    mesh = sf.make_mesh({"dp": 2})
    own = _detached if mesh.rank else _mean
    step = sf.sharded_step(sf.jit(own, backend="graph"), sf.optim.sgd(0.5), mesh=mesh, zero=sf.Zero(stage=2))
    state, _ = step(step.init(_params()), _mine(BATCHES[0], mesh))
    first = lambda params, x: _mean(params, x.chunk(2)[0]) / 2  # noqa: E731
    want = one_device(first, sf.optim.sgd(0.5), _params(), BATCHES[:1]).params["w"]
    got = sf.unshard(state.params)["w"]
    assert (got - want).abs().max() <= RTOL[torch.float64] * want.abs().max()


def test_lower_and_value_and_grad_refuse_a_loss_without_a_gradient() -> None:
    with pytest.raises(ValueError, match=r"no gradient.*params\['gate'\], params\['w'\]"):
        sf.sharded_step(_fixed, sf.optim.adamw(0.1)).lower(_params(), BATCHES[0])
    for loss in (_fixed, _detached, _elsewhere):
        with pytest.raises(ValueError, match=r"no gradient.*params\['gate'\], params\['w'\]"):
            sf.value_and_grad(loss)(_params(), BATCHES[0])
    _, grads = sf.value_and_grad(_mean)(_params(), BATCHES[0])  # one of two leaves
    assert grads["w"].any() and not grads["gate"].any()


def test_bare_errors_name_the_leaves_and_the_remedy() -> None:
    params = {"w": torch.ones(3, 2), "b": torch.zeros(2)}
    step = sf.sharded_step(lambda p, batch: (batch["x"] @ p["w"] + p["b"]).mean(), sf.optim.sgd(0.1), donate=False)
    state = step.init(params)
    with pytest.raises(RuntimeError) as caught:
        step(state, {"x": torch.ones(4, 5)})
    assert "The batch has batch['x'] (4, 5)." in caught.value.__notes__
    assert "The parameters have params['b'] (2,), params['w'] (3, 2)." in caught.value.__notes__
    other = sf.sharded_step(lambda p, batch: (batch["x"] @ p["weight"]).mean(), sf.optim.sgd(0.1), donate=False)
    with pytest.raises(KeyError) as caught:
        other(other.init(params), {"x": torch.ones(4, 3)})
    assert any("The parameters have 'w', 'b'." in note for note in caught.value.__notes__)
    with pytest.raises(AttributeError, match=r"state = state._replace\(params=...\)"):
        state.params = params  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"state = state._replace\(params=...\)"):
        state["params"] = params
    with pytest.raises(TypeError, match=r"cannot be written in place.*with_block"):
        state.params["w"][0] = 1.0
    assert torch.equal(step(state, {"x": torch.ones(4, 3)})[0].step, torch.tensor(1))
