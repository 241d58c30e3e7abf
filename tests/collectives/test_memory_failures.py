"""Covers ranks that die, stop or leave while others read their memory; and the reasons not to share memory."""

import contextlib
import ctypes
import functools
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.collectives import Channels, TransportError, TwoHops
from shardfn.collectives.transport import _memory, _sharing
from shardfn.collectives.transport._memory import IN, OUT, RINGS, Lanes
from shardfn.collectives.transport._segment import NotSharedError, Reader, Segment
from shardfn.testing import distributed

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_PATIENCE = 60.0  # seconds after which a test calls it a hang
Body = Callable[[Lanes, Callable[[str], None]], None]


class _Rank:
    """A process that has one end of a channel and runs a body; it sends the body's messages, or its error."""

    def __init__(self, body: Body, world: int, index: int, timeout: float) -> None:
        self._pipe, there = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
                torch.set_num_threads(1)
                _memory.engine = _memory.TransportEngine
                _run(body, Lanes(world, index, timeout), there)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        there.close()

    def hear(self) -> Any:
        assert self._pipe.poll(_PATIENCE), "a rank hangs"
        return self._pipe.recv()

    def tell(self, what: Any) -> None:
        self._pipe.send(what)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._pipe.close()


def _run(body: Body, lanes: Lanes, pipe: Connection) -> None:
    pipe.send(lanes.offer)
    lanes.open(pipe.recv())
    pipe.send("open")
    pipe.recv()
    try:
        body(lanes, pipe.send)
    except TransportError as error:
        lanes.close()
        pipe.send(str(error))
    wait([pipe], _PATIENCE)


def _start(body: Body, world: int, timeout: float = _PATIENCE) -> list[_Rank]:
    ranks = [_Rank(body, world, i, timeout) for i in range(world)]
    offers = [rank.hear() for rank in ranks]
    for what in (offers, "go"):
        for rank in ranks:
            rank.tell(what)
        assert what == "go" or all(rank.hear() == "open" for rank in ranks)
    return ranks


def _turn(lanes: Lanes, turn: int) -> None:
    """All operations, some longer than a ring, waited for in an order of this rank's own."""
    me, n = lanes.index, lanes.size
    k = RINGS // 8 if turn % 4 == 0 else 1000 * turn % 7777 + 1
    parts, into = [torch.full((k,), float(me + turn)) for _ in range(n)], [torch.empty(k) for _ in range(n)]
    total, got, whole = torch.empty(k), torch.empty(k), [torch.full((k,), float(me + turn)) for _ in range(n)]
    entries = [
        lanes.all_gather(parts[me], into),
        lanes.reduce_scatter(parts, total),
        lanes.all_reduce(whole),
    ]
    for entry in random.sample(entries, len(entries)):
        lanes.wait(entry, IN | OUT)
    entries = [
        lanes.message(parts[0], (me + 1) % n, turn, sends=True),
        lanes.message(got, (me - 1) % n, turn, sends=False),
    ]
    for entry in entries:
        lanes.wait(entry, IN | OUT)
    assert [float(x[-1]) for i, x in enumerate(into) if i != me] == [float(i + turn) for i in range(n) if i != me]
    assert {float(x[-1]) for x in (total, *whole)} == {sum(i + turn for i in range(n))}
    assert float(got[0]) == (me - 1) % n + turn


def _on_and_on(lanes: Lanes, say: Callable[[str], None]) -> None:
    say("begins")
    turn = 0
    while True:
        turn += 1
        _turn(lanes, turn)


def _a_while(turns: int) -> Body:
    def body(lanes: Lanes, say: Callable[[str], None]) -> None:
        for turn in range(1, turns + 1):
            _turn(lanes, turn)
        say("done")

    return body


def _kill(world: int, victims: int, seed: int) -> None:
    draw = random.Random(seed)
    ranks = _start(_on_and_on, world)
    try:
        assert all(rank.hear() == "begins" for rank in ranks)
        time.sleep(draw.random() * 0.3)
        gone = draw.sample(range(world), victims)
        for i in gone:
            os.kill(ranks[i].pid, signal.SIGKILL)
        said = [rank.hear() for i, rank in enumerate(ranks) if i not in gone]
        # A rank woken by another's leaving reports that; the first one has seen the death.
        assert all("closed it" in text or "died" in text for text in said), said
        assert not said or any(f"rank {i} of the channel died" in text for i in gone for text in said), (gone, said)
    finally:
        for rank in ranks:
            rank.end()


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_that_wait_in_orders_of_their_own_never_lock(world: int) -> None:
    ranks = _start(_a_while(40), world)
    try:
        assert all(rank.hear() == "done" for rank in ranks)
    finally:
        for rank in ranks:
            rank.end()


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[None]:
    """Ranks have folders of their own for temporary and cached files, and leave nothing there or in /dev/shm."""
    built = pathlib.Path(_memory.TransportEngine()._library._name)
    kept, temporary = tmp_path / "shardfn", tmp_path / "temporary"
    for folder in (kept, temporary):
        folder.mkdir()
    shutil.copy(built, kept)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)  # the folder that it found before
    before = set(pathlib.Path("/dev/shm").glob("*shardfn*"))
    yield
    assert list(kept.iterdir()) == [kept / built.name]
    assert list(temporary.iterdir()) == []
    assert set(pathlib.Path("/dev/shm").glob("*shardfn*")) <= before


