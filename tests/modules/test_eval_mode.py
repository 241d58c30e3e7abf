"""Covers modules inside of `step.evaluate`: eval mode, with the statistics of the model state."""

import copy
import pathlib
import warnings
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import shardfn as sf
from shardfn.testing import distributed

X = 3 * torch.randn(12, 4, generator=torch.Generator().manual_seed(1)) + 1
WRAPS = {"eager": lambda f: f, "graph": lambda f: sf.jit(f, backend="graph")}


class Net(nn.Module):
    """Layers that are others in training: statistics, dropout, two kinds of spectral norm, noise, and layer drop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = parametrizations.spectral_norm(nn.Linear(4, 6)), nn.BatchNorm1d(6)
        self.drop, self.last = nn.Dropout(0.5), spectral_norm(nn.Linear(6, 3))
        self.attend = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.norm(self.first(x))))[:, None]
        h = h + self.attend(h, h, h, need_weights=False)[0]
        return self.last(h[:, 0] * (2.0 if self.training else 1.0))


def _trained(net: nn.Module, mesh: Any, wrap: Any) -> tuple[Any, Any, Any]:
    """A step, its state after three calls, and the module's function."""
    params, buffers, apply = sf.from_module(net, has_state=True, axis="dp")

    def loss(p: Any, s: Any, batch: Any, key: Tensor) -> Any:
        out, s = apply.keyed(key, batch["index"])(p, s, batch["x"])
        return sf.WeightedMean(out.square().sum(), out.numel()), s

    step = sf.sharded_step(wrap(loss), sf.optim.sgd(0.1), mesh=mesh, has_state=True, key=sf.key(0))
    state, rows = step.init(params, model_state=buffers), step.rows(12)
    for n in range(3):
        state, _ = step(state, {"x": X[rows] * (n + 1), "index": torch.arange(12)[rows]})
    return step, state, apply


@pytest.mark.day("1")
@distributed(world=[1, 2, 3], timeout=200)
@torch.no_grad()
def test_a_module_evaluates_as_torch_does(world: int) -> None:
    del world
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    for wrap in WRAPS.values():
        net = Net()
        with torch.enable_grad():
            step, state, apply = _trained(net, mesh, wrap)
        sf.to_module(state, net)
        fresh = Net()
        fresh.load_state_dict(net.state_dict())
        assert net.training and all(sub.training for sub in net.modules())
        assert net.norm.num_batches_tracked is not None and int(net.norm.num_batches_tracked) == 3
        want = float(fresh.eval()(X).square().mean())
        rows = slice(0, 12) if mesh.size == 1 else slice(0, 5) if mesh.rank == 0 else slice(5, 12)
        # Batches of other sizes than those of training, and a rank without any.
        own = [{"x": X[rows], "index": torch.arange(12)[rows]}] if mesh.rank < 2 else []
        assert step.evaluate(state, own)["loss"] == pytest.approx(want, rel=1e-5)

        def metrics(p: Any, s: Any, batch: Any, f: Any = apply) -> dict[str, Tensor]:  # without a key: nothing draws
            return {"square": f(p, s, batch["x"])[0].square().mean()}

        assert step.evaluate(state, own, metrics=metrics)["square"] == pytest.approx(want, rel=1e-5)
        assert all(sub.training for sub in net.modules())


def test_evaluation_and_training_do_not_mix() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    params, apply = sf.from_module(net)

    def loss(p: Any, batch: Any, key: Tensor) -> Tensor:
        return apply.keyed(key, batch["index"])(p, batch["x"]).square().mean()

    batch = {"x": X, "index": torch.arange(12)}
    for wrap in (*WRAPS.values(), sf.partition):
        values = []
        for between in (False, True):
            step = sf.sharded_step(wrap(loss), sf.optim.sgd(0.1), key=sf.key(0), mesh=sf.make_mesh({"tp": 1}))
            state = step.init(params)
            for _ in range(2):
                if between:
                    step.evaluate(state, [batch])
                state, metrics = step(state, batch)
                values.append(float(metrics["loss"]))
        assert values[:2] == values[2:]


