"""Covers the reducer: the order of sends, leaves without a gradient, sums over backwards, rows and wholes."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.engine.plan import _plan
from shardfn.engine.transfers import _reduce
from shardfn.engine.transfers._reduce import Reducer

from .fakes import Wire, plan_of

SHAPES = {"a": (4, 3), "b": (3, 5), "c": (7,), "d": (2, 2)}


class Case:
    """A reducer of four leaves, rank 0 of two; the other rank has the same gradients. Units are numbered as leaves."""

    def __init__(self, stage: int, order: tuple[int, ...] = (), bucket_bytes: int = 0) -> None:
        zero = sf.Zero(stage, persist_elements=0, travel=sf.Travel(bucket_bytes=bucket_bytes))
        self.plan, self.grads, _ = plan_of(SHAPES, zero)
        self.wire = Wire()
        self.reducer = Reducer(self.plan, self.wire, order)

    def takes(self, *leaves: int, times: float = 1.0) -> None:
        for i in leaves:
            self.reducer.take((i, 0), times * self.grads[i])

    def sent(self) -> list[int]:
        """The units that were sent, by the size of their gradients."""
        sizes = [x.numel() for x in self.grads]
        return [sizes.index(n) for kind, n in self.wire.log if kind == "reduce"]

    def rows(self, leaf: int) -> Tensor:
        layout = self.plan.layers[leaf]
        return layout.rows(self.grads[leaf], 0)

    def check(self, factors: dict[int, float]) -> None:
        got = self.reducer.gradients().take_all()
        assert sorted(got) == [0, 1, 2, 3]
        for i, x in got.items():
            assert isinstance(x, Tensor)
            torch.testing.assert_close(x, factors.get(i, 0.0) * self.rows(i))


def test_sends_wait_for_their_turn_in_the_agreed_order() -> None:
    case = Case(2, order=(3, 1, 0, 2))
    case.reducer.begin(send=True, last=True)
    case.takes(0, 1)
    assert case.sent() == []
    case.takes(3)
    assert case.sent() == [3, 1, 0]
    case.takes(2)
    case.reducer.end()
    assert case.sent() == [3, 1, 0, 2] and case.reducer.queue.seen == [0, 1, 3, 2]
    case.check(dict.fromkeys(range(4), 2.0))


def test_without_an_order_they_leave_when_ready() -> None:
    case = Case(2)
    case.reducer.begin(send=True, last=True)
    case.takes(2, 0)
    assert case.sent() == [2, 0]
    case.reducer.end()
    assert case.sent() == [2, 0, 1, 3]  # zeros for those that the loss did not use
    case.check({2: 2.0, 0: 2.0})


def test_backwards_that_are_not_sent_are_added_up_here() -> None:
    case = Case(2)
    assert not case.reducer.received
    case.reducer.begin(send=False, last=False)
    case.takes(0, 1)
    case.reducer.end()
    assert case.sent() == [] and case.reducer.received
    case.reducer.begin(send=True, last=True)
    case.takes(1, 2, times=3.0)
    case.reducer.end()
    assert sorted(case.sent()) == [0, 1, 2, 3]
    case.check({0: 2.0, 1: 8.0, 2: 6.0})


def test_backwards_that_are_sent_each_are_added_up_where_they_are_kept() -> None:
    case = Case(2)
    for k, last in enumerate((False, False, True)):
        case.reducer.begin(send=True, last=last)
        case.takes(0, 1, 2, 3, times=k + 1.0)
        case.reducer.end()
    assert len(case.sent()) == 12
    case.check(dict.fromkeys(range(4), 12.0))


def test_a_gradient_is_taken_between_begin_and_end() -> None:
    case = Case(2)
    assert not case.reducer.collects
    case.reducer.begin(send=True, last=True)
    assert case.reducer.collects
    case.reducer.end()
    assert not case.reducer.collects


def test_gradients_taken_together_are_as_those_that_hooks_take() -> None:
    case = Case(2, order=(3, 1, 0, 2))
    for last in (False, True):
        case.reducer.begin(send=True, last=last)
        case.takes(3)
        case.reducer.take_all([((i, 0), case.grads[i]) for i in (0, 1)])
        assert case.sent()[-3:] == [3, 1, 0]
        case.takes(2)
        case.reducer.end()
    case.check(dict.fromkeys(range(4), 4.0))


def test_the_tail_of_the_order_is_sent_last_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2)
    assert case.plan.sent_last() == set()  # no order learnt yet
    case.plan.learnt.take_reduce_order([3, 1, 0, 2])
    assert case.plan.sent_last() == {0, 1, 2, 3}
    monkeypatch.setattr(_plan, "TAIL_BYTES", (7 + 12) * 4)
    assert case.plan.sent_last() == {0, 2}
    monkeypatch.setattr(_plan, "TAIL_BYTES", 0)  # a message is one, however large
    assert case.plan.sent_last() == {2}


@pytest.mark.parametrize(("stage", "waits"), [(0, False), (1, True)])
def test_only_gradients_that_are_let_go_are_held_back_for(
    stage: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_reduce, "IN_FLIGHT_BYTES", 1)
    monkeypatch.setattr(_reduce, "PATIENCE", 1e-3)
    case = Case(stage)
    for whole in (2 * x.view(-1) for x in case.grads):  # the whole sums that stage 0 gathers
        case.wire.messages[tuple(whole[: (len(whole) + 1) // 2].tolist())] = whole
    case.reducer.begin(send=True, last=True)
    case.takes(0, 1, 2, 3)
    assert (case.reducer.queue.patience < 1e-3) == waits
    case.reducer.end()
    assert case.reducer.queue.in_flight == 0


def test_taken_gradients_are_not_written_to() -> None:
    case = Case(1)
    before = [x.clone() for x in case.grads]
    for last in (False, True):
        case.reducer.begin(send=True, last=last)
        case.takes(0, 1, 2, 3)
        case.reducer.end()
    for x in case.reducer.gradients().take_all().values():
        assert isinstance(x, Tensor)
        x.mul_(0)
    assert all(torch.equal(x, y) for x, y in zip(case.grads, before, strict=True))


@pytest.mark.parametrize("bucket", [0, 1 << 20])
def test_leaves_that_travel_together_are_taken_apart(bucket: int) -> None:
    case = Case(2, bucket_bytes=bucket)
    case.reducer.begin(send=True, last=True)
    case.takes(3, 0)
    assert len(case.wire.log) == (0 if bucket else 2)
    case.takes(2, 1)
    case.reducer.end()
    assert len(case.wire.log) == (1 if bucket else 4)
    case.check(dict.fromkeys(range(4), 2.0))


def test_a_reducer_is_freed_without_the_garbage_collector() -> None:
    case = Case(2)
    case.reducer.begin(send=True, last=True)
    case.takes(0, 1, 2, 3)
    case.reducer.end()
    there = weakref.ref(case.reducer)
    gc.disable()
    try:
        del case.reducer
        assert there() is None
    finally:
        gc.enable()
