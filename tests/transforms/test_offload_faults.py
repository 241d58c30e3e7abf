"""Covers faults of steps whose state is on disk: killed ranks, a full disk, damaged files; commits outlive them."""

import hashlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import shardfn as sf

# One interpreter that has imported everything; each line that it reads makes a child that is a rank of a job.
RANK = """
import hashlib, os, sys, torch
import shardfn as sf

def say(word, what):
    os.write(1, f"{word} {os.getpid()} {what}\\n".encode())  # in one piece, as the ranks share the pipe

def params():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(37, 37, generator=draw) / 6 for _ in range(6)]

def loss(p, x):
    for w in p:
        x = torch.tanh(x @ w)
    return x.square().mean()

def batch(n):
    return torch.randn(4, 37, generator=torch.Generator().manual_seed(n))

def make(directory, mesh, **fields):
    where = dict(params="disk", grads="disk", optimizer="disk", directory=directory) if directory else {}
    zero = sf.Zero.flat(stage=3, persist_elements=0, bucket_bytes=0, **where, **fields)
    return sf.sharded_step(loss, sf.optim.adamw(1e-2), mesh=mesh, zero=zero)

def digest(state):
    leaves = sf.core.tree_leaves(sf.unshard((state.params, state.opt_state)))
    return hashlib.sha1(b"".join(x.contiguous().numpy().tobytes() for x in leaves)).hexdigest()

def work(directory, steps, rank, world, port):
    torch.set_num_threads(1)
    if int(world) > 1:
        os.environ |= {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        torch.distributed.init_process_group("gloo")
    mesh = sf.make_mesh({"dp": int(world)})
    step = make(None if directory == "-" else directory, mesh, chunk_bytes=1 << 13)
    begun = os.path.exists(f"{directory}/rank{rank}")
    state = step.resume(params()) if begun else step.init(params())
    say("pid", int(state.step))
    while int(state.step) < int(steps):
        state, _ = step(state, batch(int(state.step)).chunk(mesh.size)[mesh.rank])
        say("step", int(state.step))
    say("done", digest(state))

if __name__ == "__main__":
    for line in sys.stdin:
        if not os.fork():
            try:
                work(*line.split())
            except BaseException as error:
                say("failed", repr(error))
            os._exit(0)
"""


