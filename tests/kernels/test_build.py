"""Covers builds of C++ by several processes: one builds, the others wait for it, and never for a dead or stuck one."""

import contextlib
import errno
import fcntl
import functools
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardfn.kernels import _build, _sources, build, building, cxx_compiler, implemented_by, row_norm

pytestmark = pytest.mark.skipif(cxx_compiler() is None, reason="there is no C++ compiler")

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 100.0  # seconds; a machine with other work needs them
PROGRAM = """
import pathlib, sys
from shardfn.kernels import build
print("begins", flush=True)
sys.stdin.readline()
print(build("probe", pathlib.Path(sys.argv[1])).answer())
"""


class Builders:
    """Processes that build one source in an empty cache, by a compiler that writes down its calls."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.calls, self.cache, self._source = folder / "calls", folder / "cache" / "shardfn", folder / "probe.cpp"
        self.stuck = folder / "stuck"  # while it exists, the compiler does nothing
        self._source.write_text('extern "C" int answer() { return 42; }')
        self.calls.touch()
        (folder / "bin").mkdir()
        compiler = folder / "bin" / "c++"
        wait = f"if [ -e {self.stuck} ]; then exec sleep 600; fi"
        compiler.write_text(f'#!/bin/sh\necho $$ >> {self.calls}\n{wait}\nexec {cxx_compiler()} "$@"\n')
        compiler.chmod(0o755)
        self.env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
        self.env["PATH"] = f"{compiler.parent}{os.pathsep}{os.environ['PATH']}"
        self.all = list[subprocess.Popen[str]]()

    def start(self, source: pathlib.Path | None = None) -> subprocess.Popen[str]:
        """A process that is ready to build."""
        command = [sys.executable, "-c", PROGRAM, str(source or self._source)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.all.append(subprocess.Popen(command, env=self.env, **pipes))
        assert self.all[-1].stdout is not None and self.all[-1].stdout.readline() == "begins\n"
        return self.all[-1]

    def compilers(self) -> list[int]:
        return [int(line) for line in self.calls.read_text().split()]

    def waits(self, process: subprocess.Popen[str]) -> bool:
        """Whether a process has opened the lock."""
        links = pathlib.Path(f"/proc/{process.pid}/fd").glob("*")
        return any(os.readlink(link).endswith(".lock") for link in links)


@pytest.fixture
def builders(tmp_path: pathlib.Path) -> Iterator[Builders]:
    made = Builders(tmp_path)
    yield made
    for process in made.all:
        process.kill()
        process.communicate()
    for pid in made.compilers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def wait_for(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.nightly
def test_of_processes_that_start_together_one_builds(builders: Builders) -> None:
    several = [builders.start() for _ in range(3)]
    for process in several:
        go(process)
    assert [process.communicate(timeout=LIMIT)[0] for process in several] == ["42\n"] * 3
    assert len(builders.compilers()) == 1
    assert [path.suffix for path in builders.cache.iterdir()] == [".so"]


@pytest.mark.skipif(sys.platform != "linux", reason="sees the files that a process has opened")
def test_when_the_builder_is_killed_another_one_builds(builders: Builders) -> None:
    builders.stuck.touch()
    first, second = builders.start(), builders.start()
    go(first)
    wait_for(builders.compilers)
    go(second)
    wait_for(lambda: builders.waits(second))
    time.sleep(0.2)
    assert len(builders.compilers()) == 1  # it waits
    builders.stuck.unlink()
    first.kill()  # its compiler lives on
    assert second.communicate(timeout=LIMIT)[0] == "42\n"
    assert len(builders.compilers()) == 2
    assert [path.suffix for path in builders.cache.iterdir()] == [".so"]  # the folder of the dead one is gone


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="ends processes by signals")
def test_folders_of_dead_builders_alone_are_removed(builders: Builders, tmp_path: pathlib.Path) -> None:
    builders.stuck.touch()
    dead, live = builders.start(), builders.start(tmp_path / "live.cpp")
    (tmp_path / "live.cpp").write_text('extern "C" int answer() { return 43; }')
    go(dead)
    wait_for(builders.compilers)
    [old] = builders.cache.glob("building-*")
    dead.kill()
    dead.communicate()
    assert old.exists()
    go(live)
    wait_for(lambda: len(builders.compilers()) == 2)
    [own] = builders.cache.glob("building-*")
    assert own != old
    builders.stuck.unlink()
    (tmp_path / "other.cpp").write_text('extern "C" int answer() { return 44; }')
    other = builders.start(tmp_path / "other.cpp")
    assert other.communicate("\n", timeout=LIMIT)[0] == "44\n"
    assert live.poll() is None and own.exists()


@pytest.fixture
def source(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A file, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "probe.cpp"
    path.write_text('extern "C" int answer() { return 7; }')
    return path


def test_without_locks_each_process_builds(source: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert build("probe", source).answer() == 7


def test_a_builder_that_is_stuck_is_waited_for_as_long_as_a_compiler_may_take(
    source: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(_build, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    build("probe", source)
    [made] = (source.parent / "shardfn").iterdir()
    made.unlink()
    assert clock == [0.0]
    with made.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert build("probe", source).answer() == 7
    assert clock[0] == pytest.approx(_sources.PATIENCE, abs=0.1)


def test_ops_are_built_beside_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[Any]()
    monkeypatch.setattr(_build, "library", begun.append)
    with building(torch.device("cpu"), ["row_norm", "draw"]):
        pass
    assert sorted(begun) == ["_draw.cpp", "_pool.cpp", "_row_norm.cpp", "_shared.cpp"]
    with building(torch.device("meta"), ["row_norm"]):
        pass
    assert len(begun) == 4


def test_a_built_op_computes() -> None:
    x, one, zero = torch.randn(3, 8), torch.ones(8), torch.zeros(8)
    with building(torch.device("cpu"), ["row_norm"]), implemented_by("native"):
        found = row_norm(x, one, zero, eps=1e-5, centered=True)
    with implemented_by("reference"):
        assert torch.equal(found, row_norm(x, one, zero, eps=1e-5, centered=True))


def test_the_tables_name_all_files_of_the_package() -> None:
    found = {str(path.relative_to(_sources.PACKAGE)) for path in _sources.PACKAGE.rglob("*.cpp")}
    assert found == set(_sources.FLAGS)


def test_a_changed_header_changes_the_name_of_the_library(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.cpp").write_text('#include "b.h"\nint main() {}\n')
    (tmp_path / "b.h").write_text('#include <cmath>\n  #include "none.h"\n#include "c.h"\n')
    names = set[str]()
    for text in ("", "// another text"):
        (tmp_path / "c.h").write_text(text)
        names.add(_sources.digest(tmp_path / "a.cpp", ("-O2",)))
    assert len(names) == 2


def test_a_build_is_announced_with_the_name_of_the_file(builders: Builders) -> None:
    process = builders.start()
    go(process)
    process.wait(LIMIT)
    assert process.stderr is not None
    assert "building C++ for this processor, once: probe" in process.stderr.read()


def test_a_rank_that_is_not_the_first_builds_in_silence(builders: Builders) -> None:
    builders.env["LOCAL_RANK"] = "1"
    process = builders.start()
    go(process)
    process.wait(LIMIT)
    assert process.stderr is not None and process.stderr.read() == ""


def test_without_a_compiler_one_warning_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sources, "compiler", lambda: None)
    monkeypatch.setattr(_sources, "SHIPPED", pathlib.Path("/nowhere"))
    for cached in (_build._load_library, _build._warn_once):
        monkeypatch.setattr(_build, cached.__name__, functools.cache(cached.__wrapped__))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for source in ("_row_norm.cpp", "_draw.cpp", "_row_norm.cpp"):
            assert _build.library(source) is None
    [said] = [str(one.message) for one in caught]
    assert "apt install g++" in said and "no C++ compiler" in said


def test_a_shipped_library_is_loaded_and_none_is_built(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped file has the name of the cached file, without the compiler; a file that cannot be loaded is built."""
    source, form = "kernels/_chain.cpp", _build.generation()
    monkeypatch.setattr(_sources, "SHIPPED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shipped = tmp_path / _sources.file_of(source, form)
    _sources.compile_source(_sources.PACKAGE / source, _sources.flags_of(source, form), shipped)
    assert _build.load_library(source)._name == str(shipped)
    assert not (tmp_path / "cache").exists()
    foreign = tmp_path / "foreign"  # another path, as a library that is loaded stays loaded
    foreign.mkdir()
    (foreign / shipped.name).write_bytes(b"of another system")
    monkeypatch.setattr(_sources, "SHIPPED", foreign)
    assert _build.load_library(source)._name.startswith(str(tmp_path / "cache"))
