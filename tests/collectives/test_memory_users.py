"""Covers the ranks that share memory: those of one user, root or not, never those of two users or two jobs."""

import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.collectives import Channels
from shardfn.collectives.transport import _memory, _sharing
from shardfn.collectives.transport._memory import Lanes
from shardfn.collectives.transport._segment import NotSharedError, Reader
from shardfn.collectives.transport._sharing import wished

pytestmark = pytest.mark.skipif(wished() == "gloo", reason="of the way through memory, which is not wished for")
ROOT, DAEMON, NOBODY = 0, 1, 65534
_DIES_WITH_PARENT, _READABLE = 1, 4  # PR_SET_PDEATHSIG, PR_SET_DUMPABLE
_PATIENCE = 60.0
_TURNS = 20

switches = pytest.mark.skipif(os.getuid() != ROOT, reason="only root can become another user")


def _night(*users: int) -> Any:
    return pytest.param(list(users), marks=[switches, pytest.mark.nightly])


class Said(NamedTuple):
    """The report of a rank."""

    user: int
    shared: int
    warned: list[str]
    right: bool


class _Job:
    """A program of a few ranks, which are processes of users that are given, by rank."""

    def __init__(self, users: list[int], mark: float, cache: str = "") -> None:
        _memory._load_library()  # which ranks inherit, unless they have a cache of their own
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = [self._fork(rank, users, mark, cache) for rank in range(len(users))]

    def said(self) -> list[Said]:
        """The reports of all ranks."""
        assert all(pipe.poll(_PATIENCE) for _, pipe in self._ranks), "a rank hangs"
        return [pipe.recv() for _, pipe in self._ranks]

    def end(self) -> None:
        for pid, pipe in self._ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.close()

    def _fork(self, rank: int, users: list[int], mark: float, cache: str) -> tuple[int, Connection]:
        here, there = Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
                torch.set_num_threads(1)
                if cache:
                    os.environ["XDG_CACHE_HOME"] = cache
                    _memory._load_library.cache_clear()
                _become(users[rank])
                there.send(_talk(rank, len(users), self._store.port, mark))
                there.poll(_PATIENCE)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        there.close()
        return pid, here


def _become(user: int) -> None:
    """Makes this process one of a user, as if it had been started by that user."""
    if user == os.getuid():
        return
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # A process that has changed its user belongs to root in /proc until it starts another program, or makes this call.
    ctypes.CDLL(None).prctl(_READABLE, 1)


def _talk(rank: int, world: int, port: int, mark: float) -> Said:
    """Gathers and sums a number that no other job has."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh, right = sf.make_mesh({"dp": world}, device="cpu"), True
    _sharing._SAID.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        channels = Channels(mesh)
        gather, reduce = channels.gather(("dp",)), channels.reduce(("dp",))
    for turn in range(_TURNS):
        got = gather.all_gather(torch.full((999,), mark + rank + turn), [999] * world, settled=True).result()
        right &= torch.equal(got[::999], mark + turn + torch.arange(float(world)))
        total = reduce.reduce_scatter(torch.full((5 * world,), mark + turn), [5] * world).result()
        right &= torch.equal(total, torch.full((5,), world * (mark + turn)))
    return Said(os.getuid(), gather.shared_bytes, [str(w.message) for w in caught], right)


@contextlib.contextmanager
def _job(users: list[int], mark: float = 1.0, cache: str = "") -> Iterator[_Job]:
    job = _Job(users, mark, cache)
    try:
        yield job
    finally:
        job.end()


@pytest.fixture
def cache() -> Iterator[Callable[[int], str]]:
    """A folder of a user's own where the C++ part has been built already."""
    built = pathlib.Path(_memory.TransportEngine()._library._name)
    with tempfile.TemporaryDirectory() as folder:

        def of(user: int) -> str:
            place = pathlib.Path(folder) / "shardfn"
            place.mkdir()
            shutil.copy(built, place)
            for path in (pathlib.Path(folder), place, place / built.name):
                os.chown(path, user, user)
            return folder

        yield of


@pytest.mark.nightly
@switches
def test_ranks_of_the_user_nobody_share_memory(cache: Callable[[int], str]) -> None:
    with _job([NOBODY, NOBODY], cache=cache(NOBODY)) as job:
        for said in job.said():
            assert said.right and said.user == NOBODY and said.shared and not said.warned, said


@pytest.mark.nightly
@switches
def test_ranks_of_a_user_without_a_home_go_on_by_gloo_and_the_first_warns() -> None:
    with _job([NOBODY, NOBODY], cache="/proc/none") as job:
        first, second = job.said()
    assert all(said.right and said.user == NOBODY and not said.shared for said in (first, second))
    assert len(first.warned) == 1 and "its C++ part cannot be built" in first.warned[0], first
    assert "'/proc/none" in first.warned[0] and not second.warned, (first, second)


@pytest.mark.nightly
@switches
@pytest.mark.parametrize("users", [[ROOT, NOBODY], _night(NOBODY, DAEMON), _night(NOBODY, NOBODY, ROOT)], ids=str)
def test_ranks_of_different_users_go_on_by_gloo_and_the_first_warns(users: list[int]) -> None:
    with _job(users) as job:
        told = job.said()
    assert [said.user for said in told] == users
    assert all(said.right and not said.shared for said in told), told
    warned = [[text for text in said.warned if "talk by gloo" in text] for said in told]
    assert list(map(len, warned)) == [1] + [0] * (len(users) - 1), warned
    assert "/proc/" in warned[0][0] and "Permission denied" in warned[0][0]


@pytest.mark.parametrize(
    "users",
    [pytest.param([ROOT, ROOT], marks=pytest.mark.nightly), _night(NOBODY, NOBODY), _night(NOBODY, DAEMON)],
    ids=str,
)
def test_two_jobs_at_the_same_time_never_meet(users: list[int]) -> None:
    mine = os.getuid()
    one, other = ([user if mine == ROOT else mine] * 2 for user in users)
    with _job(one, mark=100.0) as first, _job(other, mark=-5.5) as second:
        for job in (first, second):
            told = job.said()
            assert all(said.right and said.shared for said in told), told


def _offer(pipe: Connection) -> None:
    lanes = Lanes(2, 0, None)
    pipe.send(lanes.offer)
    pipe.poll(_PATIENCE)


def test_the_place_of_one_job_s_memory_with_the_word_of_another_is_refused() -> None:
    # As where a rank has died and a process of another job has its number, with the same file of the same size.
    pids, pipes = [], []
    try:
        for _ in range(2):
            here, there = Pipe()
            pids.append(os.fork())
            if pids[-1] == 0:
                try:
                    _offer(there)
                finally:
                    os._exit(0)
            pipes.append(here)
        offers: list[Any] = [pipe.recv().segment for pipe in pipes]
        Reader(offers[1]).close()
        with pytest.raises(NotSharedError, match="another process's memory"):
            Reader(offers[1]._replace(word=offers[0].word))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
