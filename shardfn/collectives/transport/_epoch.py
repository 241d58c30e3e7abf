"""The beginning of an epoch: all ranks of a mesh meet at the job's store before communicators are made.

An epoch is the life of a mesh's communicators. An epoch ends on every rank with the first error between ranks, and the
next call of each rank begins the next epoch, with the next number. Groups are made only when all ranks have come: a
rank that waits in vain has made no group, and the ranks' counts of groups stay the same.

A warning appears while a rank waits for ranks that may never come, such as when a single rank makes a collective call.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from shardfn.core import Mesh

from ._failure import Board

# Seconds between two looks at the store: at first, and at most.
_FIRST, _LONGEST = 0.001, 0.05


def absent_from(mesh: Mesh, epoch: int) -> list[int]:
    """Waits for all ranks to begin an epoch. Returns the ranks that have not arrived within `agreement_timeout`.

    Ranks meet in rounds. A rank that gives up ends the round for all ranks, unless the last rank has come first. The
    other ranks continue to the next round.
    """
    if mesh.size == 1 or dist.get_backend() == "fake":
        return []
    deadline, number = time.monotonic() + mesh.agreement_timeout.total_seconds(), 0
    while True:
        board = Board(f"epoch/{mesh.name}/{epoch}/{number}", mesh.rank, mesh.size)
        outcome = board.get(_OUTCOME) or _meet_round(board, mesh.size, deadline)
        if outcome == _GO:
            return []
        if time.monotonic() > deadline:
            return board.absent()
        number += 1


_OUTCOME, _GO, _VOID = "outcome", "go", "void"


def _meet_round(board: Board, size: int, deadline: float) -> str:
    """Returns the outcome of a round, decided by the last rank to come, or the first to give up.

    All ranks have the same outcome.
    """
    board.leave()
    try:
        if board.count(1) == size:
            return board.decide(_OUTCOME, _GO)
        pause = _FIRST
        while time.monotonic() < deadline:
            if outcome := board.get(_OUTCOME):
                return outcome
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return board.decide(_OUTCOME, _VOID)
    except BaseException:  # an interrupt from the keyboard
        board.decide(_OUTCOME, _VOID)
        raise


_LOG = logging.getLogger("shardfn.collectives")
# Seconds of waiting before the warning. Calls that all ranks make at once take less.
SECONDS = 30.0


@contextlib.contextmanager
def naming_the_wait(what: str) -> Iterator[None]:
    """Logs a warning if the block takes long: `what` names the waiting rank and the awaited event."""
    timer = threading.Timer(SECONDS, _LOG.warning, [f"{what}, and has waited for {SECONDS:g} s."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
