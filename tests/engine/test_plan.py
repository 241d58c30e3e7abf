"""Covers plans: leaves and layers, guessed and learnt orders, the cache, the agreement of ranks, errors."""

import dataclasses
import pathlib
import re
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.collectives import GlobalTensor
from shardfn.core import Mesh, P, Sharding, Zero, tree_flatten
from shardfn.engine import Plan, Planner
from shardfn.engine.plan._plan import UseOrder
from shardfn.state._state import TrainState

TREE = {"out": torch.empty(6, 2, device="meta"), "stack": torch.empty(3, 8, 4, device="meta")}
SPECS = {"out": P(), "stack": Sharding(P(), stacked=True)}


def _planner(world: int = 2, specs: Any = SPECS, **zero: Any) -> Planner:
    mesh = Mesh({"dp": world}, torch.device("cpu"), abstract=True)
    rule: dict[str, Any] = {"stage": 3, "persist_elements": 0, "bucket_bytes": 0}
    return Planner(mesh, specs, P("dp"), Zero.flat(**rule | zero), True)


def _plan(world: int = 2, **zero: Any) -> Plan:
    leaves, treedef = tree_flatten(TREE)
    return _planner(world, **zero).plan(treedef, leaves)


def test_a_stacked_leaf_becomes_its_layers_and_one_leaf_again() -> None:
    plan = _plan()
    out, stack = torch.randn(3, 2), torch.randn(3, 4, 4)
    layers = plan.by_layer([out, stack])
    assert len(plan.layers) == 4 and [tuple(x.shape) for x in layers] == [(3, 2), (4, 4), (4, 4), (4, 4)]
    assert layers[1].data_ptr() == stack.data_ptr()
    assert plan.by_layer([None, None]) == [None] * 4
    assert plan.first_layers == [0, 1]
    whole = plan.with_whole_stacks()
    assert whole.by_layer([out, stack]) == [out, stack] and len(whole.layers) == 2 and whole.first_layers == [0, 1]
    assert whole.with_whole_stacks().layers == whole.layers


def test_gradients_are_guessed_to_come_against_the_order_of_use() -> None:
    plan = _plan()
    last_first = [plan.reduce_units[u].leaves for u in plan.guessed_order(UseOrder([[1, 2, 3, 0]]))]
    assert last_first == [(0,), (3,), (2,), (1,)]
    assert _plan(world=1).guessed_order(UseOrder([[1, 2, 3, 0]])) == []  # no messages
    assert plan.for_capture().guessed_order(UseOrder([[0]])) == []


def test_orders_of_use_are_kept_by_call_and_the_oldest_are_forgotten() -> None:
    plan = _plan()
    order = plan.learnt.use_order("step")
    assert plan.learnt.use_order("step") is order
    for name in "abc":
        plan.learnt.use_order(name)
    plan.learnt.forget_orders(2)
    assert list(plan.learnt.use_orders) == ["step", "b", "c"]
    assert not plan.for_capture().learnt.use_orders


def test_a_plan_is_made_once_for_each_tree() -> None:
    planner = _planner()
    leaves, treedef = tree_flatten(TREE)
    first = planner.plan(treedef, leaves)
    assert planner.plan(treedef, [torch.empty_like(x) for x in leaves]) is first
    assert planner.plan(treedef, [x.double() for x in leaves]) is not first
    assert first.trained == ["params['out']", "params['stack']"]


def test_the_text_that_ranks_compare_has_every_decision_and_no_place_of_one_rank() -> None:
    told = _plan().describe()
    for other in (
        _plan(world=3),
        _plan(stage=2),
        _plan(bucket_bytes=10),
        _plan(persist_elements=10_000, prefetch_bytes=7),
    ):
        assert other.describe() != told
    assert _plan().describe() == told

    def on_disk(directory: str) -> str:
        return _plan(optimizer="disk", directory=directory).describe()

    assert on_disk("/a") == on_disk("/b") != told
    assert "params['stack']: (3, 8, 4)" in told and "stacked" in told.splitlines()[-1]


