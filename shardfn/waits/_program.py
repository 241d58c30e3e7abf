"""The wait of a command of `shardfn` that loads a model: from the first import to the end of its start."""

import itertools
import sys

from ._waits import Wait, waiting

_COMMANDS = {"generate", "serve"}
_RANK = "shardfn.cli._serve_rank"

_STARTED: list[Wait] = []  # of this process: at most one


def announce_start() -> None:
    """Begins the wait of this process if the process is a command with imports that take seconds.

    `end_start` ends the wait. This file calls the function when imported, before any other import of the package.
    """
    if _is_command(sys.orig_argv):
        _STARTED.append(waiting("starting", whole=True))


def end_start() -> None:
    """Ends the wait of `announce_start`."""
    while _STARTED:
        _STARTED.pop().end()


def _is_command(argv: list[str]) -> bool:
    """Returns whether Python's arguments begin `shardfn generate`, `shardfn serve` or a rank of a server.

    Example:
        >>> _is_command(["python", "/usr/bin/shardfn", "generate", "MODEL"]), _is_command(["python", "-m", "pytest"])
        (True, False)
    """
    pairs = itertools.pairwise(argv[1:])  # the program's name comes after Python's
    return _RANK in argv or any(word.rpartition("/")[2] == "shardfn" and then in _COMMANDS for word, then in pairs)


announce_start()
