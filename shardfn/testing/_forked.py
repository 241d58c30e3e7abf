"""The parent's side of the fork server: a process that has imported torch, and workers forked from there.

A worker thus starts in some ten milliseconds, where imports take seconds, and shares the memory of the modules.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from typing import IO, Any

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
