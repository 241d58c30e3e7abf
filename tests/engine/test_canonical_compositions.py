"""Covers canonical sums under accumulate, jit, offload and a model state: equal bits on 1 to 4 ranks, stages 0 to 3."""

import functools
import itertools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.core import tree_leaves
from shardfn.engine import Chunks
from shardfn.testing import distributed

CHUNKS = 8
SPECS = {"x": P("dp"), "y": P("dp")}


def _params() -> Any:
    g = torch.Generator().manual_seed(1)
    shapes = {"a": (7, 13), "b": (13, 5), "c": (5,), "unused": (3,)}
    return {k: torch.randn(s, generator=g) / 3 for k, s in shapes.items()}


def _mean(p: Any, batch: Any) -> Any:
    y = torch.tanh(batch["x"] @ p["a"]) @ p["b"] + p["c"]
    return (y - batch["y"]).square().mean() + 0 * p["unused"].sum()


def _weighted(p: Any, batch: Any) -> Any:
    y = torch.tanh(batch["x"] @ p["a"]) @ p["b"] + p["c"]
    w = batch["y"][:, 0] > 0
    return sf.WeightedMean(((y - batch["y"]).square().sum(1) * w).sum(), w.sum())


def _changing(p: Any, kept: Any, batch: Any) -> Any:
    y = torch.tanh(batch["x"] @ p["a"]) @ p["b"] + p["c"] + kept["mean"]
    new = {"mean": 0.9 * kept["mean"] + 0.1 * batch["y"].mean(0), "seen": kept["seen"] + (batch["y"] > 0).sum()}
    return (y - batch["y"]).square().mean() + 0 * p["unused"].sum(), kept | new


def _model_state() -> Any:
    return {"mean": torch.zeros(5), "seen": torch.zeros((), dtype=torch.int64), "constant": torch.full((2,), 0.1)}


def _batch(n: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(n)
    return {k: torch.randn(3 * CHUNKS, d, generator=g) for k, d in (("x", 7), ("y", 5))}


LOSSES = {"mean": _mean, "weighted": _weighted, "changing": _changing}
RULES = {
    "adamw": lambda: optim.adamw(1e-2),
    "lamb": lambda: optim.lamb(1e-2),
    "clip": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2)),
}
_GRAPH = functools.partial(sf.jit, backend="graph")
WRAPS = {
    "plain": lambda f: f,
    "accumulate": lambda f: sf.accumulate(f, 3),
    "jit": _GRAPH,
    "jit of accumulate": lambda f: _GRAPH(sf.accumulate(f, 3)),
}
# Loss, optimizer, stage, wrap, and the memory of parameters, gradients and optimizer state.
Case = tuple[str, str, int, str, tuple[tuple[str, str], ...]]
PAIRS = [("weighted", "clip"), ("mean", "lamb")]
MEMORY = {
    1: [(("optimizer", "host"),), (("optimizer", "disk"),)],
    2: [(("optimizer", "disk"), ("grads", "disk")), (("optimizer", "host"), ("grads", "host"))],
    3: [(("params", "disk"), ("optimizer", "disk"), ("grads", "host"))],
}
WRAPPED: list[Case] = [(*pair, stage, wrap, ()) for pair in PAIRS for stage in range(4) for wrap in WRAPS]
STATES: list[Case] = [("changing", "clip", stage, wrap, ()) for stage in (0, 3) for wrap in WRAPS]
AWAY: list[Case] = [
    (*pair, stage, wrap, memory)
    for pair in [*PAIRS, ("mean", "adamw")]
    for stage, kinds in MEMORY.items()
    for memory in kinds
    for wrap in ("plain", "jit")
]
CASES = [*WRAPPED, *STATES, *AWAY]
BY_DAY = [
    ("weighted", "clip", 3, "jit of accumulate", ()),
    ("mean", "lamb", 2, "plain", MEMORY[2][0]),
    ("changing", "clip", 3, "jit", ()),
]


def _train(case: Case, directory: str, steps: int = 3) -> list[Tensor]:
    """Parameters, states and metrics after some steps, on all ranks of the program."""
    loss, rule, stage, wrap, memory = case
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = sf.make_mesh({"dp": ranks}) if ranks > 1 else sf.make_mesh(alone=True)
    where: dict[str, Any] = dict(memory)
    if "disk" in where.values():
        where["disk"] = sf.Disk(tempfile.mkdtemp(dir=directory))
    zero = sf.Zero(stage=stage, persist_elements=0, reduction="canonical", reduction_chunks=CHUNKS, **where)
    keeps = loss == "changing"
    step = sf.sharded_step(WRAPS[wrap](LOSSES[loss]), RULES[rule](), mesh=mesh, zero=zero, batch=SPECS, has_state=keeps)
    state, metrics = step.init(_params(), model_state=_model_state() if keeps else ()), []
    start, stop = Chunks(CHUNKS, ranks, rank).bounds
    for n in range(steps):
        state, m = step(state, {k: x[3 * start : 3 * stop] for k, x in _batch(n).items()})
        metrics += [m["loss"], m["grad_norm"]]
    trees = (state.params, state.opt_state, state.model_state)
    leaves = [x.full_tensor() for x in tree_leaves(trees) if hasattr(x, "full_tensor")]
    step.close()
    return [*leaves, torch.stack([x.float() for x in metrics])]


