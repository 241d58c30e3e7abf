"""Loss that `partition` returns: written for a single device along some axes, and run on blocks.

A step or `sharded` binds the loss to the compute specs of the leaves. Called with blocks, `Partitioned` captures the
forward of the loss once a signature, with the shapes that the leaves have as wholes along the axis. Then a program is
planned by the sharding rules of the op table, and run on the blocks. The program is made of torch operations and the
primitives of the table, so that the backward, ZeRO, remat and a surrounding capture treat the program as any other
loss. So does the capture for a second axis, whose graph has the primitives of the first as operations.

A run of a program is on this rank's parts: ops on blocks, and the collectives of the table between them.

Along several axes, the capture for an axis runs the program along the earlier axes. The program along the first axis
runs on leaves that are whole along the second, while the second axis captures the run. Transfers of the first are then
operations of the second's graph, `convert_form`, with a separate rule: dims that the first axis does not cut are left
unchanged. So the second axis is independent of the first, and a step that the second runs sends along both.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node, map_arg
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_meta, track_tensor

from shardfn._torch import FakeTensor, in_other_words
from shardfn.capture import node_of, recorder
from shardfn.collectives import axis_index, axis_size, no_axis_types, pmax, psum, pvary, set_call_site, view_mesh_from
from shardfn.core import PyTree, is_evaluating, tree_flatten, tree_unflatten
from shardfn.engine.loss import MAX_GRAPHS, BoundedCache, Loss, Transform, without_data
from shardfn.engine.plan import LeafView, LeafViews
from shardfn.graph import Form, Ranks, Strategy, convert_form
from shardfn.leaves import opened
from shardfn.nn import moe, run_layers

from ._capture import Noting
from ._other_axis_ops import EveryRank, of_several_sizes
from ._plan import LossCall
from ._program import (
    Compute,
    Convert,
    Loop,
    PartitionProgram,
    Passage,
    converted,
)

# The cost of a byte of a value that a rank holds where values are to stay cut, in bytes sent. High enough that the sums
# of a norm's small gradients do not decide, and low enough that nothing large is sent instead.
_VALUE_PRICE = 1 / 4


@dataclasses.dataclass(frozen=True)
class Partitioned(Transform):
    """Loss that sees whole leaves along an axis. `sharded_step` passes blocks.

    Attributes:
        inner: loss, as written for a single device.
        axes: mesh axes of the partition, in order. A dim that several axes cut is cut by the first axis, and the blocks
            by the next.
        sequence: whether values between blocks stay cut where a cut sends about as much (sequence parallelism).
        views: leaves that the loss may be called with. None: the loss is not bound to leaves yet.
    """

    transform: ClassVar[str] = "partition"

    inner: Loss
    axes: tuple[str, ...]
    sequence: bool = False
    views: LeafViews | None = None
    _programs: BoundedCache["_Programs"] = dataclasses.field(
        default_factory=lambda: BoundedCache(MAX_GRAPHS), repr=False, compare=False
    )

    def __call__(self, params: PyTree, *args: Any) -> Any:
        """Returns the loss of this rank's blocks, the same on all ranks along the axes."""
        axes = tuple(axis for axis in self.axes if axis_size(axis) > 1)
        if not axes:
            return self.inner(params, *args)
        if self.views is None:
            told = " x ".join(f"{axis_size(axis)} ranks along {axis!r}" for axis in axes)
            raise ValueError(
                f"partition(loss, axes={self.axes!r}) is called on {told}, but the cuts of the leaves must"
                " be known. Pass the loss to sharded_step or sharded, with specs."
            )
        leaves, treedef = tree_flatten(params)
        return self.along(axes, self.views.seen_as(treedef, leaves), params, *args)

    def along(
        self,
        axes: tuple[str, ...],
        views: Sequence[LeafView],
        params: PyTree,
        *args: Any,
        programs: "_Programs | None" = None,
    ) -> Any:
        """Returns the loss of leaves that are blocks along these axes.

        The last axis is partitioned around the other axes.

        Args:
            axes: mesh axes.
            views: leaves.
            params: blocks.
            *args: other arguments.
            programs: programs of the surrounding call. None: the call is the outermost.
        """
        if not axes:
            return self.inner(params, *args)
        # Ranks agree on a plan without a message, so a plan may only depend on the programs of this signature, and not
        # on programs that a rank happens to keep.
        own: _Programs = {} if programs is None else programs
        before = axes[:-1]
        around = functools.partial(self.along, before, views, programs=own)
        whole = axes[-1], *(a for a in self.axes if a not in axes)
        call = LossCall.of(around, params, args, views, whole, _VALUE_PRICE if self.sequence else 0.0)
        loss, leaves = call.loss, call.leaves
        looks = tuple((tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad) for x in call.tensors)
        seen = (
            tuple(x.dtype for x in leaves),
            tuple((type(x), x) for x in loss.static),
            looks,
            _autocast_dtypes(leaves),
            is_evaluating(),
        )
        # The blocks that the earlier axes leave are planned with this rank's sizes.
        at = self.views and self.views.planner, axes, tuple(int(axis_index(a)) for a in before)
        key = (self.inner, at, tuple(views), loss.treedef, loss.rest_def, *seen)
        if programs is None:
            own = self._programs.find(key) or own
        if key not in own:
            with in_other_words(_REFUSALS, _IN_TORCH_FUNC):
                program = agreed_program(call, before, lambda: [x.program for x in own.values()])
            own[key] = _PreparedLoss(program, loss.out_def, getattr(self.inner, "title", ""))
            if programs is None:
                self._programs.keep(key, own)
        ready = own[key]
        with no_axis_types():  # the program has its casts
            return ready.result(run_program(ready.program, [*leaves, *call.tensors]))

    def as_text(self) -> str:
        """Returns every collective, with bytes and the line in the loss, by signature that was run or lowered.

        The last 64 signatures are kept, the most recently used at the end.
        """
        texts = [(x.title, program_text(x.program)) for own in self._programs.values() for x in own.values()]
        return "\n\n".join(f"{title}, {text}" if title else text for title, text in texts)

    def programs(self) -> list[PartitionProgram]:
        """Returns the programs that were made, for each signature and axis."""
        return [x.program for own in self._programs.values() for x in own.values()]


