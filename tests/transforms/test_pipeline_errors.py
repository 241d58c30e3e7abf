"""Covers refusals of a pipeline, and how the ranks learn of a stage that fails."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, Zero, optim, schedules
from shardfn.testing import distributed


def _params(layers: int = 4) -> Any:
    g = torch.Generator().manual_seed(0)
    return {"blocks": {"w": torch.randn(layers, 3, 3, generator=g)}, "scale": torch.ones(3)}


SPECS = {"blocks": P("pp"), "scale": P()}


def _first(p: Any, x: Tensor) -> Tensor:
    return x * p["scale"]


def _block(p: Any, h: Tensor) -> Tensor:
    return torch.tanh(h @ p["w"])


def _last(p: Any, h: Tensor, x: Tensor) -> Tensor:
    return (h - x).square().mean()


def _step(loss: Any = None, *, mesh: Any = None, specs: Any = SPECS, **options: Any) -> Any:
    loss = sf.pipeline(_first, _block, _last, num_microbatches=4) if loss is None else loss
    mesh = sf.make_mesh({"pp": 2}, abstract=True) if mesh is None else mesh
    return sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, specs=specs, batch=P("dp"), **options)


def _loss(schedule: Any, m: int = 2, **options: Any) -> Any:
    return sf.pipeline(_first, _block, _last, num_microbatches=m, schedule=schedule, **options)


def test_a_schedule_that_would_never_end_is_refused_with_its_circle() -> None:
    ranks = (schedules.parse("F0 B0 F1 B1"), schedules.parse("F0 F1 B1 B0"))
    wrong = schedules.PipelineSchedule("by hand", 2, ((0,), (1,)), ranks)
    with pytest.raises(schedules.ScheduleError) as caught:
        _step(_loss(wrong))
    assert str(caught.value).splitlines() == [
        "the schedule by hand would never end, as its ranks wait in a circle:",
        "  - rank 0 at B0 waits for B0 of rank 1, which comes after F1 there",
        "  - rank 1 at F1 waits for F1 of rank 0, which comes after B0 there",
    ]


def test_a_schedule_of_other_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1f1b is for 3 ranks with stages .* and 2 microbatches; the step has 2 with"):
        _step(_loss(schedules.one_f_one_b(3, 2)))
    with pytest.raises(ValueError, match=r"is for 2 ranks .* and 3 microbatches; the step has 2 .* and 2\."):
        _step(_loss(schedules.one_f_one_b(2, 3)))
    with pytest.raises(ValueError, match="zb-v is of 2 chunks, not 1"):
        _loss(schedules.zero_bubble_v(2, 2))
    with pytest.raises(ValueError, match="'zb-v' with num_chunks=3: it has num_chunks=2"):
        _loss("zb-v", num_chunks=3)
    with pytest.raises(ValueError, match="'interleaved' with num_chunks=1: it has two chunks or more"):
        _loss("interleaved")
    with pytest.raises(ValueError, match="'1b1f' is none of gpipe, 1f1b, interleaved, zb-h1"):
        _loss("1b1f")
    with pytest.raises(ValueError, match="several chunks are 'interleaved'"):
        _loss("1f1b", num_chunks=2)
    with pytest.raises(ValueError, match=r"3 microbatches and 2 chunks do not fit\. Use 4 microbatches"):
        _step(_loss("interleaved", 3, num_chunks=2))


def test_on_a_mesh_without_the_axis_it_may_be_jitted() -> None:
    step = sf.sharded_step(sf.jit(_loss("1f1b"), backend="graph"), optim.sgd(0.1))
    plain = sf.sharded_step(_loss("1f1b"), optim.sgd(0.1))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    ours, _ = step(step.init(_params()), x)
    theirs, _ = plain(plain.init(_params()), x)
    torch.testing.assert_close(sf.unshard(ours.params), sf.unshard(theirs.params), rtol=0, atol=0)


@distributed(world=2)
def test_a_layout_that_is_none_of_stages_is_refused() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    with pytest.raises(ValueError, match=r"params\['blocks'\]\['w'\] has spec P\(\); cut dim 0, its layers: P\('pp'\)"):
        _step(mesh=mesh, specs={"blocks": P(), "scale": P()}).init(_params())
    with pytest.raises(ValueError, match=r"params\['scale'\] has spec P\('pp'\), but is no layer; leave 'pp' out"):
        _step(mesh=mesh, specs=P("pp")).init(_params())
    with pytest.raises(ValueError, match=r"of 2 stages along 'pp' needs a layer for each:\n.*params.* has 1"):
        _step(mesh=mesh).init(_params(1))
    zero = Zero(stage=3, axis="pp", persist_elements=0)
    with pytest.raises(ValueError, match=r"ZeRO cannot keep leaves in pieces along 'pp'.*\n.*params\['scale'\]"):
        _step(mesh=mesh, zero=zero).init(_params())
    with pytest.raises(ValueError, match="a schedule of 2 chunks wants a list of 2 stacks of layers, got a dict"):
        _step(_loss("interleaved", num_chunks=2), mesh=mesh).init(_params())


@distributed(world=2)
def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    step = _step(mesh=sf.make_mesh({"pp": 2}, device="cpu"))
    state = step.init(_params())
    with pytest.raises((ValueError, sf.RankError), match=r"4 microbatches of a pipeline must have.*batch has 2 rows"):
        step(state, torch.ones(6, 3))
    step(state, torch.ones(8, 3))


@distributed(world=2)
def test_layers_that_change_shapes_are_refused() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")

    def wide(p: Any, h: Tensor) -> Tensor:
        return _block(p, h).double()

    step = _step(sf.pipeline(_first, wide, _last, num_microbatches=2), mesh=mesh)
    with pytest.raises((TypeError, sf.RankError), match=r"torch.float64; in init it is .* torch.float32"):
        step(step.init(_params()), torch.ones(4, 3))


@distributed(world=2)
def test_ranks_agree_on_the_schedule() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    step = _step(_loss("gpipe" if mesh.rank else "1f1b"), mesh=mesh)
    with pytest.raises(sf.RankError, match=r"(?s)rank 0: pipeline along 'pp': 1f1b.*rank 1: pipeline along 'pp': gpip"):
        step.init(_params())


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ZeroDivisionError("in the backward")


@pytest.mark.nightly
@distributed(world=4, timeout=120)
def test_a_stage_that_fails_is_named_by_all_at_once() -> None:
    # At once: a rank that waits in vain waits for 30 minutes, the limit of a mesh, and this test has two.
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")
    fail, calls = {"at": ""}, [0]

    def block(p: Any, h: Tensor) -> Tensor:
        if mesh.coords == {"pp": 1, "dp": 0} and fail["at"]:
            calls[0] += 1
            if fail["at"] == "forward" and calls[0] == 5:  # two layers a stage
                raise ZeroDivisionError("in the forward")
            if fail["at"] == "backward" and calls[0] == 3:
                h = _FailingBackward.apply(h)
        return _block(p, h)

    for stage in (0, 3):
        step = _step(
            sf.pipeline(_first, block, _last, num_microbatches=4),
            mesh=mesh,
            zero=Zero(stage=stage, persist_elements=0),
        )
        state = step.init(_params())
        for at, microbatch in (("forward", 2), ("backward", 1)):
            state, _ = step(state, torch.ones(8, 3))
            fail["at"], calls[0] = at, 0
            mine = mesh.coords == {"pp": 1, "dp": 0}
            with pytest.raises(ZeroDivisionError if mine else sf.RankError) as caught:
                step(state, torch.ones(8, 3))
            told = "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
            assert f"in the {at}" in told and f"in stage 1 of 2, {at} of microbatch {microbatch}" in told, told
            if not mine:
                assert "test_pipeline_errors.py:" in told, told
            fail["at"] = ""
            state, metrics = step(state, torch.ones(8, 3))  # the state lives on
            assert metrics["finite"]


@pytest.mark.nightly
@distributed(world=4, timeout=120)
def test_a_stage_that_fails_in_a_captured_schedule_is_named_by_all_at_once() -> None:
    mesh = sf.make_mesh({"pp": 2, "dp": 2}, device="cpu")

    def first(p: Any, batch: Any) -> Tensor:
        return _first(p, batch["x"])

    def last(p: Any, h: Tensor, batch: Any) -> Tensor:
        return _last(p, h.index_select(0, batch["rows"]), batch["x"])  # of rows that may not be there

    loss = sf.jit(sf.pipeline(first, _block, last, num_microbatches=4), backend="graph")
    step = _step(loss, mesh=mesh, zero=Zero(stage=3, persist_elements=0))
    good = {"x": torch.ones(8, 3), "rows": torch.zeros(8, dtype=torch.int64)}
    state, _ = step(step.init(_params()), good)
    # The bad index is in microbatch 2 of one replica.
    bad = {**good, "rows": torch.tensor([0, 0, 0, 0, 0, 9 * (mesh.coords["dp"] == 0), 0, 0])}
    mine = mesh.coords == {"pp": 1, "dp": 0}
    with pytest.raises((IndexError, RuntimeError) if mine else sf.RankError) as caught:
        step(state, bad)
    told = "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "in stage 1 of 2, forward of microbatch 2" in told and "test_pipeline_errors.py:" in told, told
    state, metrics = step(state, good)  # the state lives on
    assert metrics["finite"]


@distributed(world=2)
def test_layers_that_differentiate_something_cannot_be_split() -> None:
    mesh, params = sf.make_mesh({"pp": 2}, device="cpu"), _params()

    def block(p: Any, h: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(_block(p, h.detach()).sum(), p["w"])
        return _block(p, h) + slope.mean()

    for schedule in ("1f1b", "zb-h1"):
        step = _step(sf.pipeline(_first, block, _last, num_microbatches=2, schedule=schedule), mesh=mesh)
        state = step.init(params)
        if schedule == "1f1b":
            step(state, torch.ones(2, 3))
            continue
        with pytest.raises((ValueError, sf.RankError)) as caught:
            step(state, torch.ones(2, 3))
        told = "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "differentiates something itself cannot have its backward split" in told, told


@distributed(world=2)
def test_a_loss_that_returns_something_else_is_refused() -> None:
    mesh, other = sf.make_mesh({"pp": 2}, device="cpu"), [False]

    def last(p: Any, h: Tensor, x: Tensor) -> Any:
        loss = _last(p, h, x)
        return loss, ({"b": 1.0} if other[0] else {"a": 1.0})

    step = _step(sf.pipeline(_first, _block, last, num_microbatches=2), mesh=mesh, has_aux=True)
    state = step.init(_params())
    state, metrics = step(state, torch.ones(4, 3))
    assert metrics["a"] == 1.0
    other[0] = True
    with pytest.raises((ValueError, sf.RankError), match="in the first step, and now"):
        step(state, torch.ones(4, 3))


def test_a_split_list_is_told_by_its_actions() -> None:
    plain = schedules.one_f_one_b(2, 2)
    assert not plain.splits
    assert dataclasses.replace(plain, ranks=(schedules.parse("F0 B0 W0"),)).splits


@distributed(world=2)
def test_leaves_of_unlike_lengths_are_no_stack() -> None:
    params = _params() | {"blocks": {"w": torch.ones(4, 3, 3), "b": torch.ones(5, 3)}}
    loss = sf.pipeline(_first, lambda p, h: torch.tanh(h @ p["w"] + p["b"]), _last)
    message = r"(?s)different numbers of layers; .*\['b'\] has 5, .*\['w'\] has 4"
    with pytest.raises(ValueError, match=message):
        loss(params, torch.ones(2, 3))
    with pytest.raises(ValueError, match=message):
        _step(loss, mesh=sf.make_mesh({"pp": 2})).init(params)


@distributed(world=2)
def test_a_function_of_stages_is_given_stages() -> None:
    mesh = sf.make_mesh({"pp": 2})
    loss = sf.pipeline(_first, _block, _last, num_microbatches=2)
    f = sf.sharded(loss, mesh=mesh)
    with pytest.raises(ValueError, match=r"\['w'\] has spec P\(\); cut dim 0, its layers: P\('pp'\)"):
        f(f.init(_params()), torch.ones(4, 3))
    g = sf.sharded(loss, mesh=mesh, specs=SPECS)
    torch.testing.assert_close(g(g.init(_params()), torch.ones(4, 3)), loss(_params(), torch.ones(4, 3)))


@distributed(world=2)
def test_a_first_that_asks_for_values_is_named() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")

    def asks(p: Any, x: Tensor) -> Tensor:
        return _first(p, x) * x.sum().item()

    def selects(p: Any, x: Tensor) -> Tensor:
        return _first(p, x)[x[:, 0].nonzero()[:, 0]]

    def branches(p: Any, x: Tensor) -> Tensor:
        return _first(p, x) if x.sum() > 0 else x

    for first in (asks, selects, branches):
        step = _step(sf.pipeline(first, _block, _last, num_microbatches=2), mesh=mesh)
        state = step.init(_params())
        with pytest.raises(ValueError, match=rf"first=.*{first.__name__} of a pipeline is run once without data"):
            step(state, torch.ones(4, 3))


def test_the_remedy_of_a_missing_axis_is_no_axis_of_stages() -> None:
    with pytest.raises(
        ValueError, match=r"axis='dp'\) has no effect.*Leave out zero=, or give the mesh an axis of data"
    ):
        _step(zero=Zero(stage=3))
    mesh = sf.make_mesh({"pp": 4, "fsdp": 2}, abstract=True)
    with pytest.raises(ValueError, match=r"has no effect.*pass Zero\(axis='fsdp'\)"):
        _step(mesh=mesh, zero=Zero(stage=3))
