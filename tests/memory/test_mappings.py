"""Covers host memory that is used again: never while a reference is left, and never more than was in use at once."""

import gc
import mmap
import os
import random
import signal
import threading
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from shardfn import memory
from shardfn.memory import _host
from shardfn.memory._host import Mappings

PAGE = 4096


def test_returned_memory_is_lent_again() -> None:
    mappings = Mappings(keep=1 << 20)
    area = mappings.lend(3 * PAGE)
    where = np.frombuffer(area, np.uint8).ctypes.data
    assert where % PAGE == 0
    del area
    again = mappings.lend(3 * PAGE)
    assert np.frombuffer(again, np.uint8).ctypes.data == where and mappings.waiting == 0
    assert np.frombuffer(mappings.lend(3 * PAGE), np.uint8).ctypes.data != where


@pytest.mark.nightly
@pytest.mark.parametrize(
    "view",
    [
        lambda area: torch.frombuffer(area, dtype=torch.float32, offset=PAGE),
        pytest.param(
            lambda area: torch.frombuffer(area, dtype=torch.float32)[5:].view(-1).numpy()[1:], marks=pytest.mark.nightly
        ),
        pytest.param(lambda area: np.frombuffer(area, np.uint8)[7:][::2], marks=pytest.mark.nightly),
        lambda area: memoryview(area)[3:].cast("B")[2:],
        pytest.param(
            lambda area: torch.from_numpy(np.frombuffer(area, np.uint8).reshape(2, -1)[1]), marks=pytest.mark.nightly
        ),
        pytest.param(
            lambda area: torch.frombuffer(area, dtype=torch.uint8).untyped_storage(), marks=pytest.mark.nightly
        ),
        pytest.param(
            lambda area: torch.from_dlpack(torch.frombuffer(area, dtype=torch.uint8)[1:]), marks=pytest.mark.nightly
        ),
    ],
)
def test_a_view_of_a_view_keeps_memory_from_being_lent(view: Any) -> None:
    mappings = Mappings(keep=1 << 20)
    area = mappings.lend(2 * PAGE)
    seen = view(area)
    del area
    gc.collect()
    assert mappings.waiting == 0
    del seen
    gc.collect()
    assert mappings.waiting == 2 * PAGE


def test_no_more_waits_than_was_in_use_and_the_oldest_goes_first() -> None:
    mappings = Mappings(keep=10 * PAGE)
    for n in range(1, 6):
        mappings.lend(n * PAGE)
    assert mappings.waiting == 5 * PAGE  # one at a time
    held = [mappings.lend(4 * PAGE) for _ in range(4)]
    del held
    assert mappings.waiting == 8 * PAGE  # at most `keep`
    lent = mappings.lend(6 * PAGE)
    assert mappings.waiting == 8 * PAGE  # 16 pages were in use at once
    large = mappings.lend(12 * PAGE)
    assert mappings.waiting == 0
    del lent, large
    assert mappings.waiting == 6 * PAGE  # the 12 alone are too many
    mappings.trim()
    assert mappings.waiting == 0


def test_sizes_are_rounded_a_little() -> None:
    draw = random.Random(0)
    for nbytes in [1, PAGE, PAGE + 1, *(draw.randrange(1, 1 << 30) for _ in range(1000))]:
        size = _host._round_up(nbytes)
        assert nbytes <= size <= max(nbytes * 9 / 8 + PAGE, PAGE) and size % PAGE == 0
    assert len({_host._round_up(n) for n in range(1 << 20, 2 << 20, 997)}) <= 9


def test_when_there_is_no_room_waiting_memory_is_given_up() -> None:
    mappings, full = Mappings(keep=1 << 20), []
    mappings.lend(8 * PAGE)
    made = _host._map_memory

    def scarce(nbytes: int) -> mmap.mmap:
        if full or mappings.waiting:
            raise OSError(12, "Cannot allocate memory")
        return made(nbytes)

    with mock.patch.object(_host, "_map_memory", scarce):
        held = mappings.lend(16 * PAGE)
        assert mappings.waiting == 0
        full.append(True)
        with pytest.raises(OSError, match="Cannot allocate"):
            mappings.lend(2 * PAGE)
    del held
    assert mappings.waiting == 16 * PAGE  # a failed loan does not count as in use


def test_threads_never_share_lent_memory() -> None:
    errors: list[str] = []

    def work(own: int) -> None:
        draw, held = random.Random(own), []
        for n in range(400):
            x = memory.host_empty((draw.choice([20_000, 20_001, 70_000, 300_000]),))
            x.fill_(own * 1000 + n)
            held.append((own * 1000 + n, x if draw.random() < 0.5 else x.numpy()[:: draw.randrange(1, 4)]))
            if len(held) > 4:
                value, y = held.pop(draw.randrange(len(held)))
                if not bool((torch.as_tensor(y) == value).all()):
                    errors.append(f"thread {own}, round {n}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_child_is_usable_though_a_thread_was_in_here_when_it_was_forked() -> None:
    with _host._MAPPINGS._lock:
        child = os.fork()
        if not child:
            memory.host_empty((1 << 16,)).fill_(1.0)
            os._exit(0)
    deadline = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
