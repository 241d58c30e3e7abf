"""Exchanges of tokens and experts: `Local`, `GatherExperts`, `AllReduce`, `AllToAll`. Equal values, other bytes.

S tokens of the rank, k choices of each, E experts, D model, n ranks of the axis.

    exchange             leaves of experts   tokens                   collective
    Local()              whole               local                    none
    GatherExperts(axis)  cut: P(axis)        local                    all-gather of experts, gradients are summed
    AllReduce(axis)      cut: P(axis)        the same on all ranks    all-reduce of the result
    AllToAll(axis)       cut: P(axis)        local                    all-to-all of rows to the experts' ranks, and back

The exchanges of `AllToAll` are transposes of each other: a layer is `D^T W E(D x)` with D the permutation by expert and
the exchange. Experts are cut as by `torch.chunk`, so E need not be a multiple of n, for example 7 experts on 3 ranks.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn.collectives import (
    all_gather,
    pvary,
)
from shardfn.core import (
    Axes,
    P,
    PyTree,
    check_recompute,
    named_leaves,
    raise_all,
    tree_leaves,
    tree_map,
)
from shardfn.nn import BatchInvariantWeight, all_ranges, enter_parallel, leave_parallel, linear, rank_range

from ._experts import ExpertFunction
from ._permute import Permutation, combine, dispatch, permutation, undispatch
from ._routing import Routing, refuse, softmax_of


@runtime_checkable
class Exchange(Protocol):
    """Way in which tokens and experts come together."""

    @property
    def spec(self) -> P:
        """Returns the compute spec of the leaves of experts."""
        ...

    def run(self, experts: ExpertFunction, params: PyTree, x_SD: Tensor, routing: Routing, *, name: str) -> Tensor:
        """Returns the sum over each token's choices of weight times expert. `apply` describes the arguments."""
        ...


@dataclasses.dataclass(frozen=True)
class Local:
    """Exchange where every rank has all experts, and applies the experts to local tokens.

    Under ZeRO's stage 3 the experts are gathered layer by layer, ahead of use, and tokens stay in place.
    """

    @property
    def spec(self) -> P:
        """Returns the spec of experts that each rank holds whole."""
        return P()

    def run(self, experts: ExpertFunction, params: PyTree, x_SD: Tensor, routing: Routing, *, name: str) -> Tensor:
        """Applies experts as `Exchange.run`."""
        check_leaves(name, params, routing.num_experts, routing.num_experts, self)
        places, counts_E = permutation(routing.experts, routing.num_experts)
        return combine(experts(params, dispatch(x_SD, places), counts_E), places, routing.weights)


