"""The plan of a step: the consequences of its annotations and the shapes of a parameter tree, computed once.

A plan is a layout, and never changes. `Learnt` is the memory of a plan, which its steps fill.

A fact is written once by the first step that finds it, except for orders of use, which grow and are forgotten. Only
the methods of `Learnt` write.

The order of use: which units a step gathers, in which order, agreed by all ranks and learnt while running.

A step has phases (a forward, a backward, for each microbatch). Within a phase the agreed order is a list of units. The
first time it is empty. A rank that needs a unit which is not ahead in the list asks for it aloud, all ranks serve it,
and it joins the list. So a branch that only some ranks take neither hangs nor goes unnoticed by the others.

Refuses a leaf that the batch's axis cuts in blocks, where the loss exchanges nothing along that axis.

Each rank would apply its own block to its own rows alone: experts that no other rank's tokens reach.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import AxisTypeError, AxisTypeMode, track_axis_types
from shardfn.core import (
    Mesh,
    PyTree,
    Zero,
    raise_all,
    tree_unflatten,
)
from shardfn.leaves import (
    LeafLayout,
    Unit,
    gather_units,
    reduce_units,
    refresh_units,
)
from shardfn.optim import GradientTransformation
from shardfn.state import layers_of

from ._chunks import Chunks


class Turn(NamedTuple):
    """The actions at one position: units to drop, units to gather."""

    drop: list[int]
    issue: list[int]

    @staticmethod
    def between(held: Collection[int], ahead: Collection[int]) -> "Turn":
        """Returns the turn that leads from the units held now to those wanted."""
        return Turn([u for u in held if u not in ahead], [u for u in ahead if u not in held])


@dataclasses.dataclass
class UseOrder:
    """The agreed order, phase by phase."""

    phases: list[list[int]] = dataclasses.field(default_factory=list)
    # The result of `schedule` for the sizes and the limit of its first call since the last `extend`. A plan has but one
    # of each.
    _moves: "list[list[Turn]]" = dataclasses.field(default_factory=list)

    def phase(self, index: int) -> list[int]:
        """Returns the units of one phase (created empty)."""
        while len(self.phases) <= index:
            self.phases.append([])
        return self.phases[index]

    def extend(self, phase: int, units: list[int]) -> None:
        """Adds the units that a phase used beyond the agreed order; earlier results of `schedule` are dropped."""
        self.phase(phase).extend(units)
        self._moves = []

    def schedule(self, sizes: list[int], limit: int) -> "list[list[Turn]]":
        """Returns the units that a step drops and gathers there for each position of each phase."""
        if not self._moves:
            held: dict[int, None] = {}
            for phase, units in enumerate(self.phases):
                moves = []
                for pos in range(len(units)):
                    # As `Gatherer` would work it out: at one position it holds the units that were ahead at the one
                    # before.
                    ahead = self.window(phase, pos, sizes, limit)
                    moves.append(Turn.between(held, ahead))
                    held = ahead
                self._moves.append(moves)
        return self._moves

    def find(self, phase: int, start: int, unit: int) -> int | None:
        """Returns the next position of `unit` in a phase, from `start` on."""
        try:
            return self.phase(phase).index(unit, start)
        except ValueError:
            return None

    def window(self, phase: int, start: int, sizes: list[int], limit: int) -> dict[int, None]:
        """Returns the distinct units used from a position on, across phases, while they fit `limit` bytes.

        At least one.
        """
        out: dict[int, None] = {}
        total = 0
        for p in range(phase, len(self.phases)):
            units = self.phases[p]
            for pos in range(start if p == phase else 0, len(units)):
                unit = units[pos]
                if unit in out:
                    continue
                total += sizes[unit]
                if out and total > limit:
                    return out
                out[unit] = None
        return out


class ActivationShapes(NamedTuple):
    """The values sent between stages, as a tree of tensors without data.

    Attributes:
        treedef: the structure.
        leaves: the tensors.
        paths: names.
        axes: the axes besides the batch's along which ranks hold different values by leaf.
    """

    treedef: Any
    leaves: list[Tensor]
    paths: list[str]
    axes: list[tuple[str, ...]]


@dataclasses.dataclass
class _StagesSeen:
    """The facts that a plan's steps have learnt, empty until one has run.

    Attributes:
        ends: the kinds of values that the last stage returns.
        between: shapes of a batch -> the tensors that are sent between stages.
    """

    ends: Any = None
    between: dict[Any, ActivationShapes] = dataclasses.field(default_factory=dict)

    def take_ends(self, ends: Any) -> Any:
        """Keeps the kinds of values that the last stage returns, equal on all stages, and returns them."""
        self.ends = ends
        return ends

    def shapes(self, key: Hashable, find: Callable[[], ActivationShapes]) -> ActivationShapes:
        """Returns the tensors that travel between stages for batches of a shape: found by `find` the first time."""
        if key not in self.between:
            self.between[key] = find()
        return self.between[key]


@dataclasses.dataclass
class Learnt:
    """Facts that the steps of one plan have learnt, empty before the first step."""

    # By kind of call, the order in which leaves are gathered. A `Gatherer` extends it at the end of each phase by the
    # units that ranks of one ZeRO group have agreed on, so it is equal on them. A call that some rank has forgotten is
    # forgotten by all before it runs.
    use_orders: dict[Any, UseOrder] = dataclasses.field(default_factory=dict)
    # The order in which gradients become ready. Written at the end of the first step, with that of the first rank of
    # each group that shares leaves, empty before, and where no gradient is sent.
    reduce_order: list[int] = dataclasses.field(default_factory=list)
    # The kinds of values that the loss returns. Written at the end of the first step, before all ranks of the mesh
    # compare it: where it differs, all of them raise. A capture writes its own.
    outcome: str | None = None
    # Whether losses, model states and rows have been compared between ranks. Written after the first step that was not
    # skipped, which is the same on all ranks of the mesh.
    compared: bool = False
    # Whether the model states after the end of a step have been compared, where `update` makes them.
    compared_end: bool = False
    # By optimizer, the same decided on this layout's leaves. A function of the layout alone, so ranks need not agree;
    # shared by all plans of a single layout.
    rules: dict[GradientTransformation, GradientTransformation] = dataclasses.field(default_factory=dict)
    # The facts of the stages of a pipeline. Each rank finds the shapes for itself. The last stage's kinds of values are
    # sent to the others in the first step.
    stages: _StagesSeen = dataclasses.field(default_factory=_StagesSeen)
    # By axes that an optimizer reduces, the plan of its steps, which learns for itself. A function of the layout.
    unreduced: "dict[tuple[str, ...], Plan]" = dataclasses.field(default_factory=dict)

    def use_order(self, key: Hashable) -> UseOrder:
        """Returns the order of use of a kind of call; created empty."""
        return self.use_orders.setdefault(key, UseOrder())

    def forget_order(self, key: Hashable) -> None:
        """Drops the order of a kind of call, if there is one."""
        self.use_orders.pop(key, None)

    def forget_orders(self, keep: int) -> None:
        """Drops all but the `keep` newest orders of use, besides the step's own."""
        applied = [key for key in self.use_orders if key != "step"]
        for key in applied[: max(0, len(applied) - keep)]:
            del self.use_orders[key]

    def take_reduce_order(self, order: list[int]) -> None:
        """Keeps the order in which gradients became ready, equal on all ranks that send them."""
        self.reduce_order = order

    def take_outcome(self, outcome: str) -> None:
        """Keeps the kinds of values that the loss returns, which all ranks then compare."""
        self.outcome = outcome

    def take_compared(self, done: bool) -> None:
        """Keeps whether values that must be equal on ranks have been compared."""
        self.compared = done

    def take_compared_end(self) -> None:
        """Keeps that the model states after the end of a step have been compared."""
        self.compared_end = True

    def rule(
        self, optimizer: GradientTransformation, decide: Callable[[], GradientTransformation]
    ) -> GradientTransformation:
        """Returns the optimizer decided on this layout: by `decide` the first time."""
        if optimizer not in self.rules:
            self.rules[optimizer] = decide()
        return self.rules[optimizer]

    def find_unreduced(self, axes: tuple[str, ...], make: "Callable[[], Plan]") -> "Plan":
        """Returns the plan with gradients that stay summands along `axes`: made by `make` the first time."""
        if axes not in self.unreduced:
            self.unreduced[axes] = make()
        return self.unreduced[axes]


