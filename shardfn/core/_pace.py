"""`Pace`: when the leaves that ZeRO keeps in pieces move, and how much at a time."""

import dataclasses

from ._errors import did_you_mean

# The most bytes of parameters that a step gathers before use, and of whole gradients under way.
PREFETCH_BYTES, IN_FLIGHT_BYTES = 32 << 20, 24 << 20


@dataclasses.dataclass(frozen=True)
class Pace:
    """Pace of transfers: when leaves are gathered and gradients reduced, and how much optimizer state moves at once.

    The fields trade memory against waiting. Only `accumulate` changes results, through the order of sums.

    Attributes:
        prefetch_bytes: at stage 3, the most bytes of parameters that may be gathered before their use.
        accumulate: with gradient accumulation (`sf.accumulate`), "each" reduces the gradients of every microbatch, so
            that gradients stay sharded. "once" reduces the local sum at the end: fewer bytes are sent, and whole
            gradients are held.
        chunk_bytes: the size of the chunks in which an offloaded optimizer state passes through the memory of the
            update.

    Raises:
        ValueError: a field is out of range.

    Example:
        >>> Pace(accumulate="once").prefetch_bytes >> 20
        32
    """

    prefetch_bytes: int = PREFETCH_BYTES
    accumulate: str = "each"
    chunk_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.prefetch_bytes < 0:
            raise ValueError(f"Pace(prefetch_bytes={self.prefetch_bytes}): must not be negative.")
        if self.accumulate not in ("each", "once"):
            hint = did_you_mean(str(self.accumulate), ("each", "once"))
            raise ValueError(f"Pace(accumulate={self.accumulate!r}): use 'each' or 'once'.{hint}")
        if self.chunk_bytes < 1:
            raise ValueError(f"Pace(chunk_bytes={self.chunk_bytes}): must be positive.")
