"""Covers `testing.distributed`: arguments, errors, deaths, hangs, skips, and the pool behind them."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from shardfn.core import RankError
from shardfn.testing import distributed
from shardfn.testing._pool import _WORKERS, end_workers


class Pair(NamedTuple):
    a: int
    b: int


class OddError(ValueError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@distributed(
    world=[
        pytest.param(1, marks=pytest.mark.nightly),
        pytest.param(2, marks=pytest.mark.nightly),
        3,
        pytest.param(4, marks=pytest.mark.nightly),
    ]
)
def test_collectives(world: int) -> None:
    assert dist.is_initialized() == (world > 1)
    x = torch.ones(())
    if world > 1:
        assert dist.get_world_size() == world
        dist.all_reduce(x)
    assert x == world


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_several_worlds_need_no_world_argument() -> None:
    assert not dist.is_initialized() or dist.get_world_size() == 2


@pytest.mark.parametrize("n", [3, 5])
@distributed(world=2)
def test_passes_fixtures_and_parameters(tmp_path: Path, n: int, world: int) -> None:
    assert world == 2
    (tmp_path / str(dist.get_rank())).write_text(str(n))
    dist.barrier()
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == [str(n)] * 2


@distributed(world=2)
def rank_values(pair: Pair, *, scale: int) -> Pair:
    return Pair(pair.a * scale, dist.get_rank())


def test_values_come_back_in_rank_order() -> None:
    assert rank_values(Pair(3, 0), scale=2) == [Pair(6, 0), Pair(6, 1)]


@distributed(world=3)
def pids() -> int:
    return os.getpid()


@distributed(world=2)
def pids_of_two() -> int:
    return os.getpid()


def test_workers_are_reused() -> None:
    first = pids()
    assert len({*first, os.getpid()}) == 4
    assert pids() == first
    assert pids_of_two() == first[:2]


@distributed(world=3)
def fails_on_one(error: Exception) -> None:
    if dist.get_rank() == 1:
        raise error
    dist.barrier()


def test_error_of_one_rank() -> None:
    before = pids()
    with pytest.raises(KeyError) as info:
        fails_on_one(KeyError("wq"))
    assert info.value.args == ("wq",)
    (note,) = info.value.__notes__
    assert note.startswith("On rank 1 of 3:\nTraceback") and "in fails_on_one" in note
    assert pids() == before


@distributed(world=2)
def fails_oddly() -> None:
    raise OddError("this", "that")


def test_error_that_does_not_pickle_keeps_its_builtin_type() -> None:
    with pytest.raises(ValueError, match="this and that") as info:
        fails_oddly()
    assert "OddError" in info.value.__notes__[0]


@distributed(world=2)
def leaves() -> None:
    sys.exit(3)


def test_sys_exit_does_not_end_the_caller() -> None:
    with pytest.raises(RankError, match="SystemExit: 3"):
        leaves()


@distributed(world=2)
def asserts(x: int) -> None:
    print("said on stdout")
    print("said on stderr", file=sys.stderr)
    dist.barrier()  # both have printed before one fails
    assert x + dist.get_rank() == 7


def test_assertion_text_and_output(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError) as info:
        asserts(7)
    assert str(info.value).startswith("assert (7 + 1) == 7")
    (note,) = info.value.__notes__
    assert note.startswith("On rank 1 of 2:") and "stderr of rank 1:\nsaid on stderr" in note
    out, err = capfd.readouterr()
    assert out == "[rank 0] said on stdout\n[rank 1] said on stdout\n"
    assert err == "[rank 0] said on stderr\n[rank 1] said on stderr\n"


@distributed(world=2)
def dies(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(("how", "code"), [("exit", "exit code 3"), ("kill", "signal SIGKILL")])
def test_death_of_one_rank(how: str, code: str) -> None:
    before = pids_of_two()
    with pytest.raises(RankError, match=f"rank 1 of 2 died with {code} in dies"):
        dies(how)
    assert not {*pids_of_two()} & {*before}


@distributed(world=3, timeout=1.5)
def hangs() -> None:
    if dist.get_rank() != 2:
        time.sleep(1000)


def test_hang() -> None:
    with pytest.raises(TimeoutError) as info:
        hangs()
    text = str(info.value)
    assert text.startswith("hangs did not finish on 3 ranks within 1.5 s:\n  rank 0: still running\n")
    assert "  rank 1: still running\n" in text and text.endswith("  rank 2: finished")
    assert text.count("in hangs\n") == 2 and "_exit_with_parent" not in text
    assert len(pids()) == 3


@distributed(world=2)
def fails_beside_a_hang() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    time.sleep(1000)


@pytest.mark.nightly
def test_error_beside_a_hang_does_not_wait_for_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfn.testing._pool.GRACE", 0.5)
    with pytest.raises(ValueError, match="the cause") as info:
        fails_beside_a_hang()
    assert "rank 0: still running" in info.value.__notes__[0]
    assert len(pids()) == 3


@distributed(world=2)
def skips() -> None:
    pytest.skip("not here")


def test_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        skips()


@distributed(world=2)
def warns() -> None:
    warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_warnings_are_errors_as_in_the_caller() -> None:
    with pytest.raises(DeprecationWarning, match="old"):
        warns()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert warns() is None


@distributed(world=1)
def checks_types() -> str:
    from shardfn.core import chunk_bounds

    try:
        chunk_bounds("seven", 4, 0)  # pyright: ignore[reportArgumentType]  # the point of the test
    except Exception as error:
        return type(error).__name__
    return "unchecked"


def test_workers_check_annotations_too() -> None:
    assert checks_types() == ["TypeCheckError"]


def test_a_number_of_ranks_may_have_marks() -> None:
    (worlds,) = [mark for mark in vars(test_collectives)["pytestmark"] if mark.name == "parametrize"]
    plain = [n for n in worlds.args[1] if isinstance(n, int)]
    marked = [n for n in worlds.args[1] if n not in plain]
    assert plain and {(*n.values, n.marks[0].name) for n in marked} >= {(4, "nightly")}
    assert test_collectives(world=4) is None


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="1 rank or more"):
        distributed(world=0)
    with pytest.raises(ValueError, match="1 rank or more"):
        distributed(world=[1, pytest.param(0)])
    with pytest.raises(ValueError, match="must be at the module level"):
        distributed(world=2)(lambda: None)
    with pytest.raises(TypeError, match=r"these cannot:\n  - error = <function"):
        fails_on_one(lambda: None)


SCRIPT = """
from shardfn.testing import distributed
import os, torch, torch.distributed as dist

