"""Covers `checkpoint.Preemption`: a signal on any rank, all stop after the same step, save, and end as was chosen."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import checkpoint
from shardfn.checkpoint import Preemption
from shardfn.collectives.transport._rounds import Rounds
from shardfn.testing import distributed

ROOT = pathlib.Path(__file__).parents[2]
CODES = {signal.SIGTERM: 3, signal.SIGUSR1: 7}


def _loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).square().mean()


def _trained(directory: pathlib.Path, told: dict[int, int], *, stage: int = 3, jit: bool = False) -> tuple[int, int]:
    """A loop in which ranks get a signal in some step each; the steps that it made, and how it would end."""
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    loss: Any = sf.jit(_loss, backend="graph") if jit else _loss
    zero = sf.Zero(stage=stage, persist_elements=0)
    step = sf.sharded_step(loss, sf.optim.adamw(1e-2), mesh=mesh, zero=zero)
    state = step.init(torch.linspace(-1, 1, 12))
    batch = torch.ones(2, 12)
    with (
        checkpoint.Manager(directory, mesh=mesh, save_every=100) as manager,
        Preemption(mesh, signals=CODES) as preemption,
    ):
        for n in range(40):
            if told.get(mesh.rank) == n:
                os.kill(os.getpid(), signal.SIGUSR1 if n % 2 else signal.SIGTERM)
            state, _ = step(state, batch)
            manager.save(state, now=preemption.stopping)
            if preemption.stopping:
                break
    return int(state.step), preemption.exit_code


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 3])
def test_a_signal_on_one_rank_stops_all_after_the_same_step(world: int, tmp_path: pathlib.Path) -> None:
    assert _trained(tmp_path / "one", {world - 1: 5}) == (6, 7)
    assert checkpoint.steps(tmp_path / "one") == [6]
    # Several ranks, at different steps: the first counts.
    assert _trained(tmp_path / "all", {rank: 8 - 2 * rank for rank in range(world)}, stage=0) == (11 - 2 * world, 3)
    assert _trained(tmp_path / "none", {}) == (40, 0)


@pytest.mark.nightly
@distributed(world=[1, 2, 3])
def test_a_signal_stops_steps_that_run_a_graph(world: int, tmp_path: pathlib.Path) -> None:
    assert _trained(tmp_path, {world // 2: 5}, stage=0, jit=True) == (6, 7)


@pytest.mark.nightly
@distributed(world=8, timeout=110)
def test_a_signal_on_one_rank_of_eight(tmp_path: pathlib.Path) -> None:
    assert _trained(tmp_path / "eager", {6: 7}) == (8, 7)
    assert _trained(tmp_path / "graph", {5: 3}, jit=True) == (4, 7)


@distributed(world=2)
def test_no_message_is_sent_for_it() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    step = sf.sharded_step(_loss, sf.optim.sgd(0.1), mesh=mesh)
    state, _ = step(step.init(torch.ones(4)), torch.ones(2, 4))
    rounds, exchange = [0, 0], Rounds.exchange
    for k, noting in enumerate((contextlib.nullcontext(), Preemption(mesh))):

        def counted(self: Rounds, value: int, *how: Any, k: int = k) -> list[int]:
            rounds[k] += 1
            return exchange(self, value, *how)

        Rounds.exchange = counted  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with noting as preemption:
                for n in range(4):
                    if preemption is not None and n == mesh.rank == 1:
                        signal.raise_signal(signal.SIGTERM)
                    state, _ = step(state, torch.ones(2, 4))
                    assert preemption is None or preemption.stopping == (n >= 1)
        finally:
            Rounds.exchange = exchange
    assert rounds[0] == rounds[1] > 0


@distributed(world=2)
def test_a_loop_without_steps_asks_by_itself() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    with Preemption(mesh) as preemption:
        if mesh.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        assert not preemption.stopping
        preemption.meet()
        assert preemption.stopping and preemption.exit_code == 75
        if mesh.rank == 0:
            preemption.stop(80)
        preemption.meet()
        assert preemption.exit_code == 80


PROGRAM = """
import os, signal, sys
from shardfn.checkpoint import Preemption
from shardfn.collectives.transport._rounds import Rounds

def ended(what):
    pid = os.fork()
    if pid == 0:
        what()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def twice():
    with Preemption(patience=0):
        signal.raise_signal(signal.SIGTERM)
        while True:
            signal.raise_signal(signal.SIGTERM)

print(ended(twice))
with Preemption(patience=1e9) as preemption:
    print(ended(lambda: signal.raise_signal(signal.SIGTERM)))  # a fork has no loop to leave
    preemption.meet()
    print(preemption.stopping, preemption.exit_code)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # an echo
    preemption.meet()
print("saved")
sys.exit(preemption.exit_code)
"""


@pytest.mark.nightly
def test_a_second_signal_ends_at_once_but_an_echo_does_not() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-u", "-c", PROGRAM]
    ended = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines() == ["-15", "-15", "False 0", "saved"], ended.stderr
    assert ended.returncode == 75


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert signal.getsignal(signal.SIGTERM) == preemption._handle_signal
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(ValueError, match=r"signals\[SIGUSR1\]=256"):
        Preemption(signals={signal.SIGUSR1: 256})


def test_another_thread_is_refused() -> None:
    found: list[Exception] = []

    def enter() -> None:
        try:
            with Preemption():
                pass
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])
