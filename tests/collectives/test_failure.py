"""Covers the board where ranks leave word of failures, when the store that keeps it does not answer."""

import threading
from typing import Any

import pytest

from shardfn.collectives.transport import _failure
from shardfn.collectives.transport._failure import Board


class Store:
    """A store that answers once it is open, and counts its requests."""

    def __init__(self) -> None:
        self.open, self.asked, self.kept = threading.Event(), 0, {}

    def _answer(self) -> None:
        self.asked += 1
        self.open.wait(60)

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return all(key in self.kept for key in keys)

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()

    def set(self, key: str, value: str) -> None:
        self._answer()
        self.kept[key] = value

    def append(self, key: str, value: str) -> None:
        self._answer()
        self.kept[key] = self.kept.get(key, "") + value


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    store = Store()
    monkeypatch.setattr(_failure, "_current_store", lambda: store)
    yield store
    store.open.set()


def test_posts_are_read_after_their_rank_has_left(store: Store) -> None:
    store.open.set()
    board = Board("one", 1, 3)
    board.post("rank 1 broke", [2])
    board.post("rank 1 broke", [2])
    board.leave()
    assert board.read() == [("rank 1 broke", [2])]
    assert Board("one", 0, 3).absent() == [2] and board.absent() == [0, 2] and not board.silent


def test_a_store_that_does_not_answer_is_asked_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_failure, "PATIENCE", 0.1)
    board = Board("one", 1, 3)
    assert board.read() == [] and board.silent
    board.post("rank 1 broke")
    board.leave()
    board.wait_for_all(0.0)
    assert board.absent() == [0, 2] and store.asked == 1


def test_a_store_that_is_gone_keeps_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(store, "check", broken)
    board = Board("one", 0, 2)
    assert board.read() == [] and board.absent() == [1] and not board.silent
