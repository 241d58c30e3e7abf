"""The pool of long-lived workers on which `distributed` runs: start, call, watch, end.

Rank r of a call is worker r of the pool for every world size, so a session holds the workers of the largest world. A
call that leaves a worker dead or stuck ends all workers of the call. The next call starts new workers.

A fork server is a process that has imported torch, and workers are forked from there. A worker thus starts in some ten
milliseconds, where imports take seconds, and shares the memory of the modules.
"""

import atexit
import contextlib
import dataclasses
import itertools
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from typing import IO, Any

import torch.distributed as dist

from shardfn.core import RankError

START = 300.0  # seconds that the server has to import torch on a busy machine
_SCRIPT = str(pathlib.Path(__file__).with_name("_fork_server.py"))


class Forked:
    """Worker process, a child of the fork server, with the methods of `subprocess.Popen`.

    The server writes the exit code into a pipe, and closes the pipe. A pipe closed without an exit code means that the
    server has ended, too.
    """

    def __init__(self, pid: int, status: Connection) -> None:
        self.pid, self._status = pid, status
        self._code: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while the worker runs."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> int | None:
        """Returns the result of `poll`, after at most `timeout` seconds."""
        if self._code is None and self._status.poll(timeout):
            text = os.read(self._status.fileno(), 64)
            self._code = int(text) if text else -signal.SIGKILL
            self._status.close()
        return self._code

    def send_signal(self, number: int) -> None:
        """Sends a signal to a running worker."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the worker, and waits for the end."""
        self.send_signal(signal.SIGKILL)
        self.wait(60.0)


