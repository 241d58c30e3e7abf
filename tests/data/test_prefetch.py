"""Prefetching: the same items in order, exceptions in their place, and no thread left behind."""

import threading
from collections.abc import Iterator

import pytest

from shardfn.data import prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardfn-prefetch"]


@pytest.mark.parametrize(
    "depth", [1, pytest.param(2, marks=pytest.mark.nightly), pytest.param(50, marks=pytest.mark.nightly)]
)
def test_same_items_in_order(depth: int) -> None:
    assert list(prefetch(iter(range(20)), depth)) == list(range(20))
    assert list(prefetch([], depth)) == []
    assert not threads()


def test_items_may_be_none() -> None:
    assert list(prefetch([None, None])) == [None, None]


def test_it_runs_ahead_but_not_further_than_depth() -> None:
    made: list[int] = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            if i == 3:
                third.set()
            yield i

    ahead = prefetch(items(), 2)
    assert next(ahead) == 0
    assert third.wait(10)  # 1 and 2 wait in the queue, 3 in the thread
    assert made == [0, 1, 2, 3]
    ahead.close()


def test_closing_ends_the_thread() -> None:
    def forever() -> Iterator[int]:
        while True:
            yield 1

    ahead = prefetch(forever())
    assert next(ahead) == 1
    assert len(threads()) == 1
    ahead.close()
    assert not threads()


def test_leaving_the_loop_ends_the_thread() -> None:
    for item in prefetch(range(1000)):
        if item == 3:
            break
    assert not threads()


def test_exception_arrives_in_its_place() -> None:
    def fails() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("third")

    ahead = prefetch(fails(), 5)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(KeyError, match="third"):
        next(ahead)
    assert not threads()


def test_exception_of_the_reader_ends_the_thread() -> None:
    with pytest.raises(RuntimeError, match="reader"):
        for _ in prefetch(range(1000)):
            raise RuntimeError("reader")
    assert not [t for t in threads() if not t.join(5) and t.is_alive()]


def test_nothing_starts_before_the_first_item() -> None:
    prefetch(range(3))
    assert not threads()


def test_depth_below_one() -> None:
    with pytest.raises(ValueError, match="depth=0"):
        prefetch([1], 0)
