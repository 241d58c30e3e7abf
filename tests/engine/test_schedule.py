"""Covers the schedule of a step: lists of forwards and backwards, and their results in another order."""

import dataclasses
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import Zero, optim
from shardfn.engine.transfers._gradients import accumulation, check_schedule
from shardfn.schedules import Action, as_text
from shardfn.testing import RTOL, distributed
from shardfn.transforms import ShardedStep, policies

LISTS = {
    "one by one": "F0 B0 F1 B1 F2 B2",
    "first in, first out": "F0 F1 F2 B0 B1 B2",
    "last in, first out": "F0 F1 F2 B2 B1 B0",
    "one forward, one backward": "F0 F1 B0 F2 B1 B2",
}
ODD: dict[str, Any] = {"persist_elements": 4, "bucket_bytes": 64, "prefetch_bytes": 150}


def _schedule(text: str) -> tuple[Action, ...]:
    return tuple(Action("forward" if word[0] == "F" else "backward", int(word[1:])) for word in text.split())


def _params() -> Any:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(5, 5, generator=g) / 2 for name in "abc"} | {"scale": torch.ones(())}


def _loss(p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ p["a"])
    h = sf.remat(lambda h, b: torch.tanh(h @ b))(h, p["b"])
    return (p["scale"] * (h @ p["c"] + x @ p["a"])).square().mean()


def _weighted(p: Any, x: Tensor) -> sf.WeightedMean:
    return sf.WeightedMean(_loss(p, x) * x[0, 0].abs(), x[0, 0].abs())


def _step(text: str, zero: Zero, loss: Any = _loss, ranks: int = 2) -> ShardedStep:
    step = sf.sharded_step(
        sf.accumulate(loss, 3), optim.sgd(0.1), mesh=sf.make_mesh({"dp": ranks}, device="cpu"), zero=zero
    )
    parts = dataclasses.replace(step._parts, schedule=_schedule(text))
    return ShardedStep(parts, step._unwrapped, step._planner, None)


def _trained(text: str, zero: Zero, loss: Any = _loss) -> Any:
    """Parameters and norms of two steps, the second in the orders that the first has taught."""
    step = _step(text, zero, loss)
    state = step.init(_params())
    norms = []
    for n in range(2):
        rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(n)).chunk(2)[torch.distributed.get_rank()]
        state, metrics = step(state, rows)
        norms.append(metrics["grad_norm"])
    return {"norms": norms} | {k: x.full_tensor() for k, x in state.params.items()}


@distributed(world=[2])
def _all(zero: Zero, loss: Any, world: int) -> dict[str, Any]:
    del world
    return {name: _trained(text, zero, loss) for name, text in LISTS.items()}


def _check(zero: Zero, loss: Any = _loss) -> None:
    for found in _all(zero, loss, world=2):
        want = found.pop("one by one")
        for name, got in found.items():
            if name == "last in, first out":  # adds gradients up in another order
                torch.testing.assert_close(got, want, rtol=RTOL[torch.float32], atol=1e-6)
            else:
                torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_any_list_gives_the_gradients_of_accumulation(stage: int) -> None:
    _check(Zero.flat(stage=stage, **ODD))


@pytest.mark.nightly
@pytest.mark.parametrize("loss", [_loss, _weighted])
@pytest.mark.parametrize("accumulate", ["each", "once"])
@pytest.mark.parametrize("rule", [{"stage": n} for n in range(4)] + [{"stage": 3, "params": "host", "grads": "host"}])
def test_any_list_under_any_rule(rule: dict[str, Any], accumulate: Any, loss: Any) -> None:
    _check(Zero.flat(**rule, **ODD, accumulate=accumulate), loss)


WRAPPED = {
    "plain": _loss,
    "offload": sf.offload(_loss, policies.offload_larger_than(4096), window=1 << 14),
    "remat": sf.remat(_loss, policies.offload_larger_than(4096)),
}
HOMES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"params": "host", "grads": "host", "optimizer": "host"},
    "disk": {"params": "disk", "grads": "host", "optimizer": "disk"},
}


def _alone(text: str, wrap: str, zero: Zero) -> dict[str, Tensor]:
    """Parameters after two steps of one process; of the second the update may begin beside the backward."""
    step = _step(text, zero, WRAPPED[wrap], ranks=1)
    g = torch.Generator().manual_seed(0)
    state = step.init({k: torch.randn(64, 64, generator=g) / 8 for k in "abc"} | {"scale": torch.ones(())})
    for _ in range(2):
        state, _ = step(state, torch.randn(192, 64, generator=g))
    return {k: x.full_tensor() for k, x in state.params.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("wrap", WRAPPED)
def test_activations_that_wait_elsewhere_belong_to_their_microbatch(
    wrap: str, home: str, tmp_path: pathlib.Path
) -> None:
    def trained(name: str) -> dict[str, Tensor]:
        where: dict[str, Any] = {"directory": str(tmp_path / name)} if home == "disk" else {}
        return _alone(LISTS[name], wrap, Zero.flat(stage=3, persist_elements=4, **HOMES[home], **where))

    want = trained("one by one")
    for name in ("first in, first out", "one forward, one backward"):
        torch.testing.assert_close(trained(name), want, rtol=0, atol=0)


@distributed(world=[2])
def _captured(world: int) -> None:
    del world
    eager = _trained(LISTS["first in, first out"], Zero.flat(stage=3, **ODD))
    graph = _trained(LISTS["first in, first out"], Zero.flat(stage=3, **ODD), sf.jit(_loss, backend="graph"))
    torch.testing.assert_close(graph, eager, rtol=0, atol=0)


@pytest.mark.nightly
def test_a_list_is_captured_as_it_runs() -> None:
    _captured(world=2)


@distributed(world=[2])
def _other_lists(world: int) -> None:
    del world
    text = [LISTS["one by one"], LISTS["last in, first out"]][torch.distributed.get_rank()]
    with pytest.raises(sf.RankError, match=r"(?s)rank 0: schedule F0 B0 F1.*rank 1: schedule F0 F1 F2 B2"):
        _step(text, Zero(stage=1)).init(_params())


def test_ranks_agree_on_the_list_before_the_first_transfer() -> None:
    _other_lists(world=2)


def test_accumulation() -> None:
    assert as_text(accumulation(2)) == "F0 B0 F1 B1"
    check_schedule(accumulation(3), 3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("F0 B0 F1", "B1 is there 0 times, not once"),
        pytest.param("F0 F1 B1 B0 B0", "B0 is there 2 times, not once", marks=pytest.mark.nightly),
        pytest.param("F0 B1 F1 B0", "B1 comes before F1", marks=pytest.mark.nightly),
        ("F0 B0 F1 B1 F2 B2", "F2 is of no microbatch"),
    ],
)
def test_a_list_that_is_no_step_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)the schedule {text} is not a step of 2 microbatches.*{told}"):
        check_schedule(_schedule(text), 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_may_differentiate_its_parameters(stage: int) -> None:
    def penalty(w: Tensor, x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((w * x).pow(3).sum(), w, create_graph=True)
        return g.square().sum()

    w, x = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.5])
    step = sf.sharded_step(penalty, optim.sgd(0.01), zero=Zero(stage=stage, persist_elements=0))
    state, _ = step(step.init(w), x)
    want = w - 0.01 * 36 * w**3 * x**6
    torch.testing.assert_close(state.params.full_tensor(), want, rtol=RTOL[torch.float32], atol=0)