def test_states_of_another_layout_are_refused_leaf_by_leaf() -> None:
    planner = _planner(world=1, specs=P(), stage=0)
    mesh = planner.mesh

    def state(**leaves: Any) -> TrainState:
        return TrainState(leaves, (), torch.zeros((), dtype=torch.int64))

    def leaf(spec: P, kind: Any = "device") -> GlobalTensor:
        return GlobalTensor(torch.ones(4), torch.Size([4]), spec, mesh, kind)

    assert planner.plan_of(state(w=leaf(P()))).leaves[0].path == "params['w']"
    with pytest.raises(
        ValueError, match=r"(?s)params\['v'\] is kept as P\('tp'\) at 'host'; here it is P\(\) at"
    ) as error:
        planner.plan_of(state(v=leaf(P("tp"), "host"), w=leaf(P())))
    assert "params['w']" not in str(error.value)
    with pytest.raises(TypeError, match=r"params\['w'\] is a Tensor"):
        planner.plan_of(state(w=torch.ones(4)))


@pytest.mark.parametrize(
    "shape, specs, words",
    [
        ((4,), P(None, "tp"), r"params of shape \(4,\) has spec P\(None, 'tp'\); drop entries"),
        pytest.param(
            (3, 4), Sharding(P("tp"), stacked=True), r"use Sharding\(P\(\), stacked=True\)", marks=pytest.mark.nightly
        ),
        pytest.param(
            (), Sharding(P(), stacked=True), r"has no layers; leave out stacked=True", marks=pytest.mark.nightly
        ),
        ((0, 4), Sharding(P(), stacked=True), r"has no layers; leave out stacked=True"),
    ],
)
def test_specs_that_do_not_fit_are_refused(shape: tuple[int, ...], specs: Any, words: str) -> None:
    leaves, treedef = tree_flatten(torch.empty(shape, device="meta"))
    with pytest.raises(ValueError, match=words):
        _planner(specs=specs).plan(treedef, leaves)


def test_an_option_for_the_disk_needs_something_there() -> None:
    leaves, treedef = tree_flatten(TREE)
    with pytest.raises(ValueError, match=r"Zero\(disk=Disk\(directory='/a'.*has no effect: nothing is kept on disk"):
        _planner(directory="/a").plan(treedef, leaves)
    assert sf.Zero().directory is None


def test_a_plan_is_frozen_and_only_its_memory_changes() -> None:
    plan = _plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.captured = True  # type: ignore[misc]
    plan.learnt.take_outcome("a mean and aux []")
    plan.learnt.take_compared(True)
    local = plan.with_unreduced(("dp",))
    assert plan.with_unreduced(("dp",)) is local and local.unreduced_axes == ("dp",) and plan.with_unreduced(()) is plan
    for other in (plan.for_capture(), plan.with_whole_stacks(), local):
        assert other.learnt.outcome is None and other.learnt.rules is plan.learnt.rules
        assert other.learnt.compared is other.captured  # a capture has no values to compare


def test_no_module_outside_of_the_plan_assigns_to_the_facts_that_steps_have_learnt() -> None:
    engine = pathlib.Path(sf.__file__).parent / "engine"
    # Assigned attributes of `learnt`, `learnt.stages`, or an item of one of them.
    write = re.compile(r"\blearnt\.\w+(\.\w+)*(\[.*\])? *([-+|]?=)(?!=)|\bdel .*learnt")
    files = [x for x in engine.rglob("*.py") if x.parent.name != "plan"]
    assert files
    assert [f"{x}:{row}" for x in files for row in x.read_text().splitlines() if write.search(row)] == []
    assert write.search("plan.learnt.outcome = 'a mean'") and not write.search("if plan.learnt.outcome == x:")