class _Nursery:
    """Starts ranks, and reads their reports."""

    def __init__(self) -> None:
        self._proc = subprocess.Popen(
            [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pids: list[str] = []
        self.said: dict[str, int] = {}

    def start(self, directory: str, steps: int, world: int) -> list[int]:
        """Begins a job; gives the step that each rank begins at, in any order."""
        assert self._proc.stdin is not None
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        for rank in range(world):
            self._proc.stdin.write(f"{directory} {steps} {rank} {world} {port}\n")
        self._proc.stdin.flush()
        before, self.pids, begun = self.pids, [], []
        while len(begun) < world:
            word, pid, step = self.hear()
            if pid in before and word == "step":  # from before it was killed
                continue
            assert word == "pid", (word, step)
            self.pids.append(pid)
            begun.append(int(step))
        return begun

    def hear(self) -> tuple[str, str, str]:
        assert self._proc.stdout is not None
        line = self._proc.stdout.readline()
        assert line, "the nursery has died"
        word, pid, rest = line.rstrip("\n").split(" ", 2)
        if word in ("pid", "step"):
            self.said[pid] = int(rest)
        return word, pid, rest

    def close(self) -> None:
        assert self._proc.stdin is not None and self._proc.stdout is not None
        self._proc.stdin.close()
        self._proc.stdout.close()
        self._proc.wait(60)


@pytest.fixture
def nursery() -> Iterator[_Nursery]:
    made = _Nursery()
    yield made
    made.close()


def _digest(nursery: _Nursery, directory: str, steps: int, world: int) -> tuple[list[int], str]:
    begun, ends = nursery.start(directory, steps, world), set()
    heard = 0
    while heard < world:
        word, pid, rest = nursery.hear()
        assert word in ("step", "done") or pid not in nursery.pids, rest
        if word == "done":
            heard += 1
            ends.add(rest)
    assert len(ends) == 1
    return begun, ends.pop()


def _kill(nursery: _Nursery, directory: str, world: int, times: int) -> None:
    draw = random.Random(times)
    before: list[str] = []
    for _ in range(times):
        begun = nursery.start(directory, 10**6, world)
        # The ranks agree on one commit, and no commit that all of them have reported is lost.
        assert len(set(begun)) == 1 and begun[0] >= min([nursery.said[pid] for pid in before], default=0)
        before = nursery.pids
        while min(nursery.said[pid] for pid in before) < begun[0] + 2:
            word, _, rest = nursery.hear()
            assert word == "step", rest
        time.sleep(draw.uniform(0, 0.05))
        for pid in draw.sample(before, world):
            os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    steps = min(nursery.said[pid] for pid in before) + 5
    begun, got = _digest(nursery, directory, steps, world)
    assert begun[0] >= min(nursery.said[pid] for pid in before)
    assert got == _digest(nursery, "-", steps, world)[1]


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_killed_ranks_go_on_with_the_bits_of_a_run_that_was_not(
    tmp_path: pathlib.Path, nursery: _Nursery, world: int
) -> None:
    _kill(nursery, str(tmp_path), world, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_killed_at_20_points_go_on(tmp_path: pathlib.Path, nursery: _Nursery, world: int) -> None:
    _kill(nursery, str(tmp_path), world, 20)


@pytest.fixture
def job() -> dict[str, Any]:
    """The job's own functions."""
    made: dict[str, Any] = {"__name__": "job"}
    exec(RANK, made)
    return made


def _files(place: pathlib.Path) -> list[pathlib.Path]:
    return sorted(place.glob("rank0/slot-*.bin"))


def test_damage_is_named_and_leaves_the_state(tmp_path: pathlib.Path, job: dict[str, Any]) -> None:
    mesh = sf.make_mesh({"dp": 1})
    step = job["make"](str(tmp_path), mesh, checksum=True)
    state, _ = step(step.init(job["params"]()), job["batch"](0))
    slot = state.opt_state[0].mu[3].held.slot.path
    whole = slot.read_bytes()
    flipped = bytearray(whole)
    flipped[100] ^= 4
    for bad, told in ((bytes(flipped), "differs|changed|checksum"), (whole[:1000], "1000|too short|truncated")):
        slot.write_bytes(bad)
        with pytest.raises(sf.memory.DamagedError, match=r"opt_state.*mu.*3") as caught:
            step(state, job["batch"](1))
        assert any(word in str(caught.value) for word in told.split("|")), caught.value
        slot.write_bytes(whole)
    state, _ = step(state, job["batch"](1))
    plain = job["make"](None, mesh)
    want = plain.init(job["params"]())
    for n in range(2):
        want, _ = plain(want, job["batch"](n))
    assert job["digest"](state) == job["digest"](want)
    step.close()
    _files(tmp_path)[0].write_bytes(b"")
    with pytest.raises(sf.memory.DamagedError, match="slot-"):
        job["make"](str(tmp_path), sf.make_mesh({"dp": 1})).resume(job["params"]())


@pytest.mark.nightly
def test_a_full_disk_leaves_the_state_and_the_step_can_be_taken_again(
    small_disk: pathlib.Path, job: dict[str, Any]
) -> None:
    mesh = sf.make_mesh({"dp": 1})
    step, plain = job["make"](str(small_disk), mesh), job["make"](None, mesh)
    state, want = step.init(job["params"]()), plain.init(job["params"]())
    with open(small_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(bytes(4096))
    with pytest.raises(sf.memory.DiskFullError, match="free"):
        step(state, job["batch"](0))
    assert hashlib.sha1(state.params[0].local.numpy().tobytes()).digest()
    (small_disk / "filler").unlink()
    for n in range(2):
        state, _ = step(state, job["batch"](n))
        want, _ = plain(want, job["batch"](n))
    assert job["digest"](state) == job["digest"](want)
    step.close()


def test_a_directory_without_effect_or_without_a_commit_is_refused(tmp_path: pathlib.Path, job: dict[str, Any]) -> None:
    mesh = sf.make_mesh({"dp": 1})
    with pytest.raises(ValueError, match="no effect: nothing is kept on disk"):
        sf.sharded_step(job["loss"], sf.optim.sgd(0.1), zero=sf.Zero(disk=sf.Disk(str(tmp_path)))).init(job["params"]())
    with pytest.raises(ValueError, match=r"Zero\(disk=Disk\("):
        sf.Zero(params="disk")
    with pytest.raises(FileNotFoundError, match="rank 0: none"):
        job["make"](str(tmp_path / "new"), mesh).resume(job["params"]())
    with pytest.raises(ValueError, match="nothing is kept there"):
        job["make"](None, mesh).resume(job["params"]())