@dataclasses.dataclass(frozen=True)
class _PreparedLoss:
    """Program, with the structure of the results, and the part of a loss that the program runs, if not all."""

    program: PartitionProgram
    treedef: Any
    title: str = ""

    def result(self, flat: Sequence[Any]) -> Any:
        return tree_unflatten(self.treedef, list(flat))


# Parts of the errors by which transforms of torch.func refuse a capture.
_REFUSALS = ("saved tensor hooks", "Tensor.requires_grad_() (or perhaps")
_IN_TORCH_FUNC = (
    "partition(loss) is captured at its first call with arguments of these shapes, and torch.func's vmap, jvp,"
    " and grad of a batch refuse captures inside of them. Call the loss once before, outside of torch.func,"
    " with such arguments; those that are differentiated must require gradients there."
)


# The programs of a call, by the signature of the call along each axis.
_Programs = dict[Any, _PreparedLoss]


def _autocast_dtypes(leaves: Sequence[Any]) -> Any:
    """Returns the dtypes that autocast gives to products, which captures depend on."""
    kinds = sorted({x.device.type for x in leaves})
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


def program_text(program: PartitionProgram) -> str:
    """Returns a line per collective, for example a psum with bytes and the user's line, in order, then the sums.

    Example:
        >>> print(program_text(PartitionProgram("tp", 2)))
        along "tp", 2 ranks: 0 collectives, 0 bytes a rank in the forward and 0 in the backward
    """
    sent = program.sent
    forward, backward = (int(sum(x.times * getattr(x, name) for x in sent)) for name in ("forward", "backward"))
    number = sum(x.times for x in sent)
    head = (
        f'along "{program.axis}", {program.num} ranks: {number} collectives, {forward} bytes a rank in the forward'
        f" and {backward} in the backward"
    )
    return "\n".join([head, *map(_format_line, sent)])


