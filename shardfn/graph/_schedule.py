"""Runs the passes in an order in which each helps the next."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.fx import GraphModule

from ._bucket import bucket as bucket_pass
from ._donate import donate as donate_pass
from ._edit import drafted, settled
from ._free import free_at_last_use
from ._overlap import overlap_reductions
from ._prefetch import prefetch as prefetch_pass
from ._rematerialise import rematerialise
from ._reuse import reuse_gathers
from ._sink import sink_waits


def schedule(
    gm: GraphModule,
    *,
    budget: int | None = None,
    prefetch: int | None = 32 << 20,
    bucket: int | None = 1 << 20,
    reductions: int | None = 24 << 20,
    reuse: int | None = None,
    donate: bool = True,
    temporaries: bool = True,
) -> GraphModule:
    """Schedules a captured step by a sequence of passes; None leaves an option's pass out. Only `budget` adds work.

    First the passes on computation (`rematerialise`), then on messages (`reuse_gathers`, `bucket`), then on their times
    (`sink_waits`, `overlap_reductions`, `prefetch`), then on memory (`free_at_last_use`, `donate`), which needs the
    final order. It is a function of the graph alone: ranks with the same graph issue the same transfers in the same
    order.

        w = wait(all_gather_start(a))            h = all_gather_start(a)
        y = x @ w                                h1 = all_gather_start(b)
        v = wait(all_gather_start(b))     =>     w = wait(h)
        z = y + v                                y = x @ w
                                                 v = wait(h1)
                                                 z = y.add_(v)

    Args:
        gm: a captured step.
        budget: bytes that the step's own values may hold at any time; None keeps all activations.
        prefetch: bytes of gathered values ahead of their use.
        bucket: bytes up to which small transfers travel together.
        reductions: bytes of whole gradients in flight.
        reuse: a gathered value stays in memory while at most this many bytes of others are gathered; default as
            `prefetch`.
        donate: whether pure updates may run in place.
        temporaries: whether in place means the step's own memory, too; see `donate`.

    Returns:
        A new graph with the same bits.

    Raises:
        ValueError: a number of bytes is negative.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def gathered(own):
        ...     return torch.ops.shardfn.wait(torch.ops.shardfn.all_gather_start(own, [1, 1], "dp"))
        >>> gm = make_fx(lambda a, b, x: (x * gathered(a) + gathered(b),), tracing_mode="fake")(
        ...     torch.ones(1), torch.ones(1), torch.ones(2))
        >>> [n.name for n in schedule(gm, bucket=0).graph.nodes][3:-1]
        ['all_gather_start', 'all_gather_start_1', 'wait', 'mul', 'wait_1', 'add']
    """
    chosen = stages(
        budget=budget,
        prefetch=prefetch,
        bucket=bucket,
        reductions=reductions,
        reuse=reuse,
        donate=donate,
        temporaries=temporaries,
    )
    return run_all(chosen, gm)


class Stage(NamedTuple):
    """One pass of a schedule with its options; equal stages make equal graphs of one graph.

    Attributes:
        run: the pass.
        options: its keyword arguments.
    """

    run: Callable[..., GraphModule]
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, gm: GraphModule) -> GraphModule:
        """The pass's graph."""
        return self.run(gm, **dict(self.options))


def run_all(passes: Sequence["Stage"], gm: GraphModule) -> GraphModule:
    """Runs passes of this room one after another; returns a new graph, and leaves `gm` unchanged."""
    draft = drafted(gm)
    for stage in passes:
        draft = stage(draft)
    return settled(draft)


def stages(
    *,
    budget: int | None,
    prefetch: int | None,
    bucket: int | None,
    reductions: int | None,
    reuse: int | None,
    donate: bool,
    temporaries: bool,
) -> list[Stage]:
    """The passes that `schedule` runs, in order."""
    reuse = prefetch if reuse is None else reuse
    chosen = [
        (True, free_at_last_use, {}),
        (budget is not None, rematerialise, {"budget": budget}),
        (reuse is not None, reuse_gathers, {"budget": reuse}),
        (bucket is not None, bucket_pass, {"limit": bucket}),
        (True, sink_waits, {}),
        (reductions is not None, overlap_reductions, {"limit": reductions}),
        (prefetch is not None, prefetch_pass, {"budget": prefetch}),
        (True, free_at_last_use, {}),
        (donate, donate_pass, {"temporaries": temporaries}),
    ]
    return [Stage(run, tuple(options.items())) for wanted, run, options in chosen if wanted]
