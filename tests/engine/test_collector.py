"""Covers engine/agreement/_collector.py: Python's collector does not run inside a step, and garbage does not grow."""

import contextlib
import gc
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.engine.agreement import _collector
from shardfn.engine.agreement._collector import catch_up, collected, uncollected

LEAVES = 20


class Node:
    """An object in a cycle with itself."""

    def __init__(self) -> None:
        self.me = self


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[int, bool]]]:
    """The collections that begin while the context is open: the generation, and whether a step was running."""
    seen: list[tuple[int, bool]] = []

    def note(phase: str, info: Any) -> None:
        if phase == "start":
            names = {(f.f_code.co_name, f.f_code.co_filename.split("/")[-1]) for f, _ in traceback.walk_stack(None)}
            seen.append((info["generation"], ("fused", "_halves.py") in names))

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


def stepping(loss: Any, **zero: Any) -> tuple[Any, Any]:
    step = sf.sharded_step(loss, sf.optim.adamw(1e-3), mesh=sf.make_mesh({"dp": 1}, device="cpu"), zero=sf.Zero(**zero))
    return step, step.init([torch.ones(4) for _ in range(LEAVES)])


def chain(params: list[Tensor], x: Tensor) -> Tensor:
    for w in params:
        x = x * w
    return x.mean()


@pytest.mark.day("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_no_collection_begins_inside_a_step(stage: int) -> None:
    step, state = stepping(chain, stage=stage, **({"persist_elements": 0} if stage else {}))
    for _ in range(3):
        state, _ = step(state, torch.ones(2, 4))
    gc.set_threshold(50, 2, 2)
    try:
        inside, between = 0, 0
        for _ in range(10):
            with counted() as seen:
                state, _ = step(state, torch.ones(2, 4))
                _ = [[] for _ in range(200)]  # the next allocations start the collections that are due
            inside += sum(is_inside for _, is_inside in seen)
            between += sum(not is_inside for _, is_inside in seen)
    finally:
        gc.set_threshold(700, 10, 10)
    assert inside == 0 and between >= 10


@pytest.mark.nightly
def test_live_objects_do_not_grow_over_two_hundred_steps() -> None:
    made: list[weakref.ref[Node]] = []

    def loss(params: list[Tensor], x: Tensor) -> Tensor:
        made.append(weakref.ref(Node()))
        return chain(params, x)

    step, state = stepping(loss)
    counts = []
    for k in range(200):
        state, _ = step(state, torch.ones(2, 4))
        if k in (19, 199):
            counts.append(len(gc.get_objects()))
    alive = sum(ref() is not None for ref in made)
    assert alive < 100, alive  # without a call of the collector
    assert counts[1] - counts[0] < 2_000, counts


@pytest.mark.nightly
def test_a_step_that_makes_much_garbage_is_caught_up_with_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_collector, "MOST", 2_000)
    made: list[weakref.ref[Node]] = []

    def loss(params: list[Tensor], x: Tensor) -> Tensor:
        nodes = [Node() for _ in range(1_500)]
        made.extend(map(weakref.ref, nodes))
        return chain(params[:2], x)

    step, state = stepping(sf.accumulate(loss, 8))
    state, _ = step(state, torch.ones(8, 4))
    made.clear()
    gc.collect()
    with counted() as seen:
        state, _ = step(state, torch.ones(8, 4))
        assert {(1, True)} <= set(seen) <= {(0, False), (1, True)}
        assert sum(ref() is not None for ref in made) < 6_000


def test_a_collector_that_the_program_has_stopped_stays_stopped() -> None:
    step, state = stepping(chain)
    gc.disable()
    try:
        step(state, torch.ones(2, 4))
        assert not gc.isenabled()
        with collected():
            assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ZeroDivisionError), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_the_last_one_of_two_threads_starts_it_again() -> None:
    inside, go = threading.Event(), threading.Event()

    def other() -> None:
        with uncollected():
            with collected():  # this thread's step runs
                assert not gc.isenabled()
            inside.set()
            go.wait(60)
            with collected():
                assert gc.isenabled()
            assert not gc.isenabled()
            catch_up()

    with uncollected():
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(60)
        with collected():
            assert not gc.isenabled()
    assert not gc.isenabled()
    go.set()
    thread.join()
    assert gc.isenabled()


def test_steps_within_a_step_pause_it_once() -> None:
    with uncollected():
        with uncollected(), collected():
            assert gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