# Bytes of gradients that gain nothing by setting out before a backward has ended.
TAIL_BYTES = 2 << 20


# Compared by identity: two plans of a single layout learn apart.
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A layout and its units of transfer.

    Attributes:
        leaves: where each leaf lives.
        treedef: the structure of the parameter tree.
        zero: the rule.
        mesh: the mesh.
        batch_axes: the axes that cut the batch.
        batch: prefix tree of the batch's specs.
        stage_axes: the axis along which ranks run the stages of a pipeline, or ().
        gather_bytes: bytes of layers that are gathered together.
        captured: whether it is for capturing a step in a graph, which then holds its orders.
        whole: whether stacked leaves travel whole.
        learnt: the facts that its steps have learnt.
    """

    leaves: list[LeafLayout]
    treedef: Any
    zero: Zero
    mesh: Mesh
    batch_axes: tuple[str, ...]
    batch: PyTree
    stage_axes: tuple[str, ...] = ()
    gather_bytes: int = 0
    captured: bool = False
    whole: bool = False
    learnt: Learnt = dataclasses.field(default_factory=Learnt)

    @functools.cached_property
    def layers(self) -> list[LeafLayout]:
        """Returns the tensors that enter the loss and are sent: the leaves, and for a stacked leaf each of its layers.

        Units count these.
        """
        return self.leaves if self.whole else [x for leaf in self.leaves for x in leaf.layers or (leaf,)]

    @functools.cached_property
    def gather_units(self) -> list[Unit]:
        """Returns the groups of layers that are gathered together."""
        return gather_units(self.layers, self.gather_bytes)

    @functools.cached_property
    def reduce_units(self) -> list[Unit]:
        """Returns the groups of layers whose gradients are reduced together."""
        return reduce_units(self.layers, self.zero, self.mesh)

    @functools.cached_property
    def refresh_units(self) -> list[Unit]:
        """Returns the groups of layers that are gathered together after the update."""
        return refresh_units(self.layers, self.zero)

    @functools.cached_property
    def chunks(self) -> Chunks | None:
        """Returns the chunks of this rank, in a step with canonical sums."""
        return Chunks.of(self.zero.reduction_chunks, self.mesh, self.batch_axes) if self.zero.is_canonical else None

    @functools.cached_property
    def leaf_layouts(self) -> list[tuple[Any, ...]]:
        """Returns spec, mesh, shape, mark of a frozen leaf, and memory of each leaf of a state."""
        return [(x.param, self.mesh, x.shape, x.frozen, x.home) for x in self.leaves]

    @functools.cached_property
    def leaf_dtypes(self) -> list[torch.dtype]:
        """Returns the dtype of each leaf of a state."""
        return [x.dtypes.param for x in self.leaves]

    @functools.cached_property
    def has_codes(self) -> bool:
        """Returns whether a leaf is kept in codes."""
        return any(x.places.quantization is not None for x in self.leaves)

    @functools.cached_property
    def has_stacks(self) -> bool:
        """Returns whether there is a stacked leaf, which has several layers."""
        return any(leaf.layers for leaf in self.leaves)

    @functools.cached_property
    def at_home(self) -> bool:
        """Returns whether everything that an update reads and writes lies in the device's memory, unconverted."""
        return all(leaf.ways.at_home for leaf in self.leaves if leaf.trainable)

    @functools.cached_property
    def shards(self) -> PyTree:
        """Returns the specs of the rows that are updated.

        A tree like the parameters, None for leaves that are not trained.
        """
        return tree_unflatten(self.treedef, [leaf.shard if leaf.trainable else None for leaf in self.leaves])

    @functools.cached_property
    def rank_cuts(self) -> dict[str, tuple[int, int, int]]:
        """By path of a leaf that is gathered after the update: dim, start and length of the rows of this rank."""
        out: dict[str, tuple[int, int, int]] = {}
        for leaf in self.leaves:
            if leaf.refreshed and leaf.dim is not None:
                lo, hi = leaf.pieces.bounds[self.zero_rank(leaf)]
                out[leaf.path] = leaf.dim, lo, hi - lo
        return out

    @functools.cached_property
    def following(self) -> AxisTypeMode:
        """Follows the values of the loss: a leaf varies along the axes of the batch and those that cut it."""
        return AxisTypeMode(self.mesh, [a for a in self.mesh.axis_names if a not in self.stage_axes], self.batch_axes)

    @functools.cached_property
    def following_function(self) -> AxisTypeMode:
        """Follows the values of a function whose leaves are the same on all ranks, but for the axes that cut them."""
        return AxisTypeMode(self.mesh, self.following.axes, batch=self.batch_axes)

    @functools.cached_property
    def _list_exchanged_blocks(self) -> dict[str, tuple[str, ...]]:
        """Returns the blocks along axes of the batch. A stage of a pipeline may be one without them."""
        return {} if self.stage_axes else _blocks_of_batch_axes(self.leaves, self.following.batch)

    def follows(self) -> AbstractContextManager[Any]:
        """Follows the values of a loss: from its beginning where a leaf is a block, else from its first collective.

        Raises:
            AxisTypeError: (at its end) the loss exchanges nothing along an axis of the batch that cuts a leaf.
        """
        own = {a for leaf in self.leaves for a in leaf.distinct_axes} - {*self.batch_axes}
        at_once = not own.isdisjoint(self.following.axes)
        if self._list_exchanged_blocks:
            return _exchanging(self.following, self._list_exchanged_blocks, at_once=at_once)
        return track_axis_types(self.following, at_once=at_once)

    def for_capture(self) -> "Plan":
        """The same layout, with nothing learnt, for capturing a step, which has no values to compare."""
        # A graph holds a gather for each leaf and use; units are decided when it is scheduled.
        plan = self._replace_fields(gather_bytes=0, captured=True)
        plan.learnt.take_compared(True)
        return plan

    def with_whole_stacks(self) -> "Plan":
        """The same layout, with stacked leaves that travel whole."""
        return self._replace_fields(whole=True) if self.has_stacks else self

    def with_unreduced(self, axes: tuple[str, ...]) -> "Plan":
        """Returns the plan of steps whose gradients stay summands along `axes`, which the optimizer reduces."""
        axes = tuple(a for a in self.batch_axes if a in axes)

        def make() -> Plan:
            return self._replace_fields(leaves=[leaf.with_unreduced(axes) for leaf in self.leaves])

        return self.learnt.find_unreduced(axes, make) if axes else self

    def _replace_fields(self, **changes: Any) -> "Plan":
        """Returns a plan with nothing learnt but the optimizers' decisions, which depend on the layout alone."""
        kept = "treedef", "zero", "mesh", "batch_axes", "batch", "stage_axes", "gather_bytes"
        same = {name: getattr(self, name) for name in kept}
        own: dict[str, Any] = {"leaves": self.leaves, **same, **changes}
        return Plan(**own, learnt=Learnt(rules=self.learnt.rules))

    @property
    def trained(self) -> list[str]:
        """Returns the paths of the trainable leaves."""
        return [leaf.path for leaf in self.leaves if leaf.trainable]

    def num_summands(self, leaf: LeafLayout) -> int:
        """Returns the number of ranks whose summands add up to a leaf's gradient. 1 for a reduced gradient."""
        return self.mesh.axis_size(leaf.ways.summed.unreduced)

    @functools.cached_property
    def unreduced_axes(self) -> tuple[str, ...]:
        """Returns the axes along which the gradients of some leaves stay summands."""
        found = {a for leaf in self.leaves for a in leaf.ways.summed.unreduced if leaf.trainable}
        return tuple(a for a in self.batch_axes if a in found)

    def by_layer(self, tensors: Sequence[Any]) -> list[Any]:
        """From one tensor per leaf to one per layer, which are views of stacked leaves."""
        if not self.has_stacks or self.whole:
            return list(tensors)
        out: list[Any] = []
        for leaf, x in zip(self.leaves, tensors, strict=True):
            out += [x] if not leaf.layers else [None] * len(leaf.layers) if x is None else layers_of(x)
        return out

    @functools.cached_property
    def first_layers(self) -> list[int]:
        """Returns the number of its first layer, by leaf: a leaf that is not a stack is a layer itself."""
        return [0, *itertools.accumulate(1 if self.whole else len(x.layers) or 1 for x in self.leaves)][:-1]

    def guessed_order(self, used: UseOrder) -> list[int]:
        """Returns a guess, equal on all ranks, of the order in which gradients become ready: that of use, reversed.

        Where no gradient is sent, and while a step is captured, no order need be agreed on: it is empty.

        Args:
            used: the order in which leaves were gathered in the forward.
        """
        axes = {leaf.reduce_axes for leaf in self.layers if leaf.trainable}
        if self.captured or all(self.mesh.axis_size(a) == 1 for a in axes):
            return []
        last = {i: pos for pos, u in enumerate(used.phase(0)) for i in self.gather_units[u].leaves}
        when = [max(last.get(i, -1) for i in unit.leaves) for unit in self.reduce_units]
        return sorted(range(len(when)), key=lambda u: (when[u], u), reverse=True)

    def sent_last(self) -> frozenset[int]:
        """Returns the layers whose gradients set out when a backward has ended: of the last units of the learnt order.

        None where gradients leave the device, which has room for few, or an update waits for them.
        """
        out, nbytes = set[int](), 0
        if not self.at_home:
            return frozenset()
        for unit in (self.reduce_units[u] for u in reversed(self.learnt.reduce_order)):
            nbytes += unit.nbytes
            if out and nbytes > TAIL_BYTES:
                break
            out.update(unit.leaves)
        return frozenset(out)

    @functools.cached_property
    def psum_axes(self) -> list[tuple[str, ...]]:
        """Returns the sets of axes over which the step's measures are summed, in the mesh's order; sorted."""
        sets = {self.batch_axes, *(self.norm_axes(leaf) for leaf in self.leaves if leaf.trainable)}
        return [tuple(a for a in self.mesh.axis_names if a in names) for names in sorted(sets)]

    @functools.cached_property
    def reduce_unit_of(self) -> dict[int, int]:
        """Returns the number of its unit of reduction, by layer that is trained."""
        return {i: u for u, unit in enumerate(self.reduce_units) for i in unit.leaves}

    @functools.cached_property
    def units_by_norm(self) -> list[tuple[str, ...]]:
        """Returns, for each reduction unit, the mesh axes along which ranks have disjoint pieces of the gradients."""
        return [self.norm_axes(self.layers[unit.leaves[0]]) for unit in self.reduce_units]

    @functools.cached_property
    def summands_by_unit(self) -> list[int]:
        """Returns `num_summands` of the leaves of each unit of reduction."""
        return [self.num_summands(self.layers[unit.leaves[0]]) for unit in self.reduce_units]

    def norm_axes(self, leaf: LeafLayout) -> tuple[str, ...]:
        """Returns the axes along which the pieces of a leaf's gradient are disjoint, or are different ranks' own."""
        disjoint = leaf.reduce_axes + leaf.ways.summed.unreduced + leaf.distinct_axes
        return tuple(a for a in self.mesh.axis_names if a in disjoint)

    @functools.cached_property
    def sharing_axes(self) -> tuple[str, ...]:
        """Returns the axes along which leaves or gradients are sent. Ranks along others may run other actions."""
        used = {a for leaf in self.layers for a in (*leaf.zero_axes, *leaf.reduce_axes, *leaf.extra_axes)}
        return tuple(a for a in self.mesh.axis_names if a in used or a in self.batch_axes)

    def zero_rank(self, leaf: LeafLayout) -> int:
        """This rank's index among the ranks that share the rows of a leaf."""
        return self.mesh.axis_index(leaf.zero_axes)

    def describe(self) -> str:
        """One line per fact, equal on all ranks that run the same plan."""
        # Each rank may have a disk of its own.
        lines = [f"Zero({k}={v!r})" for k, v in self.zero.as_flat().items() if k != "directory"]
        lines += [f"mesh {self.mesh.shape}, batch cut along {self.batch_axes}"]
        for x in self.leaves:
            kept = f"compute {x.compute!r} trainable {x.trainable}{' stacked' if x.layers else ''}"
            homes = f"kept at {x.home}, {x.ways.summed.memory_kind}, {x.ways.state.memory_kind}"
            quantization = "" if x.places.quantization is None else f" in {x.places.quantization}"
            lines.append(f"{x.path}: {tuple(x.shape)} {x.dtypes} {kept} {homes}{quantization}")
        return "\n".join(lines)