@distributed(world=1, timeout=800)
def on_1(cases: list[Case], directory: str) -> list[list[Tensor]]:
    return [_train(case, directory) for case in cases]


@distributed(world=2, timeout=800)
def on_2(cases: list[Case], directory: str) -> list[list[Tensor]]:
    return [_train(case, directory) for case in cases]


@distributed(world=3, timeout=800)
def on_3(cases: list[Case], directory: str) -> list[list[Tensor]]:
    return [_train(case, directory) for case in cases]


@distributed(world=4, timeout=800)
def on_4(cases: list[Case], directory: str) -> list[list[Tensor]]:
    return [_train(case, directory) for case in cases]


# Results of one rank, for all tests of a session.
_KNOWN: dict[Case, list[Tensor]] = {}


def _train_alone(cases: list[Case], directory: Any) -> list[list[Tensor]]:
    new = [case for case in cases if case not in _KNOWN]
    if new:
        _KNOWN.update(zip(new, on_1(new, str(directory))[0], strict=True))
    return [_KNOWN[case] for case in cases]


def _compare(cases: list[Case], world: int, directory: Any) -> None:
    want = _train_alone(cases, directory)
    for rank, found in enumerate({2: on_2, 3: on_3, 4: on_4}[world](cases, str(directory))):
        for case, a, b in zip(cases, want, found, strict=True):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                assert torch.equal(x, y), (case, world, rank, i, (x.double() - y.double()).abs().max())


def test_three_ranks_have_the_bits_of_one(tmp_path: Any) -> None:
    _compare(BY_DAY, 3, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("cases", [WRAPPED, STATES, AWAY], ids=["wrapped", "states", "away"])
def test_any_number_of_ranks_gives_the_same_bits(world: int, cases: list[Case], tmp_path: Any) -> None:
    """Each case on one number of ranks: the next test shows that all cases have the same bits on one rank."""
    _compare(cases[world - 2 :: 3], world, tmp_path)


@pytest.mark.nightly
def test_neither_the_stage_nor_the_memory_nor_jit_changes_a_bit(tmp_path: Any) -> None:
    first: dict[Any, tuple[Case, list[Tensor]]] = {}
    for case, got in zip(CASES, _train_alone(CASES, tmp_path), strict=True):
        loss, rule, _, wrap, _ = case
        other, want = first.setdefault((loss, rule, wrap.endswith("accumulate")), (case, got))
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)), (case, other)


def test_accumulation_cuts_each_chunk_and_is_the_mean_of_the_batch(tmp_path: Any) -> None:
    """Beside the plain step on one device, within rounding."""
    for loss, rule, wrap in itertools.product(("mean", "weighted"), ("adamw", "clip"), ("plain", "accumulate")):
        step = sf.sharded_step(LOSSES[loss], RULES[rule](), mesh=sf.make_mesh(alone=True))
        state = step.init(_params())
        for n in range(3):
            state, _ = step(state, _batch(n))
        got = _train((loss, rule, 1, wrap, ()), str(tmp_path))
        for x, y in zip(got, [x.full_tensor() for x in tree_leaves(state.params)], strict=False):
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)


def test_a_model_state_is_the_mean_of_the_chunks_and_counts_all_rows(tmp_path: Any) -> None:
    got = _train(("changing", "clip", 0, "plain", ()), str(tmp_path))[-4:-1]
    constant, mean, seen = got
    want = torch.zeros(5, dtype=torch.float64)
    for n in range(3):
        rows = _batch(n)["y"].double().view(CHUNKS, 3, 5).mean(1)
        want = (0.9 * want + 0.1 * rows).mean(0)
    assert torch.equal(constant, torch.full((2,), 0.1))
    torch.testing.assert_close(mean.double(), want, rtol=1e-6, atol=1e-7)
    assert int(seen) == sum(int((_batch(n)["y"] > 0).sum()) for n in range(3))


