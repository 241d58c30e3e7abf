"""The passes, in the order in which they help one another."""

from torch.fx import GraphModule

from ._bucket import bucket as bucket_pass
from ._donate import donate as donate_pass
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
    """Schedules a captured step; every option but `budget` only changes when things happen, `None` leaves it out.

    First what is computed (`rematerialise`), then what travels (`reuse_gathers`, `bucket`), then when
    (`sink_waits`, `overlap_reductions`, `prefetch`), then where it is kept (`free_at_last_use`, `donate`), which needs
    the final order. It is a function of the graph alone: ranks with the same graph issue the same transfers in the same
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
        reuse: bytes of other gathered values for which a gathered value is kept; default as `prefetch`.
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
    reuse = prefetch if reuse is None else reuse
    gm = free_at_last_use(gm)
    gm = gm if budget is None else rematerialise(gm, budget=budget)
    gm = gm if reuse is None else reuse_gathers(gm, budget=reuse)
    gm = gm if bucket is None else bucket_pass(gm, limit=bucket)
    gm = sink_waits(gm)
    gm = gm if reductions is None else overlap_reductions(gm, limit=reductions)
    gm = gm if prefetch is None else prefetch_pass(gm, budget=prefetch)
    gm = free_at_last_use(gm)
    return donate_pass(gm, temporaries=temporaries) if donate else gm
