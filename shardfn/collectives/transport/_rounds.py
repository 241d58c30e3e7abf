"""Rounds: small CPU messages in which each rank of a group sends a value and receives those of all.

They go by gloo until the ranks have agreed on their channel (`share`); from then on exchanges among ranks of one host
go through memory.
"""

import datetime
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardfn.core import RankError

from ._failure import EndedGroup, close
from ._memory import IN, OUT, Lanes
from ._notice import Notice
from ._sharing import shared_lanes

# Bytes of a ring of exchanges, each two cache lines.
_RING = 4096


class Rounds:
    """The rounds of the ranks of one gloo group. All of them take part in each, in the same order.

    Args:
        group: the group; None for one rank.
        rank: this rank's name in errors.
        failure: from the error of a round to the error to raise.
        notice: travels with each exchange; None = no notice.

    Attributes:
        rank: as above.
        size: the number of ranks.
    """

    def __init__(
        self, group: Any, rank: int, failure: Callable[[BaseException], RankError], notice: Notice | None = None
    ) -> None:
        self._group, self.rank, self._failure = group, rank, failure
        self._notice = Notice() if notice is None else notice
        self.size: int = 1 if group is None else group.size()
        self._lanes: Lanes | None = None
        self._shared = group is None

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory that this rank has set aside for others to read."""
        return 0 if self._lanes is None else self._lanes.nbytes

    def share(self, timeout: datetime.timedelta | None) -> None:
        """Lets exchanges go through memory, if the ranks share some; once. All must have chosen the same channel."""
        if self._shared or isinstance(self._group, EndedGroup):
            return
        self._shared = True
        try:
            if dist.get_backend(self._group) == "gloo":
                self._lanes = shared_lanes(self._group, timeout, _RING)
        except RuntimeError as error:
            raise self._failure(error) from error

    def exchange(self, value: int) -> list[int]:
        """Every rank's value (63 bits), in the group's order.

        Through memory it is one message to each rank. By gloo it is one all_reduce of three integers if all are the
        same.

        Raises:
            RankError: a rank did not answer within the group's timeout.
        """
        if self._group is None:
            self._notice.told = max(self._notice.told, self._notice.mine)
            return [value]
        if self._lanes is not None:
            return self._through_memory(self._lanes, value)
        # The greatest and the least, on all ranks: all go on to the gather, or none.
        sent = torch.tensor([value, -value, self._notice.mine])
        self._reduce_max(sent)
        most, least, told = sent.tolist()
        self._notice.told = max(self._notice.told, told)
        if most == -least:
            return [value] * self.size
        return [int(v) for v in self.gather(value)]  # type: ignore[arg-type]

    def gather(self, value: object) -> list[object]:
        """Every rank's picklable value, in the group's order."""
        if self._group is None:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        self._reduce_max(size)
        # A pickle marks its own end, so the bytes behind it are ignored.
        padded = torch.zeros(int(size) + 8, dtype=torch.uint8)
        padded[: data.numel()] = data
        out = torch.empty(self.size * padded.numel(), dtype=torch.uint8)
        try:
            dist.all_gather_single(out, padded, group=self._group)
        except RuntimeError as error:
            raise self._failure(error) from error
        return [pickle.loads(row.numpy().tobytes()) for row in out.view(self.size, -1)]

    def close(self) -> None:
        """Ends them, which wakes the ranks that wait for this one."""
        if self._lanes is not None:
            self._lanes.close()
        if self._group is not None and not isinstance(self._group, EndedGroup):
            close(self._group)
            self._group = EndedGroup()

    def _through_memory(self, lanes: Lanes, value: int) -> list[int]:
        out = torch.tensor([[value, self._notice.mine]] * self.size)
        rows = out.unbind()
        try:
            lanes.wait(lanes.all_gather(rows[lanes.index], rows), IN | OUT)
        except RuntimeError as error:
            raise self._failure(error) from error
        values, told = zip(*out.tolist(), strict=True)
        self._notice.told = max(self._notice.told, *told)
        return list(values)

    def _reduce_max(self, x: torch.Tensor) -> None:
        try:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise self._failure(error) from error
