"""`Schedule`: which passes run over a captured graph, as a single value. Each pass helps the next."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.fx import GraphModule

from shardfn.core import IN_FLIGHT_BYTES, PREFETCH_BYTES

from ._bucket import bucket
from ._donate import donate
from ._edit import draft_graph, settle_graph
from ._overlap import overlap_reductions
from ._prefetch import prefetch
from ._rematerialise import rematerialise
from ._reorder import free_at_last_use, sink_waits
from ._reuse import reuse_gathers


class SchedulePass(NamedTuple):
    """Pass of a schedule with options. Equal stages make equal graphs of the same graph.

    Attributes:
        run: pass.
        options: keyword arguments.
    """

    run: Callable[..., GraphModule]
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, gm: GraphModule) -> GraphModule:
        """Returns the pass's graph."""
        return self.run(gm, **dict(self.options))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Passes over a captured step. All but `budget` only change when things happen. None leaves a pass out.

    First the passes on computation (`rematerialise`), then on messages (`reuse_gathers`, `bucket`), then on times
    (`sink_waits`, `overlap_reductions`, `prefetch`), then on memory (`free_at_last_use`, `donate`), which needs the
    final order. The result depends only on the graph: ranks with the same graph issue the same transfers in the same
    order, and the scheduled graph has the same bits.

        w = wait(all_gather_start(a))            h = all_gather_start(a)
        y = x @ w                                h1 = all_gather_start(b)
        v = wait(all_gather_start(b))     =>     w = wait(h)
        z = y + v                                y = x @ w
                                                 v = wait(h1)
                                                 z = y.add_(v)

    Attributes:
        prefetch: bytes of gathered leaves that may be there ahead of use.
        bucket: bytes up to which small transfers travel together.
        reductions: bytes of whole gradients that may be under way.
        reuse: limit in bytes. A gathered leaf stays in memory while at most this many bytes of other leaves are
            gathered. Default: as `prefetch`.
        budget: bytes that a step's values may take. Activations beyond the budget are computed again. None keeps all
            activations.
        donate: whether pure updates may run in place.
        passes: further passes `f(gm) -> gm`, which run first, in this order.

    Raises:
        ValueError: a number of bytes is negative.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def gathered(own):
        ...     return torch.ops.shardfn.wait(torch.ops.shardfn.all_gather_start(own, [1, 1], "dp"))
        >>> gm = make_fx(lambda a, b, x: (x * gathered(a) + gathered(b),), tracing_mode="fake")(
        ...     torch.ones(1), torch.ones(1), torch.ones(2))
        >>> [n.name for n in Schedule(bucket=0)(gm).graph.nodes][3:-1]
        ['all_gather_start', 'all_gather_start_1', 'wait', 'mul', 'wait_1', 'add']
    """

    prefetch: int | None = PREFETCH_BYTES
    bucket: int | None = 1 << 20
    reductions: int | None = IN_FLIGHT_BYTES
    reuse: int | None = None
    budget: int | None = None
    donate: bool = True
    passes: tuple[Callable[[GraphModule], GraphModule], ...] = ()

    def __post_init__(self) -> None:
        for name in ("prefetch", "bucket", "reductions", "reuse", "budget"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(
                    f"Schedule({name}={value}): must be a number of bytes, 0 or more, or None to leave the pass out."
                )

    def __call__(self, gm: GraphModule, *, fuses: bool = False) -> GraphModule:
        """Returns the scheduled graph. `gm` stays unchanged.

        Args:
            gm: captured step.
            fuses: whether the back end fuses elementwise ops.
        """
        for own in self.passes:
            gm = own(gm)
        draft = draft_graph(gm)
        for stage in self.stages(fuses=fuses)[len(self.passes) :]:
            draft = stage(draft)
        return settle_graph(draft)

    def stages(self, *, fuses: bool = False) -> list[SchedulePass]:
        """Returns the passes of this schedule, in order: first `passes`, then the passes of the room."""
        reuse = self.prefetch if self.reuse is None else self.reuse
        chosen = [
            (True, free_at_last_use, {}),
            (self.budget is not None, rematerialise, {"budget": self.budget}),
            (reuse is not None, reuse_gathers, {"budget": reuse}),
            (self.bucket is not None, bucket, {"limit": self.bucket}),
            (True, sink_waits, {}),
            (self.reductions is not None, overlap_reductions, {"limit": self.reductions}),
            (self.prefetch is not None, prefetch, {"budget": self.prefetch}),
            (True, free_at_last_use, {}),
            (self.donate, donate, {"temporaries": not fuses}),
        ]
        return [
            *map(SchedulePass, self.passes),
            *(SchedulePass(run, tuple(how.items())) for wanted, run, how in chosen if wanted),
        ]
