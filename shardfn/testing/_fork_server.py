"""The process from which the pool's workers are forked, started as a script: imports the workers' modules once.

Only the forking thread survives in the child, so this process has a single thread, and imported modules must not start
threads. The process serves one pipe in a single loop, and ends when the parent closes the other end.
"""

import contextlib
import dataclasses
import gc
import importlib.util
import os
import pathlib
import select
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from types import ModuleType
from typing import Any, NoReturn

HANDLES = 5  # sent with a request: the worker's pipe, three files, and the pipe for the exit code


@dataclasses.dataclass(frozen=True)
class ForkServer:
    """Forks a worker for each request, and writes a worker's exit code to the pipe of the request.

    Between two turns of the loop `statuses` has the pipe of each running child, and no other descriptor of a child is
    open here: a pipe of a child ends with the child.
    """

    parent: Connection
    worker: ModuleType
    wake: int
    statuses: dict[int, int]

    def run(self) -> None:
        """Serves requests until the parent closes the pipe."""
        while True:
            ready, _, _ = select.select([self.parent, self.wake], [], [])
            self._reap_children()
            if self.parent in ready:
                try:
                    request = self.parent.recv()
                except EOFError:
                    return
                self._fork_child(request)

    def _fork_child(self, request: dict[str, Any]) -> None:
        conn, out, err, stack, status = (recv_handle(self.parent) for _ in range(HANDLES))
        pid = os.fork()
        if pid == 0:
            for fd in (status, *self.statuses.values()):
                os.close(fd)
            self.parent.close()
            _run_child(self.worker, request, conn, out, err, stack)
        for fd in (conn, out, err, stack):
            os.close(fd)
        self.statuses[pid] = status
        self.parent.send(pid)

    def _reap_children(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 1024)
        for child, status in list(self.statuses.items()):
            pid, code = os.waitpid(child, os.WNOHANG)
            if pid == child:
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
                os.close(self.statuses.pop(child))


def _run_child(worker: ModuleType, request: dict[str, Any], conn: int, out: int, err: int, stack: int) -> NoReturn:
    """Runs the rest of a child's life. Never returns into the server's loop."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # an interrupt from the keyboard is the parent's to handle
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[:] = request["path"]
        worker.main(Connection(conn), stack, request["port"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    """Imports the modules named by the parent, reports to the parent, and serves."""
    parent = Connection(int(sys.argv[1]))
    setup = parent.recv()
    sys.path[:] = setup["path"]
    worker = _import_sibling("_worker")
    for i, file in enumerate(setup["files"]):
        worker.load(f"_worker_setup_{i}", file, rewrite=False)
    wake, wakes = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()  # or the first collection of a child would copy all pages with objects
    parent.send("ready")
    ForkServer(parent, worker, wake, {}).run()


def _import_sibling(name: str) -> ModuleType:
    """Returns a module next to this file, without the package.

    A setup file may have to come before the first of shardfn.
    """
    spec = importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