@dataclasses.dataclass(frozen=True)
class GatherExperts:
    """Exchange with experts cut along an axis. Each rank gathers all experts, and applies the experts to local tokens.

    Attributes:
        axis: mesh axes along which experts are cut. None means a single device.
    """

    axis: Axes

    @property
    def spec(self) -> P:
        """Cut along the first dim."""
        return P(self.axis)

    def run(self, experts: ExpertFunction, params: PyTree, x_SD: Tensor, routing: Routing, *, name: str) -> Tensor:
        """Applies experts as `Exchange.run`."""
        E = routing.num_experts
        check_leaves(name, params, local_number(E, self.axis), E, self)
        whole = tree_map(lambda w: all_gather(w, self.axis, size=E), params)
        return Local().run(experts, whole, x_SD, routing, name=name)


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Exchange where all ranks of an axis have the same tokens.

    Each rank applies local experts, and results are summed.

    Attributes:
        axis: mesh axes along which experts, and no rows of the batch, are cut. None means a single device.
        in_order: whether the results of all choices travel, k times the bytes, and each rank adds the results in order.
            Values then equal a single device exactly, if the values of single experts do.
    """

    axis: Axes
    in_order: bool = False

    @property
    def spec(self) -> P:
        """Cut along the first dim."""
        return P(self.axis)

    def run(self, experts: ExpertFunction, params: PyTree, x_SD: Tensor, routing: Routing, *, name: str) -> Tensor:
        """Applies experts as `Exchange.run`."""
        if routing.experts.shape[1] > min(b - a for a, b in all_ranges(routing.num_experts, self.axis)):
            _check_distinct(name, routing.experts)
        start, stop = rank_range(routing.num_experts, self.axis)
        check_leaves(name, params, stop - start, routing.num_experts, self)
        S, k = routing.experts.shape
        own_Sk = (routing.experts >= start) & (routing.experts < stop)
        chosen_Sk = torch.where(own_Sk, routing.experts - start, -1)
        num = S * min(k, stop - start)
        places, counts_E = permutation(chosen_Sk, stop - start, rows=num)
        rows = dispatch(enter_parallel(x_SD, self.axis), places)
        if self.in_order:
            by_choice, _ = permutation(chosen_Sk.view(-1, 1), stop - start, rows=num)
            y = undispatch(experts(params, rows, counts_E), by_choice)
            # Each choice is computed by a single rank, and zeros of the other ranks change no number.
            return combine(leave_parallel(y, self.axis), _flatten_choices(routing.experts), routing.weights)
        y_SD = combine(experts(params, rows, counts_E), places, pvary(routing.weights, self.axis))
        return leave_parallel(y_SD, self.axis)


def _flatten_choices(experts_Sk: Tensor) -> Permutation:
    """Returns a row for each choice with an expert, in the order of choices."""
    S, k = experts_Sk.shape
    at_Sk = torch.arange(S * k, device=experts_Sk.device).view(S, k)
    places_Sk = torch.where(experts_Sk >= 0, at_Sk, -1)
    return Permutation(torch.where(experts_Sk >= 0, at_Sk // max(k, 1), -1).flatten(), places_Sk)


def _check_distinct(name: str, experts_Sk: Tensor) -> None:
    """Raises for an expert chosen twice by a token: a rank with fewer experts than choices has no room for both."""
    ordered_Sk = experts_Sk.sort(1).values
    twice = ((ordered_Sk[:, 1:] == ordered_Sk[:, :-1]) & (ordered_Sk[:, 1:] >= 0)).any(1).sum()
    refuse(
        twice,
        f"{name}: tokens have chosen an expert twice, but AllReduce has no room. Give each choice of a token another"
        " expert, or -1.",
    )


def local_number(num: int, axis: Axes) -> int:
    """Returns how many of `num` experts this rank has."""
    start, stop = rank_range(num, axis)
    return stop - start


def check_leaves(name: str, params: PyTree, own: int, E: int, exchange: Exchange) -> None:
    """Refuses leaves with other than `own` experts.

    Raises:
        ValueError: lists the leaves by path.
    """
    if all(w.shape[:1] == (own,) for w in tree_leaves(params)):
        return
    wrong = [
        f"{path}: its first dim must be {own} of the {E} experts of the router, got {tuple(w.shape)}"
        for path, w in named_leaves(params, "params")
        if w.shape[:1] != (own,)
    ]
    raise_all(
        ValueError, f"{name}: with {exchange} leaves have the spec {exchange.spec} and the router's experts:", wrong
    )


_LOCAL = Local()


def apply(
    experts: ExpertFunction,
    params: PyTree,
    x_SD: Float[Tensor, "s d"],
    routing: Routing,
    *,
    exchange: Exchange = _LOCAL,
    name: str = "moe",
) -> Float[Tensor, "s d"]:
    """Sums, over choices i, `routing.weights[s, i]` times the result of expert `routing.experts[s, i]` for `x_SD[s]`.

    Differentiable in `x_SD`, the routing's weights, and `params`. The value does not depend on the exchange beyond
    rounding, and without capacity not on the other tokens.

    Args:
        experts: the function of a group of rows, as `swiglu_experts`.
        params: leaves with experts along dim 0, cut by `exchange.spec`.
        x_SD: tokens of the rank.
        routing: routing of the tokens, from a router such as `top_k`.
        exchange: exchange that brings tokens and experts together.
        name: name of the layer, for errors.

    Raises:
        ValueError: leaves with another number of experts, by path. A routing of other tokens, or more rows than the
            exchange has room for, on all ranks.
        RuntimeError: (in the backward, under `remat` or torch's checkpoint) the tokens have other experts than in the
            forward.

    Example:
        >>> import torch
        >>> from shardfn.nn import moe
        >>> logits, x = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2, 3)
        >>> params = {"w_up": torch.ones(2, 4, 3), "w_down": torch.ones(2, 3, 4)}
        >>> apply(moe.gelu_experts, params, x, moe.top_k(logits, 1)).shape
        torch.Size([2, 3])
    """
    if len(routing.experts) != len(x_SD):
        raise ValueError(
            f"{name}: the routing must be of the {len(x_SD)} tokens of x, got {len(routing.experts)}."
            " Route the same tokens."
        )
    check_recompute(routing.experts, f"{name}: the experts of tokens")
    return exchange.run(experts, params, x_SD, routing, name=name)


def residual(
    experts_SD: Float[Tensor, "*s d"],
    mlp_SD: Float[Tensor, "*s d"],
    x_SD: Float[Tensor, "*s d"],
    w_2D: Float[Tensor, "2 d"] | BatchInvariantWeight,
    b_2: Float[Tensor, "2"] | None = None,
    *,
    batch_invariant: bool = False,
) -> Float[Tensor, "*s d"]:
    """Returns `c[0] * experts + c[1] * mlp`, c = softmax(x w^T + b) of each token.

    With a single expert for each token the layer has the computation of two experts, without the second exchange.

    Args:
        experts_SD: the result of `moe.apply`.
        mlp_SD: mlp of the dense MLP, for the same tokens.
        x_SD: the tokens.
        w_2D: leaf next to the router's leaf, whole on all ranks.
        b_2: bias, or None.
        batch_invariant: whether a token's result has the same bits next to any other tokens. `w_2D` is then a
            `nn.BatchInvariantWeight`, in float32 or float64.

    Example:
        >>> one = torch.ones(1, 3)
        >>> residual(3 * one, one, one, torch.zeros(2, 3))
        tensor([[2., 2., 2.]])

    References:
        Rajbhandari et al., DeepSpeed-MoE, 2022, https://arxiv.org/abs/2201.05596
    """
    mixed = softmax_of(linear(x_SD, w_2D, b_2), batch_invariant)
    return experts_SD * mixed[..., :1] + mlp_SD * mixed[..., 1:]
