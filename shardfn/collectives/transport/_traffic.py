"""How many bytes a rank sends: a counter that every collective reports to.

The counts are as in ring algorithms: the bytes that one rank puts on the wire, independent of the backend. For a full
tensor of M bytes over N ranks: `all_gather` and `psum_scatter` M (N - 1) / N, `psum` 2 M (N - 1) / N; for a local
buffer of m bytes: `all_to_all` m less this rank's block; `ppermute` the bytes that this rank really sends.
"""

import dataclasses
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from shardfn.core import Ambient, as_html, columns


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
