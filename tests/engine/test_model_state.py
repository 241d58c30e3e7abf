"""Covers model state: it equals one device's, in eager, captured and pure steps; skips, commits, cuts, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.engine.loss._model_state import put_in
from shardfn.testing import RTOL, distributed

FIRST = {"mean": torch.zeros(3), "seen": torch.tensor(0), "last": torch.zeros(())}
MODES = {"eager": lambda f: f, "graph": lambda f: sf.jit(f, backend="graph")}


def _loss(p: dict, s: dict, batch: Tensor, axis: str | None = "dp") -> tuple[sf.WeightedMean, dict]:
    """Normalises by a running mean of the rows of all ranks, which may have different numbers of them."""
    num = sf.psum(torch.tensor(float(len(batch))), axis)
    mean = 0.5 * s["mean"] + 0.5 * sf.psum(batch.sum(0), axis) / num
    value = torch.tanh((batch - mean) @ p["w"]).square()
    new = {"mean": mean, "seen": s["seen"] + num.long(), "last": sf.psum(value.detach().sum(), axis)}
    return sf.WeightedMean(value.sum(), len(batch)), new


def _params() -> dict:
    return {"w": torch.linspace(-1.0, 1.0, 21).view(3, 7)}


def _batch(n: int) -> Tensor:
    return torch.randn(12, 3, generator=torch.Generator().manual_seed(n))


def _one_device(micro: int, batches: list[list[Tensor]]) -> tuple[dict, dict]:
    """Plain SGD, microbatch by microbatch: params and model state after the steps."""
    w, s = _params()["w"], dict(FIRST)
    for batch in batches:
        handle, total, weight = w.clone().requires_grad_(), 0.0, 0
        for rows in batch:
            value, s = _loss({"w": handle}, s, rows, None)
            s = {k: x.detach() for k, x in s.items()}
            total, weight = total + value.total, weight + value.weight
        assert len(batch) == micro and isinstance(total, Tensor)
        (grad,) = torch.autograd.grad(total / weight, handle)
        w = w - 0.1 * grad
    return {"w": w}, s


def _close(got: Any, want: Any) -> None:
    for name, x in want.items():
        scale = float(x.abs().max()) if x.numel() else 0.0
        torch.testing.assert_close(got[name], x, rtol=0, atol=RTOL.get(x.dtype, 0.0) * scale * 4)


def _runs(world: int, modes: list[str], stages: list[int], micros: list[int]) -> None:
    mesh = sf.make_mesh({"dp": -1})
    sizes = {1: [6], 2: [4, 2], 3: [3, 2, 1]}[world]  # rows of each rank in a microbatch of 6
    for micro in micros:
        cut = [[_batch(n)[k * 6 :][:6] for k in range(micro)] for n in range(3)]
        want, want_state = _one_device(micro, cut)
        first = None
        for mode, stage in ((m, s) for m in modes for s in stages):
            step = sf.sharded_step(
                MODES[mode](sf.accumulate(_loss, micro)),
                optim.sgd(0.1),
                mesh=mesh,
                has_state=True,
                zero=sf.Zero(stage=stage, persist_elements=0),
            )
            state = step.init(_params(), model_state=FIRST)
            for batch in cut:
                own = torch.cat([rows.split(sizes)[mesh.rank] for rows in batch])
                before = state
                state, _ = step(state, own)
                assert before.model_state["mean"].donated
            got = sf.unshard(state.model_state)
            _close(sf.unshard(state.params), want)
            _close(got, want_state)
            first = got if first is None else first
            assert all(torch.equal(got[k], x) for k, x in first.items()), (mode, stage)


@pytest.mark.nightly
def test_equals_one_device() -> None:
    _ranks(cases=[["eager", "graph"], [3], [2]], world=2)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_one_device_at_every_stage(world: int) -> None:
    _ranks(cases=[["eager", "graph"], [0, 1, 2, 3], [1, 2]], world=world)


@distributed(world=[1, 2, 3], timeout=200)
def _ranks(cases: list[Any], world: int) -> None:
    _runs(world, *cases)


@distributed(world=2)
def test_a_pure_step_and_the_loss_take_it_too() -> None:
    mesh = sf.make_mesh({"dp": 2})
    step = sf.sharded_step(
        sf.accumulate(_loss, 2),
        optim.sgd(0.1),
        mesh=mesh,
        has_state=True,
        zero=sf.Zero(3, persist_elements=0),
        donate=False,
    )
    rows, state = _batch(0).chunk(2)[mesh.rank], step.init(_params(), model_state=FIRST)
    new, metrics = step(state, rows)
    assert not state.model_state["mean"].donated and torch.equal(state.model_state["mean"].local, FIRST["mean"])
    many, _ = torch.func.vmap(lambda x: step(state, x), out_dims=0)(torch.stack([rows, rows]))
    for name, x in sf.unshard(new.model_state).items():
        torch.testing.assert_close(sf.member(many, 1).model_state[name].full_tensor(), x)
    torch.testing.assert_close(step.loss(state.params, rows, model_state=state.model_state), metrics["loss"])
    gradient = torch.func.grad(step.loss)(state.params, rows, model_state=state.model_state)
    torch.testing.assert_close(
        sf.unshard(state.params)["w"] - 0.1 * sf.unshard(gradient)["w"], sf.unshard(new.params)["w"]
    )


@distributed(world=2)
def test_a_step_that_is_skipped_keeps_the_old_one() -> None:
    mesh = sf.make_mesh({"dp": 2})
    bad = torch.full((4, 3), float("nan") if mesh.rank else 1.0)
    for jit in MODES.values():
        step = sf.sharded_step(
            jit(_loss), optim.sgd(0.1), mesh=mesh, has_state=True, has_aux=False, skip_nonfinite=True
        )
        state, _ = step(step.init(_params(), model_state=FIRST), _batch(0)[:4])
        kept = sf.unshard(state.model_state)
        state, metrics = step(state, bad)
        assert metrics["skipped"] and all(torch.equal(state.model_state[k].local, x) for k, x in kept.items())
        state, metrics = step(state, _batch(1)[:4])
        assert metrics["finite"] and int(state.model_state["seen"].local) == 16


@distributed(world=2)
def test_it_is_cut_and_resumed(tmp_path: Any) -> None:
    mesh = sf.make_mesh({"dp": 2})

    def loss(p: dict, s: dict, x: Tensor, key: Tensor) -> tuple[Tensor, dict, dict]:
        return (x @ p["w"]).square().mean(), {"sum": x.sum()}, {"own": s["own"] + x.sum()}

    where: dict[str, Any] = {"params": "disk", "optimizer": "disk", "directory": str(tmp_path)}

    def make() -> sf.transforms.ShardedStep:
        return sf.sharded_step(
            loss,
            optim.sgd(0.1),
            mesh=mesh,
            has_aux=True,
            has_state=True,
            key=sf.key(0),
            state_specs={"own": P("dp")},
            zero=sf.Zero.flat(stage=3, persist_elements=0, **where),
        )

    step, own = make(), {"own": torch.zeros(3)}
    state, metrics = step.init(_params(), model_state=own), {}
    assert len(state.model_state["own"].local) == (2, 1)[mesh.rank]
    for _ in range(2):
        state, metrics = step(state, torch.full((2, 3), mesh.rank + 1.0))
    assert state.model_state["own"].full_tensor().tolist() == [12.0, 12.0, 24.0] and metrics["sum"] == 9
    step.close()
    again = make().resume(_params(), model_state=own)
    assert torch.equal(again.model_state["own"].local, state.model_state["own"].local) and int(again.step) == 2


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_whose_states_drift_apart_raise_in_the_first_step() -> None:
    mesh = sf.make_mesh({"dp": 2})

    def loss(p: dict, s: dict, x: Tensor) -> tuple[Tensor, dict]:
        return (x @ p["w"]).square().mean(), {"mean": x.mean(0)}

    for jit, error, words in (
        (MODES["eager"], sf.RankError, r"(?s)sf\.pmean.*model_state\['mean'\], kept as P\(\), differs along \('dp',\)"),
        (MODES["graph"], TypeError, r"the new model_state\['mean'\] varies along 'dp'"),
    ):
        step = sf.sharded_step(jit(loss), optim.sgd(0.1), mesh=mesh, has_state=True)
        with pytest.raises(error, match=words):
            step(step.init(_params(), model_state={"mean": torch.zeros(3)}), torch.full((2, 3), 1.0 + mesh.rank))


def _returns(make: Any) -> Any:
    return lambda p, s, x: ((x @ p["w"]).square().mean(), make(s))


def _writes(p: dict, s: dict, x: Tensor) -> tuple[Tensor, dict]:
    s["mean"].add_(1)
    return (x @ p["w"]).square().mean(), s


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.nightly)])
def test_a_leaf_that_is_no_model_state_is_refused_by_path(mode: str) -> None:
    x = torch.ones(2, 3)
    for loss, error, words in (
        (
            _returns(lambda s: {"mean": s["mean"][:1]}),
            ValueError,
            r"model_state\['mean'\] is \(1,\) torch.float32, and",
        ),
        (
            _returns(lambda s: {"mean": s["mean"].double()}),
            ValueError,
            r"model_state\['mean'\] is \(3,\) torch.float64",
        ),
        (_returns(lambda s: {"mean": 1.0}), TypeError, r"model_state\['mean'\] is a float"),
        (_returns(lambda s: {}), ValueError, "Return the same tree"),
        (lambda p, s, x: (x @ p["w"]).mean(), TypeError, "has_state=True the loss must return"),
        (_writes, ValueError, r"model_state\['mean'\] is written to inside the loss"),
    ):
        step = sf.sharded_step(MODES[mode](loss), optim.sgd(0.1), has_state=True)
        with pytest.raises(error, match=words):
            step(step.init(_params(), model_state={"mean": torch.zeros(3)}), x)


@pytest.mark.nightly
def test_a_state_of_another_step_is_refused() -> None:
    step = sf.sharded_step(_loss, optim.sgd(0.1), has_state=True)
    plain = sf.sharded_step(lambda p, x: (x @ p["w"]).mean(), optim.sgd(0.1))
    state, x = step.init(_params(), model_state=FIRST), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"built without\. Pass has_state=True"):
        plain(state, x)
    with pytest.raises(ValueError, match=r"no model state.*init\(params, model_state=\.\.\.\)"):
        step.init(_params())
    with pytest.raises(ValueError, match=r"no model state"):
        step.lower(_params(), x)
    with pytest.raises(TypeError, match=r"model_state\['a'\] is a int"):
        step.init(_params(), model_state={"a": 1})
    shapes = sf.eval_shape(lambda: step.init(_params(), model_state=FIRST))
    assert "input other model_state['mean']" in step.lower(shapes, x).as_text()


def test_leaves_may_change_places() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    assert [x.tolist() for x in put_in([a, b], [b, a])] == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.nightly
def test_a_graph_is_for_the_shapes_of_its_model_state() -> None:
    def loss(p: Any, state: Any, x: Tensor) -> Any:
        return (p["w"] * x).mean() + state["h"].sum() / state["h"].numel(), state

    step = sf.sharded_step(sf.jit(loss, backend="graph"), optim.sgd(0.0), has_state=True)
    for size in (4, 8):
        state = step.init({"w": torch.ones(2)}, model_state={"h": torch.ones(size)})
        _, metrics = step(state, torch.full((2,), 2.0))
        assert float(metrics["loss"]) == 3.0


def test_a_model_state_has_no_gradient_through_microbatches() -> None:
    def loss(p: Tensor, state: Tensor, x: Tensor) -> Any:
        new = 0.5 * state + 0.5 * (x * p).mean()
        return ((x * p - new) ** 2).mean(), new

    step = sf.sharded_step(sf.accumulate(loss, 2), optim.sgd(1.0), has_state=True)
    x = torch.tensor([1.0, 2.0, -1.0, 0.5])
    state = step.init(torch.tensor(0.7), model_state=torch.tensor(0.3))
    grad = torch.func.grad(lambda p: step.loss(p, x, model_state=state.model_state))(state.params).full_tensor()
    before = state.params.full_tensor().clone()
    new, _ = step(state, x)
    torch.testing.assert_close(before - new.params.full_tensor(), grad)


def test_leaves_of_another_mesh_are_refused() -> None:
    elsewhere = sf.make_mesh({"dp": 2}, device="cpu", abstract=True)
    x = sf.shard(torch.arange(4.0), P("dp"), elsewhere)
    f = sf.sharded(lambda p: p, specs=P("dp"))
    with pytest.raises(ValueError, match=r"(?s)on another mesh.*sf.reshard.*is on Mesh\(dp=2"):
        f(x)


def _counting(p: dict, s: dict, batch: Tensor) -> Any:
    value = torch.tanh((batch - s["mean"].to(batch.dtype)) @ p["w"]).square().mean()
    mean = 0.5 * s["mean"] + 0.5 * batch.float().mean(0)
    return value, {"size": value.detach().float()}, {"mean": mean, "seen": s["seen"] + len(batch)}


POLICY = sf.Policy.bf16()
WRAPPED: dict[str, tuple[Any, Any]] = {
    "accumulate": (lambda f: sf.accumulate(f, 2), lambda f: sf.accumulate(f, 2, has_state=True)),
    "nested": (
        lambda f: sf.accumulate(sf.accumulate(f, 2), 3),
        lambda f: sf.accumulate(sf.accumulate(f, 2, has_state=True), 3, has_state=True),
    ),
    "mixed_precision": (
        lambda f: sf.mixed_precision(f, POLICY),
        lambda f: sf.mixed_precision(f, POLICY, has_state=True),
    ),
    "both": (
        lambda f: sf.mixed_precision(sf.accumulate(f, 2), POLICY),
        lambda f: sf.mixed_precision(sf.accumulate(f, 2, has_state=True), POLICY, has_state=True),
    ),
    "the other way round": (
        lambda f: sf.accumulate(sf.mixed_precision(f, POLICY), 2),
        lambda f: sf.accumulate(sf.mixed_precision(f, POLICY, has_state=True), 2, has_state=True),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(list(WRAPPED))]
)
def test_outside_of_a_step_it_is_the_step_s(name: str) -> None:
    in_step, alone = (f(_counting) for f in WRAPPED[name])
    # Rows of the state that the microbatches divide, and a count.
    first = {"mean": torch.linspace(-1.0, 1.0, 6), "seen": torch.tensor(0)}
    params = {"w": torch.linspace(-1.0, 1.0, 42).view(6, 7)}
    batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    loss, aux, state = alone(params, first, batch)
    # Transforms that were made with `has_state=True` may be used in a step, too.
    for wrapped in (in_step, alone):
        step = sf.sharded_step(wrapped, optim.sgd(0.1), has_state=True, has_aux=True)
        after, metrics = step(step.init(params, model_state=first), batch)
        # A precision around the mean rounds it to bfloat16; a step takes the mean of values that are cast already.
        rtol = 2**-8 if name == "both" else 0
        torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=rtol, atol=0)
        torch.testing.assert_close(metrics["size"], aux["size"], rtol=0, atol=0)
        for key, x in state.items():
            torch.testing.assert_close(after.model_state[key].full_tensor(), x, rtol=0, atol=0)
    assert state["seen"] == 12 and state["mean"].dtype == torch.float32


def test_an_undeclared_state_is_refused() -> None:
    first = {"mean": torch.zeros(6), "seen": torch.tensor(0)}
    params, batch = {"w": torch.ones(6, 7)}, torch.ones(12, 6)

    def loss(p: dict, s: dict, x: Tensor) -> Any:
        value, _, s = _counting(p, {"mean": torch.zeros(6), "seen": s["seen"]}, x)
        return value, s

    with pytest.raises(
        ValueError, match=r"(?s)averages the results of microbatches.*has_state=True.*'mean' of shape \(6,\)"
    ):
        sf.accumulate(loss, 2)(params, first, batch)
    with pytest.raises(
        ValueError, match=r"(?s)averages the results of microbatches.*has_state=True.*a loss, dict, dict"
    ):
        sf.accumulate(_counting, 1)(params, first, batch)
    told = sf.accumulate(loss, 2, has_state=True)
    with pytest.raises(ValueError, match=r"the step was built without\. Pass has_state=True to both"):
        sf.sharded_step(told, optim.sgd(0.1))
    with pytest.raises(ValueError, match=r"takes a model state, and is differentiated by\s+sharded_step"):
        sf.value_and_grad(told)(params, first, batch)
    with pytest.raises(ValueError, match=r"has_state=False\) of accumulate\(..., has_state=True\): a loss has a model"):
        sf.mixed_precision(told, POLICY)
    with pytest.raises(ValueError, match=r"has_state=True\) of mixed_precision\(..., has_state=False\)"):
        sf.accumulate(sf.mixed_precision(loss, POLICY), 2, has_state=True)
