"""Bytes of each exchange by sizes, and the exchange with the fewest bytes.

S tokens of a rank, k choices of each, E experts, D model, F ffn of an expert, n ranks, b bytes of an element.

    AllToAll       4 k S D b (n - 1) / n        two exchanges forward and two backward, of equally busy experts
    GatherExperts  3 m E D F b (n - 1) / n      two gathers and a sum of the gradients, of m matrices of each expert
    AllReduce      4 S D b (n - 1) / n          a sum forward and a sum backward, of tokens on all ranks

On N nodes of G ranks, n = N G, an exchange of R = k S D b bytes takes, for messages that start one after another:

                   messages between nodes, inside    bytes between nodes    bytes inside
    one hop        (N - 1) G        G - 1            R (N - 1) / N          R (G - 1) / n
    two hops       N - 1            G - 1            R (N - 1) / N          R (G - 1) / G
"""

import math
from typing import NamedTuple, Protocol, runtime_checkable

from shardfn.core import Axes, P, raise_all

from ._all_to_all import AllToAll
from ._exchange import Exchange, GatherExperts, Local


class ExchangeBytes(NamedTuple):
    """Bytes that a rank sends in a layer, forward and backward.

    Attributes:
        tokens: tokens of `AllToAll`, where all experts are equally busy.
        most: bytes of `AllToAll`, where all choices of the rank go to other ranks' experts, and the rank's room is
            full.
        weights: weights of `GatherExperts`, and of `Local` under ZeRO's stage 3.
        sum: bytes of `AllReduce`, with S tokens on all ranks together.
    """

    tokens: float
    most: float
    weights: float
    sum: float


