"""Shape checks for the whole package, here and in the workers of `shardfn.testing.distributed`."""

import argparse
import ast
import collections
import fcntl
import functools
import gc
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


def _parse_without_collection(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `ast.parse` for Python 3.11, where a garbage collection during the call may run another thread's call.

    Two calls at once raise "AST constructor recursion depth mismatch" (https://github.com/python/cpython/issues/106905).
    """

    @functools.wraps(parse)
    def safe(*args: Any, **kwargs: Any) -> Any:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return parse(*args, **kwargs)
        finally:
            if enabled:
                gc.enable()

    return safe


if sys.version_info < (3, 12):
    ast.parse = _parse_without_collection(ast.parse)

# The oracles of collectives and optimizers, in an environment of their own.
JAX = ["jax==0.10.2", "optax==0.2.8"]

# Must precede the first import of shardfn. The rooms of graphs and of the command line have no tensors in their
# signatures; checking every call there takes minutes.
CHECKED = ["core", "kernels", "collectives", "memory", "optim", "nn", "data", "models", "transforms", "testing"]
_spec = importlib.util.spec_from_file_location("shape_checks", pathlib.Path(__file__).with_name("shape_checks.py"))
assert _spec is not None and _spec.loader is not None
shape_checks = importlib.util.module_from_spec(_spec)
sys.modules["shape_checks"] = shape_checks
_spec.loader.exec_module(shape_checks)
shape_checks.install([f"shardfn.{room}" for room in CHECKED])
torch.set_num_threads(1)

from shardfn.testing import worker_setup  # noqa: E402  # after the checks

worker_setup(__file__)
if __name__.startswith("_worker_setup"):
    # In the process that workers are forked from: the imports of a first capture, once and not in each worker.
    import torch._dynamo
    import torch.fx.experimental.symbolic_shapes


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--share 3/12`: of the tests that are left, those of one part of twelve."""
    parser.addoption("--share", metavar="K/N", type=_share, help="only part K of N (0 <= K < N) of the tests")


@pytest.hookimpl(tryfirst=True)  # before `-m` reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases of `day` that run at night, and keeps the share of the tests that `--share` asks for."""
    cases = collections.defaultdict(list)
    by_id = any("[" in arg for arg in config.args)  # cases that the command line names run
    for item in items:
        if item.get_closest_marker("day") and not item.get_closest_marker("nightly") and not by_id:
            cases[item.nodeid.partition("[")[0]].append(item)
    for family in cases.values():
        for item in _by_night(family):
            item.add_marker(pytest.mark.nightly)
    share = config.getoption("--share")
    if share is not None:
        part, parts = share
        mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part]
        taken = set(mine)
        config.hook.pytest_deselected(items=[item for item in items if item not in taken])
        items[:] = mine


def _by_night(family: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of a test that run at night: all but those that its `day` names, or all but a number, evenly spaced."""
    mark = family[0].get_closest_marker("day")
    assert mark is not None
    if isinstance(mark.args[0], int):
        day = {i * len(family) // mark.args[0] for i in range(mark.args[0])}
        return [item for i, item in enumerate(family) if i not in day]
    ids = {item.nodeid.partition("[")[2][:-1]: item for item in family}
    unknown = set(mark.args) - ids.keys()
    if unknown:
        raise pytest.UsageError(f"{family[0].nodeid}: day names {sorted(unknown)}, and its cases are {list(ids)}")
    return [item for name, item in ids.items() if name not in mark.args]


def _share(text: str) -> tuple[int, int]:
    """The part of a test depends on its name alone, so that tests keep their parts when others are added."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share: K/N with 0 <= K < N, as in 3/12")
    return int(part), int(parts)


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="session")
def jax_python() -> str:
    """A Python that has jax and optax: `$JAX_PYTHON`, or one that the first test to need it installs from PyPI."""
    given = os.environ.get("JAX_PYTHON")
    if given:
        return given
    venv = pathlib.Path(tempfile.gettempdir()) / f"shardfn-jax-{os.getuid()}"
    python = venv / "bin" / "python"
    with open(f"{venv}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one run of the tests share the environment
        if not (venv / "complete").exists():
            make = [[sys.executable, "-m", "venv", str(venv)], [str(python), "-m", "pip", "install", "-q", *JAX]]
            for command in make:
                if subprocess.run(command, capture_output=True, check=False).returncode:
                    pytest.skip(f"{' '.join(JAX)} cannot be installed: set JAX_PYTHON to a Python that has them")
            (venv / "complete").touch()
    return str(python)
