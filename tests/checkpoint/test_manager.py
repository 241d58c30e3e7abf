"""Covers `checkpoint.Manager`: behind the steps, kept and removed, linked, killed, without room, with two owners."""

import contextlib
import errno
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import checkpoint, optim
from shardfn.checkpoint import Manager
from shardfn.core import P, RankError
from shardfn.memory import DamagedError, DiskFullError, InUseError
from shardfn.testing import distributed

ROOT = pathlib.Path(__file__).parents[2]


def tree(step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size,), float(step)), "b": torch.full((size // 2,), step), "frozen": torch.arange(size)}


def assert_is(directory: pathlib.Path, step: int, size: int = 1000) -> None:
    """The newest checkpoint is that of a step, in every byte."""
    assert checkpoint.verify(directory).step == step
    got = checkpoint.restore(directory, tree(0, size)).tree
    assert all(torch.equal(got[name], x) for name, x in tree(step, size).items())


def test_checkpoints_are_written_behind_the_steps_and_removed(tmp_path: pathlib.Path) -> None:
    with Manager(tmp_path, save_every=10, keep_last=2, keep_every=40) as manager:
        for step in range(1, 101):
            state = tree(step)
            assert manager.save(state, step, user={"next": step}) == (step % 10 == 0)
            for x in state.values():
                x.fill_(-1)  # as the next step does
        assert manager.save(tree(101), 101, now=True)
        saved = manager.wait()
        assert saved is not None and pathlib.Path(saved.path).name == "step_000101" and manager.wait() is None
        assert manager.steps() == [40, 80, 100, 101]
    assert_is(tmp_path, 101)
    assert checkpoint.latest(tmp_path) == 101 and checkpoint.restore(tmp_path, tree(0), step=80).user == {"next": 80}
    with pytest.raises(ValueError, match="keep_last=0"):
        Manager(tmp_path, keep_last=0)


def test_older_numbers_than_the_directory_has_are_refused_or_take_its_place(tmp_path: pathlib.Path) -> None:
    """A checkpoint just saved is never removed, and a restart goes on from the run that was saved last."""
    with Manager(tmp_path, keep_last=2) as manager:
        for step in (1, 700, 800):
            manager.save(tree(step), step)
    with Manager(tmp_path, keep_last=2) as manager:
        with pytest.raises(
            FileExistsError, match=r"step 70 must not be saved .* steps \[700, 800\](.|\n)*replace=True"
        ):
            manager.save(tree(70), 70)
    assert checkpoint.steps(tmp_path) == [700, 800]
    with Manager(tmp_path, keep_last=2, replace=True) as manager:
        for step in (70, 140, 210):
            manager.save(tree(step), step)
            assert manager.wait() is not None and manager.steps()[-1] == step
            assert_is(tmp_path, step)
    assert checkpoint.steps(tmp_path) == [140, 210]


def test_at_most_one_save_is_under_way(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step between two saves does not wait; the next save that is due waits for the one before."""
    write, may_write, writers = os.write, threading.Event(), set[str]()

    def slow(fd: int, data: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            writers.add(threading.current_thread().name)
            assert may_write.wait(60)
        return write(fd, data)

    monkeypatch.setattr(os, "write", slow)
    with Manager(tmp_path, save_every=2, keep_last=9) as manager:
        assert manager.save(tree(2), 2) and not manager.save(tree(3), 3)  # both return before a write
        assert manager.steps() == []
        later = threading.Timer(0.3, may_write.set)
        later.start()
        assert manager.save(tree(4), 4) and may_write.is_set()
        assert 2 in manager.steps()
    later.join()
    assert writers and checkpoint.steps(tmp_path) == [2, 4]
    assert_is(tmp_path, 4)


def test_user_values_beside_a_state_are_saved_unchanged(tmp_path: pathlib.Path) -> None:
    cursor = {"next": 0, "seen": [0]}
    with Manager(tmp_path, keep_last=3) as manager:
        for step in range(3):
            cursor["next"], cursor["seen"][0] = step + 1, step
            manager.save(tree(step, 100_000), step, user=cursor)
            cursor["next"], cursor["seen"][0] = 99, 99  # as the next step does, while files are written
    like = tree(0, 100_000)
    found = [checkpoint.restore(tmp_path, like, step=step, donate=False).user for step in range(3)]
    assert found == [{"next": step + 1, "seen": [step]} for step in range(3)]


@distributed(world=2, timeout=60)
def test_leaves_of_another_mesh_are_refused(tmp_path: pathlib.Path) -> None:
    mesh, other = sf.make_mesh({"dp": 2}, device="cpu"), sf.make_mesh({"tp": 2}, device="cpu")
    with Manager(tmp_path, mesh=mesh) as manager:
        with pytest.raises((ValueError, RankError), match=r"another mesh than(.|\n)*\['w'\] is on"):
            manager.save({"w": sf.shard(torch.arange(4.0), P("tp"), other), "v": torch.zeros(2)}, 1)
        assert manager.steps() == []


@distributed(world=2, timeout=60)
def test_an_error_in_removing_old_checkpoints_is_raised_by_all(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    rename = os.rename

    def failing(old: Any, new: Any) -> None:
        if ".old-" in str(new):
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(old, new)

    with Manager(tmp_path, mesh=mesh, keep_last=1) as manager:
        manager.save({"w": torch.ones(3)}, 1)
        manager.wait()
        os.rename = failing
        try:
            manager.save({"w": torch.ones(3)}, 2)
            with pytest.raises(PermissionError, match="cannot be written to"):
                manager.wait()
        finally:
            os.rename = rename
        assert manager.steps() == [1, 2]
        manager.save({"w": torch.ones(3)}, 3)  # ranks are in step, and the older checkpoints go now
    assert checkpoint.steps(tmp_path) == [3]


def test_files_in_which_nothing_changed_are_linked(tmp_path: pathlib.Path) -> None:
    """A file of frozen leaves is written once, and outlives the checkpoints that had it before."""
    state: Any = {"params": {"frozen": torch.randn(5000)}, "moving": torch.zeros(10)}

    sizes = []
    with Manager(tmp_path, keep_last=1, file_bytes=100, durable=False) as manager:
        for step in range(4):
            state["moving"] += 1
            manager.save(state, step)
            done = manager.wait()
            assert done is not None
            sizes.append((done.bytes, done.linked))
    assert sizes[0][1] == 0 and all(linked > 20000 > written for written, linked in sizes[1:])
    assert manager.steps() == [3] and checkpoint.verify(tmp_path).step == 3
    state["params"]["frozen"][7] += 1  # one element, and it is written again
    assert checkpoint.save(tmp_path, state, 4, file_bytes=100).bytes > 20000
    got = checkpoint.restore(tmp_path, {"params": {"frozen": torch.zeros(5000)}, "moving": torch.zeros(10)}).tree
    assert torch.equal(got["params"]["frozen"], state["params"]["frozen"])


def test_a_state_on_disk_is_saved_while_steps_go_on(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": 1}, device="cpu")
    zero = sf.Zero(params="disk", optimizer="disk", persist_elements=0, disk=sf.Disk(str(tmp_path / "pool")))
    step = sf.sharded_step(lambda w, x: (x @ w["a"]).square().mean(), optim.adamw(0.1), mesh=mesh, zero=zero)
    state = step.init({"a": torch.randn(64, 64)})
    want = {}
    with Manager(tmp_path / "ckpt", mesh=mesh, keep_last=10) as manager:
        for n in range(6):
            state, _ = step(state, torch.randn(4, 64))
            want[n + 1] = state.params["a"].full_tensor().clone()
            manager.save(state)  # and the next steps write into files that are free
    for n, x in want.items():
        checkpoint.verify(tmp_path / "ckpt", n)
        got = checkpoint.restore(tmp_path / "ckpt", {"a": torch.zeros(64, 64)}, step=n, at="params").tree
        assert torch.equal(got["a"], x)
    step.close()
    shutil.rmtree(tmp_path / "pool")
    fresh = step.init({"a": torch.zeros(64, 64)})
    back = checkpoint.restore(tmp_path / "ckpt", fresh).tree
    assert back.params["a"].memory_kind == "disk" and torch.equal(back.params["a"].local, want[6])
    assert int(back.step) == 6 and step(back, torch.randn(4, 64))[0].step == 7
    step.close()


@distributed(world=2, timeout=90)
def test_an_error_of_one_rank_is_raised_by_all_at_the_next_save(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")

    def leaf(step: int) -> dict[str, Any]:
        return {"w": sf.shard(torch.full((8,), float(step)), P("dp"), mesh)}

    with Manager(tmp_path, mesh=mesh) as manager:
        manager.save(leaf(1), 1)
        manager.wait()
        write, failing = os.write, threading.Event()
        if mesh.rank == 1:

            def full(fd: int, data: Any) -> int:
                if failing.is_set() and threading.current_thread().name.startswith("shardfn-write"):
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write(fd, data)

            os.write = full
        try:
            failing.set()
            manager.save(leaf(2), 2)  # training goes on
            with pytest.raises(DiskFullError, match="no room for a checkpoint") as error:
                manager.save(leaf(3), 3)
            assert ("rank 1" in str(error.value)) == (mesh.rank == 0)
        finally:
            os.write = write
        assert manager.steps() == [1]
        manager.save(leaf(4), 4)
        manager.wait()
        assert manager.steps()[-1] == 4 and checkpoint.verify(tmp_path).step == 4
    with pytest.raises((InUseError, RankError), match="belongs to a checkpoint writer of process"):
        with Manager(tmp_path, mesh=mesh):
            Manager(tmp_path, mesh=mesh)
    checkpoint.save(tmp_path, leaf(5), 5)  # given up with the block


_OTHER_JOB = """
import sys, torch
from shardfn import checkpoint
with checkpoint.Manager(sys.argv[1]) as manager:
    manager.save({"w": torch.zeros(3)}, 1)
    manager.wait()
    print("saved", flush=True)
    sys.stdin.read()
"""


@pytest.mark.nightly
def test_the_error_of_a_second_job_at_one_place_names_the_process_that_has_it(tmp_path: pathlib.Path) -> None:
    line = [sys.executable, "-c", _OTHER_JOB, str(tmp_path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "saved\n"
        for begin in (Manager, lambda place: checkpoint.save(place, {"w": torch.ones(3)}, 2)):
            with pytest.raises(InUseError) as error:
                begin(tmp_path)
            assert f"{tmp_path} belongs to a checkpoint writer of process {other.pid}" in str(error.value)
            assert "alive" in str(error.value)
        # Who only reads is not in the way.
        assert checkpoint.restore(tmp_path, {"w": torch.ones(3)}).tree["w"].tolist() == [0, 0, 0]
        other.stdin.close()
    checkpoint.save(tmp_path, {"w": torch.ones(3)}, 2)
    assert checkpoint.steps(tmp_path) == [1, 2]


@pytest.fixture
def tiny(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]).returncode:
        pytest.skip("needs root, to mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_leaves_the_checkpoints_before(tiny: pathlib.Path) -> None:
    with Manager(tiny, keep_last=3) as manager:
        manager.save(tree(1, 20000), 1)
        manager.wait()
        manager.save(tree(2, 60000), 2)
        with pytest.raises(DiskFullError, match=r"no room for a checkpoint in .*tiny.*keep fewer"):
            manager.wait()
        assert sorted(p.name for p in tiny.iterdir()) == ["owner", "step_000001"]
        assert_is(tiny, 1, 20000)
        manager.save(tree(3, 20000), 3)
    assert_is(tiny, 3, 20000)


def test_a_directory_that_cannot_be_written_to(tiny: pathlib.Path) -> None:
    checkpoint.save(tiny, tree(1), 1)
    subprocess.run(["mount", "-o", "remount,ro", tiny], check=True)
    with pytest.raises(PermissionError, match=r"cannot be written to .*Read-only"):
        checkpoint.save(tiny, tree(2), 2)
    with pytest.raises(PermissionError, match="cannot be written to"):
        Manager(tiny)
    assert_is(tiny, 1)


# kill -9

LOOP = """
import os, sys, random, signal, time
import torch
torch.set_num_threads(1)
sys.path.insert(0, os.environ["TESTS"])
from test_manager import tree
from shardfn.checkpoint import Manager, latest

def work(directory):
    with Manager(directory, keep_last=2, keep_every=7, file_bytes=3000) as manager:
        step = (latest(directory) or 0) + 1
        while True:
            manager.save(tree(step), step)
            os.write(1, b".")
            step += 1

draw, took = random.Random(int(sys.argv[3])), 0.1
for n in range(int(sys.argv[2])):
    saved, saves = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(saves, 1)
        try:
            work(sys.argv[1])
        finally:
            os._exit(1)
    os.close(saves)
    # At the start, or between two saves of those that follow: whatever a save takes on this machine.
    begun = time.monotonic()
    for _ in range(draw.randint(0, 6)):
        assert os.read(saved, 1), "it ended by itself"
        took, begun = time.monotonic() - begun, time.monotonic()
    time.sleep(draw.uniform(0.0, took))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(saved)
    os.write(1, f"killed {n}\\n".encode())
    sys.stdin.readline()
"""


def killed(directory: pathlib.Path, times: int, seed: int) -> int:
    """Kills a saving process `times` times; after each kill the newest checkpoint is whole."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "TESTS": str(pathlib.Path(__file__).parent)}
    command = [sys.executable, "-c", LOOP, str(directory), str(times), str(seed)]
    halves, newest = 0, 0
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for n in range(times):
            assert f"killed {n}" in process.stdout.readline()
            halves += any(".tmp-" in p.name or ".old-" in p.name for p in directory.glob("step_*"))
            found = checkpoint.latest(directory)
            assert found is None or found >= newest
            if found is not None:
                newest = found
                assert_is(directory, found)
                for step in checkpoint.steps(directory):
                    checkpoint.verify(directory, step)
            process.stdin.write("\n")
            process.stdin.flush()
    assert newest > times // 4
    return halves


@pytest.mark.nightly
def test_killed_at_any_instant_the_newest_checkpoint_is_whole(tmp_path: pathlib.Path) -> None:
    assert killed(tmp_path, 8, seed=0) > 0  # some of these instants were in the middle of a save


@pytest.mark.nightly
def test_killed_at_fifty_instants(tmp_path: pathlib.Path) -> None:
    assert killed(tmp_path, 50, seed=1) > 5


@distributed(world=2, timeout=60)
def _one_dies(directory: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    leaf = {"w": sf.shard(torch.ones(1 << 16), P("dp"), mesh)}
    manager = Manager(directory, mesh=mesh)
    manager.save(leaf, 1)
    manager.wait()
    if mesh.rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with contextlib.suppress(RankError):
        for step in range(2, 10000):
            manager.save(leaf, step)
    time.sleep(5)


@pytest.mark.nightly
def test_a_rank_that_dies_leaves_whole_checkpoints(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RankError):
        _one_dies(tmp_path)
    for step in checkpoint.steps(tmp_path):
        checkpoint.verify(tmp_path, step)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest >= 1
    checkpoint.save(tmp_path, tree(1), newest + 1)  # the directory is free, and the remains are removed
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.nightly
def test_every_flipped_byte_is_found(tmp_path: pathlib.Path) -> None:
    place = pathlib.Path(
        checkpoint.save(tmp_path, {"a": torch.arange(5.0), "b": torch.ones(3, dtype=torch.bool)}, 1).path
    )
    files = sorted(place.iterdir())
    count = 0
    for path in files:
        data = path.read_bytes()
        for i in range(len(data)):
            path.write_bytes(data[:i] + bytes([data[i] ^ (1 << i % 8)]) + data[i + 1 :])
            with pytest.raises((DamagedError, ValueError)):
                checkpoint.verify(tmp_path)
            count += 1
        for worse in (data[:-1], data + b"\0", b""):
            path.write_bytes(worse)
            with pytest.raises(DamagedError):
                checkpoint.verify(tmp_path)
        path.unlink()
        with pytest.raises((DamagedError, FileNotFoundError)):
            checkpoint.verify(tmp_path)
        path.write_bytes(data)
    assert count > 500 and checkpoint.verify(tmp_path).files == len(files) - 1
    victim = next(p for p in files if p.suffix == ".safetensors")
    victim.write_bytes(random.Random(0).randbytes(victim.stat().st_size))
    with pytest.raises(DamagedError, match="have changed since they were written"):
        checkpoint.restore(tmp_path, {"a": torch.zeros(5), "b": torch.zeros(3, dtype=torch.bool)})


def test_a_run_that_goes_on_from_an_older_step_replaces_later_ones(tmp_path: pathlib.Path) -> None:
    with sf.checkpoint.Manager(tmp_path, keep_last=3) as manager:
        for n in range(3):
            manager.save({"w": torch.full((3,), float(n))}, n)
    with sf.checkpoint.Manager(tmp_path, keep_last=3) as manager:
        for n in (1, 2):
            with pytest.raises(FileExistsError):
                manager.save({"w": torch.zeros(3)}, n)
                manager.wait()
    with sf.checkpoint.Manager(tmp_path, keep_last=3, replace=True) as manager:
        tree = manager.restore({"w": torch.zeros(3)}, step=0).tree
        manager.save({"w": tree["w"] + 10}, 1)
        manager.wait()
        assert manager.restore({"w": torch.zeros(3)}, step=1).tree["w"].tolist() == [10.0] * 3
        assert manager.steps() == [0, 1]  # 2 was of the run that was left


CANONICAL = {"reduction": "canonical", "reduction_chunks": 4}


def _loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"]).square().mean() + (p["w"] ** 2).mean()


def _run(directory: str, steps: int) -> list[float]:
    """Resumes and runs up to `steps` steps on all ranks; returns the parameters."""
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    rule = sf.optim.chain(sf.optim.clip_by_global_norm(0.3), sf.optim.adamw(1e-2))
    step = sf.sharded_step(_loss, rule, mesh=mesh, zero=sf.Zero(stage=mesh.size - 1, persist_elements=0, **CANONICAL))
    state = step.init({"w": torch.linspace(-1, 1, 21).view(7, 3)})
    with sf.checkpoint.Manager(directory, mesh=mesh, keep_last=9) as manager:
        if manager.steps():
            state = manager.restore(state).tree
        for n in range(int(state.step), steps):
            batch = torch.randn(8, 7, generator=torch.Generator().manual_seed(n))
            state, _ = step(state, batch[step.rows(8)])
        manager.save(state)
    return state.params["w"].full_tensor().flatten().tolist()


@distributed(world=1)
def _on_1(directory: str, steps: int) -> list[float]:
    return _run(directory, steps)


@distributed(world=2)
def _on_2(directory: str, steps: int) -> list[float]:
    return _run(directory, steps)


@distributed(world=3)
def _on_3(directory: str, steps: int) -> list[float]:
    return _run(directory, steps)


def test_a_job_that_loses_and_gets_back_ranks_has_the_bits_of_one_that_did_not(tmp_path: pathlib.Path) -> None:
    (want,) = _on_1(str(tmp_path / "whole"), 9)
    parts = str(tmp_path / "parts")
    _on_3(parts, 3)
    _on_1(parts, 5)
    for found in _on_2(parts, 9):
        assert found == want
