"""Covers pools: reuse of files, commits, opening after any end, full disks, owners, and `info`."""

import gc
import itertools
import logging
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from shardfn import memory
from shardfn.memory import _lock, _pool

X = torch.arange(5000.0)


def _files(place: pathlib.Path) -> set[str]:
    return {p.name for p in place.glob("slot-*.bin")}


def test_files_are_used_again_when_their_values_are_garbage(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path) as pool:
        state = pool.write(X).result()
        for step in range(5):  # two files take turns
            state = pool.write(state.load() + 1).result()
            assert torch.equal(state.load(), X + step + 1)
        assert len(_files(tmp_path)) == 2
        unfinished = pool.writer((9000,), torch.float32)
        del unfinished
        assert (pool.info().free_files, pool.trim()) == (2, 20480 + 36864)
        assert len(_files(tmp_path)) == 1 and pool.info().free_files == 0
        assert torch.equal(state.load(), X + 5)
    assert not _files(tmp_path)


@pytest.mark.parametrize("durable", [False, True])
def test_an_opened_pool_equals_its_commit(tmp_path: pathlib.Path, durable: bool) -> None:
    values = {"w": X, "half": torch.ones(3000).bfloat16(), "count": torch.tensor(7), "none": torch.empty(0, 3)}
    with memory.Pool(tmp_path, checksum=durable) as pool:
        on_disk = {name: pool.write(x).result() for name, x in values.items()}
        pool.commit({**on_disk, "large": X + 1, "small": X[:3], "lr": 0.1, "tag": "a", "off": None}, 3, durable=durable)
        assert on_disk["w"].name == "w"
        assert on_disk["w"].slot is not None
    pool, found, step = memory.Pool.open(tmp_path)
    with pool:
        assert step == 3
        for name, x in values.items():
            assert isinstance(found[name], memory.DiskTensor) and torch.equal(found[name].load(), x)
        assert torch.equal(found["large"].load(), X + 1) and torch.equal(found["small"], X[:3])
        assert (found["lr"], found["tag"], found["off"]) == (0.1, "a", None)
        fresh = pool.write(X - 1).result()  # no file of the commit is written again
        assert torch.equal(found["w"].load(), X) and torch.equal(fresh.load(), X - 1)


def test_files_of_the_last_commit_are_kept_until_the_next(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path) as pool:
        pool.commit({"x": pool.write(X).result()}, 0)
        others = [pool.write(X + i).result() for i in range(3)]
        assert len(_files(tmp_path)) == 4 and pool.info().free_files == 0
        pool.commit({"x": others[0]}, 1)
        assert pool.info().free_files == 1
        with pytest.raises(TypeError, match="y: list"):
            pool.commit({"y": [1]}, 2)
    pool, found, step = memory.Pool.open(tmp_path)
    with pool:
        assert step == 1 and torch.equal(found["x"].load(), X) and len(_files(tmp_path)) == 1


def test_values_belong_to_one_pool(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path / "a") as a, memory.Pool(tmp_path / "b") as b:
        x = a.write(X).result()
        with pytest.raises(ValueError, match="w: values of another pool"):
            b.commit({"w": x}, 0)


def test_a_pool_does_not_write_over_a_commit(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing was committed"):
        memory.Pool.open(tmp_path)
    with memory.Pool(tmp_path) as pool:
        pool.commit({"x": X}, 0)
    with pytest.raises(ValueError, match=r"Pool.open"):
        memory.Pool(tmp_path)
    with pytest.raises(TypeError, match="thread"):
        memory.Pool.open(tmp_path, thread=1)
    with pytest.raises(ValueError, match="threads=0"):
        memory.Pool.open(tmp_path, threads=0)
    memory.Pool.open(tmp_path).pool.close()  # every failure above gave the directory up


@pytest.mark.nightly
def test_a_directory_has_one_lock(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path) as pool:
        pool.commit({"x": X}, 0)
        for take in (memory.Pool, memory.Pool.open):
            with pytest.raises(memory.PoolInUseError, match=f"process {os.getpid()}, which is alive"):
                take(tmp_path)
        child = os.fork()
        if not child:
            signal.pause()  # holds all descriptors that a fork inherits
    try:
        memory.Pool.open(tmp_path).pool.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    del pool
    pool = memory.Pool.open(tmp_path).pool
    del pool  # without close: the directory is given up with the last reference
    gc.collect()
    memory.Pool.open(tmp_path).pool.close()


def test_damage_is_found_when_a_commit_is_opened(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path) as pool:
        pool.commit({"a": X, "b": X, "c": X}, 0)
    (tmp_path / "slot-000000.bin").unlink()
    with open(tmp_path / "slot-000002.bin", "r+b") as file:
        file.truncate(100)
    with pytest.raises(memory.DamagedError) as error:
        memory.Pool.open(tmp_path)
    assert "which holds 'a', is gone" in str(error.value)
    assert "which holds 'c', is truncated: expected 20480 bytes, found 100" in str(error.value)
    assert "'b'" not in str(error.value) and _files(tmp_path) == {"slot-000001.bin", "slot-000002.bin"}
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace("float32", "float16", 1))
    with pytest.raises(memory.DamagedError, match=r"manifest.json has changed"):
        memory.Pool.open(tmp_path)


