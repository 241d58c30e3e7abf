"""Covers torchrun's restarts: ranks that are killed, stopped or cut off are named, and the job resumes by itself.

Under canonical sums it continues bit for bit like an undisturbed job, on the same number of ranks, fewer, or more.
"""

import contextlib
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from shardfn import checkpoint

PROGRAM = pathlib.Path(__file__).parent / "train_elastic.py"
PATIENCE = 300  # seconds; a bound for a hang, under any load of the machine


def _env(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])} | more


def _rows(directory: pathlib.Path) -> list[dict[str, object]]:
    path = directory / "losses.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _undisturbed(directory: pathlib.Path, steps: int) -> dict[object, object]:
    """The losses of one undisturbed process."""
    directory.mkdir()
    assert runpy.run_path(str(PROGRAM))["main"](str(directory), "--steps", str(steps)) == 0
    return {row["step"]: row["loss"] for row in _rows(directory)}


def _assert_undisturbed(directory: pathlib.Path, want: dict[object, object]) -> None:
    """Every step was made, with the same loss each time; the end is saved."""
    rows = _rows(directory)
    assert {row["step"] for row in rows} == want.keys()
    assert [row for row in rows if row["loss"] != want[row["step"]]] == []
    assert checkpoint.verify(directory / "checkpoints").step == len(want)


def _agent(directory: pathlib.Path, how: list[str], *args: str, **env: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "torch.distributed.run", *how, str(PROGRAM), str(directory), *args]
    with (directory / f"agent-{env.get('NAME', '0')}-{time.monotonic_ns()}.log").open("w") as out:
        return subprocess.Popen(line, env=_env(**env), stdout=out, stderr=subprocess.STDOUT, text=True)


def _said(directory: pathlib.Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(directory.glob("agent-*.log")))


@contextlib.contextmanager
def _ending(agent: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Ends it after the block, in any case."""
    try:
        yield agent
    finally:
        agent.terminate()  # it ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(45)  # it gives its ranks 30 seconds, and one that is stopped takes them
        agent.kill()
        agent.wait()


def _until(what: Callable[[], bool], directory: pathlib.Path) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, _said(directory)
        time.sleep(0.05)


def _finish(agents: list[subprocess.Popen[str]], directory: pathlib.Path) -> None:
    for agent in agents:
        assert agent.wait(PATIENCE) == 0, _said(directory)


def _standalone(ranks: int) -> list[str]:
    return ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "2"]


def _told(directory: pathlib.Path, ranks: set[int]) -> list[str]:
    """The errors of these ranks of the first round."""
    found = {int(p.name.split("-")[2]): p.read_text() for p in directory.glob("told-0-*")}
    assert found.keys() == ranks
    return list(found.values())


@pytest.mark.nightly
def test_a_rank_that_is_killed_is_named_and_the_job_goes_on(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "job"
    place.mkdir()
    agent = _agent(place, _standalone(2), "--steps", "6", "--fault", "kill:1:4")
    with _ending(agent):
        _finish([agent], place)
    (told,) = _told(place, {0})
    assert "rank 1 died without a word" in told
    _assert_undisturbed(place, _undisturbed(tmp_path / "one", 6))


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_hangs_is_named_with_its_call_and_the_job_goes_on(tmp_path: pathlib.Path, victim: int) -> None:
    """It is stopped, not dead: only the timeout detects it. torchrun waits another 30 seconds before it kills it."""
    place = tmp_path / "job"
    place.mkdir()
    agent = _agent(place, _standalone(3), "--steps", "6", "--fault", f"stop:{victim}:3", "--timeout", "12")
    with _ending(agent):
        _finish([agent], place)
    for told in _told(place, {0, 1, 2} - {victim}):
        assert f"rank {victim} did not reach step 3" in told and "for 12 s" in told
    _assert_undisturbed(place, _undisturbed(tmp_path / "one", 6))


@pytest.mark.nightly
def test_where_rank_0_has_the_store_and_hangs_the_others_report_it_and_the_job_goes_on(tmp_path: pathlib.Path) -> None:
    """The ranks' requests to the store then get no answer."""
    place = tmp_path / "job"
    place.mkdir()
    how = (*_standalone(3), "--monitor-interval", "0.5")
    args = ("--steps", "6", "--fault", "stop:0:3", "--timeout", "12")
    agent = _agent(place, list(how), *args, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with _ending(agent):
        _finish([agent], place)
    for told in _told(place, {1, 2}):
        assert "for 12 s in step 3" in told and "its process is stopped" in told
    _assert_undisturbed(place, _undisturbed(tmp_path / "one", 6))


@pytest.mark.nightly
def test_a_job_loses_half_of_its_ranks_goes_on_and_gets_them_back(tmp_path: pathlib.Path) -> None:
    """Four agents of one rank each; two are killed with their ranks, and come back later."""
    place = tmp_path / "job"
    place.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4,is_host={0}"

    def agent(name: str) -> subprocess.Popen[str]:
        how = ["--nnodes=2:4", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
        how += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        how += [f"--rdzv-conf={conf.format(int(name == 'a'))}"]
        # A store for each round: the shared one is expected on its old node, which may be gone.
        own = {"NAME": name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return _agent(place, how, "--steps", "12", "--gate", "5", "8", **own)

    agents = {name: agent(name) for name in "abcd"}
    with contextlib.ExitStack() as stack:
        for x in agents.values():
            stack.enter_context(_ending(x))
        _until(lambda: any(row["step"] == 4 for row in _rows(place)), place)
        assert {row["world"] for row in _rows(place)} == {4}
        for name in "cd":
            agents[name].send_signal(signal.SIGKILL)
            os.kill(int((place / f"pid-{name}").read_text()), signal.SIGKILL)
        (place / "gate-5").touch()
        _until(lambda: any((row["step"], row["world"]) == (7, 2) for row in _rows(place)), place)
        for name in "cd":
            agents[name].wait()
            agents[name] = stack.enter_context(_ending(agent(name)))
        _until(lambda: any((row["step"], row["world"]) == (9, 4) for row in _rows(place)), place)
        _finish(list(agents.values()), place)
    told = [p.read_text() for p in place.glob("told-0-*")]
    assert told and all("died without a word" in text for text in told)
    _assert_undisturbed(place, _undisturbed(tmp_path / "one", 12))
    # The ranks that made room for others had saved their current step, so no step was made twice.
    steps = [(int(str(row["step"])), row["world"]) for row in _rows(place)]
    again = [n for n, world in steps if world == 4 and n >= 8]
    assert again == sorted(set(again))
