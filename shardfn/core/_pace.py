"""`Pace`: when the leaves that ZeRO keeps in pieces move, and how much of them at a time."""

import dataclasses

from ._errors import did_you_mean


@dataclasses.dataclass(frozen=True)
class Pace:
    """How far ahead leaves are gathered, when gradients are reduced, and in what chunks the optimizer's state moves.

    Memory against waiting: only `accumulate` changes a bit, since it changes what is summed in which order.

    Attributes:
        prefetch_bytes: stage 3: gathered parameters that may be alive ahead of their use.
        accumulate: with `sf.accumulate`: "each" reduces every microbatch (gradients stay sharded), "once" reduces their
            local sum at the end (fewer bytes sent, full gradients held).
        chunk_bytes: the optimizer's state goes in chunks of this size through the memory of the update.
        refresh: stages 1 and 2: when a step waits for the parameters that other ranks have updated. "update": before it
            returns. "use": each leaf where the next loss first uses it, or whoever reads the state; leaves then enter a
            loss as they do at stage 3. A captured step waits before it returns.

    Raises:
        ValueError: a field is out of range.

    Example:
        >>> Pace(accumulate="once").prefetch_bytes >> 20
        32
    """

    prefetch_bytes: int = 32 << 20
    accumulate: str = "each"
    chunk_bytes: int = 64 << 20
    refresh: str = "update"

    def __post_init__(self) -> None:
        if self.prefetch_bytes < 0:
            raise ValueError(f"Pace(prefetch_bytes={self.prefetch_bytes}): must not be negative.")
        if self.accumulate not in ("each", "once"):
            hint = did_you_mean(str(self.accumulate), ("each", "once"))
            raise ValueError(f"Pace(accumulate={self.accumulate!r}): use 'each' or 'once'.{hint}")
        if self.refresh not in ("update", "use"):
            hint = did_you_mean(str(self.refresh), ("update", "use"))
            raise ValueError(f"Pace(refresh={self.refresh!r}): use 'update' or 'use'.{hint}")
        if self.chunk_bytes < 1:
            raise ValueError(f"Pace(chunk_bytes={self.chunk_bytes}): must be positive.")
