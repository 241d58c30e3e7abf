"""Losses that `pipeline` and `pipeline_module` return, whose layers may lie on several ranks.

A stack is layers stacked along dim 0. With several chunks a rank has a piece of each of several stacks. In a schedule
that passes through the ranks forwards and then backwards, every second stack has the layers in reverse order. So the
result of the plain loss does not depend on the number of ranks, and every rank has a block of each stack.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import axis_index, axis_size, current_axis_types, psum, pvary, transforming
from shardfn.core import (
    Mesh,
    PyTree,
    chunk_bounds,
    fold_in,
    named_leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine.loss import (
    FIRST,
    LAST,
    LeafUses,
    Loss,
    Transform,
    Unwrapped,
    check_count,
    find_transforms,
    leaves_for,
    pass_count,
    varying_along,
)
from shardfn.engine.plan import (
    LeafView,
    LeafViews,
    Pick,
    every_leaf,
)
from shardfn.nn import scan
from shardfn.schedules import PipelineSchedule, loop_stages, timeline, v_stages

from ._stacks import (
    ElsewhereTensor,
    check_rows,
    layer_rows,
    refilled,
    unpadded,
)
from ._stage_state import (
    PipelineState,
    apart,
    check_in_order,
    current_state,
    put_part,
    with_part,
)

StageRows = list[list[list[int]]]  # by chunk, kind of layers and rank
NO_LAYERS = "a pipeline has no stacked layers: `blocks` leads to an empty tree."
UNLIKE = "the leaves of a pipeline's stack are of different numbers of layers; stack the same number of each:"


# From a function of a pipeline, and the function's choice of leaves, to a replacement.
Change = Callable[[Callable[..., Any], Pick], Callable[..., Any]]


class Place(NamedTuple):
    """Place of a rank's chunk in the model.

    Attributes:
        chunk: number of the stack that the layers belong to.
        row: number of the layer in the first row of the block.
        begins: whether the place is the first stage, without an input.
        ends: whether the place is the last stage. The last stage returns the loss.
    """

    chunk: int
    row: int
    begins: bool
    ends: bool


@dataclasses.dataclass(frozen=True)
class Pipelined(Transform):
    """Loss with layers that may lie on several ranks.

    Subclasses define the parts and how parts run: `PipelinedLayers` of three functions, `PipelinedModule` of a module.

    Attributes:
        blocks: function from params to the stack, or, with several chunks, to a sequence of stacks.
        axis: axis along which stages lie.
        schedule: function from the numbers of ranks and microbatches to the actions of each rank in a step.
        num_chunks: number of stacks.
        turns: whether the stages pass through the ranks forwards and then backwards.
        per_stage: number of layers of each rank in a stack with unused rows. None: every row is a layer, and the stack
            is cut evenly.
        has_state: whether functions take and return parts of a model state, inside `ModelState.through`.
        count: whether the last argument is the number of the step, for the end of the loss and not for its layers.
        views: leaves of a step's parameters. None: the loss is not bound to leaves yet.
    """

    transform: ClassVar[str] = "pipeline"
    # Field of the function that returns the loss.
    ends: ClassVar[str]

    blocks: Callable[[PyTree], Any]
    axis: str
    schedule: Callable[[int, int], PipelineSchedule]
    num_chunks: int
    turns: bool
    per_stage: tuple[int, ...] | None
    has_state: bool = dataclasses.field(default=False, kw_only=True)
    count: bool = dataclasses.field(default=False, kw_only=True)
    views: LeafViews | None = dataclasses.field(default=None, kw_only=True, repr=False, compare=False)

    @abc.abstractmethod
    def enter(self, params: PyTree, batch: PyTree, *key: Tensor) -> PyTree:
        """Returns the input of the first layer."""

    @property
    @abc.abstractmethod
    def begins(self) -> tuple[str, Callable[..., Any]]:
        """Returns the function that `enter` runs, and the function's name for users."""

    def stage(self, params: PyTree, batch: PyTree, given: PyTree, place: Place, key: tuple[Tensor, ...]) -> Any:
        """Runs a stage: returns the values for the next stage, or, for the last stage, the loss.

        The first stage takes no values.

        Args:
            params: parameters with this rank's blocks of the stacks.
            batch: microbatch.
            given: values from the previous stage.
            place: place of the stage in the pipeline.
            key: key of the loss, or ().
        """
        h = self.enter(params, batch, *key) if place.begins else given
        h = self.between(params, batch, h, place, key)
        return self.leave(params, h, batch, *key) if place.ends else h

    @abc.abstractmethod
    def between(self, params: PyTree, batch: PyTree, h: PyTree, place: Place, key: tuple[Tensor, ...]) -> PyTree:
        """Runs the layers of this rank's block on `h`, at any stage."""

    @abc.abstractmethod
    def leave(self, params: PyTree, h: PyTree, batch: PyTree, *key: Tensor) -> Any:
        """Returns the loss, from the output of the last layer."""

    def __call__(self, params: PyTree, batch: PyTree, *key: Tensor) -> Any:
        """Returns the loss, stage after stage, while all other ranks wait.

        A step runs stages at the same time instead.
        """
        h = self.enter(params, batch, *key)
        if axis_size(self.axis) == 1:
            lengths = [[_count_layers(self.filled(s))] for s in self.stacks(params)]
            for chunk, row in enumerate(self.firsts(lengths, 0)):
                h = self.between(params, batch, h, Place(chunk, row, False, False), key)
        else:
            h = self._stage_by_stage(params, batch, h, key)
        return self.leave(params, h, batch, *key)

    def stacks(self, params: PyTree) -> Sequence[PyTree]:
        """Returns the stacks, or this rank's blocks of the stacks.

        Raises:
            ValueError: the number of stacks is not the number of chunks.
        """
        found = self.blocks(params)
        if self.num_chunks == 1:
            return [found]
        if not isinstance(found, list | tuple) or len(found) != self.num_chunks:
            told = f"{len(found)}" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
            raise ValueError(
                f"a schedule of {self.num_chunks} chunks expected a list of {self.num_chunks} stacks of"
                f" layers, got {told}. Cut the stack in {self.num_chunks} along dim 0."
            )
        return found

    def kinds(self, stack: PyTree) -> Sequence[PyTree]:
        """Returns the parts of a stack, or of a similar tree, whose layers differ in leaves. A part may be uncut."""
        return [stack]

    def cut(self, rows: Sequence[Sequence[int]]) -> list[bool]:
        """Returns by kind whether ranks have different rows of the kind's stack. `rows` are as in `shares`."""
        return [True for _ in rows]

    def shares(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Returns by rank the number of layers of a stack.

        Args:
            rows: number of rows by kind and rank.

        Raises:
            ValueError: the rows of a rank are not rows of layers that run in sequence.
        """
        return list(rows[0])

    def filled(self, stack: PyTree) -> PyTree:
        """Returns a stack, or this rank's block of the stack, without unused rows."""
        if self.per_stage is None:
            return stack
        if axis_size(self.axis) == 1:
            named = named_leaves(stack, "blocks")
            check_rows({path: len(x) for path, x in named}, self.per_stage)
        if axis_size(self.axis) > 1:
            own = self.per_stage[int(axis_index(self.axis))]
            return tree_map(lambda x: x.narrow(0, 0, own), stack)
        return unpadded(stack, self.per_stage)

    def tied(self, params: PyTree) -> PyTree:
        """Returns the parameters that the layers of this rank depend on."""
        return self.stacks(params)

    def without_stacks(self, params: PyTree) -> PyTree:
        """Returns the parameters for code outside of the layers. Stacks on several ranks have no values there."""
        if axis_size(self.axis) == 1:
            return params
        own = {id(x) for x in tree_leaves(self.stacks(params))}
        return tree_map(lambda x: ElsewhereTensor.of(x) if id(x) in own else x, params)

    def firsts(self, rows: Sequence[Sequence[int]], rank: int) -> list[int]:
        """Returns by chunk the number of the layer in the first row of a rank's block.

        Args:
            rows: number of layers of each rank by chunk.
            rank: index of the rank.
        """
        out, before = [], 0
        for chunk, by_rank in enumerate(rows):
            own, num = sum(by_rank[:rank]), sum(by_rank)
            out.append(before + (num - 1 - own if self.reverses(chunk) else own))
            before += num
        return out

    @property
    def without_collectives(self) -> tuple["Pipelined", tuple[str, ...]]:
        """Returns a loss of the same shapes that sends nothing along some axes, and the axes.

        Along these axes the loss takes whole leaves.
        """
        return self, ()

    def with_functions(self, change: Change) -> "Pipelined":
        """Returns the loss with each function of a part of the parameters replaced by `change(function, pick)`."""
        del change
        return self

    def with_state(self) -> "Pipelined":
        """Returns the loss for a step with a model state. Each function takes a part."""
        return dataclasses.replace(self, has_state=True)

    def with_count(self) -> "Pipelined":
        """Returns the loss for a step that passes the step's number behind all other arguments.

        Raises:
            TypeError: the function that returns the loss takes no argument `step`.
        """
        function = getattr(self, self.ends)
        check_count(f"{self.ends} of a pipeline", function)
        own = {self.ends: pass_count(function)}
        return dataclasses.replace(self, count=True, **own)

    def keys(self, rest: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the key, or (), from the arguments behind the batch."""
        return rest[: len(rest) - self.count]

    def shared_layers(self, state: PipelineState, stage: int, here: bool) -> PipelineState:
        """Returns the model state with the layers' part from the ranks that ran the layers.

        `here`: whether this rank ran the stage.
        """
        del stage, here
        return state  # each rank has different rows of a stack

    def reverses(self, chunk: int) -> bool:
        """Returns whether the layers of a stack come in reverse."""
        return self.turns and chunk % 2 == 1

    def stages(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the stage, by rank and chunk."""
        return v_stages(num_ranks) if self.turns else loop_stages(num_ranks, self.num_chunks)

    def leaf_uses(self, leaves: PyTree) -> dict[int, LeafUses]:
        """Returns the functions that may use a leaf, for leaves that several functions may use. The mesh must be bound.

        Args:
            leaves: a tree like the parameters, of the numbers of leaves.
        """
        stacked = set(tree_leaves(self.stacks(leaves)))
        return {i: self.uses_of((FIRST, LAST)) for i in tree_leaves(leaves) if i not in stacked}

    def uses_of(self, functions: tuple[int, ...]) -> LeafUses:
        """Returns the uses of a leaf by some functions. The mesh must be bound."""
        return LeafUses(functions, tuple(map(self.runs_here, functions)))

    def runs_here(self, function: int) -> bool:
        """Returns whether this rank runs `first` or `last`, by number. The mesh must be bound."""
        own = self.stages(axis_size(self.axis))[int(axis_index(self.axis))]
        return (0 if function == FIRST else axis_size(self.axis) * self.num_chunks - 1) in own

    def _vary_params(self, params: PyTree, rows: StageRows) -> PyTree:
        """Returns the parameters, with leaves that are not cut along the axis made varying."""
        kinds = [zip(self.kinds(s), self.cut(r), strict=True) for s, r in zip(self.stacks(params), rows, strict=True)]
        own = {id(x) for of_stack in kinds for kind, is_cut in of_stack if is_cut for x in tree_leaves(kind)}
        differs = lambda x: id(x) not in own and x.is_floating_point()  # noqa: E731
        return tree_map(lambda x: pvary(x, self.axis) if differs(x) else x, params)

    def _rows_of_all(self, params: PyTree) -> StageRows:
        """Returns how many rows of the stacks each rank has."""
        if self.per_stage:
            return [[list(self.per_stage)]]
        if self.views is None:
            return [[_rows_by_rank(kind, self.axis) for kind in self.kinds(s)] for s in self.stacks(params)]
        # From the whole shapes, so that a captured call needs no value.
        blocks, treedef = tree_flatten(params)
        wholes = self.stacks(tree_unflatten(treedef, self.views.seen_as(treedef, blocks)))
        return [[rows_of_ranks(tree_leaves(k), self.axis) for k in self.kinds(s)] for s in wholes]

    def _stage_by_stage(self, params: PyTree, batch: PyTree, h: PyTree, key: tuple[Tensor, ...]) -> PyTree:
        """Runs the layers of all ranks on `h`, each layer on the layer's rank. The result is on all ranks."""
        num, rank, rows_of_kinds = axis_size(self.axis), int(axis_index(self.axis)), self._rows_of_all(params)
        rows = [list(self.per_stage)] if self.per_stage else [self.shares(of_stack) for of_stack in rows_of_kinds]
        firsts = [self.firsts(rows, r) for r in range(num)]
        homes = {s: (r, c) for r, row in enumerate(self.stages(num)) for c, s in enumerate(row)}
        tie = None
        if torch.is_grad_enabled() or transforming():
            # Each rank only uses leaves for the rank's layers, so gradients of leaves are summed along the axis.
            params = self._vary_params(params, rows_of_kinds)
            # So that autograd follows h on all ranks or on none: a collective that autograd follows on a rank must be
            # followed on all.
            tie = _tie_stacks(self.tied(params))
        for stage in range(num * self.num_chunks):
            there, chunk = homes[stage]
            mine = pvary(h, self.axis)
            if there == rank:
                mine = self.between(params, batch, mine, Place(chunk, firsts[rank][chunk], False, False), key)
            if self.has_state:
                put_part(blocks=self.shared_layers(current_state(), stage, there == rank).blocks)
            h = tree_map(lambda x, given, on=there == rank: _pass_on(x, given, on, self.axis, tie), mine, h)
        return h


@dataclasses.dataclass(frozen=True)
class Enclosed(Pipelined):
    """Layers between two functions, `first(params, batch)` and `last(params, h, batch)`.

    Attributes:
        first: `first(params, batch[, key]) -> h`.
        last: `last(params, h, batch[, key]) -> loss`.
    """

    ends: ClassVar[str] = "last"

    first: Callable[..., PyTree]
    last: Callable[..., Any]

    @property
    def begins(self) -> tuple[str, Callable[..., Any]]:
        """Returns `first`, and the function's name for users."""
        return "first", self.first

    def enter(self, params: PyTree, batch: PyTree, *key: Tensor) -> PyTree:
        """Runs `first`."""
        own = leaves_for(FIRST, self.without_stacks(params))
        if self.has_state:
            return with_part(self.first, "first", "h", own, (batch, *self.keys(key)))
        return self.first(own, batch, *self.keys(key))

    def with_functions(self, change: Change) -> Pipelined:
        """Returns the loss with other functions for `first` and `last`."""
        return dataclasses.replace(self, first=change(self.first, every_leaf), last=change(self.last, every_leaf))

    def leave(self, params: PyTree, h: PyTree, batch: PyTree, *key: Tensor) -> Any:
        """Runs `last`."""
        own = leaves_for(LAST, self.without_stacks(params))
        if self.has_state:
            return with_part(self.last, "last", "loss[, aux]", own, (h, batch, *key), 3)
        return self.last(own, h, batch, *key)


@dataclasses.dataclass(frozen=True)
class PipelinedLayers(Enclosed):
    """Loss of equal layers, stacked.

    Attributes:
        block: `block(p, h[, key]) -> h`, a single layer.
    """

    block: Callable[..., PyTree]

    def between(self, params: PyTree, batch: PyTree, h: PyTree, place: Place, key: tuple[Tensor, ...]) -> PyTree:
        """Runs the layers."""
        del batch
        stack = self.filled(self.stacks(params)[place.chunk])
        if not self.has_state:
            return self.through((stack,), place, h, key)[0]
        alone, every = self.num_chunks == 1, current_state().blocks
        old = every if alone else every[place.chunk]
        h, new = self.through((stack, self.filled(old)), place, h, key)
        new = new if self.per_stage is None else refilled(old, new, self._find_used_rows())
        put_part(blocks=new if alone else [new if c == place.chunk else x for c, x in enumerate(every)])
        return h

    def through(
        self, stacks: tuple[PyTree, ...], place: Place, h: PyTree, key: tuple[Tensor, ...]
    ) -> tuple[PyTree, PyTree]:
        """Runs the layers of this rank's block of a stack on `h` and on the layers' model state.

        Args:
            stacks: block of the stack, and with `has_state` the block of the model state.
            place: place of the block. Layers of a stack in reverse are numbered downwards.
            h: tree of tensors.
            key: key of the loss, or none. Layer l gets `fold_in(key, l)`.
        """
        num = _count_layers(stacks[0])
        if not num:
            return h, stacks[-1]
        back = self.reverses(place.chunk)
        numbers = [place.row - i if back else place.row + i for i in range(num)]
        keys = (fold_in(k, torch.tensor(numbers, device=k.device)) for k in self.keys(key))
        # Lambdas only over this loss, so that a capture recognises the functions from microbatch to microbatch.
        layer: Callable[..., Any] = lambda h, x: (self.block(x[0], h, *x[1:]), None)  # noqa: E731
        if self.has_state:
            layer = lambda h, x: apart(self.block(x[0], x[1], h, *x[2:]), "block", "h")  # noqa: E731
        xs = (*stacks, *keys)
        if not back:
            return scan(layer, h, xs)
        leaves, treedef = tree_flatten(xs)
        columns, new = [x.unbind(0) for x in leaves], []
        for i in reversed(range(num)):
            h, own = layer(h, tree_unflatten(treedef, [column[i] for column in columns]))
            new.insert(0, own)
        return h, tree_map(lambda *rows: torch.stack(rows), *new) if self.has_state else None

    def with_functions(self, change: Change) -> Pipelined:
        """Returns the loss with other functions for `first`, `block` and `last`."""
        return dataclasses.replace(super().with_functions(change), block=change(self.block, self.rows))

    def rows(self, tree: PyTree) -> list[PyTree]:
        """Returns the leaves that `block` may be called with, from a tree of `LeafView`s: a row of each stack."""
        return [tree_map(lambda view: view.row(), stack) for stack in self.stacks(tree)]

    def _find_used_rows(self) -> list[int]:
        """Returns the rows of this rank's block of a stack that are layers."""
        assert self.per_stage is not None
        if axis_size(self.axis) > 1:
            return list(range(self.per_stage[int(axis_index(self.axis))]))
        return layer_rows(self.per_stage)


def pipelined_in(loss: Loss) -> Pipelined | None:
    """Returns the pipelined loss inside a step's loss, or None."""
    inner = find_transforms(loss)[1]
    return inner if isinstance(inner, Pipelined) else None


def stage_axes(loss: Loss) -> tuple[str, ...]:
    """Returns the axis along which ranks have different layers, if the loss is pipelined."""
    of = pipelined_in(loss)
    return () if of is None else (of.axis,)


def table_of(loss: Unwrapped, num_microbatches: int, mesh: Mesh) -> PipelineSchedule | None:
    """Returns the actions of each rank in a step of a pipelined loss, or None if all stages are on a single rank.

    Raises:
        ScheduleError: the schedule would never end (a deadlock). The message shows the ranks that wait in a circle.
        ValueError: the schedule is for other numbers of ranks or microbatches.
    """
    of = pipelined_in(loss.loss)
    if of is None or mesh.axis_size(of.axis) == 1:
        return None
    table = of.schedule(mesh.axis_size(of.axis), num_microbatches)
    numbers = table.num_ranks, table.num_microbatches, table.stages
    wanted = mesh.axis_size(of.axis), num_microbatches, of.stages(mesh.axis_size(of.axis))
    if numbers != wanted:
        raise ValueError(
            f"the schedule {table.name} is for {numbers[0]} ranks with stages {numbers[2]}, and {numbers[1]}"
            f" microbatches, but the step has {wanted[0]} with stages {wanted[2]}, and {wanted[1]}. The"
            " numbers must be equal: make the schedule for the step's, or pass a name, schedule='1f1b'."
        )
    timeline(table)
    if of.has_state:
        check_in_order(table)
    return table


def lengths_text(lengths: dict[str, int]) -> str:
    """Returns the number of layers of each leaf, as text."""
    return ", ".join(f"{path} has {n}" for path, n in lengths.items())


def _count_layers(stack: PyTree) -> int:
    """Returns the number of layers of a stack.

    Raises:
        ValueError: the stack has no leaves, or the leaves have different numbers of layers.
    """
    leaves = tree_leaves(stack)
    if not leaves:
        raise ValueError(NO_LAYERS)
    if len({x.shape[0] for x in leaves}) > 1:
        named = zip(tree_paths(stack, "blocks"), leaves, strict=True)
        raise ValueError(f"{UNLIKE} {lengths_text({path: x.shape[0] for path, x in named})}")
    return leaves[0].shape[0]


def rows_of_ranks(leaves: Sequence[LeafView], axis: str) -> list[int]:
    """Returns by rank the number of rows of a stack: a block, or all rows where the stack is not cut."""
    rows, num = leaves[0].shape[0], axis_size(axis)
    if axis not in leaves[0].spec.dim_axes(0):
        return [rows] * num
    bounds = [chunk_bounds(rows, num, r) for r in range(num)]
    return [stop - start for start, stop in bounds]


def _rows_by_rank(stack: PyTree, axis: str) -> list[int]:
    """Returns by rank the number of layers of a stack, as the ranks report."""
    own = torch.zeros(axis_size(axis), dtype=torch.int64, device=tree_leaves(stack)[0].device)
    own[axis_index(axis)] = _count_layers(stack)
    return psum(own, axis).tolist()


def _tie_stacks(stacks: PyTree) -> Tensor | None:
    """Returns a sum that depends on the leaves that this rank trains."""
    floats = [x for x in tree_leaves(stacks) if x.is_floating_point()]
    return torch.stack([x.flatten()[:1].sum() for x in floats]).sum() if floats else None


# Another remedy for a value that a stage returns.
LET_FIRST = " Or let `first` return sf.pvary of it along these axes, as stages return its result."


def _pass_on(x: Tensor, given: Tensor, here: bool, axis: str, tie: Tensor | None) -> Tensor:
    """Returns a rank's result of a stage on `given`, on all ranks.

    All ranks must agree on the axes along which the result varies.
    """
    mode = current_axis_types(begin=False)
    if mode is None:
        return from_one(x, here, axis, tie)
    axes = (*mode.batch, *mode.axes_of(given))
    x = varying_along("h of a stage", x, axes, LET_FIRST) if here else x
    return mode.declare(from_one(x, here, axis, tie), axes)


def from_one(x: Tensor, here: bool, axis: str, tie: Tensor | None = None) -> Tensor:
    """Returns a rank's values, on all ranks. On the other ranks autograd follows `tie`."""
    if not here:
        never = torch.zeros((), dtype=torch.bool, device=x.device)
        follows = tie is not None and x.is_floating_point()
        x = torch.where(never, x + tie.to(x.dtype), 0) if follows else torch.zeros_like(x)  # pyright: ignore
    return psum(x, axis).to(x.dtype)