def _format_line(x: object) -> str:
    name, shape, forward, backward, line, because, times = x  # pyright: ignore[reportGeneralTypeIssues]
    why = f"; {because} takes it whole" if because else ""
    often = f"{times} x " if times > 1 else ""
    return f"  {often}{name} of {list(shape)}: {int(forward)} + {int(backward)} bytes, {line}{why}"


def agreed_program(
    call: LossCall, before: Sequence[str], made: Callable[[], list[PartitionProgram]]
) -> PartitionProgram:
    """Returns the program along an axis of a call whose graph has the programs along other axes.

    Where ranks along the other axes have blocks of several sizes, each kind of rank has a separate graph. The ranks
    agree without a message: each rank plans for a rank of every kind, and the first kind decides which values are sent
    along the other axes.

    Args:
        call: call to plan.
        before: other axes.
        made: programs along the other axes, once the call was captured.
    """
    own = call.captured()
    kinds = of_several_sizes([x for x in made() if x.axis in before])
    chosen: list[Strategy] | None = None
    for place in itertools.product(*kinds.values()) if kinds else ():
        with view_mesh_from(dict(zip(kinds, place, strict=True))):
            there = call.captured()
            every = EveryRank(there.graph, chosen)
            program = call.planned(there, every)
        chosen = every.taken(program) if chosen is None else chosen
    return call.planned(own, EveryRank(own.graph, chosen) if kinds else None)


class _NotedRanks(Ranks):
    """Ranks along an axis, while another axis captures: transfers along the ranks are noted."""

    def __init__(self, axis: str, notes: Noting) -> None:
        super().__init__(axis, moe.FUNCTIONS_OF_OPS)
        self._notes = notes

    def psum(self, x: Tensor) -> Tensor:
        """Notes a sum. See `Ranks`."""
        return _note_call(psum, x, (self.axis,), list(x.shape), self._notes)

    def pmax(self, x: Tensor) -> Tensor:
        """Notes a maximum. See `Ranks`."""
        return _note_call(pmax, x, (self.axis,), list(x.shape), self._notes)

    def pvary(self, x: Tensor) -> Tensor:
        """Notes a `pvary`. See `Ranks`."""
        return _note_call(pvary, x, (self.axis,), list(x.shape), self._notes)

    def convert(self, x: Any, step: Convert) -> Any:
        """Notes a conversion, and returns the result. Converts values that the capture does not follow."""
        if not _is_followed(x, self._notes):
            return self.block(x, step.after) if step.after.kind == "cut" else x
        shape = self.local(step.shape, step.after)
        return _note_call(
            convert_form, x, (self.axis, tuple(step.before), tuple(step.after), step.shape), shape, self._notes
        )


def _ranks_along(axis: str) -> Ranks:
    """Returns the ranks along an axis, as a program that runs sees them."""
    notes = recorder()
    return _NotedRanks(axis, notes) if isinstance(notes, Noting) else Ranks(axis, moe.FUNCTIONS_OF_OPS)


def _send_along(x: Any, axis: str, before: Any, after: Any, shape: Sequence[int]) -> Any:
    """Runs a node of `convert_form`."""
    return converted(x, Convert(0, 0, Form(*before), Form(*after), tuple(shape), True, ""), axis)


def _is_followed(x: Any, notes: Noting) -> bool:
    return isinstance(x, FakeTensor) and get_proxy_slot(x, notes.tracer, None) is not None


def _note_call(target: Callable[..., Any], x: Any, args: tuple[Any, ...], shape: list[int], notes: Noting) -> Tensor:
    """Notes a call of a primitive. The result is a tensor without data."""
    tracer = notes.tracer
    proxy = tracer.create_proxy("call_function", target, (tracer.proxy(node_of(x, notes)), *args), {})
    made = without_data(x.fake_mode, x.dtype, shape, x.device)
    track_tensor(made, proxy, constant=None, tracer=tracer)
    set_meta(proxy, made)
    return made.requires_grad_(x.requires_grad and not proxy.node.meta.get("no_grad"))


# Functions that take layers of a stacked leaf without opening the leaf.
_OF_STACKS = {torch.ops.aten.unbind.int: torch.unbind, torch.ops.aten.select.int: torch.select}
# The functions that run for targets that are only marks.
_MARKS = {convert_form: _send_along}