class Box:
    def __init__(self, x): self.x = x

@distributed(world=2)
def total(box):
    x = torch.tensor(box.x + dist.get_rank())
    dist.all_reduce(x)
    return Box((x.item(), os.getpid()))

if __name__ == "__main__":
    boxes = total(Box(5))
    print(*[b.x[0] for b in boxes], *[b.x[1] for b in boxes], flush=True)
"""


@pytest.mark.nightly
def test_plain_script_whose_workers_end_with_it(tmp_path: Path) -> None:
    run = _run_script(tmp_path, SCRIPT)
    a, b, *workers = map(int, run.stdout.split())
    assert (run.returncode, a, b) == (0, 11, 11)
    assert not any(_lives(pid) for pid in workers)


@pytest.mark.nightly
def test_workers_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    run = _run_script(tmp_path, SCRIPT + "    os.kill(os.getpid(), 9)\n")
    workers = [int(word) for word in run.stdout.split()[2:]]
    assert (run.returncode, len(workers)) == (-signal.SIGKILL, 2)
    limit = time.monotonic() + 30
    while any(_lives(pid) for pid in workers) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in workers)


def _run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(text)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, check=False)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.nightly
def test_a_setup_file_that_fails_is_shown(tmp_path: Path) -> None:
    (tmp_path / "odd_setup.py").write_text("raise ValueError('odd setup')")
    script = tmp_path / "plain.py"
    script.write_text(
        "from shardfn.testing import distributed, worker_setup\n"
        "worker_setup('odd_setup.py')\n"
        "@distributed(world=2)\n"
        "def f():\n"
        "    return 1\n"
        "if __name__ == '__main__':\n"
        "    f()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RankError: a worker ended at its start with exit code 1" in done.stderr and "odd setup" in done.stderr


@distributed(world=2)
def environment(name: str) -> str | None:
    return os.environ.get(name)


def test_a_new_worker_has_the_environment_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD_NAME", "odd")
    end_workers(_WORKERS)
    assert environment("ODD_NAME") == ["odd", "odd"]
    end_workers(_WORKERS)
