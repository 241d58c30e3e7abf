"""Runs candidates of a file in a separate process, with limits of time and memory.

The process protects from mistakes of a candidate, such as a hang or a crash. It does not protect from a program that
means harm: a candidate may read and write files as the user may.
"""

import importlib.util
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ._build import library
from ._harness_modules import MODULE_OPS, find_op
from ._op import KERNELS

# Seconds until torch is imported, and until the C++ of the ops is built.
_START = 600.0
_PROGRAM = "import sys; from shardfn.kernels._harness_process import serve; serve(*sys.argv[1:])"


class CandidateError(ValueError):
    """A candidate cannot be judged.

    Args:
        reason: "file", "import", "missing", "signature", "time", "memory", "exit", or "harness" for an error outside of
            the candidate.
        message: the rule, the facts, and the remedy.

    Attributes:
        reason: see the arguments.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ProcessLimits(NamedTuple):
    """ProcessLimits of the process of a candidate.

    Attributes:
        seconds: seconds for the import of the file, and again for all checks or measurements.
        memory_bytes: bytes of address space in addition to the process's at its start.
    """

    seconds: float = 120.0
    memory_bytes: int = 4 << 30


def load_candidate(path: pathlib.Path, name: str) -> Callable[..., Any]:
    """Returns a function of a Python file.

    Raises:
        CandidateError: the file has no such function, cannot be read, or raises when it is imported.
    """
    return _find_functions(path, (name,))[name]


def run_apart(path: pathlib.Path, task: str, names: Sequence[str], limits: ProcessLimits, *more: str) -> list[Any]:
    """Runs a task for candidates of a file in a separate process.

    Args:
        path: Python file.
        task: "check" or "measure".
        names: names of ops. Empty: all ops for which the file has functions.
        limits: limits of the process.
        more: arguments of the task.

    Returns:
        A result for each op, of JSON.

    Raises:
        CandidateError: for mistakes of the file or its functions.
    """
    if not path.is_file():
        raise CandidateError("file", f"candidates must be in a Python file, got {str(path)!r}, which is not a file")
    incoming, outgoing = os.pipe()
    wanted = [str(outgoing), str(path), task, ",".join(names), str(limits.memory_bytes), *more]
    root = str(pathlib.Path(__file__).parents[2])
    before = os.environ.get("PYTHONPATH")
    variables = os.environ | {"PYTHONPATH": root if not before else f"{root}{os.pathsep}{before}"}
    with tempfile.TemporaryFile() as printed, os.fdopen(incoming, "rb", buffering=0) as reader:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *wanted],
            **{"pass_fds": (outgoing,), "start_new_session": True, "env": variables},
            **{"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": printed},
        )
        os.close(outgoing)
        try:
            found = _read_messages(reader, path, limits)
        finally:
            _end_group(process)
        if found is not None:
            return found
        printed.seek(0)
        raise CandidateError("exit", _explain_exit(path, process.returncode, printed.read().decode(errors="replace")))


def _read_messages(reader: Any, path: pathlib.Path, limits: ProcessLimits) -> list[Any] | None:
    """Returns the results, or None where the process ended without results."""
    left, received = {"started": limits.seconds, "loaded": _START, "built": limits.seconds}, b""
    phase, seconds = "start", _START
    while True:
        if not select.select([reader], [], [], seconds)[0]:
            during = {"started": "the import", "built": "the run"}.get(phase, phase)
            raise CandidateError(
                "time",
                f"candidates of {path} must end within {seconds:g} s, got no end of {during}. Look for an endless loop,"
                " or pass more seconds",
            )
        received += (read := reader.read(1 << 16))
        if not read:
            return None
        *lines, received = received.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "results" in message:
                return message["results"]
            if "error" in message:
                raise CandidateError(*message["error"])
            phase = message["phase"]
            seconds = left[phase]


def _end_group(process: subprocess.Popen[Any]) -> None:
    """Ends a process with its children. A process that has closed its pipe gets a second to end by itself."""
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _explain_exit(path: pathlib.Path, status: int, printed: str) -> str:
    how = f"the signal {signal.Signals(-status).name}" if status < 0 else f"the exit status {status}"
    last = "".join(f"\n  {line}" for line in printed.splitlines()[-5:])
    return f"candidates of {path} must return, but ended the process, got {how}. The last lines:{last}"


# In the process.


def serve(outgoing: str, path: str, task: str, names: str, memory_bytes: str, *more: str) -> None:
    """Runs a task, and writes messages in JSON to a pipe."""
    from . import _harness, _harness_measure

    tasks: dict[str, Callable[..., Any]] = {
        "check": lambda name, f: _harness.check(name, f)._asdict(),
        "measure": lambda name, f: _harness_measure.measure(
            name, f, _harness_measure.import_steps(more[1:]), rounds=int(more[0])
        )._asdict(),
    }
    with os.fdopen(int(outgoing), "w", buffering=1) as pipe:

        def send(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")

        send(phase="started")
        _limit_memory(int(memory_bytes))
        try:
            found = _find_functions(pathlib.Path(path), tuple(filter(None, names.split(","))))
            for name, f in found.items():
                _harness.check_signature(find_op(name), f)
            send(phase="loaded")
            for name in found:
                library(find_op(name).source)
            send(phase="built")
            send(results=[tasks[task](name, f) for name, f in found.items()])
        except CandidateError as error:
            send(error=[error.reason, str(error)])
        except Exception as error:  # a mistake of the harness or of a step
            send(error=("harness", f"{task} must return, got {type(error).__name__}: {error}"))


def _limit_memory(more: int) -> None:
    import resource

    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc/self/statm") else 0
    if pages:
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _find_functions(path: pathlib.Path, names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    spec = importlib.util.spec_from_file_location(f"candidates_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise CandidateError("file", f"candidates must be in a Python file, got {str(path)!r}. Rename it to end in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CandidateError(
            "import", f"{path} must be importable, but raises {type(error).__name__}: {error}"
        ) from error
    functions = {k: v for k, v in vars(module).items() if callable(v) and k in {*KERNELS, *MODULE_OPS}}
    if missing := [name for name in names if name not in functions]:
        raise CandidateError(
            "missing", f"{path} must have a function named {missing[0]!r}, as its op, got {_list_names(module)}"
        )
    if not functions:
        raise CandidateError(
            "missing",
            f"{path} must have a function with the name of an op, as `shardfn kernels list` prints them, got"
            f" {_list_names(module)}",
        )
    return {name: functions[name] for name in names or functions}


def _list_names(module: Any) -> str:
    return ", ".join(k for k, v in vars(module).items() if callable(v) and not k.startswith("_")) or "no function"