@pytest.mark.day("3-1")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("world", "victims"), [(2, 1), (3, 1), pytest.param(2, 2, marks=pytest.mark.nightly)])
def test_a_killed_rank_is_noticed_at_once_and_leaves_nothing(world: int, victims: int) -> None:
    _kill(world, victims, seed=world + victims)


@pytest.mark.nightly
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("seed", range(20))
def test_ranks_killed_at_any_instant_are_noticed_at_once_and_leave_nothing(seed: int) -> None:
    _kill(2 + seed % 3, 1 + seed % 2, seed)


@pytest.mark.nightly
def test_a_stopped_rank_is_waited_for_no_longer_than_agreed_and_then_named() -> None:
    ranks = _start(_on_and_on, 3, timeout=2.0)
    try:
        assert all(rank.hear() == "begins" for rank in ranks)
        os.kill(ranks[1].pid, signal.SIGSTOP)
        said = [ranks[i].hear() for i in (0, 2)]
        assert any("waited 2 s through memory for ranks" in text for text in said), said
        assert all("waited 2 s" in text or "closed it" in text for text in said), said
        os.kill(ranks[1].pid, signal.SIGCONT)
        late = ranks[1].hear()  # its own time has run out, too, whichever it sees first
        assert "closed it" in late or "waited 2 s" in late, late
    finally:
        for rank in ranks:
            rank.end()