def run_program(program: PartitionProgram, inputs: Sequence[Any]) -> list[Any]:
    """Returns the results, whole on all ranks.

    Args:
        program: program made for the bound mesh.
        inputs: this rank's block of each leaf, and the other arguments.
    """
    return _run_program(program, inputs, _ranks_along(program.axis))


def _run_program(program: PartitionProgram, inputs: Sequence[Any], ranks: Ranks) -> list[Any]:
    slots: list[Any] = [None] * program.num_slots
    for slot, x in zip(program.inputs, inputs, strict=True):
        slots[slot] = x
    for slot, x in program.constants.items():
        slots[slot] = x
    for passage in program.passages:
        if passage.section is None:
            _run_passage(program, passage, ranks, slots)
        else:
            _run_section(program, passage, ranks, slots)
    return [opened(slots[x]) if is_slot else x for is_slot, x in program.outputs]


def _run_passage(program: PartitionProgram, passage: Passage, ranks: Ranks, slots: list[Any]) -> None:
    noted = isinstance(ranks, _NotedRanks)
    for i in passage.steps:
        step = program.steps[i]
        with set_call_site(step.line):
            if isinstance(step, Convert):
                x = slots[step.src]
                slots[step.dst] = ranks.convert(opened(x), step) if noted else converted(x, step, program.axis)
            elif isinstance(step, Loop):
                _run_loop(step, ranks, slots)
            else:
                _run_compute(step, ranks, slots)
        for slot in program.last_use[i]:
            slots[slot] = None


def _run_section(program: PartitionProgram, passage: Passage, ranks: Ranks, slots: list[Any]) -> None:
    """Runs a section as a function of its inputs, inside the transform that drops or moves its activations."""

    def run_steps(*given: Any) -> tuple[Any, ...]:
        own: list[Any] = [None] * len(slots)
        for slot, x in zip(passage.ins, given, strict=True):
            own[slot] = x
        _run_passage(program, passage, ranks, own)
        return tuple(own[slot] for slot in passage.outs)

    given = [slots[slot] for slot in passage.ins]
    for i in passage.steps:
        for slot in program.last_use[i]:
            slots[slot] = None
    for slot, x in zip(passage.outs, passage.section.around(run_steps)(*given), strict=True):
        slots[slot] = x


def _run_loop(step: Loop, ranks: Ranks, slots: list[Any]) -> None:
    """Runs a loop as a scan of the body. A capture writes the scan layer by layer, as any other scan."""
    outside = [slots[slot] for slot in step.outside]
    num = len(step.carry)

    def run_layer(carry: list[Tensor], x: list[Any], first: Any) -> tuple[list[Tensor], list[Tensor]]:
        del first
        out = _run_program(step.body, [*carry, *x, *outside], ranks)
        return out[:num], out[num:]

    layers = [[slots[slot] for slot in x] for x in step.layers]
    carry, ys = run_layers(run_layer, [opened(slots[slot]) for slot in step.carry], layers)
    results = [*carry, *(y for layer in ys for y in layer)]
    for at, dst in step.dsts.items():
        slots[dst] = results[at]


def _run_compute(step: Compute, ranks: Ranks, slots: list[Any]) -> None:
    node, strategy = step.node, step.strategy
    given = iter(step.slots)
    target: Any = _OF_STACKS.get(node.target, node.target)  # pyright: ignore[reportArgumentType, reportCallIssue]
    stacked = target is not node.target
    target = _MARKS.get(target, ranks.functions.get(target, target))

    def take_value(n: Node) -> Any:
        x = slots[next(given)]
        return x if stacked else opened(x)

    args, kwargs = map_arg((node.args, dict(node.kwargs)), take_value)
    mode = torch.no_grad() if node.meta.get("no_grad") else contextlib.nullcontext()
    with mode:
        if strategy.run is None:
            out = target(*args, **kwargs)
        else:
            out = strategy.run(ranks, (*args, *(slots[slot] for slot in given)), kwargs)
    results = (out,) if step.single else out
    for at, dst in step.dsts.items():
        slots[dst] = results[at]
