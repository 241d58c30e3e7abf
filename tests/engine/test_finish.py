"""Covers the end of a step for the model state: once a step, of all microbatches and ranks, under every executor."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.engine.loss import check_finish
from shardfn.testing import distributed

EXPERTS, WIDTH, RATE = 3, 4, 0.125
MODES = {"eager": lambda f: f, "graph": lambda f: sf.jit(f, backend="graph")}
FIRST = {"bias": torch.zeros(EXPERTS), "counts": torch.zeros(EXPERTS, dtype=torch.int64), "ends": torch.tensor(0)}


def _params() -> dict:
    draw = torch.Generator().manual_seed(1)
    return {
        "gate": torch.randn(WIDTH, EXPERTS, generator=draw),
        "experts": torch.randn(EXPERTS, WIDTH, generator=draw),
    }


def _block(gate: Tensor, experts: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows after the expert of each, and how many rows each expert has."""
    scores = torch.sigmoid(x @ gate)
    chosen = (scores.detach() + bias).argmax(1)
    counts = (chosen[:, None] == torch.arange(EXPERTS)).sum(0)
    return scores.gather(1, chosen[:, None]) * experts[chosen] * x, counts


def _loss(remat: bool) -> Any:
    block = sf.remat(_block) if remat else _block

    def loss(p: dict, s: dict, x: Tensor) -> tuple[Tensor, dict]:
        y, counts = block(p["gate"], p["experts"], s["bias"], x)
        return y.square().mean(), s | {"counts": s["counts"] + counts}

    return loss


def _finish(s: dict, axis: str | None = "dp") -> dict:
    """Moves the bias by the sign of the summed counts, then clears them; as balancing without a loss does."""
    counts = sf.psum(s["counts"], axis)
    moved = s["bias"] + RATE * torch.sign(counts.double().mean() - counts).float()
    return {"bias": moved, "counts": torch.zeros_like(s["counts"]), "ends": s["ends"] + 1}


def _batch(n: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(n))


def _one_device(steps: int, num: int) -> list[dict]:
    """The model states after each step of plain SGD over `num` microbatches."""
    p, s, out = _params(), dict(FIRST), []
    for n in range(steps):
        handles = {k: x.clone().requires_grad_() for k, x in p.items()}
        total = torch.zeros(())
        for rows in _batch(n).chunk(num):
            value, s = _loss(remat=False)(handles, s, rows)
            total = total + value / num
        grads = torch.autograd.grad(total, list(handles.values()))
        p = {k: x - 0.1 * g for (k, x), g in zip(p.items(), grads, strict=True)}
        s = _finish(s, None)
        out.append(s)
    return out


def _own(mesh: Any, rows: Tensor, num: int) -> Tensor:
    """This rank's rows, such that its microbatches and those of the others are parts of the same ones."""
    return torch.cat([micro.chunk(mesh.size)[mesh.rank] for micro in rows.chunk(num)])


@pytest.mark.day("1-2")
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("world", [1, 2])
def test_it_runs_once_a_step_on_the_counts_of_all_microbatches_and_ranks(world: int, num: int) -> None:
    _counted([num], world=world)