def _mean(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (x * params["first"].sum() * params["second"]).square().mean()


@pytest.mark.nightly
@distributed(world=2, timeout=120)
def test_a_rank_stopped_while_others_read_its_buffer_is_named_and_the_state_is_intact() -> None:
    rank, n, pids = dist.get_rank(), 3 * RINGS // 4, [0, 0]
    dist.all_gather_object(pids, os.getpid())
    mesh, under_way, stops = sf.make_mesh(timeout=3), [], [False]
    real = Lanes.all_gather

    def all_gather(self: Lanes, *args: Any) -> _memory.LaneOp:
        under_way.append((real(self, *args), self))
        return under_way[-1][0]

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        params["first"].sum()
        if stops[0] and rank == 1:
            entry, lanes = under_way[-1]
            assert lanes.state(entry, OUT) == 0, "its block is longer than the ring that others now read"
            os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 has given up
        return _mean(params, x)

    zero = sf.Zero.flat(stage=3, persist_elements=0, prefetch_bytes=1 << 30, bucket_bytes=0)
    step, plain = (sf.sharded_step(f, sf.optim.sgd(0.1), mesh=mesh, zero=zero) for f in (loss, _mean))
    params, x = {"first": torch.ones(2), "second": torch.linspace(0, 1, n)}, torch.full((n,), 1.0 + rank)
    state, _ = step(step.init(params), x)  # the first learns the order of use
    want = [whole.full_tensor().clone() for whole in state.params.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "all_gather", all_gather)
        stops[0] = True
        with pytest.raises(sf.RankError) as caught:
            step(state, x)
        stops[0] = False
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    told = "rank 1 reached" if rank == 0 else "given up waiting for this one, rank 1"
    assert told in str(caught.value) and "slow, stopped" in str(caught.value), str(caught.value)
    assert all(torch.equal(x.full_tensor(), y) for x, y in zip(state.params.values(), want, strict=True))
    again, _ = step(state, x)
    fresh, _ = plain(plain.init(params), x)
    fresh, _ = plain(fresh, x)
    for name in params:
        assert torch.equal(again.params[name].full_tensor(), fresh.params[name].full_tensor()), name
    mesh.close()


def _leave(lanes: Lanes, say: Callable[[str], None]) -> None:
    """All ranks gather; rank 0 leaves as soon as it has its result."""
    own, into = torch.full((RINGS // 32,), float(lanes.index)), [torch.empty(RINGS // 32) for _ in range(lanes.size)]
    entry = lanes.all_gather(own, into)
    if lanes.index == 0:
        lanes.wait(entry, IN | OUT)
        os._exit(0)
    time.sleep(0.5)
    lanes.wait(entry, IN)
    say(str(float(into[0][-1])))


def test_messages_written_by_a_rank_are_read_after_its_end() -> None:
    ranks = _start(_leave, 2)
    try:
        assert ranks[1].hear() == "0.0"
    finally:
        for rank in ranks:
            rank.end()


def _made(way: str = "") -> bool:
    """Whether a channel goes through memory, where a user has chosen so, or nothing."""
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        if way:
            patch.setenv(_sharing.VARIABLE, way)
        else:
            patch.delenv(_sharing.VARIABLE, raising=False)
        channel = Channels(mesh).gather(("dp",))
    got = channel.all_gather(torch.full((3,), float(mesh.rank)), [3] * mesh.size, settled=True).result()
    assert torch.equal(got, torch.arange(mesh.size).repeat_interleave(3).float())
    shares = channel._lanes is not None
    mesh.close()
    return shares


def _refused(reason: str) -> None:
    """Channels are gloo's on all ranks, and the first rank warns of the reason, once."""
    _sharing._SAID.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not _made() and not _made()
    said = [str(w.message) for w in caught]
    assert len(said) == (dist.get_rank() == 0), said
    assert all(reason in text and "SHARDFN_CHANNEL=gloo" in text for text in said), said


def test_a_compiler_that_is_missing_or_fails_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = _memory.NoCompilerError("there is no C++ compiler")
    fails = subprocess.CalledProcessError(1, ["c++"], stderr="cc1plus: no space left\n")
    for error, reason in ((missing, "there is no C++ compiler"), (fails, "cc1plus: no space left")):
        calls: list[object] = []

        def build(*args: Any, error: Exception = error, calls: list[object] = calls, **kwargs: Any) -> Any:
            calls.append(args)
            raise error

        monkeypatch.setattr(_memory, "load_library", build)
        monkeypatch.setattr(_memory, "_load_library", functools.cache(_memory._load_library.__wrapped__))
        for _ in range(2):
            with pytest.raises(NotSharedError, match=re.escape(f"its C++ part cannot be built: {reason}") + "$"):
                _memory.TransportEngine()
        assert len(calls) == 1


@pytest.mark.nightly
@distributed(world=2)
def test_ranks_that_cannot_share_memory_talk_by_gloo_and_warn_with_the_reason() -> None:
    assert _made()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:  # as in two containers: a process's number means another one there
            real = Lanes.__init__

            def elsewhere(self: Lanes, *args: Any) -> None:
                real(self, *args)
                segment = self.offer.segment._replace(pid=os.getppid())
                self.offer = self.offer._replace(segment=segment)

            patch.setattr(Lanes, "__init__", elsewhere)
        _refused("rank 0: /proc/")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(_memory, "_load_library", lambda: "there is no C++ compiler")
            patch.setattr(_memory, "engine", _memory.TransportEngine)
        _refused("rank 1: its C++ part cannot be built: there is no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_memory, "MOST_RANKS", 1)
        _refused("rank 0: there are 2 ranks, and memory serves 1")
    assert _made()


@pytest.mark.nightly
@distributed(world=2)
def test_a_limit_on_one_rank_s_memory_is_the_reason_why_all_talk_by_gloo() -> None:
    assert _made()  # with the library that the first channel builds
    for method, reason in (("__init__", "cannot make 8392704 bytes to share"), ("open", "cannot be mapped")):
        real = getattr(Lanes, method)

        def limited(self: Lanes, *args: Any, real: Callable[..., None] = real) -> None:
            if dist.get_rank() == 1:
                with _limited(resource.RLIMIT_AS, _pages() + (1 << 20)):
                    real(self, *args)
            else:
                real(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Lanes, method, limited)
            _refused(reason)
            assert dist.get_rank() or str(_sharing._SAID).startswith("{'rank 1: "), _sharing._SAID
    assert _made()


@distributed(world=2)
def test_machines_of_one_name_notice_that_they_share_no_memory() -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The kernel sees one machine, with the same process and file on both sides: only the file's content differs.
        patch.setattr(_sharing, "_identify_machine", lambda: "node17")
        real = Lanes.__init__

        def elsewhere(self: Lanes, *args: Any) -> None:
            real(self, *args)
            segment = self.offer.segment._replace(word=os.urandom(16))
            self.offer = self.offer._replace(segment=segment)

        patch.setattr(Lanes, "__init__", elsewhere)
        _refused("is another process's memory")
    assert _made()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@distributed(world=2)
def test_ranks_of_different_users_talk_by_gloo_and_warn_with_the_reason() -> None:
    with pytest.MonkeyPatch.context() as patch:
        real = Lanes.open

        def as_nobody(self: Lanes, *args: Any) -> None:
            if dist.get_rank() == 1:
                os.seteuid(65534)
            try:
                real(self, *args)
            finally:
                os.seteuid(0)

        patch.setattr(Lanes, "open", as_nobody)
        _refused("rank 1: ")
        assert dist.get_rank() or "Permission denied" in str(_sharing._SAID)


@distributed(world=2)
def test_ranks_of_two_machines_talk_by_gloo_without_a_word() -> None:
    with pytest.MonkeyPatch.context() as patch:
        machine = f"machine {dist.get_rank()}"
        patch.setattr(_sharing, "_identify_machine", lambda: machine)
        assert not _made()


@distributed(world=4)
def test_the_hop_within_a_machine_goes_through_memory() -> None:
    mesh, rank = sf.make_mesh({"node": 2, "gpu": 2}, device="cpu"), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_sharing.VARIABLE, "memory")
        patch.setattr(_sharing, "_identify_machine", lambda: f"machine {rank // 2}")
        channels = Channels(mesh)
        hops = TwoHops(channels, ("node", "gpu"), ("gpu",))
        shares = [channels.gather(axes)._lanes is not None for axes in (("gpu",), ("node",))]
    assert shares == [True, False]
    brought = hops.bring(torch.full((3,), float(rank)), [3] * 4).result()
    got = hops.all_gather(brought, [3] * 4).result()
    assert torch.equal(got, torch.arange(4).repeat_interleave(3).float())
    mesh.close()


@distributed(world=2)
def test_ranks_that_do_not_choose_memory_build_nothing_and_ask_no_rank() -> None:
    def build(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("built though nobody asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_memory, "_load_library", build)
        patch.setattr(_sharing, "_gather_values", build)
        assert not _made("gloo")


@distributed(world=2)
def test_ranks_that_choose_differently_raise_before_they_wait() -> None:
    step = sf.sharded_step(lambda p, x: (x @ p).sum(), sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 2}, device="cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_sharing.VARIABLE, ["memory", "gloo"][dist.get_rank()])
        with pytest.raises(sf.RankError, match=r"(?s)rank 0: .nothing.*rank 1: SHARDFN_CHANNEL=gloo"):
            step.init(torch.ones(3))


def test_another_word_than_the_two_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_sharing.VARIABLE, "shm")
    with pytest.raises(ValueError, match="SHARDFN_CHANNEL must be one of 'memory', 'gloo', got 'shm'"):
        _sharing.wished()


@contextlib.contextmanager
def _limited(what: int, most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def _pages() -> int:
    """Bytes of addresses that this process has."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _next_file() -> int:
    """The number of the next file that is opened, and so a limit under which none can be."""
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    return free


@pytest.mark.parametrize(
    "limit",
    [
        "size of a file",
        pytest.param("addresses", marks=pytest.mark.nightly),
        pytest.param("open files", marks=pytest.mark.nightly),
    ],
)
def test_a_limit_that_forbids_the_memory_is_the_reason(limit: str) -> None:
    _memory.engine()  # built for the first channel
    what, most = {
        "size of a file": (resource.RLIMIT_FSIZE, 1 << 20),
        "addresses": (resource.RLIMIT_AS, _pages() + (1 << 20)),
        "open files": (resource.RLIMIT_NOFILE, _next_file()),
    }[limit]
    with _limited(what, most), pytest.raises(NotSharedError, match=r"cannot make 8.* bytes to share"):
        Lanes(2, 0, None)


def test_a_reader_without_room_for_the_pages_raises() -> None:
    segment = Segment(RINGS)
    with _limited(resource.RLIMIT_AS, _pages() + (1 << 20)), pytest.raises(NotSharedError, match="cannot be mapped"):
        Reader(segment.offer)
    segment.close()


def test_a_limit_that_forbids_its_pipe_is_the_reason() -> None:
    _memory.engine()
    with (
        _limited(resource.RLIMIT_NOFILE, _next_file() + 1),
        pytest.raises(NotSharedError, match="cannot make the pipe"),
    ):
        _memory.TransportEngine()


def test_a_limit_that_forbids_its_thread_is_the_reason() -> None:
    _memory.engine()
    pid = os.fork()
    if pid == 0:
        try:
            most = _pages() + (1 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            for _ in range(100):  # there may be stacks that threads which have ended left
                _memory.TransportEngine()
        except NotSharedError as error:
            os._exit(0 if "cannot start a thread" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_locked_memory_is_not_needed() -> None:
    with _limited(resource.RLIMIT_MEMLOCK, 0):
        Lanes(2, 0, None).close()
