"""Single steps of a channel's transfers by backend, and the local sum.

`is_sole_owner` decides whether a tensor shares memory with no other tensor, so that the memory may be written over.

How many bytes a rank sends: a counter that every collective reports to.

The counts are as in ring algorithms: the bytes that one rank puts on the wire, independent of the backend. For a full
tensor of M bytes over N ranks: `all_gather` and `psum_scatter` M (N - 1) / N, `psum` 2 M (N - 1) / N; for a local
buffer of m bytes: `all_to_all` m less this rank's block; `ppermute` the bytes that this rank really sends.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn._torch import all_gather_single, storage_use_count
from shardfn.core import Ambient, as_html, columns


def as_raw(x: Tensor) -> Tensor:
    """Returns a tensor's bytes, 1-D."""
    return x.view(-1).view(torch.uint8)


def ordered_sum(rows: list[Tensor], out: Tensor | None) -> Tensor:
    """Returns the sum of rows, in order, in `out` if given. 16-bit floats are summed in 32 bits, rounded once."""
    if rows[0].dtype in (torch.bfloat16, torch.float16):
        total = rows[0].float()
        for row in rows[1:]:
            total.add_(row)
        return total.to(rows[0].dtype) if out is None else out.copy_(total)
    if len(rows) == 2:
        return torch.add(rows[0], rows[1], out=out)
    total = torch.add(rows[0], rows[1])
    for row in rows[2:]:
        total.add_(row)
    return total if out is None else out.copy_(total)


def broadcast_from(rank: int) -> dist.BroadcastOptions:
    """Returns the options of an asynchronous broadcast."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = rank, 0, True
    return options


def native_all_gather(blocks: Sequence[Tensor], mine: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Gathers every rank's block into place, by the backend's native operation."""
    equal = len({b.numel() for b in blocks}) == 1
    adjacent = all(a.data_ptr() + a.numel() * a.element_size() == b.data_ptr() for a, b in itertools.pairwise(blocks))
    if equal and adjacent:
        out = blocks[0].as_strided((len(blocks) * mine.numel(),), (1,))
        work = all_gather_single(out, mine.view(-1), group=group, async_op=True)
    else:
        work = dist.all_gather(list(blocks), mine, group=group, async_op=True)
    assert work is not None
    return work


def is_sole_owner(x: Tensor) -> bool:
    """Returns whether only `x`, and the base of the view `x`, hold the memory.

    The caller must have made both, for example by `x.detach()`, and must not have passed either on: references to a
    tensor itself are not counted, only tensors that share the memory. Foreign memory (of numpy, of another library, of
    several processes) always counts as shared.

    Example:
        >>> x = torch.ones(4)
        >>> is_sole_owner(x.view(2, 2)), is_sole_owner(x.view(2, 2).detach())
        (True, False)
    """
    storage = x.untyped_storage()
    if type(x) is not Tensor:  # a capture's storage without memory: the tracer may hold the storage, too
        return _count_holders(storage) <= _WITH_BASE
    most = _ALONE if x._base is None else _WITH_BASE
    return _count_holders(storage) <= most and sys.getrefcount(storage) <= _REFERENCES and storage.resizable()


def may_be_added_to(x: Tensor) -> bool:
    """Returns whether `x.add_(y)` is `x + y` in the memory of `x`, which no other tensor may share.

    See `is_sole_owner`.

    Example:
        >>> may_be_added_to(torch.ones(2, 3).t()), may_be_added_to(torch.ones(1).expand(3))
        (True, False)
    """
    # A subclass may hold other tensors, not shown by the subclass's memory.
    plain = type(x) is Tensor and x.layout is torch.strided and not (x.is_conj() or x.is_neg() or x._is_zerotensor())
    return plain and (x.is_contiguous() or _is_dense(x)) and is_sole_owner(x)


