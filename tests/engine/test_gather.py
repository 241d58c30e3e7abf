"""Covers the gatherer: values, the order of messages, requests, and requests of other ranks."""

import dataclasses
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.collectives import gather_wires
from shardfn.core import RankError
from shardfn.engine.plan._plan import UseOrder
from shardfn.engine.transfers._gather import DONE, FAILED, IDLE, Gatherer

from .fakes import ScriptedRounds, Wire, plan_of

SHAPES = {"a": (4, 3), "b": (3, 5), "c": (6,), "d": (2, 2)}
APART = sf.Travel(bucket_bytes=0)


class Case:
    """A gatherer of four leaves that travel apart, rank 0 of two. Units are numbered as leaves."""

    def __init__(self, window: int = 0, travel: sf.Travel = APART, order: UseOrder | None = None) -> None:
        self.plan, self.wholes, self.kept = plan_of(SHAPES, sf.Zero(3, persist_elements=0, travel=travel))
        self.wire, self.order, self.window = Wire(), order or UseOrder(), window
        for unit in self.plan.gather_units:
            parts = [[self.plan.layers[i].rows(self.wholes[i], r) for i in unit.leaves] for r in range(2)]
            sent = [unit.packing.pack(x).reshape(-1) for x in parts]
            self.wire.messages[tuple(sent[0].tolist())] = torch.cat(sent)

    def start(self, *says: int, text: str = "") -> tuple[Gatherer, ScriptedRounds]:
        told = ScriptedRounds(says, text)
        blocks: list[Any] = self.kept
        return Gatherer(
            self.plan.layers,
            self.plan.gather_units,
            blocks,
            self.wire,
            told,
            self.order,
            self.window,
            torch.device("cpu"),
        ), told

    def uses(self, gatherer: Gatherer, *leaves: int) -> None:
        for i in leaves:
            assert torch.equal(gatherer.whole(i), self.wholes[i])

    @property
    def sent(self) -> list[int]:
        """The leaves that were gathered, by the sizes of the messages."""
        sizes = [x.numel() for x in self.kept]
        assert len(set(sizes)) == len(sizes)
        return [sizes.index(n) for _, n in self.wire.log]


def test_a_first_use_is_asked_for_and_then_known() -> None:
    case = Case()
    gatherer, told = case.start()
    gatherer.begin_phase()
    case.uses(gatherer, 2, 0, 2)
    gatherer.end_phase(ask=False)
    assert told.heard == [2, 0, 2, DONE] and case.sent == [2, 0, 2]
    assert case.order.phases == [[2, 0, 2]]
    gatherer, told = case.start()
    gatherer.begin_phase()
    case.uses(gatherer, 2, 0, 2)
    gatherer.end_phase(ask=False)
    assert told.heard == [DONE] and case.sent == [2, 0, 2] * 2


def test_a_window_issues_the_next_units_in_the_agreed_order() -> None:
    def at_first(window: int) -> list[int]:
        case = Case(window, order=UseOrder([[0, 1, 2, 3]]))
        gatherer, _ = case.start()
        gatherer.begin_phase()
        case.uses(gatherer, 0)
        return case.sent

    nbytes = [unit.nbytes for unit in Case().plan.gather_units]
    assert at_first(0) == [0]  # at least the leaf that is used
    assert at_first(nbytes[0] + nbytes[1]) == [0, 1]
    assert at_first(nbytes[0] + nbytes[1] + nbytes[2] - 1) == [0, 1]
    assert at_first(sum(nbytes)) == [0, 1, 2, 3]


def test_units_that_other_ranks_ask_for_are_served_and_learnt() -> None:
    case = Case()
    gatherer, told = case.start(3, 1, DONE)  # while this rank wants 0, then 0 again, and is done
    gatherer.begin_phase()
    case.uses(gatherer, 0)
    case.uses(gatherer, 0)  # still there
    assert not gatherer.end_phase(ask=False)
    assert case.sent == [0, 3, 1] and told.heard == [0, DONE, DONE]
    assert case.order.phases == [[0, 3, 1]]
    gatherer.close()
    assert sorted(case.wire.waited) == [0, 1, 2]  # the others wait for their end of it


def test_units_that_were_issued_and_not_used_still_arrive() -> None:
    case = Case(window=1 << 20, order=UseOrder([[0, 1, 2]]))
    gatherer, _ = case.start()
    gatherer.begin_phase()
    case.uses(gatherer, 1)  # the branch that uses 0 was not taken, nor the one that uses 2
    gatherer.end_phase(ask=False)
    gatherer.close()
    assert case.sent == [0, 1, 2] and sorted(case.wire.waited) == [0, 1, 2]


def test_a_failure_that_is_announced_in_a_round() -> None:
    case = Case()
    gatherer, _ = case.start(FAILED, text="ZeroDivisionError: there")
    gatherer.begin_phase()
    with pytest.raises(RankError, match="rank 1 raised ZeroDivisionError: there"):
        gatherer.whole(0)


@pytest.mark.parametrize("says, all_idle", [((IDLE,), True), ((DONE,), False)])
def test_whether_all_ranks_are_idle(says: tuple[int, ...], all_idle: bool) -> None:
    gatherer, _ = Case().start(*says)
    gatherer.begin_phase()
    assert gatherer.end_phase(ask=True, says=IDLE) is all_idle


def test_small_neighbours_travel_together() -> None:
    case = Case(travel=sf.Travel(bucket_bytes=1 << 20))
    assert [unit.leaves for unit in case.plan.gather_units] == [(0, 1, 2, 3)]
    gatherer, told = case.start()
    gatherer.begin_phase()
    case.uses(gatherer, 1, 3, 0)
    gatherer.end_phase(ask=False)
    assert [n for _, n in case.wire.log] == [sum(x.numel() for x in case.kept)] and told.heard == [0, DONE]


def test_pieces_are_cast_before_they_are_sent() -> None:
    case = Case()
    leaf, own = case.plan.layers[0], case.kept[0]
    half = leaf.places.dtypes._replace(compute=torch.bfloat16)
    narrow = dataclasses.replace(leaf, places=leaf.places._replace(dtypes=half))

    (wire,) = gather_wires(case.wire, [(narrow.ways.use, case.plan.gather_units[0].packing)])
    whole = case.wholes[0].bfloat16()
    case.wire.messages[tuple(own.bfloat16().reshape(-1).tolist())] = whole.view(-1)
    sent = wire.start([own]).result()
    assert wire.dtype == torch.bfloat16 and torch.equal(sent.view(whole.shape), whole)
