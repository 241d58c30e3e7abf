"""The control plane: small CPU messages by which ranks agree on what they are about to run, and learn who failed.

An exchange is one all_reduce of two integers when the ranks agree. A failing peer becomes a `RankError` that names it.
"""

import hashlib
import pickle
import time

import torch
import torch.distributed as dist

from shardfn.core import Mesh, RankError

from ._failure import COURTESY, Board, close, is_of_the_wire

# Seconds to wait for others to report a failure, and the tag of the messages that try a connection.
GRACE = 3.0
_PROBE = 1 << 29


class Control:
    """A gloo group over the whole mesh for agreement. Making one is collective; on one rank it does nothing.

    Attributes:
        size: the number of ranks.
        rank: this rank.
        lost: whether a peer was lost, so that nothing can be agreed on any more.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.size = mesh.size
        self.rank = mesh.rank
        self._group = mesh.new_group(mesh.axis_names, backend="gloo") if mesh.size > 1 else None
        self.lost = False
        self._board = Board(self._new_name(), self.rank, self.size)

    def exchange(self, value: int) -> list[int]:
        """Every rank's value (63 bits), in rank order.

        Raises:
            RankError: a rank did not answer within the group's timeout.
        """
        if self._group is None:
            return [value]
        pair = torch.tensor([value, -value])
        self._reduce_max(pair)
        if int(pair[0]) == -int(pair[1]):
            return [value] * self.size
        return [int(v) for v in self.gather(value)]  # type: ignore[arg-type]

    def gather(self, value: object) -> list[object]:
        """Every rank's picklable value, in rank order."""
        if self._group is None:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        self._reduce_max(size)
        padded = torch.zeros(int(size) + 8, dtype=torch.uint8)
        padded[: data.numel()] = data
        out = torch.empty(self.size * padded.numel(), dtype=torch.uint8)
        try:
            dist.all_gather_single(out, padded, group=self._group)
        except RuntimeError as error:
            raise self.failure(error) from error
        return [pickle.loads(row.numpy().tobytes()) for row in out.view(self.size, -1)]

    def agree(self, what: str, text: str) -> None:
        """Raises the same error on all ranks unless all pass the same `text`.

        Raises:
            RankError: lists what each rank passed.
        """
        codes = self.exchange(text_hash(text))
        if len(set(codes)) == 1:
            return
        texts = [str(t) for t in self.gather(text)]
        raise RankError(f"ranks disagree on {what}:\n" + _differences(texts))

    def failure(self, error: BaseException) -> RankError:
        """The error to raise when a transfer failed: says which ranks failed and how, or which do not answer."""
        self.lost = True
        self._board.leave()
        told = self._board.read() or self._lost(error)
        self.close()  # wakes those that wait for this rank in turn
        return RankError(
            f"another rank failed while rank {self.rank} was waiting for it. The state passed in is as it was, unless"
            f" its update had begun.\n{told}"
        )

    def is_theirs(self, error: BaseException) -> bool:
        """Whether an error of this rank only says that another one failed."""
        if self._group is None:
            return False
        in_torch = isinstance(error, dist.DistError)
        return is_of_the_wire(error) or (in_torch and bool(self._board.read() or self._closed()))

    def tell(self, what: str) -> None:
        """Leaves word of an error of this rank alone; then lets ranks with errors of their own leave, for a moment."""
        self._board.post(f"rank {self.rank} {what}")
        self._board.leave()
        self._board.wait_for_all(COURTESY)

    def leave(self) -> None:
        """Notes that this rank has left the step by an error that other ranks raise too."""
        self._board.leave()

    def close(self) -> None:
        """Ends the control plane: whoever waits for this rank is woken, and finds what it left word of."""
        self.lost = self._group is not None
        close(self._group)

    def _lost(self, error: BaseException) -> str:
        """Which ranks went without a word; that is left as word for the others, unless they were quicker."""
        silent = self._closed(patience=1.0) or self._board.absent(GRACE)
        names = ", ".join(f"rank {r}" for r in silent) or "a rank"
        what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        line = f"{names} died, or left the step without a word ({what}); restart the job from the last checkpoint."
        if not (told := self._board.read()):
            self._board.post(line)
        return told or f"  - {line}"

    def _closed(self, patience: float = 0.0) -> list[int]:
        """The ranks whose connection is closed: a send to them fails, at once or as soon as the end is noticed."""
        deadline = time.monotonic() + patience
        while True:
            closed = [r for r in range(self.size) if r != self.rank and not self._reaches(r)]
            if closed or time.monotonic() >= deadline:
                return closed
            time.sleep(0.1)

    def _reaches(self, rank: int) -> bool:
        assert self._group is not None
        try:
            self._group.send([torch.zeros(1)], rank, _PROBE)
        except RuntimeError:
            return False
        return True

    def _new_name(self) -> str:
        """A name that all ranks have, and that no other control plane has had while the store has been there."""
        if self._group is None:
            return ""
        now = torch.tensor([time.time_ns() if self.rank == 0 else 0])
        dist.all_reduce(now, op=dist.ReduceOp.MAX, group=self._group)
        return f"{self._group.group_name}.{int(now)}"

    def _reduce_max(self, x: torch.Tensor) -> None:
        try:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise self.failure(error) from error


def text_hash(text: str) -> int:
    """A 62-bit hash of `text` that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _differences(texts: list[str]) -> str:
    lines = [t.splitlines() for t in texts]
    same = set(lines[0]).intersection(*lines[1:])
    out = []
    for rank, mine in enumerate(lines):
        own = [line for line in mine if line not in same] or ["(nothing that the others lack)"]
        out.append("\n".join(f"  - rank {rank}: {line}" for line in own[:20]))
    return "\n".join(out)
