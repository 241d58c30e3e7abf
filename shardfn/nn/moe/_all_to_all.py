"""Exchange of rows by all-to-all: over one network or two, of all tokens or of a share of the tokens.

Hops of rows on the way to the experts, and back.

N nodes, G ranks of a node, R ranks with the same tokens, n = N G; s = n R sources of rows, E experts.

    hop       along           rows                                                    messages of a rank
    far       N nodes         for all ranks of a node, to the rank of equal number    N - 1
    near      G, or all n     for the ranks of this node, or of all nodes             G - 1, or n - 1
    gather    R               of each rank, to all R ranks                            R - 1

Without a far hop the near hop has all n ranks: one network. After the near hop rows lie at the rank of their experts. A
gather follows where R ranks have features of the same experts, and each of the R ranks has sent 1 / R of the tokens.

All numbers come from a single table, the rows from each source to each expert: [s, E].
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardfn.collectives import (
    all_gather,
    all_gather_invariant,
    all_gather_rows,
    arrived_rows,
    axis_index,
    axis_size,
    check_room,
    current_axis_types,
    exchange_rows,
    psum_scatter_rows,
    rows_as,
    take_own_block,
    values_are_known,
)
from shardfn.core import Axes, P, PyTree, checkpoint_name
from shardfn.nn import all_ranges, rank_range, runs_as_ops

from ._exchange import Local, check_leaves, local_number
from ._experts import ExpertFunction
from ._permute import Permutation, combine, dispatch, permutation, undispatch
from ._routing import Routing


class Networks(NamedTuple):
    """Mesh axes of the three hops. The axis of a missing hop is None.

    Attributes:
        far: axis of the nodes.
        near: axis of the ranks of a node, or axes of all ranks without a far hop.
        gather: axis of the ranks with the same tokens.
    """

    far: Axes
    near: Axes
    gather: Axes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns the sizes of the axes: N nodes, G ranks of a node, R ranks with the same tokens."""
        return axis_size(self.far), axis_size(self.near), axis_size(self.gather)

    @property
    def coords(self) -> tuple[int, int, int]:
        """Returns this rank's indices along the three axes."""
        return int(axis_index(self.far)), int(axis_index(self.near)), int(axis_index(self.gather))


class _RowGroups(NamedTuple):
    """Consecutive groups of rows with a label each.

    Attributes:
        lengths: number of rows of each group.
        labels: label of each group, int64.
        num_labels: number of possible labels.
    """

    lengths: Tensor
    labels: Tensor
    num_labels: int

    def sort(self, x: Tensor) -> tuple[Permutation, Tensor]:
        """Returns the order of the rows of `x` by label, and the number of rows of each label.

        Rows past the last group have no label, and stay last.
        """
        ends = self.lengths.cumsum(0)
        at = torch.searchsorted(ends, torch.arange(len(x), device=ends.device), right=True)
        label_of_row = F.pad(self.labels, (0, 1), value=-1)[at]
        order, counts = permutation(label_of_row[:, None], self.num_labels)
        return order if runs_as_ops() else Permutation(*(rows_as(at, x) for at in order)), counts


class _RowHop(NamedTuple):
    """Exchange of rows (tokens) along some mesh axes.

    Attributes:
        axis: mesh axes.
        sizes: rows from each index to each, [n, n], or for a gather the rows of each index, [R].
        arriving: number of rows that each of the s ranks receives.
        rows: number of rows of the result. None: exactly the received rows.
        groups: groups of rows before the exchange, to be sorted by the destination rank. None leaves the order.
    """

    axis: Axes
    sizes: Tensor
    arriving: Tensor
    rows: int | None
    groups: _RowGroups | None = None

    def send(self, x: Tensor) -> Tensor:
        """Sends rows, and returns the received rows."""
        move = all_gather_rows if self.sizes.ndim == 1 else exchange_rows
        return move(x, self.sizes, self.axis, rows=self.rows)

    def send_back(self, y: Tensor, rows: int | None) -> Tensor:
        """Returns the rows that this rank has sent, in their order. After a gather each is a sum over the ranks."""
        if self.sizes.ndim == 1:
            return psum_scatter_rows(y, self.sizes, self.axis, rows=rows)
        return exchange_rows(y, self.sizes.t(), self.axis, rows=rows)


