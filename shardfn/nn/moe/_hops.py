"""Hops of rows on the way to the experts, and back.

N nodes, G ranks of a node, R ranks with the same tokens, n = N G; s = n R sources of rows, E experts.

    hop       along           rows                                                    messages of a rank
    far       N nodes         for all ranks of a node, to the rank of equal number    N - 1
    near      G, or all n     for the ranks of this node, or of all nodes             G - 1, or n - 1
    gather    R               of each rank, to all R ranks                            R - 1

Without a far hop the near hop has all n ranks: one network. After the near hop rows lie at the rank of their experts. A
gather follows where R ranks have features of the same experts, and each of the R ranks has sent 1 / R of the tokens.

All numbers come from a single table, the rows from each source to each expert: [s, E].
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardfn.collectives import (
    all_gather_rows,
    arrived_rows,
    axis_index,
    axis_size,
    exchange_rows,
    psum_scatter_rows,
    rows_as,
)
from shardfn.core import Axes, checkpoint_name
from shardfn.nn import runs_as_ops

from ._permute import Permutation, dispatch, permutation, undispatch


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


class RowGroups(NamedTuple):
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


class RowHop(NamedTuple):
    """Hop of rows.

    Attributes:
        axis: mesh axes.
        sizes: rows from each index to each, [n, n], or for a gather the rows of each index, [R].
        arriving: rows that come to each of the s ranks.
        rows: number of rows of the result. None is exactly the rows that come.
        groups: groups of rows before the hop, to be sorted by the rank to which the rows go. None leaves the order.
    """

    axis: Axes
    sizes: Tensor
    arriving: Tensor
    rows: int | None
    groups: RowGroups | None = None

    def send(self, x: Tensor) -> Tensor:
        """Returns the rows that come."""
        move = all_gather_rows if self.sizes.ndim == 1 else exchange_rows
        return move(x, self.sizes, self.axis, rows=self.rows)

    def send_back(self, y: Tensor, rows: int | None) -> Tensor:
        """Returns the rows that this rank has sent, in their order. After a gather each is a sum over the ranks."""
        if self.sizes.ndim == 1:
            return psum_scatter_rows(y, self.sizes, self.axis, rows=rows)
        return exchange_rows(y, self.sizes.t(), self.axis, rows=rows)


def plan_hops(
    networks: Networks, table_sE: Tensor, ranges: Sequence[tuple[int, int]], rows: Sequence[int | None]
) -> list[RowHop]:
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
    groups, hops = None, list[RowHop]()
    if N > 1:
        arriving = moved.sum((0, 4)).permute(2, 0, 1).flatten()
        hops.append(RowHop(networks.far, moved[:, b, t].sum(-1), arriving, next(rooms)))
        groups = RowGroups(moved[:, b, t, a].flatten(), torch.arange(G, device=moved.device).repeat(N), G)
    arriving = moved.sum((0, 1)).permute(1, 2, 0).flatten()
    hops.append(RowHop(networks.near, moved[:, :, t, a].sum(0), arriving, next(rooms), groups))
    if R > 1:
        arriving = moved.sum((0, 1, 2)).flatten().repeat_interleave(R)
        hops.append(RowHop(networks.gather, moved[..., a, b].sum((0, 1)), arriving, next(rooms)))
    return hops


def group_arrivals(networks: Networks, table_sE: Tensor, start: int, stop: int) -> RowGroups:
    """Returns the groups of rows after all hops, labelled by expert and then source: so a hop more changes no order.

    Each hop puts its sources in front: rows come in the order of gather, rank of the node, node, and then expert.
    """
    s, own = len(table_sE), stop - start
    sources = torch.arange(s, device=table_sE.device).view(networks.shape).permute(2, 1, 0).flatten()
    experts = torch.arange(own, device=table_sE.device)
    labels = experts * s + sources[:, None]
    return RowGroups(table_sE[sources, start:stop].flatten(), labels.flatten(), own * s)


def send_rows(hops: Sequence[RowHop], x: Tensor) -> tuple[Tensor, list[Permutation | None]]:
    """Returns the rows at the ranks of their experts, and the order in which each hop has sent rows."""
    orders = list[Permutation | None]()
    for i, hop in enumerate(hops):
        order = None if hop.groups is None else hop.groups.sort(x)[0]
        x = x if order is None else dispatch(x, order)
        x = mark_arrived(x, hops[i - 1].sizes) if i else x
        x = mark_arrived(checkpoint_name(hop.send(x), "moe_rows"), hop.sizes)
        orders.append(order)
    return x, orders


def return_rows(hops: Sequence[RowHop], orders: Sequence[Permutation | None], y: Tensor, rows: int) -> Tensor:
    """Returns results to the ranks and places from which rows have come: `rows` of each rank, with zeros at the end."""
    for i, (hop, order) in reversed([*enumerate(zip(hops, orders, strict=True))]):
        y = mark_arrived(y, hop.sizes)
        y = checkpoint_name(hop.send_back(y, hops[i - 1].rows if i else rows), "moe_results")
        y = mark_arrived(y, hops[i - 1].sizes) if i else y
        y = y if order is None else undispatch(y, order)
    return y


def mark_arrived(x: Tensor, sizes: Tensor) -> Tensor:
    """Returns `x`, marked: rows past the arrived rows are not used."""
    # A graph differentiated at the run has derivatives only of `nn`'s ops.
    return x if runs_as_ops() else arrived_rows(x, sizes)


def _sum_by_owner(table_sE: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the rows from each source to each rank."""
    ends_sE = F.pad(table_sE.cumsum(1), (1, 0))
    starts, stops = ([r[i] for r in ranges] for i in (0, 1))
    return ends_sE[:, stops] - ends_sE[:, starts]
