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
from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from shardfn.collectives import (
    all_gather,
    arrived_rows,
    axis_index,
    axis_size,
    check_room,
    exchange_rows,
    pvary,
    rows_as,
    values_are_known,
)
from shardfn.core import (
    Axes,
    P,
    PyTree,
    check_recompute,
    checkpoint_name,
    named_leaves,
    raise_all,
    tree_leaves,
    tree_map,
)
from shardfn.nn import BatchInvariantWeight, all_ranges, enter_parallel, leave_parallel, linear, rank_range, runs_as_ops

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
        """Whole."""
        return P()

    def run(self, experts: ExpertFunction, params: PyTree, x_SD: Tensor, routing: Routing, *, name: str) -> Tensor:
        """Applies experts as `Exchange.run`."""
        _check_leaves(name, params, routing.num_experts, routing.num_experts, self)
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
        _check_leaves(name, params, _local_number(E, self.axis), E, self)
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
        _check_leaves(name, params, stop - start, routing.num_experts, self)
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


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Exchange by all-to-all.

    Experts are cut along an axis of ranks with different tokens, and rows go to experts and back.

    In eager code memory has exactly the size of the arriving rows. A captured step has the same size for all routings:
    by default the largest number that ranks of equally many tokens can send, `n S min(k, E / n)`, or `tokens min(k, E /
    n)`. For example 2 ranks of 7 tokens with k = 2 of 8 experts have room for 28 rows. Memory still holds exactly the
    arriving rows, if every operation of the experts goes by rows.

    Attributes:
        axis: mesh axes along which experts are cut. None means a single device.
        rows: number of rows that a rank takes at most. None means any number.
        overflow: action where rows find no room. "error" ends the step on all ranks, and names the layer, the ranks and
            both numbers. Nothing is sent, and the state stays. "drop" leaves out choices of the rank's experts past the
            largest capacity with room: of each expert the first choices stay, in the order of tokens over all ranks.
        uneven: whether the ranks may have unequal numbers of experts. False raises for a number of experts not divided
            by the ranks.
        tokens: number of tokens of all ranks together at most, for captured steps of ranks with unequal numbers. None
            means n times the rank's number. `models.gpt` sets `tokens` for sequences cut over ranks.

    Raises:
        ValueError: fewer than 0 rows or tokens, or another rule.

    References:
        Lepikhin et al., GShard, 2020, https://arxiv.org/abs/2006.16668
    """

    axis: Axes
    rows: int | None = None
    overflow: Literal["error", "drop"] = "error"
    uneven: bool = True
    tokens: int | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if min(self.rows or 0, self.tokens or 0) < 0 or self.overflow not in ("error", "drop"):
            raise ValueError(
                f"AllToAll(rows={self.rows}, overflow={self.overflow!r}, tokens={self.tokens}): rows and tokens must be"
                ' 0 or more, and overflow must be "error" or "drop".'
            )

    @property
    def spec(self) -> P:
        """Cut along the first dim."""
        return P(self.axis)

    def run(self, experts: ExpertFunction, params: PyTree, x_SD: Tensor, routing: Routing, *, name: str) -> Tensor:
        """Applies experts as `Exchange.run`."""
        E = routing.num_experts
        own = _local_number(E, self.axis)
        if not self.uneven:
            _check_even(name, E, self.axis)
        _check_leaves(name, params, own, E, self)
        if axis_size(self.axis) == 1 and self.rows is None:
            return Local().run(experts, params, x_SD, routing, name=name)
        S, k = routing.experts.shape
        ranges = all_ranges(E, self.axis)
        places, counts_E = permutation(routing.experts, E)
        known = values_are_known(x_SD, counts_E)
        most = axis_size(self.axis) * S if self.tokens is None else self.tokens
        rows = self.rows if self.rows is not None or known else most * min(k, own)
        table_nE, room_n = _gather_counts(counts_E, 0 if rows is None else rows, self.axis)
        if self.overflow == "drop" and rows is not None:
            table_nE = _fit_rows(table_nE, room_n, ranges)
            chosen_Sk = _drop_choices(routing.experts, places.places, counts_E, table_nE[axis_index(self.axis)])
            places, _ = permutation(chosen_Sk, E)
        sizes_nn = _sum_by_owner(table_nE, ranges)
        if rows is not None:
            check_room(sizes_nn, room_n, self.axis, name=name, remedy=self._suggest_tokens())
        come = exchange_rows(dispatch(x_SD, places), sizes_nn, self.axis, rows=rows)
        come = _mark_arrived(checkpoint_name(come, "moe_rows"), sizes_nn)
        of_row = _expert_of_row(table_nE, *rank_range(E, self.axis), len(come))
        sorted_, own_counts = permutation(of_row[:, None], own)
        # Rows past the arrived rows have no expert, and so are the last rows in both orders.
        sorted_ = sorted_ if runs_as_ops() else Permutation(*(rows_as(at, come) for at in sorted_))
        y = undispatch(experts(params, dispatch(come, sorted_), own_counts), sorted_)
        back = exchange_rows(_mark_arrived(y, sizes_nn), sizes_nn.t(), self.axis, rows=S * k)
        return combine(checkpoint_name(back, "moe_results"), places, routing.weights)

    def _suggest_tokens(self) -> str:
        if self.rows is not None:
            return 'give it more by AllToAll(rows=), or drop some by overflow="drop"'
        counted = "its captured step takes ranks to have equal numbers of tokens: " if self.tokens is None else ""
        return f"{counted}give AllToAll(tokens=) the most tokens that all ranks have together"


def _mark_arrived(x: Tensor, sizes_nn: Tensor) -> Tensor:
    """Returns `x`, marked: rows past the arrived rows are not used."""
    # A graph differentiated at the run has derivatives only of `nn`'s ops.
    return x if runs_as_ops() else arrived_rows(x, sizes_nn)


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


def _local_number(num: int, axis: Axes) -> int:
    start, stop = rank_range(num, axis)
    return stop - start


def _gather_counts(counts_E: Tensor, room: int, axis: Axes) -> tuple[Tensor, Tensor]:
    """Returns the rows for each expert and the room of all ranks."""
    own = torch.cat([counts_E, counts_E.new_full((1,), room)])
    # With the name of the rows: a recomputation needs no counts where the rows are kept.
    table = checkpoint_name(all_gather(own[None], axis), "moe_rows")
    return table[:, :-1], table[:, -1]


def _sum_by_owner(table_nE: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the rows from each rank to each."""
    ends_nE = F.pad(table_nE.cumsum(1), (1, 0))
    starts, stops = ([r[i] for r in ranges] for i in (0, 1))
    return ends_nE[:, stops] - ends_nE[:, starts]