class ForkServer:
    """Running server that forks workers.

    The server and the workers end with this process, which holds the other end of their standard input.

    Args:
        files: Python files to run before the first fork.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._conn, theirs = Pipe()
        self._err: IO[bytes] = tempfile.TemporaryFile("a+b")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-u", _SCRIPT, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=self._err,
            stderr=self._err,
            env=_make_environment(),
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # an interrupt from the keyboard is the parent's to handle
        )
        theirs.close()
        self._conn.send({"path": sys.path, "files": list(files)})
        try:
            self._receive_message()
        except BaseException:
            self.close()
            raise

    def fork(self, conn: Connection, files: Sequence[IO[bytes]], request: Mapping[str, Any]) -> Forked:
        """Forks a worker process.

        Args:
            conn: end of the pipe to the pool, which is closed here.
            files: files for standard output, standard error, and the stack of the worker.
            request: further entries of the message to the server.

        Raises:
            RankError: the server has ended. The message has the server's stderr.
        """
        status, theirs = Pipe(duplex=False)
        try:
            self._conn.send({**request, "path": sys.path, "env": _make_environment()})
            for handle in (conn, *files, theirs):
                send_handle(self._conn, handle.fileno(), self._process.pid)
        except BrokenPipeError:
            self._raise_ended("ended")
        finally:
            conn.close()
            theirs.close()
        return Forked(self._receive_message(), status)

    def close(self) -> None:
        """Ends the server. The workers must have ended."""
        self._process.kill()
        self._process.communicate()
        self._conn.close()
        self._err.close()

    def _receive_message(self) -> Any:
        if not wait([self._conn], START):
            self._raise_ended(f"did not start within {START:g} s")
        try:
            return self._conn.recv()
        except (EOFError, ConnectionResetError):
            self._raise_ended("ended")

    def _raise_ended(self, why: str) -> Any:
        if why == "ended":
            code = self._process.wait(5)
            why = f"ended at its start with {f'exit code {code}' if code >= 0 else signal.Signals(-code).name}"
        self._err.seek(0)
        raise RankError(f"a worker {why}. Its stderr:\n{self._err.read().decode(errors='replace')}")


def _make_environment() -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in launcher}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a bare machine may not resolve the local host name
    return env


GRACE = 5.0  # seconds that the other ranks have to end once a rank has failed


@dataclasses.dataclass
class Report:
    """Known state of a single rank of a call."""

    status: str = "running"  # then finished | failed | died
    time: float = 0.0
    value: bytes | None = None  # the pickled return value, or error
    line: str = ""
    text: str = ""
    released: bool = False
    idle: bool = False
    stack: str = ""
    started: bool = False  # the process group is set up, the function runs

    @property
    def stuck(self) -> bool:
        """Returns whether the rank still has something to do, other than to wait for peers."""
        return self.status == "running" or (self.released and not self.idle)


def raise_first(what: str, timeout: float, reports: list[Report], errors: list[str]) -> None:
    """Raises the error of the call, if any: of the first failed rank, a death, or a hang.

    Args:
        what: name of the function that ran.
        timeout: seconds that the function had.
        reports: report of each rank.
        errors: stderr of each rank.
    """
    bad = [rank for rank, r in enumerate(reports) if r.status in ("failed", "died")]
    stuck = [rank for rank, r in enumerate(reports) if r.stuck]
    if not bad and not stuck:
        return
    if not bad:
        raise TimeoutError(
            f"{what} did not finish on {len(reports)} ranks within {timeout:g} s:\n{_list_states(reports)}"
        )
    # A death is the cause of the errors of peers, whichever arrived first.
    first = min(bad, key=lambda rank: (reports[rank].status != "died", reports[rank].time))
    report = reports[first]
    error = _load_error(f"rank {first} of {len(reports)} {report.line} in {what}", report)
    error.add_note(_make_note(first, reports, errors[first], bad, stuck))
    raise error


def _load_error(text: str, report: Report) -> BaseException:
    try:
        if report.value is not None:
            return pickle.loads(report.value)
    except Exception as lost:
        text = f"{text}\n(the error cannot be unpickled here: {lost!r})"
    return RankError(text)


def _make_note(first: int, reports: list[Report], stderr: str, bad: list[int], stuck: list[int]) -> str:
    report = reports[first]
    parts = [f"On rank {first} of {len(reports)}" + (f":\n{_rank_frames(report)}" if report.text else ", which died.")]
    others = [f"  rank {rank}: {_describe_error(reports[rank], report)}" for rank in bad if rank != first]
    if others:
        parts.append("After that:\n" + "\n".join(others))
    if stuck:
        parts.append(f"Other ranks did not end within {GRACE:g} s:\n{_list_states(reports)}")
    if stderr.strip():
        parts.append(f"stderr of rank {first}:\n{stderr.strip()[-4000:]}")
    return "\n\n".join(parts)


def _rank_frames(report: Report) -> str:
    """Returns the traceback of a rank, without the message of an error raised here."""
    if report.value is None or not report.text.endswith(report.line):
        return report.text
    head, *rest = report.line.splitlines()
    return report.text.removesuffix(report.line) + head + (" ... (in full above)" if rest else "")


def _describe_error(report: Report, first: Report) -> str:
    """Returns the error of a further rank in a line."""
    return "the same" if report.line and report.line == first.line else report.line.splitlines()[0]


def _list_states(reports: list[Report]) -> str:
    return "\n".join(f"  rank {rank}: {_describe_state(r)}" for rank, r in enumerate(reports))


def _describe_state(report: Report) -> str:
    if report.status in ("failed", "died"):
        return f"{report.status}: {report.line.splitlines()[0]}"
    if not report.stuck:
        return "finished"
    doing = "still running" if report.status == "running" else "finished, but does not leave the process group"
    return f"{doing}\n{report.stack}"


RENDEZVOUS = 30.0  # seconds that ranks have to find one another
_SCRIPTS = tuple(str(pathlib.Path(__file__).with_name(f"{name}.py")) for name in ("_worker", "_fork_server"))
_WORKERS: list["Worker"] = []
_SERVER: list[ForkServer] = []  # at most one
_SETUP_FILES: list[str] = []
_STORE: list[dist.TCPStore] = []
_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class Worker:
    """Process, with a pipe and temporary files for output."""

    process: Forked
    conn: Connection
    out: IO[bytes]
    err: IO[bytes]
    stack: IO[bytes]


def worker_setup(file: str | os.PathLike[str]) -> None:
    """Runs a Python file before anything else in every worker, typically the test suite's own conftest.

    So code before the first `import shardfn`, such as jaxtyping's import hook, runs for the workers as well. The file
    is run once, in the process from which all workers are forked, and must leave no thread running.

    Args:
        file: path of the file. Running workers are ended, because the file has not run there.

    Example:
        >>> worker_setup(__file__)  # doctest: +SKIP
    """
    path = str(pathlib.Path(file).resolve())
    if path not in _SETUP_FILES:
        _SETUP_FILES.append(path)
        _end_pool()


def call(world: int, timeout: float, what: str, task: Mapping[str, Any]) -> list[Any]:
    """Runs one task on ranks 0..world-1 and returns the results in rank order.

    Raises:
        TimeoutError: a rank did not finish in time. The message has every rank's state and stack.
        RankError: a worker died, or an error could not be sent.
        BaseException: the error of the first rank that failed, with the traceback as a note.
    """
    workers, reports = _try_call(world, timeout, task)
    if not any(r.started or not r.stuck for r in reports):
        # gloo's rendezvous hangs now and then on a busy machine. Nothing has run yet, so other workers may try.
        end_workers(workers)
        workers, reports = _try_call(world, timeout, task)
    errors = [_print_output(rank, worker) for rank, worker in enumerate(workers)]
    # A peer of a dead rank is not trusted again either: the transport may still wait for the dead rank.
    if not all(r.idle for r in reports):
        end_workers(workers)
    raise_first(what, timeout, reports, errors)
    return [pickle.loads(r.value) for r in reports if r.value is not None]


def _try_call(world: int, timeout: float, task: Mapping[str, Any]) -> tuple[list[Worker], list[Report]]:
    workers = _start_workers(world)
    number = next(_NUMBERS)
    try:
        filters = pickle.dumps(list(warnings.filters))
        common = {**task, "number": number, "world": world, "timeout": timeout, "filters": filters}
        for rank, worker in enumerate(workers):
            _send_message(worker, {**common, "rank": rank})
        return workers, _watch_workers(workers, timeout)
    except BaseException:
        end_workers(workers)
        raise


def end_workers(workers: list[Worker]) -> None:
    """Ends these workers, each by pid, and forgets them."""
    for worker in list(workers):
        worker.process.kill()
        for file in (worker.conn, worker.out, worker.err, worker.stack):
            file.close()
        if worker in _WORKERS:
            _WORKERS.remove(worker)


def _end_pool() -> None:
    end_workers(_WORKERS)
    while _SERVER:
        _SERVER.pop().close()


atexit.register(_end_pool)


# start


def _start_workers(world: int) -> list[Worker]:
    if not _STORE:
        _STORE.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    end_workers([worker for worker in _WORKERS if worker.process.poll() is not None])
    fresh = [_fork_worker() for _ in range(world - len(_WORKERS))]
    _WORKERS.extend(fresh)
    for worker in fresh:
        _expect_ready(worker)
    return _WORKERS[:world]


def _fork_worker() -> Worker:
    if not _SERVER:
        _SERVER.append(ForkServer(_SETUP_FILES))
    ours, theirs = Pipe()
    # Opened to append, so a read from the start does not move the place where the worker writes.
    out, err, stack = (tempfile.TemporaryFile("a+b") for _ in range(3))
    try:
        process = _SERVER[0].fork(theirs, (out, err, stack), {"port": _STORE[0].port})
    except RankError:
        _end_pool()
        raise
    return Worker(process, ours, out, err, stack)


def _expect_ready(worker: Worker) -> None:
    why = f"did not start within {START:g} s"
    if worker.conn.poll(START):
        try:
            assert worker.conn.recv()[0] == "ready"
            return
        except (EOFError, ConnectionResetError):
            why = f"ended at its start with {_exit_code(worker)}"
    text = _take_contents(worker.err)
    end_workers(_WORKERS)
    raise RankError(f"a worker {why}. Its stderr:\n{text}")


# watch


def _watch_workers(workers: list[Worker], timeout: float) -> list[Report]:
    """Follows every rank until it is idle again, dead, or out of time."""
    reports = [Report() for _ in workers]
    started, grace = False, None
    deadline = time.monotonic() + RENDEZVOUS
    while left := {w.conn: (w, r) for w, r in zip(workers, reports, strict=True) if not r.idle and r.status != "died"}:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            break
        for conn in left.keys() & set(wait(list(left), seconds)):
            _receive_report(*left[conn])
        if not started and any(r.started for r in reports):
            started, deadline = True, time.monotonic() + timeout
        if any(r.status in ("failed", "died") for r in reports):
            grace = grace or time.monotonic() + GRACE
            deadline = min(deadline, grace)
        _release_ranks(workers, reports)
    for worker, report in zip(workers, reports, strict=True):
        if report.stuck:
            report.stack = _read_stack(worker)
    return reports


def _receive_report(worker: Worker, report: Report) -> None:
    try:
        kind, *rest = worker.conn.recv()
    except (EOFError, ConnectionResetError):
        report.status, report.value, report.line = "died", None, f"died with {_exit_code(worker)}"
        return
    if kind == "started":
        report.started = True
    elif kind == "idle":
        report.idle = True
    elif kind == "finished":
        report.status, (report.time, report.value) = kind, rest
    else:
        report.status, (report.time, report.value, report.line, report.text) = kind, rest


def _release_ranks(workers: list[Worker], reports: list[Report]) -> None:
    """Lets ranks leave the process group: all together, or at once when one failed, which unblocks its peers."""
    states = {r.status for r in reports}
    if "running" in states and not states & {"failed", "died"}:
        return
    for worker, report in zip(workers, reports, strict=True):
        if report.status in ("finished", "failed") and not report.released:
            report.released = True
            _send_message(worker, None)


def _send_message(worker: Worker, message: Any) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead worker is noticed by its silence
        worker.conn.send(message)


def _exit_code(worker: Worker) -> str:
    code = worker.process.wait(5.0)
    if code is None:
        return "its pipe closed"
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _read_stack(worker: Worker) -> str:
    """Returns the Python stack of a running worker, written by the signal handler."""
    worker.process.send_signal(signal.SIGUSR1)
    size, limit = 0, time.monotonic() + 2.0
    while time.monotonic() < limit:
        time.sleep(0.05)
        now = os.fstat(worker.stack.fileno()).st_size
        if now and now == size:
            break
        size = now
    threads = _take_contents(worker.stack).split("\n\n")
    lines = "\n".join(t for t in threads if "_exit_with_parent" not in t).splitlines()
    return "\n".join(f"    {line}" for line in lines if not any(s in line for s in _SCRIPTS))


# report


def _take_contents(file: IO[bytes]) -> str:
    """Returns the contents of a worker's file, and empties the file."""
    file.seek(0)
    text = file.read().decode(errors="replace")
    file.truncate(0)
    return text


def _print_output(rank: int, worker: Worker) -> str:
    """Prints a worker's output with the rank, and returns the stderr."""
    out, err = _take_contents(worker.out), _take_contents(worker.err)
    for stream, text in ((sys.stdout, out), (sys.stderr, err)):
        for line in text.splitlines():
            print(f"[rank {rank}] {line}", file=stream)
    return err