def test_checksums_outlive_the_process_and_name_the_leaf(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path, checksum=True) as pool:
        pool.commit({"opt/mu": X}, 0)
    (file,) = tmp_path.glob("slot-*.bin")
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)
    opened = memory.Pool.open(tmp_path, max_staging=1 << 16)
    with opened.pool, pytest.raises(memory.DamagedError, match="which holds 'opt/mu', has changed"):
        opened.values["opt/mu"].load()


# A full disk.


@pytest.fixture
def file_limit() -> Iterator[int]:
    """No file of this process may grow beyond this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield 1 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.nightly
def test_a_value_too_large_leaves_the_others(tmp_path: pathlib.Path, file_limit: int) -> None:
    with memory.Pool(tmp_path) as pool:
        state = pool.write(X).result()
        pool.commit({"x": state}, 4)
        needed = file_limit + 4096
        with pytest.raises(memory.DiskFullError, match=f"needs {needed} bytes more, and a limit on file sizes"):
            pool.write(torch.zeros(needed, dtype=torch.uint8))
        assert len(_files(tmp_path)) == 1 and torch.equal(state.load(), X)
        assert torch.equal(pool.write(X + 1).result().load(), X + 1)
    pool, found, step = memory.Pool.open(tmp_path)
    with pool:
        assert step == 4 and torch.equal(found["x"].load(), X)


@pytest.mark.nightly
def test_a_limit_met_while_writing_frees_half_written_files(tmp_path: pathlib.Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    x = torch.zeros(1 << 20, dtype=torch.uint8)
    with memory.Pool(tmp_path) as pool:
        writer = pool.writer(x.shape, x.dtype)  # reserved; now the limit falls
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
        try:
            writer.write(0, x[:100_000]).result()
            late = writer.write(100_000, x[100_000:])
            with pytest.raises(memory.DiskFullError, match="Make room there"):
                late.result()
            with pytest.raises(memory.DiskFullError):
                writer.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        del writer, late
        gc.collect()
        assert pool.info().free_files == 1


@pytest.mark.nightly
def test_a_full_disk_loses_nothing_and_free_files_make_room(small_disk: pathlib.Path) -> None:
    def value(i: int, size: int = 500_000) -> torch.Tensor:
        return torch.full((size,), i, dtype=torch.uint8)

    with memory.Pool(small_disk) as pool:
        held = [pool.write(value(i)).result() for i in range(3)]
        pool.commit({str(i): x for i, x in enumerate(held)}, 1)
        with pytest.raises(memory.DiskFullError, match=r"needs 602112 bytes more, and \d+ bytes are free there"):
            pool.write(value(9, 600_000))
        assert len(_files(small_disk)) == 3
        rest = pool.info().disk_free
        filler = pool.write(value(5, rest // 4096 * 4096)).result()
        with pytest.raises(memory.DiskFullError):
            pool.commit({"x": value(1, 4095), **{str(i): x for i, x in enumerate(held)}}, 2)
        del filler  # its file is free, and of the wrong size: it is removed to make room
        assert torch.equal(pool.write(value(7, 400_000)).result().load(), value(7, 400_000))
    pool, found, step = memory.Pool.open(small_disk)
    with pool:
        assert step == 1 and all(torch.equal(found[str(i)].load(), value(i)) for i in range(3))


# The end of the process, at any point.

# One interpreter that has imported everything; each line it reads makes a child that writes until it is killed.
WRITER = """
import os, sys, torch
from shardfn import memory
torch.set_num_threads(1)