@distributed(world=[1, 2], timeout=120)
def _counted(nums: list[int], world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    for num in nums:
        want = _one_device(2, num)
        assert any(float(x) for x in want[0]["bias"])
        for mode, remat in ((m, r) for m in MODES for r in (False, True)):
            loss = MODES[mode](sf.accumulate(_loss(remat), num))
            step = sf.sharded_step(
                loss, optim.sgd(0.1), mesh=mesh, has_state=True, finish=_finish, zero=sf.Zero(3, persist_elements=0)
            )
            state = step.init(_params(), model_state=FIRST)
            for n in range(2):
                state, _ = step(state, _own(mesh, _batch(n), num))
                got = sf.unshard(state.model_state)
                assert all(torch.equal(got[k], x) for k, x in want[n].items()), (num, mode, remat, n, got, want[n])


@pytest.mark.nightly
@distributed(world=2)
def test_gradients_leave_it_to_the_update() -> None:
    mesh = sf.make_mesh({"dp": 2})
    for mode in MODES.values():
        make = lambda f: sf.sharded_step(f, optim.sgd(0.1), mesh=mesh, has_state=True, finish=_finish)  # noqa: E731
        whole, halves = make(mode(_loss(remat=False))), make(mode(_loss(remat=False)))
        rows = _own(mesh, _batch(0), 1)
        want, _ = whole(whole.init(_params(), model_state=FIRST), rows)
        state = halves.init(_params(), model_state=FIRST)
        (grads, kept), _ = halves.gradients(state, rows)
        assert int(kept["counts"].local.sum()) == 4 and int(kept["ends"].local) == 0
        (_, kept), _ = halves.gradients(state._replace(model_state=kept), rows)
        assert int(kept["counts"].local.sum()) == 8
        state, _ = halves.update(state, grads, model_state=kept)
        assert torch.equal(kept["counts"].local.sum(), torch.tensor(8))  # the argument is not written to
        got = sf.unshard(state.model_state)
        assert all(torch.equal(got[k], x) for k, x in sf.unshard(want.model_state).items())
        (grads, _), _ = halves.gradients(state, rows)
        state, _ = halves.update(state, grads)  # the model state of the state stays
        assert int(state.model_state["ends"].local) == 1


@pytest.mark.nightly
@distributed(world=2)
def test_several_losses_have_one_end() -> None:
    mesh = sf.make_mesh({"dp": 2})
    for mode in MODES.values():
        losses = {"a": mode(_loss(remat=False)), "b": mode(_loss(remat=True))}
        step = sf.sharded_step(losses, optim.sgd(0.1), mesh=mesh, has_state=True, finish=_finish)
        rows = _own(mesh, _batch(0), 1)
        state, _ = step(step.init(_params(), model_state=FIRST), {"a": rows, "b": rows})
        got = sf.unshard(state.model_state)
        assert torch.equal(got["bias"], _one_device(1, 1)[0]["bias"]) and int(got["ends"]) == 1


@distributed(world=2)
def test_a_skipped_step_skips_it() -> None:
    mesh = sf.make_mesh({"dp": 2})
    for mode in MODES.values():
        step = sf.sharded_step(
            mode(_loss(remat=False)), optim.sgd(0.1), mesh=mesh, has_state=True, finish=_finish, skip_nonfinite=True
        )
        state = step.init(_params(), model_state=FIRST)
        state, metrics = step(state, torch.full((4, WIDTH), float("nan")))
        assert metrics["skipped"] and int(state.model_state["ends"].local) == 0
        assert not state.model_state["counts"].local.any()
        state, _ = step(state, _own(mesh, _batch(0), 1))
        assert int(state.model_state["ends"].local) == 1


@distributed(world=2)
def test_a_pure_step_has_it() -> None:
    mesh = sf.make_mesh({"dp": 2})
    step = sf.sharded_step(_loss(remat=False), optim.sgd(0.1), mesh=mesh, has_state=True, finish=_finish, donate=False)
    state, rows = step.init(_params(), model_state=FIRST), _own(mesh, _batch(0), 1)
    want, _ = step(state, rows)
    many, _ = torch.func.vmap(lambda x: step(state, x), out_dims=0)(torch.stack([rows, rows]))
    for name, x in sf.unshard(want.model_state).items():
        assert torch.equal(sf.member(many, 1).model_state[name].full_tensor(), x)


def _first(p: dict, s: Any, x: Tensor) -> Any:
    return x, s


def _layer(p: dict, s: dict, h: Tensor) -> Any:
    y, counts = _block(p["gate"], p["experts"], s["bias"], h)
    return h + y, s | {"counts": s["counts"] + counts}


def _last(p: dict, s: dict, h: Tensor, x: Tensor) -> Any:
    return h.square().mean(), {"seen": s["seen"] + len(x)}


def _finish_stages(s: sf.PipelineState) -> sf.PipelineState:
    """Each rank moves the biases of its own layers; `last` is on all of them."""
    counts = sf.psum(s.blocks["counts"], "dp")
    moved = s.blocks["bias"] + RATE * torch.sign(counts.double().mean(1, keepdim=True) - counts).float()
    return s._replace(blocks={"bias": moved, "counts": torch.zeros_like(counts)}, last={"seen": -s.last["seen"]})


@pytest.mark.nightly
@distributed(world=2, timeout=120)
def test_each_stage_of_a_pipeline_ends_its_own_part() -> None:
    layers = [_params() for _ in range(3)]
    params = {"blocks": {k: torch.stack([p[k] + 0.1 * i for i, p in enumerate(layers)]) for k in layers[0]}}
    kept = {"bias": torch.zeros(3, EXPERTS), "counts": torch.zeros(3, EXPERTS, dtype=torch.int64)}
    begun = sf.PipelineState(blocks=kept, last={"seen": torch.tensor(0)})
    found = []
    for sizes in ({"pp": 1, "dp": 2}, {"pp": 2, "dp": 1}):
        mesh = sf.make_mesh(sizes)
        for mode in MODES.values():
            step = sf.sharded_step(
                mode(sf.pipeline(_first, _layer, _last, num_microbatches=2)),
                optim.sgd(0.1),
                mesh=mesh,
                specs={"blocks": P("pp")},
                batch=P("dp"),
                has_state=True,
                state_specs=sf.PipelineState(P(), P("pp"), P()),
                finish=_finish_stages,
            )
            rows = torch.cat([x.chunk(sizes["dp"])[mesh.axis_index("dp")] for x in _batch(0).chunk(2)])
            state, _ = step(step.init(params, model_state=begun), rows)
            found.append(sf.unshard(state.model_state))
    assert not found[0].blocks["counts"].any() and found[0].blocks["bias"].any()
    for one in found:
        assert torch.equal(one.blocks["bias"], found[0].blocks["bias"])
    assert [int(x.last["seen"]) for x in found] == [-4, -4, -8, -8]


def _writes(s: dict) -> dict:
    s["counts"].zero_()
    return s


MISTAKES = {
    "missing": (lambda s: {"bias": s["bias"]}, ValueError, r"(?s)finish returns.*model_state\['counts'\] is missing"),
    "new": (lambda s: s | {"x": s["bias"]}, ValueError, r"(?s)Return the same tree.*model_state\['x'\] is new"),
    "shape": (
        lambda s: s | {"bias": s["bias"][:1]},
        ValueError,
        r"finish returns.*\n?.*model_state\['bias'\] is \(1,\)",
    ),
    "dtype": (lambda s: s | {"bias": s["bias"].double()}, ValueError, r"model_state\['bias'\] is \(3,\) torch.float64"),
    "number": (lambda s: s | {"bias": 1.0}, TypeError, r"model_state\['bias'\] is a float"),
    "writes": (_writes, ValueError, r"(?s)finish writes to the model state.*model_state\['counts'\]"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_wrong_result_is_refused_by_path_and_the_state_stays(mistake: str) -> None:
    finish, error, words = MISTAKES[mistake]
    for mode in MODES.values():
        step = sf.sharded_step(mode(_loss(remat=False)), optim.sgd(0.1), has_state=True, finish=finish)
        state = step.init(_params(), model_state=FIRST)
        with pytest.raises(error, match=words):
            step(state, _batch(0))
        got = sf.unshard((state.params, state.model_state))
        assert torch.equal(got[0]["gate"], _params()["gate"]) and not got[1]["counts"].any()


def test_it_needs_a_model_state_and_is_a_function() -> None:
    with pytest.raises(ValueError, match=r"finish=f\) has no effect without a model state.*has_state=True"):
        sf.sharded_step(lambda p, x: (p * x).mean(), optim.sgd(0.1), finish=_finish)
    with pytest.raises(TypeError, match=r"finish=\.\.\.\) takes a function, finish\(model_state\) -> model_state"):
        check_finish(FIRST, has_state=True)


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_that_do_not_join_their_counts_raise() -> None:
    mesh = sf.make_mesh({"dp": 2})

    def keeps(s: dict) -> dict:
        return s | {"ends": s["ends"] + 1}

    def sums(p: dict, s: dict, x: Tensor) -> tuple[Tensor, dict]:
        value, s = _loss(remat=False)(p, s, x)
        return value, s | {"bias": s["bias"] + x.sum()}

    for mode, error, words in (
        (MODES["eager"], sf.RankError, r"model_state\['bias'\], kept as P\(\), differs along \('dp',\)"),
        (MODES["graph"], TypeError, r"the new model_state\['bias'\] varies along 'dp'"),
    ):
        make = lambda: sf.sharded_step(mode(sums), optim.sgd(0.1), mesh=mesh, has_state=True, finish=keeps)  # noqa: B023, E731
        step, rows = make(), _own(mesh, _batch(0), 1)
        with pytest.raises(error, match=words):
            step(step.init(_params(), model_state=FIRST), rows)
        step = make()
        state = step.init(_params(), model_state=FIRST)
        (grads, kept), _ = step.gradients(state, rows)
        # A graph of the update alone takes the model state as its spec describes it.
        with pytest.raises(sf.RankError, match=r"model_state\['bias'\], kept as P\(\), differs along \('dp',\)"):
            step.update(state, grads, model_state=kept)


@distributed(world=2)
def test_ranks_with_other_ends_disagree_before_anything_is_sent() -> None:
    mesh = sf.make_mesh({"dp": 2})
    finish = _finish if mesh.rank == 0 else (lambda s: s)
    step = sf.sharded_step(_loss(remat=False), optim.sgd(0.1), mesh=mesh, has_state=True, finish=finish)
    with pytest.raises(sf.RankError, match="finish"):
        step.init(_params(), model_state=FIRST)