def _plan_hops(
    networks: Networks, table_sE: Tensor, ranges: Sequence[tuple[int, int]], rows: Sequence[int | None]
) -> list[_RowHop]:
    """Returns the hops, at least the near hop.

    Args:
        networks: axes of the hops.
        table_sE: rows from each source to each expert. Sources count by node, rank of the node, and rank of the gather.
        ranges: first and last expert of each of the n ranks.
        rows: room for the rows that come by each hop, or None.
    """
    rooms = iter(rows)
    (N, G, R), (a, b, t) = networks.shape, networks.coords
    # From node, rank and gather to node and rank.
    moved = _sum_by_owner(table_sE, ranges).view(N, G, R, N, G)
    groups, hops = None, list[_RowHop]()
    if N > 1:
        arriving = moved.sum((0, 4)).permute(2, 0, 1).flatten()
        hops.append(_RowHop(networks.far, moved[:, b, t].sum(-1), arriving, next(rooms)))
        groups = _RowGroups(moved[:, b, t, a].flatten(), torch.arange(G, device=moved.device).repeat(N), G)
    arriving = moved.sum((0, 1)).permute(1, 2, 0).flatten()
    hops.append(_RowHop(networks.near, moved[:, :, t, a].sum(0), arriving, next(rooms), groups))
    if R > 1:
        arriving = moved.sum((0, 1, 2)).flatten().repeat_interleave(R)
        hops.append(_RowHop(networks.gather, moved[..., a, b].sum((0, 1)), arriving, next(rooms)))
    return hops


def _group_arrivals(networks: Networks, table_sE: Tensor, start: int, stop: int) -> _RowGroups:
    """Returns the groups of rows after all hops, labelled by expert and then source: so a hop more changes no order.

    Each hop puts its sources in front: rows come in the order of gather, rank of the node, node, and then expert.
    """
    s, own = len(table_sE), stop - start
    sources = torch.arange(s, device=table_sE.device).view(networks.shape).permute(2, 1, 0).flatten()
    experts = torch.arange(own, device=table_sE.device)
    labels = experts * s + sources[:, None]
    return _RowGroups(table_sE[sources, start:stop].flatten(), labels.flatten(), own * s)


def _send_rows(hops: Sequence[_RowHop], x: Tensor) -> tuple[Tensor, list[Permutation | None]]:
    """Returns the rows at the ranks of their experts, and the order in which each hop has sent rows."""
    orders = list[Permutation | None]()
    for i, hop in enumerate(hops):
        order = None if hop.groups is None else hop.groups.sort(x)[0]
        x = x if order is None else dispatch(x, order)
        x = _mark_arrived(x, hops[i - 1].sizes) if i else x
        x = _mark_arrived(checkpoint_name(hop.send(x), "moe_rows"), hop.sizes)
        orders.append(order)
    return x, orders


def _return_rows(hops: Sequence[_RowHop], orders: Sequence[Permutation | None], y: Tensor, rows: int) -> Tensor:
    """Returns results to the ranks and places from which rows have come: `rows` of each rank, with zeros at the end."""
    for i, (hop, order) in reversed([*enumerate(zip(hops, orders, strict=True))]):
        y = _mark_arrived(y, hop.sizes)
        y = checkpoint_name(hop.send_back(y, hops[i - 1].rows if i else rows), "moe_results")
        y = _mark_arrived(y, hops[i - 1].sizes) if i else y
        y = y if order is None else undispatch(y, order)
    return y


def _mark_arrived(x: Tensor, sizes: Tensor) -> Tensor:
    """Returns `x`, marked: rows past the arrived rows are not used."""
    # A graph differentiated at the run has derivatives only of `nn`'s ops.
    return x if runs_as_ops() else arrived_rows(x, sizes)


def _sum_by_owner(table_sE: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the rows from each source to each rank."""
    ends_sE = F.pad(table_sE.cumsum(1), (1, 0))
    starts, stops = ([r[i] for r in ranges] for i in (0, 1))
    return ends_sE[:, stops] - ends_sE[:, starts]


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
        hops = _plan_hops(networks, table_sE, ranges, rows)
        for i, hop in enumerate(hops):
            if hop.rows is not None:
                remedy = self._suggest_room(is_last=hop is hops[-1])
                check_room(hop.arriving[None], room_sh[:, i], axes, name=name, remedy=remedy)
        come, orders = _send_rows(hops, dispatch(x_SD, places))
        sorted_, counts = _group_arrivals(networks, table_sE, *own).sort(come)
        counts_e = counts.view(own[1] - own[0], len(table_sE)).sum(1)
        # Rows past the arrived rows have no expert, and so are the last rows in both orders.
        y = undispatch(experts(params, dispatch(come, sorted_), counts_e), sorted_)
        return combine(_return_rows(hops, orders, y, S * k), places, routing.weights)

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
