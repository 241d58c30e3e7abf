"""Rounds: small CPU messages in which each rank of a group sends a value and receives all ranks' values.

Rounds go by gloo until the ranks have agreed on their channel (`share`). From then on exchanges among ranks of a single
host go through memory. Every round begins with the same message, in which each rank names the kind of round. So ranks
at different places of a program all detect the difference in this message.

`Notice`: a number that any rank may raise, and that all ranks learn in the same round. A notice rides on agreements.
"""

import dataclasses
import datetime
import enum
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardfn import core
from shardfn._torch import all_gather_single

from ._failure import EndedGroup, close
from ._memory import IN, OUT, Lanes
from ._sharing import shared_lanes


@dataclasses.dataclass
class Notice:
    """Number that the ranks of a mesh exchange without a separate message.

    Each exchange of the mesh's control plane carries the number, so all ranks that have come to the same call have the
    same number.

    Attributes:
        mine: number of this rank. May be set at any time, for example from a signal's handler. The greatest number
            counts.
        told: the greatest number of all ranks, as of the last exchange, which never falls.
    """

    mine: int = 0
    told: int = 0


_NOTICE: core.PerMesh[Notice] = core.PerMesh()


def notice_of(mesh: core.Mesh) -> Notice:
    """Returns the notice of a mesh. The notice outlives communicators, which are made again after a failure.

    Example:
        >>> from shardfn.core import make_mesh
        >>> mesh = make_mesh({"dp": 1}, device="cpu")
        >>> notice_of(mesh) is notice_of(mesh), notice_of(mesh).told
        (True, 0)
    """
    return _NOTICE.of(mesh, Notice)


# Bytes of a ring of exchanges, each two cache lines.
_RING = 4096
# The bits of a value, which is sent as a number from 0 on. The bits above are the kind of the round.
_BITS = 61
_MASK, _ZERO = (1 << _BITS) - 1, 1 << (_BITS - 1)


class Kind(enum.IntEnum):
    """Kinds of rounds of an agreement between ranks.

    EXCHANGE: exchange of a number, within a call. GATHER: gather of an object, within a call. INNER: agreement within a
    call. CALL: agreement at the beginning of a call.
    """

    EXCHANGE = 0
    GATHER = 1
    INNER = 2
    CALL = 3