def _is_dense(x: Tensor) -> bool:
    """Returns whether elements lie without overlaps and without gaps."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _count_holders(storage: torch.UntypedStorage) -> int:
    return storage_use_count(storage._cdata)  # pyright: ignore[reportAttributeAccessIssue]


def _count_references(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    # Python has a single object for a storage: a single holder, for any number of references.
    return _count_holders(storage), sys.getrefcount(storage)


# The number of holders, this question included, depends on torch's build.
_ALONE, _REFERENCES = _count_references(torch.empty(4))
_WITH_BASE, _ = _count_references(torch.empty(4).detach().view(-1))


@dataclasses.dataclass
class Traffic:
    """Bytes that a rank sent while `count_traffic` was open.

    Attributes:
        by_op: (operation, axes in the mesh's order) -> [calls, bytes].
        by_dtype: dtype of the sent elements, or None if unknown -> bytes.
    """

    by_op: dict[tuple[str, tuple[str, ...]], list[int]] = dataclasses.field(default_factory=dict)
    by_dtype: dict[torch.dtype | None, int] = dataclasses.field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Returns the number of collectives."""
        return sum(calls for calls, _ in self.by_op.values())

    @property
    def bytes(self) -> int:
        """Returns the bytes sent, over all operations and axes."""
        return sum(sent for _, sent in self.by_op.values())

    def __str__(self) -> str:
        """Returns a line a kind of collective, the most bytes first.

        Example:
            >>> print(Traffic({("psum", ("dp",)): [2, 64], ("all_gather", ("dp", "tp")): [1, 4096]}))
            collective  axes   calls  bytes
            all_gather  dp,tp      1  4,096
            psum        dp         2     64
            all                    3  4,160
        """
        most = sorted(self.by_op.items(), key=lambda item: (-item[1][1], item[0]))
        rows = [(op, ",".join(axes), f"{calls:,}", f"{sent:,}") for (op, axes), (calls, sent) in most]
        ends = [("collective", "axes", "calls", "bytes"), ("all", "", f"{self.calls:,}", f"{self.bytes:,}")]
        return columns([ends[0], *rows, ends[1]])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def across(self, axis: str, shape: Mapping[str, int]) -> float:
        """Returns the bytes sent to ranks of another index along `axis`, if collectives send equal parts to all ranks.

        So the bytes that a node sends to other nodes are `across("node", mesh.shape)` times the ranks of a node.

        Args:
            axis: a mesh axis.
            shape: axis -> size.

        Example:
            >>> traffic = Traffic({("all_gather", ("node", "gpu")): [1, 30], ("all_gather", ("gpu",)): [1, 8]})
            >>> traffic.across("node", {"node": 2, "gpu": 2})
            20.0
        """
        total = 0.0
        for (_, axes), (_, sent) in self.by_op.items():
            ranks = math.prod(shape[a] for a in axes)
            if axis in axes and ranks > 1:
                total += sent * (ranks - ranks // shape[axis]) / (ranks - 1)
        return total

    def add(self, op: str, axes: tuple[str, ...], sent: int, dtype: torch.dtype | None) -> None:
        """Counts the bytes of a single collective."""
        entry = self.by_op.setdefault((op, axes), [0, 0])
        entry[0] += 1
        entry[1] += sent
        self.by_dtype[dtype] = self.by_dtype.get(dtype, 0) + sent


_COUNTERS = Ambient[Traffic]("counters of traffic")


def record(op: str, axes: tuple[str, ...], sent: int, *, dtype: torch.dtype | None = None) -> None:
    """Reports a collective to every open counter. Without an open counter the cost is a single test.

    Args:
        op: the collective's name.
        axes: the mesh axes that it crossed, in the mesh's order.
        sent: bytes that this rank sends.
        dtype: the dtype of the sent elements, for `Traffic.by_dtype`.

    Example:
        >>> with count_traffic() as traffic:
        ...     record("psum", ("dp",), 64)
        >>> traffic.by_op
        {('psum', ('dp',)): [1, 64]}
    """
    if _COUNTERS:
        for counter in _COUNTERS.all:
            counter.add(op, axes, sent, dtype)


def counting_nothing() -> AbstractContextManager[None]:
    """Silences all counters: captures send no messages."""
    return _COUNTERS.hidden()


def count_traffic() -> AbstractContextManager[Traffic]:
    """Counts the bytes that this rank sends while the context is open.

    Counters nest. Each counter sees everything below.

    A captured program is counted whenever it runs.

    Returns:
        A context manager that yields a `Traffic`. The counts can still be read afterwards.

    Example:
        >>> with count_traffic() as traffic:
        ...     record("all_gather", ("dp",), 10)
        ...     record("all_gather", ("dp",), 20)
        >>> traffic.calls, traffic.bytes
        (2, 30)
    """
    return _COUNTERS.bound(Traffic())