def work(place):
    try:
        pool, state, step = memory.Pool.open(place)
    except FileNotFoundError:
        pool, state, step = memory.Pool(place), {}, 0
    x = torch.arange(40_000.)
    print(os.getpid(), flush=True)
    while True:
        step += 1
        fresh = {}
        for name in "abc":
            writer = pool.writer((40_000,), torch.float32)
            for lo in range(0, 40_000, 9_999):
                old = state[name].read(lo, min(lo + 9_999, 40_000)).result() if state else x[lo : lo + 9_999]
                writer.write(lo, old + 1)
            fresh[name] = writer.finish()
        pool.commit({**fresh, "small": torch.tensor(step)}, step)
        state = fresh
        print(step, flush=True)

for line in sys.stdin:
    if not (child := os.fork()):
        work(line.strip())
    os.waitpid(child, 0)
    print("end", flush=True)
"""


def _kill_while_writing(place: pathlib.Path, times: int, caplog: pytest.LogCaptureFixture) -> None:
    command, draw, last = [sys.executable, "-c", WRITER], random.Random(times), 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        assert nursery.stdin is not None and nursery.stdout is not None
        for _ in range(times):
            nursery.stdin.write(f"{place}\n")
            nursery.stdin.flush()
            child, first = int(nursery.stdout.readline()), int(nursery.stdout.readline())
            time.sleep(draw.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            said = [first, *map(int, itertools.takewhile("end\n".__ne__, nursery.stdout))]
            with caplog.at_level(logging.INFO, "shardfn.memory"):
                pool, found, step = memory.Pool.open(place)
            with pool:
                # Commits that the writer has printed are there; it may have made one more and not yet printed it.
                assert step in (said[-1], said[-1] + 1) and first == last + 1
                for name in "abc":
                    assert torch.equal(found[name].load(), torch.arange(40_000.0) + step)
                assert found["small"].item() == step and len(_files(place)) == 3
            last = step
    assert "removed" in caplog.text


@pytest.mark.nightly
def test_a_killed_writer_loses_nothing_that_it_committed(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    _kill_while_writing(tmp_path, 2, caplog)


@pytest.mark.nightly
def test_a_writer_killed_at_20_points_loses_nothing_that_it_committed(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    _kill_while_writing(tmp_path, 20, caplog)


def test_info_has_each_choice_and_its_reason(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with memory.Pool(tmp_path / "a", direct=False, max_staging=1 << 20, threads=3) as pool:
        info = pool.info()
        assert (info.direct, info.why_not_direct, info.threads) == (False, "not asked for", 3)
        assert info.piece * 3 <= info.max_staging <= 1 << 20 and info.disk_free > 0
    real = os.open
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "shardfn.memory"):
        patch.setattr(os, "open", lambda path, flags, *rest: real(path, _refuse(flags), *rest))
        with memory.Pool(tmp_path / "b") as pool:
            assert not pool.info().direct and "refuses O_DIRECT" in pool.info().why_not_direct
            assert torch.equal(pool.write(X).result().load(), X)
    assert "the page cache is used" in caplog.text


def _refuse(flags: int) -> int:
    if flags & os.O_DIRECT:
        raise OSError(22, "Invalid argument")
    return flags


@pytest.mark.nightly
def test_an_opening_that_fails_gives_the_directory_back_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that was given back twice could take another file with it, which has its number by then."""
    with memory.Pool(tmp_path) as pool:
        pool.commit({"w": pool.write(X).result()}, 1)
    gc.collect()  # pools that earlier tests have left
    given_back: list[int] = []
    unlock = _pool.unlock

    def note(fd: int) -> None:
        given_back.append(fd)
        unlock(fd)

    def fail(*_: object) -> None:
        raise OSError("no manifest can be renamed")

    monkeypatch.setattr(_pool, "unlock", note)
    monkeypatch.setattr(_lock, "unlock", note)
    with monkeypatch.context() as broken:
        broken.setattr(_pool.manifest, "settle", fail)
        with pytest.raises(OSError, match="no manifest"):
            memory.Pool.open(tmp_path)
        gc.collect()
    assert len(given_back) == 1
    found = memory.Pool.open(tmp_path)
    with found.pool:
        assert found.step == 1 and torch.equal(found.values["w"].load(), X)
