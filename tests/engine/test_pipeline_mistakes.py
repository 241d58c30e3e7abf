"""Covers refusals of a pipeline, and how the ranks learn of a stage that fails."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, Zero, optim, schedules
from shardfn.testing import distributed
from tests.mistakes import Mistake, cases, check, check_on_all_ranks, mesh_of


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


def _of(block: Any, schedule: str = "1f1b") -> Any:
    return sf.pipeline(_first, block, _last, num_microbatches=2, schedule=schedule)


def _first_of(first: Any) -> Any:
    return sf.pipeline(first, _block, _last, num_microbatches=2)


def _begun(loss: Any = None, *, params: Any = None, **options: Any) -> tuple[Any, Any]:
    step = _step(loss, mesh=mesh_of(), **options)
    return step, step.init(_params() if params is None else params)


def _run(loss: Any = None, *, rows: int) -> Any:
    step, state = _begun(loss)
    return step(state, torch.ones(rows, 3))


def _called(f: Any) -> Any:
    return f(f.init(_params()), torch.ones(4, 3))


def _wide(p: Any, h: Tensor) -> Tensor:
    return _block(p, h).double()


def _sloped(p: Any, h: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(_block(p, h.detach()).sum(), p["w"])
    return _block(p, h) + slope.mean()


def _asks(p: Any, x: Tensor) -> Tensor:
    return _first(p, x) * x.sum().item()


def _selects(p: Any, x: Tensor) -> Tensor:
    return _first(p, x)[x[:, 0].nonzero()[:, 0]]


def _branches(p: Any, x: Tensor) -> Tensor:
    return _first(p, x) if x.sum() > 0 else x


def _other_aux() -> Any:
    aux = {"a": 1.0}
    loss = sf.pipeline(_first, _block, lambda p, h, x: (_last(p, h, x), aux.copy()), num_microbatches=2)
    step, state = _begun(loss, has_aux=True)
    state, metrics = step(state, torch.ones(4, 3))
    assert metrics["a"] == aux.pop("a")
    aux["b"] = 1.0
    return step(state, torch.ones(4, 3))


def _unlike() -> Any:
    return _params() | {"blocks": {"w": torch.ones(4, 3, 3), "b": torch.ones(5, 3)}}


def _also(error: type[Exception]) -> tuple[type[Exception], ...]:
    """The error of the stage that makes the mistake, and that of the others."""
    return error, sf.RankError


_UNLIKE = sf.pipeline(_first, lambda p, h: torch.tanh(h @ p["w"] + p["b"]), _last)
_LENGTHS = "different numbers of layers; ... ['b'] has 5, ... ['w'] has 4"


def _by_hand() -> schedules.PipelineSchedule:
    ranks = (schedules.parse("F0 B0 F1 B1"), schedules.parse("F0 F1 B1 B0"))
    return schedules.PipelineSchedule("by hand", 2, ((0,), (1,)), ranks)


_NO_EFFECT = "Zero(stage=3, axis='dp') has no effect"
MISTAKES = [
    Mistake("the schedule would never end", lambda: _step(_loss(_by_hand())), schedules.ScheduleError,
            "the schedule by hand would never end, as its ranks wait in a circle:\n",
            "  - rank 0 at B0 waits for B0 of rank 1, which comes after F1 there\n"
            "  - rank 1 at F1 waits for F1 of rank 0, which comes after B0 there\n"),
    Mistake("the schedule is for other ranks", lambda: _step(_loss(schedules.one_f_one_b(3, 2))),
            ValueError, "1f1b is for 3 ranks ... and 2 microbatches, but the step has 2 with", "schedule='1f1b'"),
    Mistake("the schedule is for other microbatches", lambda: _step(_loss(schedules.one_f_one_b(2, 3))),
            ValueError, "is for 2 ranks ... and 3 microbatches, but the step has 2 ... and 2.",
            "make the schedule for the step's"),
    Mistake("the schedule is of several chunks", lambda: _loss(schedules.zero_bubble_v(2, 2)),
            ValueError, "num_chunks must be 2 for the schedule zb-v", "got 1"),
    Mistake("the schedule has another number of chunks", lambda: _loss("zb-v", num_chunks=3),
            ValueError, "'zb-v' with num_chunks=3", "must have num_chunks=2"),
    Mistake("the schedule has one chunk", lambda: _loss("interleaved"),
            ValueError, "'interleaved' with num_chunks=1", "must have two chunks or more"),
    Mistake("the schedule is misspelt", lambda: _loss("1b1f"), ValueError, "'1b1f'", "gpipe, 1f1b, interleaved, zb-h1"),
    Mistake("the schedule has no chunks", lambda: _loss("1f1b", num_chunks=2),
            ValueError, "'1f1b'", "For several chunks use 'interleaved'"),
    Mistake("the microbatches do not fit the chunks", lambda: _step(_loss("interleaved", 3, num_chunks=2)),
            ValueError, "3 microbatches and 2 chunks do not fit", "Use 4 microbatches"),
    Mistake("the layers have stacks of unlike lengths", lambda: _UNLIKE(_unlike(), torch.ones(2, 3)),
            ValueError, _LENGTHS, "stack the same number of each"),
    Mistake("the rule has no axis of data", lambda: _step(zero=Zero(stage=3)),
            ValueError, _NO_EFFECT, "Leave out zero=, or give the mesh an axis of data"),
    Mistake("the rule is along another axis of data",
            lambda: _step(mesh=sf.make_mesh({"pp": 4, "fsdp": 2}, abstract=True), zero=Zero(stage=3)),
            ValueError, _NO_EFFECT, "pass Zero(axis='fsdp')"),
]  # fmt: skip
ON_STAGES = [
    Mistake("the layers are not cut", lambda: _begun(specs={"blocks": P(), "scale": P()}),
            ValueError, "params['blocks']['w'] has spec P()", "cut dim 0, its layers: P('pp')"),
    Mistake("a leaf of all stages is cut", lambda: _begun(specs=P("pp")),
            ValueError, "params['scale'] has spec P('pp'), but is not a layer", "leave 'pp' out"),
    Mistake("there are fewer layers than stages", lambda: _begun(params=_params(1)),
            ValueError, "of 2 stages along 'pp' ... params['blocks']['w'] has 1", "stack more layers"),
    Mistake("the rule is along the axis of stages", lambda: _begun(zero=Zero(stage=3, axis="pp", persist_elements=0)),
            ValueError, "in pieces along 'pp' ... params['scale']", "pass Zero(axis=) an axis of data"),
    Mistake("the stacks are not a list", lambda: _begun(_loss("interleaved", num_chunks=2)),
            ValueError, "2 chunks expected a list of 2 stacks of layers, got a dict", "Cut the stack"),
    Mistake("the stacks have unlike lengths", lambda: _begun(_UNLIKE, params=_unlike()),
            ValueError, _LENGTHS, "stack the same number of each"),
    Mistake("the layers of a function are not cut", lambda: _called(sf.sharded(_loss("1f1b"), mesh=mesh_of())),
            ValueError, "['w'] has spec P()", "cut dim 0, its layers: P('pp')"),
    Mistake("the microbatches do not divide the rows", lambda: _run(rows=6),
            _also(ValueError), "4 microbatches ... batch has 2 rows; ... batch has 1 row", "a multiple of 4 rows"),
    Mistake("the layers change the dtype", lambda: _run(_of(_wide), rows=4),
            _also(TypeError), "must be ... torch.float32, as in init, got ... torch.float64", "Cast or reshape"),
    Mistake("the layers of a split backward differentiate something", lambda: _run(_of(_sloped, "zb-h1"), rows=2),
            _also(ValueError), "differentiates something itself", "a schedule that does not split, such as '1f1b'"),
    Mistake("the last function returns other aux than before", _other_aux,
            _also(ValueError), "['a']) in the first step, and now ... ['b'])", "must always return the same"),
    *(Mistake(f"the first function {first.__name__} by values", lambda first=first: _run(_first_of(first), rows=4),
              ValueError, f"first={first.__name__} of a pipeline is run once without data", "use torch.where")
      for first in (_asks, _selects, _branches)),
]  # fmt: skip


@pytest.mark.parametrize("mistake", cases(MISTAKES))
def test_a_mistake_is_refused_with_its_remedy(mistake: Mistake) -> None:
    check(mistake)


@distributed(world=2)
def test_all_stages_refuse_a_mistake() -> None:
    check_on_all_ranks(ON_STAGES, {"pp": 2})


@distributed(world=2)
def test_pipelines_that_look_like_mistakes_are_taken() -> None:
    mesh = sf.make_mesh({"pp": 2}, device="cpu")
    step = _step(mesh=mesh)
    step(step.init(_params()), torch.ones(8, 3))
    step = _step(_of(_sloped), mesh=mesh)  # its schedule does not split the backward
    step(step.init(_params()), torch.ones(2, 3))
    loss = _loss("1f1b")
    f = sf.sharded(loss, mesh=mesh, specs=SPECS)
    torch.testing.assert_close(_called(f), loss(_params(), torch.ones(4, 3)))


@pytest.mark.nightly
def test_on_a_mesh_without_the_axis_it_may_be_jitted() -> None:
    step = sf.sharded_step(sf.jit(_loss("1f1b"), backend="graph"), optim.sgd(0.1))
    plain = sf.sharded_step(_loss("1f1b"), optim.sgd(0.1))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    ours, _ = step(step.init(_params()), x)
    theirs, _ = plain(plain.init(_params()), x)
    torch.testing.assert_close(sf.unshard(ours.params), sf.unshard(theirs.params), rtol=0, atol=0)


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
                assert "test_pipeline_mistakes.py:" in told, told
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
    assert "in stage 1 of 2, forward of microbatch 2" in told and "test_pipeline_mistakes.py:" in told, told
    state, metrics = step(state, good)  # the state lives on
    assert metrics["finite"]