def exchange_bytes(
    tokens: int,
    top_k: int,
    num_experts: int,
    *,
    d_model: int,
    d_ff: int,
    ranks: int,
    matrices: int = 3,
    itemsize: int = 2,
    remat: bool = False,
) -> ExchangeBytes:
    """Returns the bytes of each exchange, by the formulas of the table above.

    Args:
        tokens: S.
        top_k: k.
        num_experts: E.
        d_model: D.
        d_ff: F.
        ranks: n.
        matrices: m: 3 of SwiGLU, 2 of an MLP.
        itemsize: b.
        remat: whether the forward, with its exchanges or gathers, runs again in the backward.

    Raises:
        ValueError: a size below 1.

    Example:
        >>> found = exchange_bytes(4096, 2, 8, d_model=4096, d_ff=14336, ranks=8)
        >>> round(found.tokens / 1e6), round(found.weights / 1e6)
        (235, 7399)
    """
    sizes = {"tokens": tokens, "top_k": top_k, "num_experts": num_experts, "d_model": d_model, "d_ff": d_ff}
    sizes |= {"ranks": ranks, "matrices": matrices, "itemsize": itemsize}
    raise_all(ValueError, "exchange_bytes:", [f"{name}={x} must be at least 1." for name, x in sizes.items() if x < 1])
    others, row = (ranks - 1) / ranks, d_model * itemsize
    passes = 3 if remat else 2  # forward, backward, and the forward once more
    moved = tokens * top_k
    room = ranks * tokens * min(top_k, -(-num_experts // ranks)) if ranks > 1 else 0
    # Under stage 3 the weights are gathered for the backward in any case.
    weights = 3 * matrices * num_experts * d_ff * row * others
    most = passes * (moved + room) * row if ranks > 1 else 0
    return ExchangeBytes(passes * 2 * moved * row * others, most, weights, passes * 2 * tokens * row * others)


@runtime_checkable
class LinkTime(Protocol):
    """Time of messages between ranks, for example by `graph.Link`."""

    def seconds(self, nbytes: float, messages: int = 1) -> float:
        """Returns the time of `messages` messages of `nbytes` together."""
        ...


@runtime_checkable
class NodeLinks(Protocol):
    """Wires inside and between nodes, for example of `graph.Cluster`."""

    @property
    def per_node(self) -> int:
        """Returns the number of ranks of a node."""
        ...

    @property
    def inside(self) -> LinkTime:
        """Returns the wire between ranks of a node."""
        ...

    @property
    def between(self) -> LinkTime:
        """Returns each rank's share of the wire between nodes."""
        ...


def cheapest(
    axis: Axes,
    *,
    tokens: int,
    top_k: int,
    num_experts: int,
    d_model: int,
    d_ff: int,
    ranks: int | tuple[int, ...],
    matrices: int = 3,
    itemsize: int = 2,
    remat: bool = False,
    cluster: NodeLinks | None = None,
) -> Exchange:
    """Returns the exchange with the fewest bytes between ranks with different tokens: `AllToAll` or `GatherExperts`.

    `AllToAll` costs less while S < 3 m E F / (4 k), with remat two thirds of this bound, for any n, D and b. With a
    cluster the exchange is the fastest, and `AllToAll` over several nodes may be hierarchical.

    Args:
        axis: mesh axes along which experts would be cut. On a single rank the answer is `Local()`.
        tokens: number S of tokens of a microbatch.
        top_k: k.
        num_experts: E.
        d_model: D.
        d_ff: F.
        ranks: n, the ranks along `axis`, or the ranks of each axis, for example `(4, 8)` along `("node", "gpu")`.
        matrices: m: 3 of SwiGLU, 2 of an MLP.
        itemsize: b.
        remat: whether the forward runs again in the backward.
        cluster: wires of the ranks, for example `graph.cluster("h100")`. Ranks are numbered node by node.

    Raises:
        ValueError: a size below 1, or ranks of other axes.

    Example:
        >>> mixtral = {"top_k": 2, "num_experts": 8, "d_model": 4096, "d_ff": 14336, "ranks": 8}
        >>> cheapest("ep", tokens=4096, **mixtral)
        AllToAll(axis='ep', rows=None, overflow='error', uneven=True, hierarchical=False, dealt=None)
        >>> cheapest("ep", tokens=131072, **mixtral)
        GatherExperts(axis='ep')
    """
    names = P(axis).axes
    each = (ranks,) if isinstance(ranks, int) else ranks
    if not isinstance(ranks, int) and len(each) != len(names):
        raise ValueError(f"cheapest: ranks={ranks} must have a number for each axis of {axis!r}, or be one number.")
    n = math.prod(each)
    sizes = {"top_k": top_k, "num_experts": num_experts, "d_model": d_model, "d_ff": d_ff, "matrices": matrices}
    found = exchange_bytes(tokens, ranks=n, itemsize=itemsize, remat=remat, **sizes)
    if n == 1 or not names:
        return Local()
    if cluster is None:
        return AllToAll(axis) if found.tokens <= found.weights else GatherExperts(axis)
    passes, moved = (3 if remat else 2), tokens * top_k * d_model * itemsize
    nodes, local = _split_by_node(each, cluster.per_node)
    one, two = _exchange_seconds(moved, nodes, local, cluster)
    gathers = 3 * (cluster.between if nodes > 1 else cluster.inside).seconds(found.weights / 3, n - 1)
    seconds: dict[Exchange, float] = {AllToAll(axis): passes * 2 * one, GatherExperts(axis): gathers}
    if len(names) > 1 and nodes == each[0] > 1 and local > 1:
        seconds[AllToAll(axis, hierarchical=True)] = passes * 2 * two
    return min(seconds, key=lambda exchange: seconds[exchange])


def _split_by_node(ranks: tuple[int, ...], per_node: int) -> tuple[int, int]:
    """Returns the number of nodes, and the ranks of each node."""
    n = math.prod(ranks)
    nodes = -(-n // per_node)
    return nodes, -(-n // nodes)


def _exchange_seconds(moved: float, nodes: int, local: int, cluster: NodeLinks) -> tuple[float, float]:
    """Returns the time of an exchange in one hop and in two."""
    across = moved * (nodes - 1) / nodes
    inside = moved * (local - 1) / local
    one = cluster.between.seconds(across, (nodes - 1) * local) + cluster.inside.seconds(inside / nodes, local - 1)
    return one, cluster.between.seconds(across, nodes - 1) + cluster.inside.seconds(inside, local - 1)