def _blocks_of_batch_axes(leaves: Sequence[LeafLayout], axes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """By path, the batch's axes with several ranks that cut a leaf in blocks, which a loss has to exchange along."""
    named = {leaf.path: tuple(a for a in leaf.distinct_axes if a in axes) for leaf in leaves}
    return {path: own for path, own in named.items() if own}


@contextlib.contextmanager
def _exchanging(mode: AxisTypeMode, blocks: Mapping[str, tuple[str, ...]], *, at_once: bool) -> Iterator[AxisTypeMode]:
    """Follows values as `track_axis_types` does, and demands an exchange along the axes of all blocks.

    Raises:
        AxisTypeError: no collective ran along any axis of a block; lists these leaves.
    """
    mode.crossed.clear()
    with track_axis_types(mode, at_once=at_once):
        yield mode
    raise_all(
        AxisTypeError,
        "the loss applies each rank's block of a leaf to its own rows of the batch alone, as no collective runs along"
        " the block's axis:",
        [
            f"{path} is cut along {', '.join(map(repr, axes))}; send rows to the blocks, as nn.moe.apply(...,"
            f" exchange=nn.moe.AllToAll({axes[0]!r})) does, gather the leaf with sf.all_gather, or remove {axes[0]!r}"
            " of its spec. A loss that sends by itself, without shardfn, declares it by a call of"
            f" sf.axis_index({axes[0]!r})"
            for path, axes in blocks.items()
            if mode.crossed.isdisjoint(axes)
        ],
    )
