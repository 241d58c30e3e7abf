"""Covers shardfn/engine/step/_evaluate.py: exact means over all rows, however they lie on ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import distributed

ROWS = torch.randn(11, 6, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.arange(11.0) % 3
# By rank, this rank's batches as ranges of rows: ragged, unequal in number, empty, and none at all.
CUTS = {
    1: [[(0, 4), (4, 8), (8, 11)]],
    2: [[(0, 2), (4, 6), (8, 10)], [(2, 4), (6, 8), (10, 11)]],
    3: [[(0, 5), (5, 5), (5, 9)], [], [(9, 10), (10, 11)]],
}


def _mean(params: Any, batch: Any) -> Tensor:
    return torch.tanh(batch["x"] @ params["w"]).square().mean(1).mean()


def _weighted(params: Any, batch: Any) -> sf.WeightedMean:
    each = torch.tanh(batch["x"] @ params["w"]).square().mean(1)
    return sf.WeightedMean((each * batch["weight"]).sum(), batch["weight"].sum())


def _metrics(params: Any, batch: Any) -> dict[str, Any]:
    return {"weighted": _weighted(params, batch), "mean": _mean(params, batch), "one": 1.0}


def _params() -> dict[str, Tensor]:
    return {"w": torch.randn(6, 5, generator=torch.Generator().manual_seed(2))}


def _batches(cuts: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
    return [{"x": ROWS[a:b], "weight": WEIGHTS[a:b]} for a, b in cuts]


@pytest.mark.nightly
@distributed(world=[1, 2, 3])
def test_means_are_those_of_one_device(world: int) -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    whole = {"x": ROWS, "weight": WEIGHTS}
    expected = _metrics(_params(), whole)
    for stage, wrap in ((0, lambda f: f), (3, lambda f: f), (3, lambda f: sf.jit(f, backend="graph"))):
        for loss, value in ((_mean, expected["mean"]), (_weighted, expected["weighted"].mean())):
            step = sf.sharded_step(wrap(loss), sf.optim.adam(0.1), mesh=mesh, zero=sf.Zero(stage=stage))
            state = step.init(_params())
            got = step.evaluate(state, iter(_batches(CUTS[world][mesh.rank])))
            assert got == pytest.approx({"loss": float(value)}, rel=1e-6)
        got = step.evaluate(state, _batches(CUTS[world][mesh.rank]), metrics=_metrics)
        told = {"weighted": float(expected["weighted"].mean()), "mean": float(expected["mean"]), "one": 1.0}
        assert got == pytest.approx(told, rel=1e-6)
        assert torch.equal(sf.unshard(state.params)["w"], _params()["w"])  # alive and unchanged


def test_it_is_in_the_precision_of_the_step() -> None:
    seen: list[torch.dtype] = []

    def loss(params: Any, batch: Any) -> Tensor:
        seen.append(params["w"].dtype)
        assert not torch.is_grad_enabled() or len(seen) > 2
        return _mean(params, batch)

    step = sf.sharded_step(sf.mixed_precision(sf.accumulate(loss, 2), sf.Policy.bf16()), sf.optim.adam(0.1))
    state = step.init(_params())
    whole = {"x": ROWS, "weight": WEIGHTS}  # eleven rows, which two microbatches would not divide
    step.evaluate(state, [whole])
    step.evaluate(state, [whole], metrics=lambda p, b: {"a": loss(p, b)})
    assert seen == [torch.bfloat16] * 2


def test_aux_model_state_and_key_go_along() -> None:
    def loss(params: Any, seen: Any, batch: Any, key: Tensor) -> Any:
        noise = sf.core.uniform(key, (1,)).sum() * 0
        mean = _mean(params, batch) + seen["bias"] + noise
        return mean, {"rows": float(len(batch["x"])), "share": sf.WeightedMean(batch["weight"].sum(), 11)}, seen

    step = sf.sharded_step(loss, sf.optim.adam(0.1), key=sf.key(0), has_aux=True, has_state=True)
    state = step.init(_params(), model_state={"bias": torch.tensor(2.0)})
    got = step.evaluate(state, _batches([(0, 11)]))
    expected = {"loss": float(_mean(_params(), {"x": ROWS}) + 2), "rows": 11.0, "share": float(WEIGHTS.sum() / 11)}
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.day("eager")
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: sf.jit(f, backend="graph")], ids=["eager", "graph"])
def test_nothing_is_dropped(wrap: Any) -> None:
    params = {"w": torch.ones(6, 5)}
    lora = sf.lora.LoRA.of(params, ["w"], rank=2, dropout=0.5)
    adapters = lora.init(sf.key(1))
    adapters["w"]["b"] += 1.0
    batch = {"x": ROWS[:4], "index": torch.arange(4)}

    def adapted(p: Any, b: Any) -> Tensor:
        return (b["x"] @ p["w"]).square().mean()

    def by_hand(p: Any, b: Any, key: Tensor) -> Tensor:
        x = sf.nn.dropout(key, b["x"], 0.5, b["index"])
        q = x.view(-1, 1, 2, 3) * p["w"].mean()
        mask = sf.nn.Causal() & sf.nn.PairDropout(key, 0.5, b["index"])
        return x.square().mean() * p["w"].mean() + sf.nn.attention(q, q, q, mask=mask).square().mean()

    plain = sf.lora.LoRA.of(params, ["w"], rank=2).adapt(adapted)
    whole = {"base": params, "lora": adapters}
    q = ROWS[:4].view(-1, 1, 2, 3)
    attended = sf.nn.attention(q, q, q, mask=sf.nn.Causal()).square().mean()
    for loss, first, want in (
        (lora.adapt(adapted), whole, plain(whole, batch)),
        (by_hand, params, ROWS[:4].square().mean() + attended),
    ):
        step = sf.sharded_step(wrap(loss), sf.optim.sgd(0.0), key=sf.key(0))
        state = step.init(first)
        assert step.evaluate(state, [batch])["loss"] == pytest.approx(float(want), rel=1e-6)
        state, metrics = step(state, batch)  # training still drops
        assert float(metrics["loss"]) != pytest.approx(float(want), rel=1e-3)


def test_metrics_take_the_model_state() -> None:
    def loss(params: Any, seen: Any, batch: Any) -> Any:
        return _mean(params, batch), seen

    step = sf.sharded_step(sf.mixed_precision(loss, sf.Policy.bf16()), sf.optim.sgd(0.1), has_state=True)
    state = step.init(_params(), model_state={"bias": torch.tensor(2.125 + 2**-20)})
    got = step.evaluate(state, _batches([(0, 11)]), metrics=lambda p, seen, b: {"bias": seen["bias"]})
    assert got == {"bias": 2.125 + 2**-20}  # in its own precision
    with pytest.raises(TypeError, match=r"evaluate\(metrics=\) calls it, _metrics\(params, model_state, batch\)"):
        step.evaluate(state, _batches([(0, 11)]), metrics=_metrics)
    without = sf.sharded_step(_mean, sf.optim.sgd(0.1))
    with pytest.raises(TypeError, match=r"<lambda>\(params, batch\).* a key by none"):
        without.evaluate(without.init(_params()), _batches([(0, 2)]), metrics=lambda p, b, key: {"a": 1.0})


def test_a_metric_without_a_mean_is_an_error() -> None:
    step = sf.sharded_step(_mean, sf.optim.sgd(0.1), donate=True)
    state = step.init(_params())
    with pytest.raises(ValueError, match="no rank has a row"):
        step.evaluate(state, _batches([(3, 3)]))
    with pytest.raises(ValueError, match=r"'a' has a total of 0\.0 and weight 0"):
        step.evaluate(state, _batches([(0, 2)]), metrics=lambda p, b: {"a": sf.WeightedMean(b["x"].sum() * 0, 0)})
    with pytest.raises(ValueError, match=r"'a' is a tensor of shape \(2, 6\)"):
        step.evaluate(state, _batches([(0, 2)]), metrics=lambda p, b: {"a": b["x"]})
    with pytest.raises(TypeError, match="dict of scalars"):
        step.evaluate(state, _batches([(0, 2)]), metrics=lambda p, b: b["x"].sum())
    step(state, _batches([(0, 2)])[0])
    with pytest.raises(sf.DonatedError):
        step.evaluate(state, _batches([(0, 2)]))


@pytest.mark.nightly
@distributed(world=4)
def test_ranks_of_a_tensor_axis_pass_the_same_rows() -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 2}, device="cpu")
    step = sf.sharded_step(_mean, sf.optim.sgd(0.1), mesh=mesh, batch=sf.P("dp"), zero=sf.Zero(stage=3))
    got = step.evaluate(step.init(_params()), _batches([(0, 4), (4, 11)] if mesh.coords["dp"] == 0 else []))
    assert got == pytest.approx({"loss": float(_mean(_params(), {"x": ROWS}))}, rel=1e-6)


@distributed(world=2)
def test_one_rank_that_evaluates_alone_is_an_error() -> None:
    step = sf.sharded_step(lambda w, x: (w * x).mean(), sf.optim.sgd(0.1), mesh=sf.make_mesh())
    state = step.init(torch.ones(3))
    with pytest.raises(sf.RankError, match=r"(?s)disagree on what to run.*rank 0: step.evaluate.*rank 1: step 0"):
        if torch.distributed.get_rank() == 0:
            step.evaluate(state, [torch.ones(3)])
        else:
            step(state, torch.ones(3))
