"""Covers imports on macOS and Windows: without the parts of Python that these systems lack, all modules import."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Modules and functions of `os` that a system lacks.
POSIX_ONLY = ("fcntl", "resource", "termios", "pwd", "grp")
LINUX_ONLY = ("memfd_create", "posix_fallocate", "posix_fadvise", "sched_getaffinity", "eventfd", "pidfd_open")
NOT_WINDOWS = (*LINUX_ONLY, "fork", "register_at_fork", "getuid", "mkfifo", "pread", "pwrite", "fchmod")
SYSTEMS = {"darwin": ((), LINUX_ONLY), "win32": (POSIX_ONLY, NOT_WINDOWS)}

PROGRAM = """
import importlib, os, pkgutil, platform, sys, sysconfig

name, modules, functions = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
# The parts of torch differ by system, too, and are those of this one here.
import torch, torch.distributed.checkpoint, torch.utils.cpp_extension
sysconfig.get_config_vars(), platform.machine()
for module in modules:
    sys.modules[module] = None
for function in functions:
    if hasattr(os, function):
        delattr(os, function)
sys.platform = name
import shardfn
for found in pkgutil.walk_packages(shardfn.__path__, "shardfn."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
params = {"w": torch.ones(3)}
step = shardfn.sharded_step(lambda p, x: (p["w"] * x).sum(), shardfn.optim.sgd(0.5))
state, metrics = step(step.init(params), torch.ones(3))
print(metrics["loss"].item(), state.params["w"].local.tolist())
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", SYSTEMS)
def test_everything_imports_and_a_step_runs(name: str) -> None:
    modules, functions = SYSTEMS[name]
    command = [sys.executable, "-c", PROGRAM, name, " ".join(modules), " ".join(functions)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[-2] == "3.0 [0.5, 0.5, 0.5]"
