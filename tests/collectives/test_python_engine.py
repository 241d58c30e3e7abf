"""Covers what an engine in Python meets and one in C++ does not: interrupts, the collector, forks, an end."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch

from shardfn.collectives import TransportError, _memory
from shardfn.collectives._engine import CompiledEngine, Engine, PythonEngine
from shardfn.collectives._memory import IN, OUT, Lanes

made_by = pytest.mark.parametrize("made", [CompiledEngine, PythonEngine])


def _pair(engine: Engine, patch: pytest.MonkeyPatch) -> tuple[Lanes, Lanes]:
    """Both ends of a channel, in this process."""
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


@made_by
def test_an_interrupt_of_a_wait_damages_nothing(made: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ends = _pair(made(), monkeypatch)
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


@made_by
def test_what_is_written_is_kept_if_its_start_is_interrupted(
    made: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made()
    one, other = _pair(engine, monkeypatch)
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


@made_by
def test_a_fork_moves_bytes_with_a_thread_of_its_own(made: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    ends = _pair(made(), monkeypatch)
    _exchange(ends)
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(30)
            for end in ends:
                end.close()  # which must not speak for the parent
            _exchange(_pair(made(), monkeypatch))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    _exchange(ends)
    for end in ends:
        end.close()


def test_a_channel_that_the_collector_finds_in_the_thread_is_closed_a_little_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = PythonEngine()
    one, other = _pair(engine, monkeypatch)
    entry = other.message(torch.zeros(5), 0, 1, sends=False)
    gc.disable()
    try:
        ring: list[object] = [one]
        ring.append(ring)
        del one, ring
        found: list[bool] = []
        engine._hand(lambda: found.append(gc.collect() > 0))
        with pytest.raises(TransportError, match="rank 0 of the channel closed it"):
            other.wait(entry, IN)
        assert found == [True]
    finally:
        gc.enable()
    other.close()


def test_a_finalizer_that_waits_in_the_thread_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PythonEngine()
    one, other = _pair(engine, monkeypatch)
    entry, said = other.message(torch.zeros(5), 0, 1, sends=False), []

    def waits() -> None:
        with pytest.raises(RuntimeError, match="a finalizer waits") as caught:
            other.wait(entry, IN)
        said.append(str(caught.value))

    engine._hand(waits)
    one.wait(one.message(torch.ones(5), 1, 1, sends=True), OUT)
    other.wait(entry, IN)
    assert len(said) == 1
    for end in (one, other):
        end.close()


_ENDS = """
import sys, time, torch
from shardfn.collectives import _memory, _python_engine
torch.set_num_threads(1)
engine = _python_engine.PythonEngine()
_memory.engine = lambda: engine
ends = _memory.Lanes(2, 0, None), _memory.Lanes(2, 1, None)
for end in ends:
    end.open([x.offer for x in ends])
n = 20_000_000
under_way = [end.reduce_scatter([torch.ones(n)] * 2, torch.empty(n)) for end in ends]
time.sleep(0.004)
assert any(end.state(x, 1) == 0 for end, x in zip(ends, under_way))
"""


@pytest.mark.nightly
def test_a_program_that_ends_amid_a_sum_ends_in_order() -> None:
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done
