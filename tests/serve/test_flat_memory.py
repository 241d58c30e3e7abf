"""Covers a server's memory: requests that have ended leave no object, whole, streamed, bound to grammars or refused."""

import gc
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.server import NAME, Running

GRAMMAR = {"regex": "[a-c]{1,4}"} if importlib.util.find_spec("llguidance") is not None else {}

FEW = 50  # objects; no more than the requests of a turn


def ask(server: Running, i: int, *, plain: bool) -> None:
    """One request, or several of many kinds."""
    given: dict[str, Any] = {
        "model": NAME,
        "prompt": [1 + i % 5, 2, 3],
        "max_tokens": 2 + i % 3,
        "seed": i,
        "stream": i % 2 == 0,
    }
    if not plain:
        given |= GRAMMAR if i % 3 == 0 else {"stop": ["zz"], "logprobs": 1} if i % 3 == 1 else {"n": 2}
    found = server.send("/v1/completions", given | ({"top_p": 7} if i % 11 == 0 else {}))
    assert found.status == (400 if i % 11 == 0 else 200)
    if i % 7 == 0 and not plain:
        assert server.send("/v1/embeddings", {"model": NAME, "input": [[1, 2, 3]]}).status == 200


def objects(server: Running) -> int:
    server.wait_idle()
    gc.collect()
    return len(gc.get_objects())


def growth(server: Running, num: int, *, plain: bool, keep: Callable[[], object] = lambda: None) -> int:
    """How many objects `num` requests leave: the least of three turns, and of one if it left few.

    Requests that leave an object each do so in every turn; a cache elsewhere in this process is filled in one.
    """
    least = num * 10**6
    for _ in range(3):
        before = objects(server)
        for i in range(num):
            ask(server, i, plain=plain)
            keep()
        least = min(least, objects(server) - before)
        if least < FEW:
            break
    return least


@pytest.mark.nightly
@pytest.mark.parametrize(("num", "plain"), [(66, True), pytest.param(2310, False, marks=pytest.mark.nightly)])
def test_requests_that_have_ended_leave_no_object(server: Running, num: int, plain: bool) -> None:
    for i in range(66 if plain else 132):
        ask(server, i, plain=plain)
    assert growth(server, num, plain=plain) < FEW
    engine = server.engine
    assert not (engine._queues._awaited or engine._texts._texts or engine.core._state.sequences)
    assert not (engine._constraints._matchers or engine._constraints._ruled)


@pytest.mark.nightly
def test_an_object_that_each_request_leaves_is_found(server: Running) -> None:
    held = list[Any]()
    assert growth(server, FEW, plain=True, keep=lambda: held.append(object.__new__(Running))) >= FEW
