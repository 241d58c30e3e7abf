"""Covers the order in which threads run jobs, the release of arguments, and the return of errors."""

import pathlib
import threading
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

from shardfn import memory
from shardfn.memory._lock import Threads, in_background


def test_tasks_that_may_wait_come_last_and_each_kind_in_its_order() -> None:
    gate, done, threads = threading.Event(), [], Threads(1, "test")
    held = threads.submit(gate.wait, 10)
    futures = [threads.submit(done.append, n, later=n % 2 == 0) for n in range(6)]
    gate.set()
    assert held.result(timeout=10)
    threads.close(wait=True)
    assert done == [1, 3, 5, 0, 2, 4] and all(future.done() for future in futures)


def test_arguments_are_let_go_of_before_the_future_is_done() -> None:
    threads = Threads(1, "test")
    for _ in range(100):
        x = torch.ones(2)
        alive = weakref.ref(x)
        future = threads.submit(torch.Tensor.sum, x)
        del x
        assert float(future.result()) == 2 and alive() is None
    threads.close(wait=True)


def test_an_error_is_the_futures() -> None:
    threads = Threads(1, "test")
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result()
    assert threads.submit(lambda: 1).result() == 1  # the thread lives on
    threads.close(wait=True)
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(lambda: 1)


def test_reads_in_the_background_wait_for_the_others(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path, threads=1) as pool:
        first, second = (pool.write(torch.full((5000,), float(n))).result() for n in range(2))
        gate, order, read = threading.Event(), [], pool.io._read_piece

        def noted(slot: Any, *rest: Any) -> None:
            order.append(slot)
            read(slot, *rest)

        held = pool.io._threads.submit(gate.wait, 10)
        with mock.patch.object(pool.io, "_read_piece", noted):
            with memory.background():
                assert in_background()
                late = first.read()
            assert not in_background()
            soon = second.read()
        gate.set()
        assert held.result(timeout=10)
        assert float(late.result().sum()) == 0 and float(soon.result().sum()) == 5000
        assert order == [second.slot, first.slot]


def test_a_job_that_is_refused_takes_no_other_ones_place() -> None:
    gate, done, threads = threading.Event(), [], Threads(1, "test")
    held = threads.submit(gate.wait, 10)
    accepted = threads.submit(done.append, "accepted", later=True)
    threads.close(wait=False)
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(done.append, "refused")
    gate.set()
    assert held.result(timeout=10) and accepted.result(timeout=10) is None
    assert done == ["accepted"]
