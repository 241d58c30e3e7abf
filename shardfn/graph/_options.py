"""`Schedule`: the options of the passes over a captured graph, as one value."""

import dataclasses
from collections.abc import Callable

from torch.fx import GraphModule

from ._schedule import Stage, run_all, stages


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Options of `schedule`; a value of it is the pass that they describe. None leaves a pass out.

    Attributes:
        prefetch: bytes of gathered leaves that may be there ahead of their use.
        bucket: bytes up to which small transfers travel together.
        reductions: bytes of whole gradients that may be in flight.
        reuse: a gathered leaf stays in memory while at most this many bytes of others are gathered; default as
            `prefetch`.
        budget: bytes that a step's own values may take; activations beyond it are computed again. None keeps them all.
        donate: whether pure updates may run in place.
        passes: further passes `f(gm) -> gm`, which run first, in this order.

    Raises:
        ValueError: a number of bytes is negative.

    Example:
        >>> Schedule(bucket=None).prefetch
        33554432
    """

    prefetch: int | None = 32 << 20
    bucket: int | None = 1 << 20
    reductions: int | None = 24 << 20
    reuse: int | None = None
    budget: int | None = None
    donate: bool = True
    passes: tuple[Callable[[GraphModule], GraphModule], ...] = ()

    def __post_init__(self) -> None:
        for name in ("prefetch", "bucket", "reductions", "reuse", "budget"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"Schedule({name}={value}): a number of bytes, 0 or more; None leaves the pass out.")

    def __call__(self, gm: GraphModule, *, fuses: bool = False) -> GraphModule:
        """The scheduled graph; `gm` is unchanged.

        Args:
            gm: a captured step.
            fuses: whether it is for a back end that fuses elementwise ops.
        """
        for own in self.passes:
            gm = own(gm)
        return run_all(self.stages(fuses=fuses)[len(self.passes) :], gm)

    def stages(self, *, fuses: bool = False) -> list[Stage]:
        """The passes of this schedule, in order: first `passes`, then those of the function `schedule`."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "passes"}
        return [*map(Stage, self.passes), *stages(**options, temporaries=not fuses)]
