"""Exchange of rows by all-to-all: over one network or two, of all tokens or of a share of the tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from shardfn.collectives import (
    all_gather,
    all_gather_invariant,
    axis_index,
    axis_size,
    check_room,
    current_axis_types,
    take_own_block,
    values_are_known,
)
from shardfn.core import Axes, P, PyTree, checkpoint_name
from shardfn.nn import all_ranges, rank_range

from ._exchange import Local, check_leaves, local_number
from ._experts import ExpertFunction
from ._hops import Networks, group_arrivals, plan_hops, return_rows, send_rows
from ._permute import combine, dispatch, permutation, undispatch
from ._routing import Routing


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
        hierarchical: whether rows for all ranks of a node travel once, to the rank with the same number in the node,
            and then inside the node. The first of `axis` then goes over nodes, for example `("node", "gpu")`. A rank
            sends N + G - 2 messages in place of N G - 1, for G ranks of each of N nodes, and sends rows inside the node
            a second time. Values and gradients have the bits of a single hop.
        dealt: mesh axes along which all ranks have the same tokens, and different features of each expert. Each of the
            R ranks sends 1 / R of the rows along `axis`, cut as by `torch.chunk`. The ranks gather the rows at the
            experts, and sum the results. The result is the same on all ranks.
        tokens: number of tokens of all ranks together at most, for captured steps of ranks with unequal numbers. None
            means n times the rank's number. `models.gpt` sets `tokens` for sequences cut over ranks.
        own_rows: whether each rank along `dealt` already has only its rows of the tokens, and gets only these results.
            `models.gpt` sets `own_rows` with `sequence=True`.

    Raises:
        ValueError: fewer than 0 rows or tokens, another rule, a single axis with `hierarchical`, or experts cut along
            `dealt`.

    References:
        Lepikhin et al., GShard, 2020, https://arxiv.org/abs/2006.16668
        Rajbhandari et al., DeepSpeed-MoE, 2022, https://arxiv.org/abs/2201.05596 (hierarchical)
        Singh et al., A Hybrid Tensor-Expert-Data Parallelism Approach, 2023, https://arxiv.org/abs/2303.06318 (dealt)
    """

    axis: Axes
    rows: int | None = None
    overflow: Literal["error", "drop"] = "error"
    uneven: bool = True
    hierarchical: bool = False
    dealt: Axes = None
    tokens: int | None = dataclasses.field(default=None, repr=False)
    own_rows: bool = dataclasses.field(default=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.rows or 0, self.tokens or 0) < 0 or self.overflow not in ("error", "drop"):
            raise ValueError(
                f"AllToAll(rows={self.rows}, overflow={self.overflow!r}, tokens={self.tokens}): rows and tokens must be"
                ' 0 or more, and overflow must be "error" or "drop".'
            )
        if self.hierarchical and len(P(self.axis).axes) < 2:
            raise ValueError(
                f"AllToAll({self.axis!r}, hierarchical=True): axis must be several mesh axes, nodes first, for example"
                ' ("node", "gpu").'
            )
        if both := set(P(self.axis).axes) & set(P(self.dealt).axes):
            raise ValueError(
                f"AllToAll({self.axis!r}, dealt={self.dealt!r}): experts are cut along {sorted(both)}, where ranks must"
                " have features of the same experts. Leave these axes out of dealt."
            )

    @property
    def spec(self) -> P:
        """Cut along the first dim."""
        return P(self.axis)

    def run(self, experts: ExpertFunction, params: PyTree, x_SD: Tensor, routing: Routing, *, name: str) -> Tensor:
        """Applies experts as `Exchange.run`."""
        E, S = routing.num_experts, len(x_SD)
        if not self.uneven:
            _check_even(name, E, self.axis)
        check_leaves(name, params, local_number(E, self.axis), E, self)
        if axis_size(self.axis) == axis_size(self.dealt) == 1 and self.rows is None:
            return Local().run(experts, params, x_SD, routing, name=name)
        if axis_size(self.dealt) == 1 or self.own_rows:
            return self._exchange(experts, params, x_SD, routing, name, S * axis_size(self.dealt))
        _check_same_tokens(name, x_SD, self.dealt)
        x_sD, experts_sk, weights_sk = (take_own_block(x, self.dealt) for x in (x_SD, routing.experts, routing.weights))
        routing = routing._replace(experts=experts_sk, weights=weights_sk)
        y_sD = self._exchange(experts, params, x_sD, routing, name, S)
        return checkpoint_name(all_gather_invariant(y_sD, self.dealt, size=S), "moe_results")

    def _exchange(
        self, experts: ExpertFunction, params: PyTree, x_SD: Tensor, routing: Routing, name: str, whole: int
    ) -> Tensor:
        """Returns the results of this rank's tokens. Along `dealt` ranks have `whole` tokens together."""
        (S, k), E, networks = routing.experts.shape, routing.num_experts, self._networks
        ranges, own = all_ranges(E, self.axis), rank_range(E, self.axis)
        places, counts_E = permutation(routing.experts, E)
        rows = self._find_room(networks, ranges, k, S, whole, known=values_are_known(x_SD, counts_E))
        axes = (*P(self.axis).axes, *P(self.dealt).axes)
        table_sE, room_sh = _gather_counts(counts_E, [room or 0 for room in rows], axes)
        if self.overflow == "drop" and self.rows is not None:
            table_sE = _fit_rows(table_sE, room_sh[:: networks.shape[2], -1], ranges)
            chosen_Sk = _drop_choices(routing.experts, places.places, counts_E, table_sE[int(axis_index(axes))])
            places, _ = permutation(chosen_Sk, E)
        hops = plan_hops(networks, table_sE, ranges, rows)
        for i, hop in enumerate(hops):
            if hop.rows is not None:
                remedy = self._suggest_room(is_last=hop is hops[-1])
                check_room(hop.arriving[None], room_sh[:, i], axes, name=name, remedy=remedy)
        come, orders = send_rows(hops, dispatch(x_SD, places))
        sorted_, counts = group_arrivals(networks, table_sE, *own).sort(come)
        counts_e = counts.view(own[1] - own[0], len(table_sE)).sum(1)
        # Rows past the arrived rows have no expert, and so are the last rows in both orders.
        y = undispatch(experts(params, dispatch(come, sorted_), counts_e), sorted_)
        return combine(return_rows(hops, orders, y, S * k), places, routing.weights)

    @property
    def _networks(self) -> Networks:
        far, near = (P(self.axis).axes[:1], P(self.axis).axes[1:]) if self.hierarchical else ((), ())
        if axis_size(far) == 1 or axis_size(near) == 1:
            return Networks(None, self.axis, self.dealt)
        return Networks(far, near, self.dealt)

    def _find_room(
        self, networks: Networks, ranges: Sequence[tuple[int, int]], k: int, S: int, whole: int, *, known: bool
    ) -> list[int | None]:
        """Returns the most rows that come by each hop, or None where rows are counted at the run."""
        (N, G, R), (a, b, _) = networks.shape, networks.coords
        of_node = sum(stop - start for start, stop in ranges[a * G : (a + 1) * G])
        start, stop = ranges[a * G + b]
        tokens = (N * S, N * G * S, N * G * whole) if self.tokens is None else (self.tokens,) * 3
        held = (of_node, stop - start, stop - start)
        most = [None if known else t * min(k, e) for t, e in zip(tokens, held, strict=True)]
        rooms = most[N == 1 : 2 + (R > 1)]
        return rooms if self.rows is None else [*rooms[:-1], self.rows]

    def _suggest_room(self, *, is_last: bool) -> str:
        if self.rows is not None and is_last:
            return 'give it more by AllToAll(rows=), or drop some by overflow="drop"'
        counted = "its captured step takes ranks to have equal numbers of tokens: " if self.tokens is None else ""
        return f"{counted}give AllToAll(tokens=) the most tokens that all ranks have together"


def _check_same_tokens(name: str, x_SD: Tensor, dealt: Axes) -> None:
    """Raises where values are followed, and tokens vary along `dealt`."""
    mode = current_axis_types()
    varying = () if mode is None else set(mode.axes_of(x_SD)) & set(P(dealt).axes)
    if varying:
        raise ValueError(
            f"{name}: AllToAll(dealt={dealt!r}) takes the same tokens on all ranks along {dealt!r}, got tokens that"
            f" vary along {sorted(varying)}. Leave out dealt where these axes cut the batch."
        )


def _gather_counts(counts_E: Tensor, rooms: Sequence[int], axis: Axes) -> tuple[Tensor, Tensor]:
    """Returns the rows for each expert and the rooms of all ranks."""
    own = torch.cat([counts_E, counts_E.new_tensor(rooms)])
    # With the name of the rows: a recomputation needs no counts where the rows are kept.
    table = checkpoint_name(all_gather(own[None], axis), "moe_rows")
    return table[:, : len(counts_E)], table[:, len(counts_E) :]


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
