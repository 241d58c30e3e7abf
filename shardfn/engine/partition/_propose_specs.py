"""Searches specs for the leaves of a loss that is written for a single device.

Along several axes specs are found axis by axis, in the order in which `partition` plans the axes. Specs along the first
axis are held while specs along the second are searched, on the program that the first specs give. Each search prices
the whole program along the axis. Combinations of both axes are not searched.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardfn.collectives import bind_mesh
from shardfn.core import (
    Mesh,
    P,
    PyTree,
    Sharding,
    chunk_bounds,
    dtype_name,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine.loss import find_transforms, microbatches
from shardfn.engine.pipeline import Pipelined
from shardfn.engine.plan import LeafView
from shardfn.graph import (
    Cluster,
    Form,
    arithmetic,
    looped,
    node_flops,
)

from ._partitioned import Partitioned
from ._plan import LossCall, constants_of
from ._spec_search import HeldBytes, Proposal, Proposer

# The bytes that a rank may hold where no limit is given, as a multiple of an even share.
_SHARE = 1.25
_TOLD = 4


@dataclasses.dataclass(frozen=True)
class Unplaced:
    """Loss with leaves that need specs.

    Attributes:
        loss: loss as written for a single device, of a microbatch.
        params: leaves.
        args: other arguments.
        rows: most rows of a leaf on a rank, for each leaf whose dim 0 the stages of a pipeline cut, else None.
        stages: axis of the stages, or None without stages.
        num_stages: number of ranks along the axis of the stages.
    """

    loss: Callable[..., Any]
    params: PyTree
    args: Sequence[Any]
    rows: Sequence[int | None]
    stages: str | None = None
    num_stages: int = 1

    @staticmethod
    def of(loss: Callable[..., Any], params: PyTree, args: Sequence[Any], sizes: Mapping[str, int]) -> "Unplaced":
        """Returns the part of a loss that a rank runs, on a mesh of these sizes.

        Raises:
            ValueError: the loss is partitioned already.
        """
        around, inner = find_transforms(loss)
        if any(isinstance(x, Partitioned) for x in around):
            raise ValueError(
                "propose_specs(partition(loss), ...): expected the loss without partition, got a partitioned loss."
            )
        leaves, treedef = tree_flatten(params)
        rows: list[int | None] = [None] * len(leaves)
        if args:
            loss, (batch, *_) = microbatches(loss, args[0])
            args = (batch, *args[1:])
        if not isinstance(inner, Pipelined):
            return Unplaced(loss, params, args, rows)
        num = sizes.get(inner.axis, 1)
        inside = tree_leaves(inner.stacks(tree_unflatten(treedef, list(range(len(leaves))))))
        for i in inside if num > 1 else ():
            rows[i] = chunk_bounds(len(leaves[i]), num, 0)[1]
        return Unplaced(_without_partition(inner), params, args, rows, inner.axis if num > 1 else None, num)


@dataclasses.dataclass(frozen=True)
class SpecSearch:
    """Search for the specs of a loss, axis by axis.

    Attributes:
        of: loss.
        mesh: mesh that has the axes.
        axes: names, in order.
        kept: bytes that are kept of each leaf.
        limit: bytes that a rank may hold. None: an even share and a quarter more, or the least.
        cluster: machines with rates that price work. None: work is free.
    """

    of: Unplaced
    mesh: Mesh
    axes: tuple[str, ...]
    kept: Sequence[HeldBytes]
    limit: float | None
    cluster: Cluster | None = None

    def found(self) -> PyTree:
        """Returns the specs.

        Raises:
            ValueError: the leaves do not fit, with any cut. The message names the biggest leaves, the limit, and a
                limit that would fit.
        """
        treedef = tree_flatten(self.of.params)[1]
        shape = {axis: num if axis in self.axes else 1 for axis, num in self.mesh.shape.items()}
        with bind_mesh(Mesh(shape, torch.device("cpu"), abstract=True)):
            found = self._fit_limit()
        specs = [self._spec_of(i, *x) for i, x in enumerate(zip(found.specs, found.scanned, strict=True))]
        return tree_unflatten(treedef, specs)

    def _fit_limit(self) -> "_CutLeaves":
        """Cuts leaves to fit the limit, if possible.

        Earlier axes keep leaves whole for later axes to cut. If later axes cannot, earlier axes cut more, and at last
        all.
        """
        limit = self._bytes_limit()
        found = self._cut_axes(limit, 1.0)
        for all_cut in (False, True) if len(self.axes) > 1 else ():
            if found.held > limit:
                found = self._cut_axes(limit, 0.0 if all_cut else limit / found.held)
        if found.held > limit and self.limit is not None:
            self._refuse_limit(found.held)
        return found

    def _bytes_limit(self) -> float:
        if self.limit is not None:
            return self.limit
        return _SHARE * sum(self._total_bytes()) / math.prod(self.mesh.shape[a] for a in self.axes)

    def _cut_axes(self, limit: float, room: float) -> "_CutLeaves":
        """Cuts axis by axis. All axes but the last leave a rank `room` of the bytes for later axes."""
        leaves = tree_leaves(self.of.params)
        views = [LeafView(tuple(x.shape), P(), tuple(x.shape)) for x in leaves]
        scanned: list[bool] = []
        held, later = 0.0, math.prod(self.mesh.shape[a] for a in self.axes)
        for k, axis in enumerate(self.axes):
            call = self._make_call(k, views)
            gm = call.captured()
            nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
            scanned = scanned or list(map(_is_scanned, nodes[: len(leaves)]))
            later //= self.mesh.shape[axis]
            # A rank does not hold the parts that later axes cut.
            most = limit if axis == self.axes[-1] else room * limit * later
            found = self._forms_along(k, gm, nodes, call.trained(nodes), most)
            held = found.held
            views = [_cut_leaf(v, found.forms[n], axis) for v, n in zip(views, nodes[: len(leaves)], strict=True)]
        return _CutLeaves([v.spec for v in views], scanned, held)

    def _make_call(self, k: int, views: Sequence[LeafView]) -> LossCall:
        """Returns the call of the loss, cut and partitioned along the first `k` axes."""
        names, of = self.axes, self.of
        before = functools.partial(Partitioned(of.loss, names).along, names[:k], views)
        return LossCall.of(before, of.params, of.args, views, names[k:])

    def _forms_along(
        self, k: int, gm: GraphModule, inputs: Sequence[Node], trained: Callable[[Node], bool], limit: float
    ) -> Proposal:
        """Returns the forms of leaves along axis `k`, in a graph of blocks along the earlier axes.

        Within a limit, or the least.
        """
        nodes, of = inputs[: len(self.kept)], self.of
        kept = {n: self._resident_bytes(i) for i, n in enumerate(nodes)}
        rows = {n for n, most in zip(nodes, of.rows, strict=True) if most is not None}
        num, price = self.mesh.shape[self.axes[k]], self._axis_price(k, gm)
        proposer = Proposer(gm.graph, num, kept, trained, constants_of(gm), rows=rows, work_price=price)
        return proposer.best(max(limit, proposer.least_held()))

    def _axis_price(self, k: int, gm: GraphModule) -> float:
        """Returns the bytes that axis `k` sends in the time of a floating-point operation."""
        if self.cluster is None:
            return 0.0
        by_dtype: dict[torch.dtype, int] = {}
        for n in gm.graph.nodes:
            if flops := node_flops(n):
                by_dtype[arithmetic(n)] = by_dtype.get(arithmetic(n), 0) + flops
        most = max(by_dtype, key=by_dtype.__getitem__, default=torch.float32)
        wire = self.cluster.link(self.mesh.shape, self.axes[k])
        return wire.bandwidth / self.cluster.device.rate(dtype_name(most))

    def _resident_bytes(self, i: int) -> HeldBytes:
        """Returns the bytes that a rank keeps of a leaf, or of the leaf's rows if stages cut the leaf."""
        kept, most = self.kept[i], self.of.rows[i]
        if most is None:
            return kept
        share = most / len(tree_leaves(self.of.params)[i])
        return HeldBytes(share * kept.per_element, share * kept.fixed)

    def _total_bytes(self) -> list[float]:
        """Returns the bytes that are kept of each leaf, before any axis of the search cuts the leaf."""
        held = map(self._resident_bytes, range(len(self.kept)))
        leaves = tree_leaves(self.of.params)
        return [kept.fixed + kept.per_element * x.numel() for kept, x in zip(held, leaves, strict=True)]

    def _refuse_limit(self, least: float) -> None:
        total = self._total_bytes()
        sizes = sorted(zip(total, tree_paths(self.of.params, "params"), strict=True), reverse=True)[:_TOLD]
        biggest = "; ".join(f"{path}, {int(size)} bytes" for size, path in sizes)
        most = math.ceil(least)
        names, num = " and ".join(map(repr, self.axes)), math.prod(self.mesh.shape[a] for a in self.axes)
        raise ValueError(
            f"propose_specs(memory={int(self.limit or 0)}): parameters and optimizer states are {int(sum(total))}"
            f" bytes. A rank of the {num} along {names} holds at least {most}, with each leaf cut where"
            f" that leaves least. The biggest leaves: {biggest}. Pass memory={most} or more, use a longer axis"
            f" {names}, or let ZeRO cut the states along another axis."
        )

    def _spec_of(self, i: int, spec: P, scanned: bool) -> P | Sharding:
        stages, most = self.of.stages, self.of.rows[i]
        if most is not None:
            spec = P(stages, *spec.entries[1:])
            # Layers of a stacked leaf are sent layer by layer, so every stage must have a layer.
            num = len(tree_leaves(self.of.params)[i])
            scanned = scanned and -(-num // most) == self.of.num_stages
        return Sharding(spec, stacked=True) if scanned else spec


@dataclasses.dataclass(frozen=True)
class _CutLeaves:
    """Spec of each leaf along the axes, whether a scan splits the leaf, and the bytes of the rank with the most."""

    specs: Sequence[P]
    scanned: Sequence[bool]
    held: float


def _cut_leaf(view: LeafView, form: Form, axis: str) -> LeafView:
    """Returns a leaf that is cut along a further axis, within the blocks that earlier axes leave."""
    if form.kind != "cut":
        return view
    names = [view.spec.dim_axes(d) for d in range(max(len(view.spec), form.dim + 1))]
    names[form.dim] = (*names[form.dim], axis)
    return LeafView(view.shape, P(*names), view.block)


def _is_scanned(node: Node) -> bool:
    """Returns whether an input is split into the layers of a scan, and used in no other way."""
    return bool(node.users) and all(map(_is_layer_split, node.users))


def _is_layer_split(node: Node) -> bool:
    """Returns whether an op splits a leaf into the layers of a scan."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    along: Any = node.args[1] if len(node.args) > 1 else 0
    layers: bool = packet is torch.ops.aten.unbind and along == 0
    return layers and all(u.target is looped for part in node.users for u in part.users)


def _without_partition(of: Pipelined) -> Pipelined:
    """Returns a pipelined loss with the functions for a single device."""
    return of.with_functions(lambda f, pick: f.inner if isinstance(f, Partitioned) else f)