def _expert_of_row(table_nE: Tensor, start: int, stop: int, rows: int) -> Tensor:
    """Returns the local expert of each arrived row, in the order of ranks and then of experts, or -1 past the last."""
    own = stop - start
    ends = table_nE[:, start:stop].reshape(-1).cumsum(0)
    at = torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)
    return torch.where(at < len(ends), at % max(own, 1), -1)


def _fit_rows(table_nE: Tensor, room_n: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the rows of each rank and expert with room, if experts of a rank share the same, largest capacity."""
    totals_E = table_nE.sum(0)
    parts = [_find_capacity(totals_E[a:b], room_n[j]).expand(b - a) for j, (a, b) in enumerate(ranges)]
    before_nE = table_nE.cumsum(0) - table_nE
    return (torch.cat(parts) - before_nE).clamp(min=0).minimum(table_nE)


def _find_capacity(totals_E: Tensor, room: Tensor) -> Tensor:
    """Returns the largest c such that the sum of `min(total, c)` is at most `room`."""
    E = len(totals_E)
    if E == 0:
        return room
    totals_E = totals_E.sort().values
    # The sum is the least of (totals under c) + (number of other totals) * c, over all places to divide the sorted
    # totals.
    under_E = totals_E.cumsum(0) - totals_E
    most = ((room - under_E) // torch.arange(E, 0, -1, device=room.device)).amax()
    return torch.where(totals_E.sum() <= room, totals_E.amax(), most)


def _drop_choices(experts_Sk: Tensor, places_Sk: Tensor, counts_E: Tensor, kept_E: Tensor) -> Tensor:
    """Returns the choices with a row among the first `kept_E` of the expert, or -1 for other choices."""
    at_Sk = experts_Sk.clamp(min=0)
    place_Sk = places_Sk - (counts_E.cumsum(0) - counts_E)[at_Sk]
    return torch.where((experts_Sk >= 0) & (place_Sk < kept_E[at_Sk]), experts_Sk, -1)


def _check_even(name: str, E: int, axis: Axes) -> None:
    if E % axis_size(axis):
        held = [stop - start for start, stop in all_ranges(E, axis)]
        raise ValueError(
            f"{name}: the {E} experts would lie on the ranks of {axis!r} as {held}, and AllToAll(uneven=False) takes"
            f" only equal numbers. Choose a multiple of {len(held)} experts, or leave the option out."
        )


def _check_leaves(name: str, params: PyTree, own: int, E: int, exchange: Exchange) -> None:
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
