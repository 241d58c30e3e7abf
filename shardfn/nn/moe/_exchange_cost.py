"""Bytes of each exchange by sizes, and the exchange with the fewest bytes.

S tokens of a rank, k choices of each, E experts, D model, F ffn of an expert, n ranks, b bytes of an element.

    AllToAll       4 k S D b (n - 1) / n        two exchanges forward and two backward, of equally busy experts
    GatherExperts  3 m E D F b (n - 1) / n      two gathers and a sum of the gradients, of m matrices of each expert
    AllReduce      4 S D b (n - 1) / n          a sum forward and a sum backward, of tokens on all ranks
"""

from typing import NamedTuple

from shardfn.core import Axes, P, raise_all

from ._exchange import AllToAll, Exchange, GatherExperts, Local


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


def cheapest(
    axis: Axes,
    *,
    tokens: int,
    top_k: int,
    num_experts: int,
    d_model: int,
    d_ff: int,
    ranks: int,
    matrices: int = 3,
    remat: bool = False,
) -> Exchange:
    """Returns the exchange with the fewest bytes between ranks with different tokens: `AllToAll` or `GatherExperts`.

    `AllToAll` costs less while S < 3 m E F / (4 k), with remat two thirds of this bound, for any n, D and b.

    Args:
        axis: mesh axes along which experts would be cut. On a single rank the answer is `Local()`.
        tokens: number S of tokens of a microbatch.
        top_k: k.
        num_experts: E.
        d_model: D.
        d_ff: F.
        ranks: n, the ranks along `axis`.
        matrices: m: 3 of SwiGLU, 2 of an MLP.
        remat: whether the forward runs again in the backward.

    Raises:
        ValueError: a size below 1.

    Example:
        >>> mixtral = {"top_k": 2, "num_experts": 8, "d_model": 4096, "d_ff": 14336, "ranks": 8}
        >>> cheapest("ep", tokens=4096, **mixtral)
        AllToAll(axis='ep', rows=None, overflow='error', uneven=True)
        >>> cheapest("ep", tokens=131072, **mixtral)
        GatherExperts(axis='ep')
    """
    found = exchange_bytes(
        tokens, top_k, num_experts, d_model=d_model, d_ff=d_ff, ranks=ranks, matrices=matrices, remat=remat
    )
    if ranks == 1 or not P(axis).axes:
        return Local()
    return AllToAll(axis) if found.tokens <= found.weights else GatherExperts(axis)
