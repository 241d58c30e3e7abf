"""One group of processes a peer; between its turns a group is blocked on a pipe and takes no processor time."""

import contextlib
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from slow_link import Link, enter

Job = Callable[..., Any]


class Group:
    """`world` processes that share a gloo group. `setup(rank, world, *args)` runs once and returns a serving function.

    `ask(x)` sends x to every rank and returns the list of the results of the ranks' serving functions. With `link`
    (of `slow_link.py`) the ranks live in its namespaces, else gloo uses the loopback.
    """

    def __init__(
        self,
        setup: Job,
        world: int,
        args: tuple[Any, ...] = (),
        *,
        preload: str = "",
        link: Link | None = None,
        checkout: str = "",
    ) -> None:
        context = mp.get_context("spawn")
        self._files = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._procs = []
        with _environment(preload, link.interface if link else "lo"), _first_on_path(checkout):
            for rank in range(world):
                here, there = context.Pipe()
                space = link.namespaces[rank] if link else ""
                job = (setup, rank, world, f"{self._files.name}/store", there, args, space, checkout)
                self._procs.append(context.Process(target=_serve, args=job, daemon=True))
                self._procs[-1].start()
                self._pipes.append(here)
                there.close()

    def ready(self, patience: float | None = None) -> "Group":
        """Waits until every rank has finished its setup.

        Raises:
            TimeoutError: a rank took more than `patience` seconds.
        """
        until = None if patience is None else time.monotonic() + patience
        for pipe in self._pipes:
            if until is not None and not pipe.poll(max(0.0, until - time.monotonic())):
                for proc in self._procs:
                    proc.kill()
                raise TimeoutError(f"a rank has not begun after {patience:.0f} seconds")
        self._collect()
        return self

    def ask(self, request: Any) -> list[Any]:
        """Every rank's answer to one request, in rank order."""
        for pipe in self._pipes:
            pipe.send((request,))
        return self._collect()

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # of a rank that has failed
                pipe.send(None)
        for proc in self._procs:
            proc.join(20)
            if proc.is_alive():
                proc.terminate()
        self._files.cleanup()

    def _collect(self) -> list[Any]:
        answers = [_receive(p) for p in self._pipes]
        for answer in answers:
            if isinstance(answer, _Failure):
                raise RuntimeError(answer.text)
        return answers


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return _Failure("a rank ended without an answer; its messages are above")


@contextmanager
def _environment(preload: str, interface: str) -> Iterator[None]:
    new = {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LD_PRELOAD": preload}
    old = {k: os.environ.get(k) for k in new}
    os.environ.update({k: v for k, v in new.items() if v})
    try:
        yield
    finally:
        for key, value in old.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


@contextmanager
def _first_on_path(directory: str) -> Iterator[None]:
    # A process that is started inside takes this path over before it imports anything of shardfn.
    sys.path[:0] = [directory] if directory else []
    try:
        yield
    finally:
        del sys.path[: 1 if directory else 0]


def _serve(
    setup: Job,
    rank: int,
    world: int,
    store: str,
    pipe: Connection,
    args: tuple[Any, ...],
    namespace: str,
    checkout: str,
) -> None:
    if namespace:
        enter(namespace)
    import torch
    import torch.distributed as dist

    import shardfn as sf

    if not str(sf.__file__).startswith(checkout):
        pipe.send(_Failure(f"rank {rank}: shardfn comes from {sf.__file__}, not from {checkout}"))
        return

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        answer = setup(rank, world, *args)
        pipe.send("ready")
        while (request := pipe.recv()) is not None:
            pipe.send(answer(request[0]))
        dist.destroy_process_group()
    except Exception:
        pipe.send(_Failure(f"rank {rank}:\n{traceback.format_exc()}"))