class Rounds:
    """Rounds of the ranks of a gloo group. All ranks take part in each round, in the same order.

    Args:
        group: the group, or None for a single rank.
        rank: this rank's name in errors.
        failure: function from the error of a round to the error to raise.
        call: this rank's call, in words.
        mismatch: function from the calls of all ranks to the error to raise if ranks are in rounds of different kinds.
        notice: notice that travels with each exchange, or None.
        begin: function that is called with the kind of each round that begins, for a flight recorder, or None.

    Attributes:
        rank: rank as above.
        size: the number of ranks.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        failure: Callable[[BaseException], core.RankError],
        call: Callable[[], str] = lambda: "a message of its own",
        mismatch: Callable[[list[str]], core.RankError] = lambda calls: core.RankError(
            f"ranks are at different calls: {calls}"
        ),
        notice: Notice | None = None,
        begin: Callable[[str], object] | None = None,
    ) -> None:
        self._group, self.rank, self._failure, self._begin = group, rank, failure, begin
        self._call, self._mismatch = call, mismatch
        self._notice = Notice() if notice is None else notice
        self.size: int = 1 if group is None else group.size()
        self._lanes: Lanes | None = None
        self._shared = group is None

    @property
    def shared_bytes(self) -> int:
        """Returns the bytes of memory that this rank has set aside for other ranks."""
        return 0 if self._lanes is None else self._lanes.nbytes

    def share(self, timeout: datetime.timedelta | None) -> None:
        """Lets exchanges go through shared memory, if there is any. All ranks must have chosen the same channel."""
        if self._shared or isinstance(self._group, EndedGroup):
            return
        self._shared = True
        try:
            if dist.get_backend(self._group) == "gloo":
                self._lanes = shared_lanes(self._group, timeout, _RING)
        except RuntimeError as error:
            raise self._failure(error) from error

    def exchange(self, value: int, kind: Kind = Kind.EXCHANGE, timeout: datetime.timedelta | None = None) -> list[int]:
        """Returns every rank's value (60 bits and a sign), in the group's order.

        Through memory the round is a message to each rank. By gloo the round is a single all_reduce of three integers
        if all values are equal.

        Args:
            value: the value.
            kind: the kind of the round, in which ranks must not differ.
            timeout: how long to wait for the other ranks. None: the group's.

        Raises:
            RankError: a rank did not answer in time, or is in a round of another kind.
        """
        if self._group is None:
            self._notice.told = max(self._notice.told, self._notice.mine)
            return [value]
        most, least, values = self._run_round(value, kind, timeout)
        if most == least:
            return [value] * self.size
        return values or [int(v) for v in self._gather_values(_pack_value(value))]  # type: ignore[arg-type]

    def gather(self, value: object) -> list[object]:
        """Returns every rank's picklable value, in the group's order."""
        if self._group is None:
            return [value]
        data = _pack_value(value)
        most, _, _ = self._run_round(data.numel(), Kind.GATHER, None)
        return self._gather_values(data, most)

    def _run_round(self, value: int, kind: Kind, timeout: datetime.timedelta | None) -> tuple[int, int, list[int]]:
        """Returns the greatest value and the least.

        Through memory also all values. The first message of every round.
        """
        if self._begin is not None:
            self._begin(f"agreement ({kind.name.lower()})")
        sent = value + _ZERO | kind << _BITS
        if self._lanes is not None:
            values = self._through_memory(self._lanes, sent, timeout)
            most, least = max(values), min(values)
        else:
            values = []
            x = torch.tensor([sent, -sent, self._notice.mine])
            self._reduce_max(x, timeout)
            most, least, told = x.tolist()
            least = -least
            self._notice.told = max(self._notice.told, told)
        # The greatest and the least, on all ranks: all continue in the same way.
        if most >> _BITS != least >> _BITS:
            raise self._mismatch([str(x) for x in self._gather_values(_pack_value(self._call()))])
        return (most & _MASK) - _ZERO, (least & _MASK) - _ZERO, [(x & _MASK) - _ZERO for x in values]

    def _gather_values(self, data: torch.Tensor, most: int | None = None) -> list[object]:
        """Returns the unpacked values of all ranks. `most` is the greatest number of bytes."""
        if most is None:
            size = torch.tensor([data.numel()])
            self._reduce_max(size)
            most = int(size)
        # A pickle marks the end, so the bytes behind are ignored.
        padded = torch.zeros(most + 8, dtype=torch.uint8)
        padded[: data.numel()] = data
        out = torch.empty(self.size * padded.numel(), dtype=torch.uint8)
        try:
            all_gather_single(out, padded, group=self._group)
        except RuntimeError as error:
            raise self._failure(error) from error
        return [pickle.loads(row.numpy().tobytes()) for row in out.view(self.size, -1)]

    def close(self) -> None:
        """Ends the rounds, and wakes the ranks that wait for this rank."""
        if self._lanes is not None:
            self._lanes.close()
        if self._group is not None and not isinstance(self._group, EndedGroup):
            close(self._group)
            self._group = EndedGroup()

    def _through_memory(self, lanes: Lanes, value: int, timeout: datetime.timedelta | None) -> list[int]:
        out = torch.tensor([[value, self._notice.mine]] * self.size)
        rows = out.unbind()
        limit = None if timeout is None else timeout.total_seconds()
        try:
            lanes.wait(lanes.all_gather(rows[lanes.index], rows), IN | OUT, limit)
        except RuntimeError as error:
            raise self._failure(error) from error
        values, told = zip(*out.tolist(), strict=True)
        self._notice.told = max(self._notice.told, *told)
        return list(values)

    def _reduce_max(self, x: torch.Tensor, timeout: datetime.timedelta | None = None) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        if timeout is not None:
            options.timeout = timeout
        try:
            self._group.allreduce([x], options).wait()
        except RuntimeError as error:
            raise self._failure(error) from error


def _pack_value(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
