"""Covers a stage that fails in the middle of a schedule: all other ranks raise at once, naming stage, microbatch, line.

At once is some tenths of a second, which are printed (`pytest -s`); on a loaded machine it may be seconds. A rank that
waits in vain waits until the timeout of the mesh, two minutes here; the tests distinguish the two cases.
"""

import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, Zero, optim, schedules
from shardfn.collectives.transport import _channel
from shardfn.testing import distributed

_TIMEOUT, _AT_ONCE = 120, 30  # seconds
_MICROBATCHES = 8
_SCHEDULES = {
    "1f1b": schedules.one_f_one_b,
    "zb-h1": schedules.zero_bubble_h1,
    "interleaved": schedules.interleaved,
}


class Failed(NamedTuple):
    """A failure as one rank has seen it."""

    own: bool
    seconds: float  # of the clock that all processes of a machine share
    told: str
    expected: str
    through_memory: bool


class _FailingBackward(torch.autograd.Function):
    at: dict[str, Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: dict[str, Any]) -> Tensor:
        ctx.at = at
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.at["failed"] = time.monotonic()
        raise ZeroDivisionError("in the backward")


def _params(chunks: int) -> Any:
    g = torch.Generator().manual_seed(0)
    stacks = [{"w": torch.randn(4, 3, 3, generator=g)} for _ in range(chunks)]
    return {"blocks": stacks if chunks > 1 else stacks[0], "scale": torch.ones(3)}


def _place(schedule: str, rank: int, stages: int, nth: int) -> tuple[int, int, int]:
    """Microbatch and stage of the nth forward of a rank, and how many stages there are."""
    table = _SCHEDULES[schedule](stages, _MICROBATCHES)
    forwards = [a for a in table.ranks[rank] if a.kind == "forward"]
    return forwards[nth].microbatch, table.stages[rank][forwards[nth].chunk], table.num_stages


@distributed(world=4, timeout=3 * _TIMEOUT)
def failures(schedule: str, channel: str, stage: int, mesh_shape: dict[str, int]) -> list[Failed]:
    """This rank's view of failures of one rank, in a forward and in a backward."""
    found, lanes = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDFN_CHANNEL", channel)
        shared = _channel.shared_lanes
        patch.setattr(_channel, "shared_lanes", lambda *args: lanes.append(shared(*args)) or lanes[-1])
        mesh = sf.make_mesh(mesh_shape, device="cpu", timeout=_TIMEOUT)
        stages, at = mesh_shape["pp"], {"where": "", "calls": 0, "nth": 0}
        mine = mesh.coords == {axis: n - 2 if axis == "pp" else 0 for axis, n in mesh_shape.items()}
        layers = 4 // stages

        def block(p: Any, h: Tensor) -> Tensor:
            if mine and at["where"]:
                at["calls"] += 1
                if at["calls"] == layers * at["nth"] + 1:
                    if at["where"] == "forward":
                        at["failed"] = time.monotonic()
                        raise ZeroDivisionError("in the forward")
                    h = _FailingBackward.apply(h, at)
            return torch.tanh(h @ p["w"])

        chunks = 2 if schedule == "interleaved" else 1
        loss = sf.pipeline(
            lambda p, x: x * p["scale"],
            block,
            lambda p, h, x: (h - x).square().mean(),
            num_microbatches=_MICROBATCHES,
            schedule=schedule,
            num_chunks=chunks,
        )
        step = sf.sharded_step(
            loss,
            optim.sgd(0.1),
            mesh=mesh,
            specs={"blocks": P("pp"), "scale": P()},
            batch=P("dp"),
            zero=Zero(stage=stage, persist_elements=0),
        )
        state = step.init(_params(chunks))
        batch = torch.ones(_MICROBATCHES, 3)
        for where, nth in (("forward", 3), ("backward", 2)):
            state, _ = step(state, batch)
            at.update(where=where, calls=0, nth=nth)
            with pytest.raises(ZeroDivisionError if mine else sf.RankError) as caught:
                step(state, batch)
            seconds = at["failed"] if mine else time.monotonic()
            lines = [e.lineno for e in caught.traceback if str(e.path).endswith("test_pipeline_failures.py")]
            microbatch, own, num = _place(schedule, stages - 2, stages, nth)
            told = "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
            expected = f"in stage {own} of {num}, {where} of microbatch {microbatch}"
            found.append(Failed(mine, seconds, f"{told} :{lines[-1] + 1}", expected, any(lanes)))
            at["where"] = ""
            state, metrics = step(state, batch)  # the state lives on
            assert metrics["finite"]
    return found


@pytest.mark.parametrize("channel", ["memory", pytest.param("gloo", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "schedule", [x if x == "1f1b" else pytest.param(x, marks=pytest.mark.nightly) for x in _SCHEDULES]
)
@pytest.mark.parametrize(
    "stage, mesh_shape", [pytest.param(0, {"pp": 4}, marks=pytest.mark.nightly), (3, {"pp": 2, "dp": 2})]
)
def test_all_others_raise_at_once(schedule: str, channel: str, stage: int, mesh_shape: dict[str, int]) -> None:
    for of_ranks in zip(*failures(schedule, channel, stage, mesh_shape), strict=True):
        (failed,) = (x for x in of_ranks if x.own)
        others = [x for x in of_ranks if not x.own]
        assert len(others) == 3
        delays = [x.seconds - failed.seconds for x in others]
        print(f"{schedule}, {channel}: {failed.expected}; the others raised after", [f"{d:.3f} s" for d in delays])
        assert max(delays) < _AT_ONCE, "they have waited until the timeout"
        line = failed.told.rsplit(" ", 1)[1]
        for x in of_ranks:
            assert failed.expected in x.told, x.told
            assert x.through_memory == (channel == "memory")
        for x in others:
            assert f"test_pipeline_failures.py{line}" in x.told and "ZeroDivisionError" in x.told, x.told