@distributed(world=2)
def test_a_partitioned_loss_has_a_program_for_each_mode() -> None:
    mesh = sf.make_mesh({"tp": 2}, device="cpu")

    def loss(p: Any, batch: Any, key: Tensor) -> Tensor:
        h = sf.nn.dropout(key, torch.tanh(batch["x"] @ p["up"].t()), 0.5, batch["index"])
        return (h @ p["down"].t()).square().mean()

    generator = torch.Generator().manual_seed(3)
    params = {"up": torch.randn(6, 4, generator=generator), "down": torch.randn(4, 6, generator=generator)}
    specs = {"up": sf.P("tp"), "down": sf.P(None, "tp")}
    step = sf.sharded_step(sf.partition(loss), sf.optim.sgd(0.0), mesh=mesh, specs=specs, batch=sf.P(), key=sf.key(0))
    state, batch = step.init(params), {"x": X, "index": torch.arange(12)}
    want = float((torch.tanh(X @ params["up"].t()) @ params["down"].t()).square().mean())
    for _ in range(2):
        assert step.evaluate(state, [batch])["loss"] == pytest.approx(want, rel=1e-5)
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) != pytest.approx(want, rel=1e-3)


def test_a_method_train_is_not_called() -> None:
    class Merging(nn.Linear):
        def train(self, mode: bool = True) -> "Merging":
            raise AssertionError

    net = nn.Sequential(nn.Flatten(), Merging(4, 2))
    params, apply = sf.from_module(net)
    step = sf.sharded_step(lambda p, x: apply(p, x).square().mean(), sf.optim.sgd(0.1))
    assert step.evaluate(step.init(params), [X])["loss"] > 0


def test_statistics_from_before_training_are_announced() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    params, buffers, apply = sf.from_module(net, has_state=True)
    _, predict = sf.from_module(copy.deepcopy(net).eval())

    def loss(p: Any, s: Any, x: Tensor) -> Any:
        out, s = apply(p, s, x)
        return out.square().mean(), s

    step = sf.sharded_step(loss, sf.optim.sgd(0.1), has_state=True)
    state, _ = step(step.init(params, model_state=buffers), X)
    with pytest.warns(UserWarning, match=r"buffers of its own, 1\.running_mean, 1\.running_var, 1\.num_batches"):
        step.evaluate(state, [X], metrics=lambda p, s, x: {"square": predict(p, x).square().mean()})
    with pytest.warns(UserWarning, match=r"Pass the buffers of the state: predict\(params \| model_state, batch\)"):
        step.apply(predict, state, X)
    want = step.evaluate(state, [X])["loss"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = step.evaluate(state, [X], metrics=lambda p, s, x: {"square": predict(p | s, x).square().mean()})
        statistics = sf.unshard(state.model_state)
        y = step.apply(lambda p, x: predict(p | statistics, x), state, X)
    assert found["square"] == want
    assert float(y.square().mean()) == pytest.approx(want, rel=1e-6)


def test_the_statistics_of_a_part_of_the_model_state_are_exported(tmp_path: pathlib.Path) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    params, buffers, apply = sf.from_module(net, has_state=True)

    def loss(p: Any, s: Any, x: Tensor) -> Any:
        out, new = apply(p, s["net"], x)
        return out.square().mean(), {**s, "net": new}

    step = sf.sharded_step(loss, sf.optim.sgd(0.1), has_state=True)
    state, _ = step(step.init(params, model_state={"net": buffers, "seen": torch.tensor(0)}), X)
    want = state.model_state["net"]["1.running_mean"].full_tensor()
    assert want.any()
    other = copy.deepcopy(net)
    sf.to_module(state, other)
    sf.export(state, net, tmp_path)
    assert torch.equal(torch.as_tensor(other[1].running_mean), want)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["1.running_mean"], want)
    twice = state._replace(model_state={"a": state.model_state["net"], "b": state.model_state["net"]})
    with pytest.raises(
        ValueError, match=r"1\.running_mean: model_state\['a'\]\['1\.running_mean'\], model_state\['b'\]"
    ):
        sf.to_module(twice, other)
