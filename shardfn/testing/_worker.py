"""One worker of the pool behind `distributed`: imports nothing of shardfn before a test or a setup file.

A worker takes one call at a time from a pipe, answers with an outcome, and waits for the message that every rank is
done before leaving the process group, so no peer loses data on the way.
"""

import ast
import datetime
import faulthandler
import importlib.machinery
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_MODULES: dict[str, tuple[int, types.ModuleType]] = {}


def main(conn: Connection, stack: int, port: int) -> None:
    """Serves calls until the parent closes the pipe.

    Args:
        conn: pipe to the pool.
        stack: file to which a signal writes the stacks of all threads.
        port: port of the store by which ranks find one another.
    """
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    conn.send(("ready", os.getpid()))
    while (call := _receive_call(conn)) is not None:
        _serve_call(conn, call, store)
        conn.send(("idle",))


def _receive_call(conn: Connection) -> dict[str, Any] | None:
    try:
        return conn.recv()
    except EOFError:
        return None


def _serve_call(conn: Connection, call: dict[str, Any], store: dist.Store) -> None:
    failed = True
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            filters: Any = warnings.filters  # a list that the type stubs declare as a read-only sequence
            filters.extend(pickle.loads(call["filters"]))
            value = pickle.dumps(_run_task(call, store, lambda: conn.send(("started",))))
        conn.send(("finished", time.monotonic(), value))
        failed = False
    except BaseException as error:
        conn.send(("failed", time.monotonic(), *_describe_error(error)))
    _receive_call(conn)
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except RuntimeError:
        if not failed:
            raise


def _run_task(call: dict[str, Any], store: dist.Store, tell_started: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    if call["world"] > 1:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call["number"]), store),
            rank=call["rank"],
            world_size=call["world"],
            # Later than the parent's limit, as the parent reports better.
            timeout=datetime.timedelta(seconds=2 * call["timeout"] + 60),
        )
    tell_started()
    function: Any = _load_module(call["module"], call["file"], call["rewrite"])
    for name in call["qualname"].split("."):
        function = getattr(function, name)
    args, kwargs = pickle.loads(call["arguments"])
    return function.__distributed__(*args, **kwargs)


def _load_module(name: str, file: str, rewrite: bool) -> types.ModuleType:
    """Returns the module of a test, imported from the file once for each modification time."""
    here = sys.modules.get(name)
    if file not in _MODULES and name != "__main__" and getattr(here, "__file__", None) == file:
        return sys.modules[name]
    mtime = os.stat(file).st_mtime_ns
    if file not in _MODULES or _MODULES[file][0] != mtime:
        # A script must not run `if __name__ == "__main__"` here. multiprocessing knows this alias, too.
        module = load("__mp_main__" if name == "__main__" else name, file, rewrite)
        _MODULES[file] = mtime, module
    sys.modules[name] = _MODULES[file][1]
    return _MODULES[file][1]


def load(name: str, file: str, rewrite: bool) -> types.ModuleType:
    """Returns a module from a file, under a name, run now."""
    spec = importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file, rewrite))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles afresh, with pytest's explanations of a failed `assert` where pytest is the caller."""

    def __init__(self, name: str, file: str, rewrite: bool) -> None:
        self.name, self.path, self.rewrite = name, file, rewrite

    def get_code(self, fullname: str) -> types.CodeType:
        del fullname
        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        if self.rewrite:
            from _pytest.assertion.rewrite import rewrite_asserts

            rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


def _describe_error(error: BaseException) -> tuple[bytes | None, str, str]:
    """Returns the pickled error (None where pickling fails), the one-line text, and the traceback."""
    last = error.__traceback__
    while last is not None and last.tb_frame.f_code.co_filename == __file__:
        last = last.tb_next
    text = "".join(traceback.format_exception(type(error), error, last or error.__traceback__)).rstrip()
    line = "".join(traceback.format_exception_only(type(error), error)).strip()
    return _pickle_error(error), line, text


def _pickle_error(error: BaseException) -> bytes | None:
    if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
        return None  # would end the parent
    if (outcomes := sys.modules.get("_pytest.outcomes")) and isinstance(error, outcomes.OutcomeException):
        type(error).__module__ = outcomes.__name__  # pytest writes "builtins" there, where pickle does not find them
    builtin = [kind for kind in type(error).__mro__ if kind.__module__ == "builtins" and issubclass(kind, Exception)]
    for make in (lambda: error, *(lambda kind=kind: kind(str(error)) for kind in builtin)):
        try:
            data = pickle.dumps(make())
            if str(pickle.loads(data)) == str(error):
                return data
        except Exception:
            continue
    return None


def _exit_with_parent() -> None:
    """Exits when the parent does: standard input is a pipe that ends with the parent."""
    os.read(0, 1)
    os._exit(1)
