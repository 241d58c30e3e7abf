"""Covers the pool of threads of native kernels: made once, in forked processes anew, shared by callers, equal bits."""

import os
import pathlib
import subprocess
import sys

import pytest

from shardfn.kernels import cxx_compiler

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of a process"),
    pytest.mark.skipif(cxx_compiler() is None, reason="there is no C++ compiler"),
]
HEAD = """
import os, threading, time, torch
from shardfn import kernels

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)  # torch's own threads do not outlive a fork
x, packed = torch.randn(64, 300), kernels.pack_rows(torch.randn(700, 300))
norms = torch.ones(300), torch.zeros(300)

def linear():
    return kernels.row_linear(x, packed, 700)

want, before = linear(), threads()
counted, torch.get_num_threads = torch.get_num_threads, lambda: 3
"""


def run(text: str) -> list[str]:
    """The lines that a process prints."""
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", HEAD + text], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_all_kernels_share_threads_that_are_made_once() -> None:
    text = """
assert all(torch.equal(linear(), want) for _ in range(300))
for _ in range(20):
    kernels.gelu(torch.randn(64, 4096))
    kernels.row_norm(torch.randn(640, 300), *norms, eps=1e-5, centered=True)
print(threads() - before)
torch.get_num_threads = lambda: 5
assert all(torch.equal(linear(), want) for _ in range(50))
print(threads() - before)
"""
    assert run(text) == ["2", "4"]


@pytest.mark.nightly
def test_a_forked_process_makes_its_own_threads() -> None:
    text = """
def forked(depth):
    assert torch.equal(linear(), want)
    child = os.fork() if depth else None
    if child == 0:
        alone = threads()
        forked(depth - 1)
        print(alone, threads(), flush=True)
        os._exit(0)
    if child:
        _, status = os.waitpid(child, 0)
        assert status == 0 and all(torch.equal(linear(), want) for _ in range(50))

forked(2)
print(threads() - before)
"""
    assert run(text) == ["1 3", "1 3", "2"]


@pytest.mark.nightly
def test_callers_of_several_threads() -> None:
    text = """
wrong = []

def call():
    for _ in range(200):
        if not torch.equal(linear(), want):
            wrong.append(1)

callers = [threading.Thread(target=call) for _ in range(4)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
for _ in range(200):  # a joined thread may still be listed
    if threads() - before > 2:
        time.sleep(0.05)
print(len(wrong), threads() - before)
"""
    assert run(text) == ["0 2"]


@pytest.mark.nightly
def test_a_process_ends_while_its_threads_sleep() -> None:
    assert run("print(torch.equal(linear(), want))") == ["True"]


@pytest.mark.nightly
def test_threads_for_kernels_leave_one_to_torch() -> None:
    text = """
torch.get_num_threads = counted
torch.set_num_threads(3)
from shardfn.kernels import threads_for_kernels

def seen():
    with threads_for_kernels():
        assert torch.get_num_threads() == 1 and torch.equal(linear(), want)
        with threads_for_kernels():  # inside of another one
            assert torch.equal(linear(), want)
        assert torch.get_num_threads() == 1
    return threads() - before

print(seen(), torch.get_num_threads())
try:
    with threads_for_kernels():
        raise KeyError
except KeyError:
    print(torch.get_num_threads())
torch.set_num_threads(1)
print(seen(), torch.get_num_threads())
"""
    assert run(text) == ["2 3", "3", "2 1"]