def _train_two(jitted: bool) -> list[Tensor]:
    """Two losses of one state, and then an opened step, on all ranks of the program."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = sf.make_mesh({"dp": ranks}) if ranks > 1 else sf.make_mesh(alone=True)
    zero = sf.Zero(stage=2, persist_elements=0, reduction="canonical", reduction_chunks=CHUNKS)
    wrap = WRAPS["jit" if jitted else "plain"]
    losses = {"mean": wrap(_mean), "weighted": wrap(_weighted)}
    step = sf.sharded_step(losses, RULES["clip"](), mesh=mesh, zero=zero, batch=P("dp"))
    state, metrics = step.init(_params()), []
    start, stop = Chunks(CHUNKS, ranks, rank).bounds
    for n in range(3):
        own = {k: x[3 * start : 3 * stop] for k, x in _batch(n).items()}
        if n < 2:
            state, m = step(state, {"mean": own, "weighted": own})
        else:
            grads, m = step.gradients(state, {"mean": own, "weighted": own})
            state, _ = step.update(state, grads, finite=m["finite"])
        metrics += [m[k] for k in ("loss", "grad_norm", "mean/grad_norm", "weighted/loss")]
    leaves = [x.full_tensor() for x in tree_leaves((state.params, state.opt_state)) if hasattr(x, "full_tensor")]
    return [*leaves, torch.stack([x.double() for x in metrics])]


@distributed(world=1)
def two_on_1(jitted: bool) -> list[Tensor]:
    return _train_two(jitted)


@distributed(world=3)
def two_on_3(jitted: bool) -> list[Tensor]:
    return _train_two(jitted)


@pytest.mark.parametrize("jitted", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_several_losses_and_opened_steps_have_the_bits_of_one_rank(jitted: bool) -> None:
    (want,) = two_on_1(jitted)
    for found in two_on_3(jitted):
        for i, (x, y) in enumerate(zip(found, want, strict=True)):
            assert torch.equal(x, y), (i, (x - y).abs().max())


def _alone(loss: Any, rule: Any = None, **options: Any) -> Any:
    zero = sf.Zero(reduction="canonical")
    return sf.sharded_step(
        loss, rule or optim.sgd(0.1), mesh=sf.make_mesh(alone=True), zero=zero, batch=SPECS, **options
    )


def test_what_cannot_be_ordered_is_refused_with_the_remedy() -> None:
    step = _alone(sf.jit(_mean, backend="inductor"))
    with pytest.raises(ValueError, match=r"got backend='inductor', which fuses(.|\n)*jit\(loss, backend='graph'\)"):
        step(step.init(_params()), _batch(0))
    lowered = _alone(_mean)
    lowered = lowered.lower(lowered.init(_params()), _batch(0))
    with pytest.raises(ValueError, match="needs the operations of the eager step, got backend='inductor'"):
        lowered.compile("inductor")
    step = _alone(sf.accumulate(_mean, 2, split=lambda batch, n: [batch] * n))
    with pytest.raises(ValueError, match=r"accumulate\(split=\): it cuts a rank's rows, whose number depends on"):
        step(step.init(_params()), _batch(0))
    step = _alone(_changing, has_state=True, finish=lambda kept: kept)
    with pytest.raises(ValueError, match="finish=: the states of chunks are joined before it"):
        step(step.init(_params(), model_state=_model_state()), _batch(0))
    step = _alone(_changing, has_state=True)
    wrong = _model_state() | {"seen": torch.zeros((), dtype=torch.bool), "mean": torch.zeros(5, dtype=torch.complex64)}
    with pytest.raises(ValueError, match=r"mean'\] of torch.complex64(.|\n)*seen'\] of torch.bool"):
        step(step.init(_params(), model_state=wrong), _batch(0))
    step, batch = _alone(_mean), _batch(0)
    state = step.init(_params())
    with pytest.raises(
        ValueError, match=r"leave them out, or the reduction:\n  - torch.func: its sums are made in order"
    ):
        torch.func.vmap(lambda s: step(state, batch | {"x": batch["x"] * s})[1]["loss"])(torch.ones(2))


@pytest.mark.nightly
@distributed(world=4)
def test_leaves_sharded_along_some_axes_of_the_batch_are_refused() -> None:
    mesh = sf.make_mesh({"dp": 2, "rp": 2})
    zero = sf.Zero(3, axis="dp", persist_elements=0, reduction="canonical")
    step = sf.sharded_step(_mean, optim.sgd(0.1), mesh=mesh, zero=zero, batch=P(("dp", "rp")))
    rows = {k: x[step.rows(len(x))] for k, x in _batch(0).items()}
    with pytest.raises(
        ValueError, match=r"params\['a'\](.|\n)*some axes of the batch only; Zero\(axis=\('dp', 'rp'\)\)"
    ):
        step(step.init(_params()), rows)


@distributed(world=2)
def test_a_model_state_that_ranks_cut_along_the_batch_is_refused() -> None:
    mesh, zero = sf.make_mesh({"dp": 2}), sf.Zero(reduction="canonical")
    step = sf.sharded_step(
        _changing, optim.sgd(0.1), mesh=mesh, zero=zero, batch=SPECS, has_state=True, state_specs=P("dp")
    )
    kept = {"constant": torch.zeros(4)}
    rows = {k: x[step.rows(len(x))] for k, x in _batch(0).items()}
    with pytest.raises((ValueError, sf.RankError), match=r"model_state\['constant'\] of torch.float32, P\('dp'\)"):
        step(step.init(_params(), model_state=kept), rows)
