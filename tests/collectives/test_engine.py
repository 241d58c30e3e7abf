"""Covers the engine of a process: interrupts from the keyboard, and forks."""

import gc
import os
import signal
import threading
import weakref
from typing import Any

import pytest
import torch

from shardfn.collectives.transport import _memory
from shardfn.collectives.transport._memory import IN, OUT, Lanes, TransportEngine


def _pair(patch: pytest.MonkeyPatch) -> tuple[Lanes, Lanes]:
    """Both ends of a channel, in this process, with an engine of their own."""
    engine = TransportEngine()
    patch.setattr(_memory, "engine", lambda: engine)
    ends = Lanes(2, 0, 30.0), Lanes(2, 1, 30.0)
    for end in ends:
        end.open([x.offer for x in ends])
    return ends


def _exchange(ends: tuple[Lanes, Lanes]) -> None:
    got = [[torch.empty(1000) for _ in range(2)] for _ in range(2)]
    entries = [end.all_gather(torch.full((1000,), 1.0 + i), got[i]) for i, end in enumerate(ends)]
    for end, entry in zip(ends, entries, strict=True):
        end.wait(entry, IN | OUT)
    assert float(got[0][1][-1]) == 2.0 and float(got[1][0][-1]) == 1.0


def test_an_interrupt_of_a_wait_damages_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ends = _pair(monkeypatch)
    got = torch.zeros(5)
    entry = one.message(got, 1, 7, sends=False)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # runners of tests may ignore it
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            one.wait(entry, IN)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, handler)
    other.wait(other.message(torch.ones(5), 0, 7, sends=True), OUT)
    one.wait(entry, IN)
    assert torch.equal(got, torch.ones(5))
    _exchange(ends)
    for end in ends:
        end.close()


@pytest.mark.nightly
def test_an_interrupted_start_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = _pair(monkeypatch)
    engine = one._engine
    into, real = torch.zeros(5), engine.call

    def call(name: str, *args: Any) -> Any:
        real(name, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "call", call)
        with pytest.raises(KeyboardInterrupt):
            one.message(into, 1, 7, sends=False)
    alive = weakref.ref(into)
    del into
    gc.collect()
    assert alive() is not None
    other.wait(other.message(torch.ones(5), 0, 7, sends=True), OUT)
    for end in (one, other):
        end.close()
    gc.collect()
    assert alive() is None


def test_a_fork_moves_bytes_with_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = _pair(monkeypatch)
    _exchange(ends)
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(30)
            for end in ends:
                end.close()  # which must not speak for the parent
            _exchange(_pair(monkeypatch))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    _exchange(ends)
    for end in ends:
        end.close()
