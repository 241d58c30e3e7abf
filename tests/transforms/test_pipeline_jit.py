"""Covers captured steps of pipelines: each rank's own graph has the bits of its eager step, and its messages add up."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, Zero, graph, optim, schedules
from shardfn.core import tree_leaves
from shardfn.models import gpt
from shardfn.testing import distributed

from .test_pipeline import ODD, _batches, _block, _first, _last, _loss, _params, _specs, _weighted

NIGHTLY = pytest.mark.nightly
wait = torch.ops.shardfn.wait


def _steps(loss: Any, mesh: sf.Mesh, params: Any, batches: list[Any], specs: Any, **options: Any) -> Any:
    """The last state, and the metrics and messages of each step."""
    step = sf.sharded_step(loss, optim.adamw(1e-2), mesh=mesh, specs=specs, batch=P("dp"), **options)
    state, told = step.init(params), list[Any]()
    num, own = mesh.axis_size("dp"), mesh.axis_index("dp")
    for batch in batches:
        with sf.count_traffic() as traffic:
            state, metrics = step(state, sf.core.tree_map(lambda x: x.chunk(num)[own], batch))
        told.append((metrics["loss"], metrics["grad_norm"], traffic.by_op.get(("send", ("pp",)))))
    return state, told


def _same_bits(loss: Any, mesh: sf.Mesh, params: Any, batches: Any = None, specs: Any = None, **options: Any) -> None:
    batches, specs = batches or _batches(2), specs or _specs(params)
    eager, told = _steps(loss, mesh, params, batches, specs, **options)
    ours, said = _steps(sf.jit(loss, backend="graph"), mesh, params, batches, specs, **options)
    assert told == said
    for x, y in zip(tree_leaves(eager), tree_leaves(ours), strict=True):
        x, y = (t.full_tensor() if isinstance(t, sf.GlobalTensor) else t for t in (x, y))
        assert torch.equal(x, y)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "schedule", [pytest.param("gpipe", marks=NIGHTLY), "1f1b", pytest.param("zb-h1", marks=NIGHTLY)]
)
@distributed(world=[pytest.param(2, marks=NIGHTLY), 3])
def test_a_stage_has_the_bits_of_its_eager_step(world: int, schedule: str) -> None:
    mesh = sf.make_mesh({"pp": world}, device="cpu")
    _same_bits(_loss(schedule=schedule), mesh, _params(5, torch.float32))
    _same_bits(_loss(_weighted, m=3, schedule=schedule), mesh, _params(4, torch.float32), skip_nonfinite=True)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world=4)
def test_with_every_stage_of_zero(stage: int) -> None:
    mesh, params = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu"), _params(9, torch.float32)
    _same_bits(_loss(m=3), mesh, params, zero=Zero.flat(stage=stage, **ODD))
    again = sf.pipeline(_first, sf.remat(_block), _last, num_microbatches=3)
    _same_bits(again, mesh, params, zero=Zero(stage=stage))


def _evaluated(loss: Any, mesh: sf.Mesh, params: Any, specs: Any = None, **options: Any) -> None:
    """An evaluation of a captured step, and its loss by `apply`, are those of one device."""
    (batch,) = _batches(1)
    want = loss(params, batch)
    step = sf.sharded_step(
        sf.jit(loss, backend="graph"),
        optim.sgd(0.1),
        mesh=mesh,
        specs=specs or _specs(params),
        batch=P("dp"),
        **options,
    )
    num, own = mesh.axis_size("dp"), mesh.axis_index("dp")
    rows = sf.core.tree_map(lambda x: x.chunk(num)[own], batch)
    for _ in range(2):
        found = step.evaluate(step.init(params), [rows])["loss"]
        want = want.total / want.weight if isinstance(want, sf.WeightedMean) else want
        torch.testing.assert_close(found, float(want), rtol=1e-12, atol=0)
    if num == 1:
        applied = step.apply(sf.jit(loss, backend="graph"), step.init(params), rows)
        applied = applied.total / applied.weight if isinstance(applied, sf.WeightedMean) else applied
        torch.testing.assert_close(applied, want, rtol=1e-12, atol=0)


@pytest.mark.nightly
@distributed(world=[2, pytest.param(3, marks=NIGHTLY)])
def test_evaluation_is_captured(world: int) -> None:
    mesh = sf.make_mesh({"pp": world}, device="cpu")
    _evaluated(_loss(), mesh, _params(4))
    _evaluated(_loss(_weighted), mesh, _params(5))
    cut = (3, 1) if world == 2 else (1, 2, 1)
    params = _params(4)
    params["blocks"] = sf.pad_layers(params["blocks"], cut)
    _evaluated(_loss(layers_per_stage=cut), mesh, params)


@NIGHTLY
@distributed(world=4)
def test_evaluation_is_captured_of_chunks_and_with_zero() -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    _evaluated(_loss(_weighted), mesh, _params(5), zero=Zero(stage=3, persist_elements=0))
    for schedule in ("interleaved", "zb-v"):
        _evaluated(_loss(_weighted, schedule=schedule, num_chunks=2), mesh, _params(7, chunks=2), zero=Zero(stage=3))


@NIGHTLY
@distributed(world=4)
def test_several_chunks() -> None:
    mesh, params = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu"), _params(7, torch.float32, 2)
    for schedule in ("interleaved", "zb-v", "dualpipe-v"):
        num = 4 if schedule == "dualpipe-v" else 2
        rows = _batches(2, 4 * num)
        _same_bits(_loss(m=num, schedule=schedule, num_chunks=2), mesh, params, rows, zero=Zero(stage=3))


@pytest.mark.nightly
@distributed(world=4)
def test_beside_tensor_parallel_layers() -> None:
    config, mesh = _gpt(3), sf.make_mesh({"pp": 2, "tp": 2}, device="cpu")
    loss = sf.pipeline(*gpt.stages(config, axis="tp"), num_microbatches=2)
    g = torch.Generator().manual_seed(0)
    batches = [{"tokens": torch.randint(config.vocab_size, (4, 9), generator=g)} for _ in range(2)]
    _same_bits(loss, mesh, gpt.init(config, sf.key(0)), batches, gpt.specs(config, tp="tp", pp="pp"))


@NIGHTLY
@distributed(world=8)
def test_three_axes() -> None:
    config, mesh = _gpt(3), sf.make_mesh({"dp": 2, "pp": 2, "tp": 2}, device="cpu")
    g = torch.Generator().manual_seed(0)
    batches = [{"tokens": torch.randint(config.vocab_size, (4, 9), generator=g)} for _ in range(2)]
    for stage in (0, 1, 2, 3):
        loss = sf.pipeline(*gpt.stages(config, axis="tp", wrap=sf.remat), num_microbatches=2)
        specs = gpt.specs(config, tp="tp", pp="pp")
        _same_bits(loss, mesh, gpt.init(config, sf.key(0)), batches, specs, zero=Zero(stage=stage, persist_elements=0))


def _gpt(layers: int, **more: Any) -> gpt.Config:
    sizes: dict[str, Any] = {"vocab_size": 24, "d_model": 8, "num_heads": 4, "max_len": 8, "d_ff": 16}
    return gpt.Config(**{**sizes, **more}, num_layers=layers, stacked=True)


def _lowered(sizes: dict[str, int], stage: int, schedule: str = "1f1b", m: int = 4, **more: Any) -> Any:
    """The program of a rank of one stage of a tiny GPT, on ranks that do not exist."""
    config = _gpt(2 * sizes["pp"])
    mesh = sf.make_mesh(sizes, device="cpu", abstract={"pp": stage})
    loss = sf.pipeline(*gpt.stages(config, axis="tp"), num_microbatches=m, schedule=schedule)
    specs = gpt.specs(config, tp="tp", pp="pp")
    step = sf.sharded_step(loss, optim.adamw(1e-2), mesh=mesh, specs=specs, batch=P("dp"), **more)
    params = sf.eval_shape(lambda: gpt.init(config, sf.key(0)))
    return step.lower(params, {"tokens": torch.empty(2 * m, 9, dtype=torch.int64, device="meta")})


@pytest.mark.nightly
def test_lowered_messages_are_those_of_the_schedule() -> None:
    """2 b s h a boundary and microbatch: a rank sends h to the next stage, and its gradient to the one before.

    A GPT's h is the hidden states and the positions of its tokens, s numbers that have no gradient.
    """
    sizes, m, h, at = {"pp": 3, "dp": 2, "tp": 2}, 4, 2 * 8 * 8 * 4, 8 * 8
    lowered = [_lowered(sizes, s, m=m, zero=Zero(stage=1)) for s in range(3)]
    sent = [x.cost_analysis().transfers["send", "pp"] for x in lowered]
    assert sent == [(2 * m, m * (h + at)), (3 * m, m * (h + at) + m * h), (m, m * h)]
    assert sum(nbytes for _, nbytes in sent) == 2 * m * (2 * h + at)  # of two boundaries
    assert lowered[1].pipeline == schedules.one_f_one_b(3, m)
    text = lowered[1].as_text()
    assert "# backward: in stage 1 of 3, backward of microbatch 3" in text
    assert "start send to 2 along pp (message " in text and "for receive from 0 along pp (message " in text
    # Each rank's program, over the mesh: those of a stage run one.
    graph.prove_no_hang([x.gm for x in lowered for _ in range(4)], sizes)


@pytest.mark.nightly
def test_activations_live_as_long_as_in_the_schedule() -> None:
    """The first of four stages holds four microbatches under 1F1B, and all eight under GPipe."""
    peaks = {s: _lowered({"pp": 4}, 0, s, m=8).memory_analysis().max_by_kind["activations"] for s in ("1f1b", "gpipe")}
    last = _lowered({"pp": 4}, 3, "1f1b", m=8).memory_analysis().max_by_kind["activations"]
    assert 1.7 < peaks["gpipe"] / peaks["1f1b"] < 2.1 and last < 0.6 * peaks["1f1b"]


def test_a_rank_that_is_not_there_is_no_view_of_a_mesh() -> None:
    with pytest.raises(ValueError, match=r"abstract=\{'pp': 3\}: an abstract mesh of \{'pp': 3\} has no rank at"):
        sf.make_mesh({"pp": 3}, device="cpu", abstract={"pp": 3})


def _captured(f: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(f, tracing_mode="fake")(torch.ones(3))
    gm.meta["mesh_shape"] = {"pp": 2}
    return gm


def _send(x: Tensor, to: int, tag: int = 0) -> Tensor:
    return torch.ops.shardfn.send_start(x, to, tag, "pp")


def _receive(source: int, tag: int = 0, size: int = 3) -> Tensor:
    return torch.ops.shardfn.receive_start([size], torch.float32, torch.device("cpu"), source, tag, "pp")


def _sends(x: Tensor) -> Tensor:
    torch.ops.shardfn.sent(_send(x, 1))
    return x


def test_messages_that_do_not_meet_are_refused() -> None:
    sends = _captured(_sends)
    graph.prove_no_hang([sends, _captured(lambda x: wait(_receive(0)))])
    with pytest.raises(sf.RankError, match=r"rank 0 sends float32 \[3\].*\n  rank 1 receives float32 \[4\]"):
        graph.prove_no_hang([sends, _captured(lambda x: wait(_receive(0, size=4)))])
    with pytest.raises(sf.RankError, match="no rank is at the other end"):
        graph.prove_no_hang([sends, _captured(lambda x: x + 1)])
    with pytest.raises(sf.RankError, match=r"message (0|1) on channel 'between pp'"):
        graph.prove_no_hang([sends, _captured(lambda x: wait(_receive(0, tag=1)))])


def test_stages_that_wait_for_each_other_are_refused() -> None:
    def first(other: int) -> Any:
        def waits(x: Tensor) -> Tensor:
            got = wait(_receive(other, tag=other))
            torch.ops.shardfn.sent(_send(x, other, tag=1 - other))
            return got

        return _captured(waits)

    with pytest.raises(sf.RankError, match=r"2 of 2 ranks would wait forever(.|\n)*the other end of message 1"):
        graph.prove_no_hang([first(1), first(0)])


@pytest.mark.nightly
def test_passes_keep_the_order_of_messages() -> None:
    gm = _lowered({"pp": 3, "dp": 2}, 1, zero=Zero(stage=3, persist_elements=0)).gm

    def order(of: Any) -> list[str]:
        moments = graph.collective_events(of).program
        return [f"{e.message} {e.wait}" for e in moments if e.message is not None]

    scheduled = graph.sink_waits(graph.prefetch(graph.bucket(gm, limit=1 << 20), budget=1 << 20))
    assert order(scheduled) == order(gm)
