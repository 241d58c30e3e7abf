"""What `partition` makes: a loss that is written for one device along some axes, run on blocks.

It is bound by what shards it, a step or `sharded`, to the compute specs of its leaves. Called with blocks, it captures
the forward of the loss once a signature, with the shapes that the leaves have as wholes along the axis, plans it by the
sharding rules of the op table, and runs it on the blocks. What it runs are operations of torch and the primitives of
the table, so that the backward, ZeRO, remat and a capture around it take it as any other loss. So does the capture for
a second axis, in whose graph the primitives of the first stand as operations (`_partition_axes.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from shardfn.capture import capture, fakes
from shardfn.collectives import axis_size
from shardfn.core import PyTree, tree_flatten, tree_unflatten
from shardfn.graph import PartitionProgram, cut, partition_graph, prepare, program_text
from shardfn.leaves import LeafLayout
from shardfn.nn import looping

from ._accumulated import Accumulated, of_whole_batch
from ._levels import Transform
from ._loss import Loss
from ._mixed import Mixed
from ._partition_axes import refuse_uneven, whole_shape
from ._partition_capture import Noting, apart, refuse_functions
from ._partition_loop import noted_loop
from ._partition_run import run_program
from ._planner import Planner
from ._unwrap import Unwrapped

# What a byte of a value that a rank holds costs where values are to stay cut, in bytes that are sent: so much that the
# sums of a norm's small gradients do not decide, and so little that nothing large is sent for it.
_VALUE_PRICE = 1 / 4


@dataclasses.dataclass(frozen=True)
class Partitioned(Transform):
    """A loss that sees whole leaves along an axis; `sharded_step` gives it blocks.

    Attributes:
        inner: the loss, as written for one device.
        axes: the mesh axes along which it is partitioned, one after another: a dim that several cut is cut by the
            first, and its blocks by the next.
        sequence: whether values between blocks stay cut where that sends about as much.
        planner: what binds it to leaves; None: nothing has yet.
    """

    transform: ClassVar[str] = "partition"

    inner: Loss
    axes: tuple[str, ...]
    sequence: bool = False
    planner: Planner | None = None
    _programs: dict[Any, "_PreparedLoss"] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __call__(self, params: PyTree, *args: Any) -> Any:
        """The loss of this rank's blocks, the same on all ranks along the axes."""
        axes = tuple(axis for axis in self.axes if axis_size(axis) > 1)
        if not axes:
            return self.inner(params, *args)
        if self.planner is None:
            told = " x ".join(f"{axis_size(axis)} ranks along {axis!r}" for axis in axes)
            raise ValueError(
                f"partition(loss, axes={self.axes!r}) is called on {told}, and nothing says how its leaves are"
                " cut; give it to sharded_step or sharded, with specs."
            )
        leaves, treedef = tree_flatten(params)
        return self._along(axes, self.planner.seen_as(treedef, leaves).leaves, params, *args)

    def _along(self, axes: tuple[str, ...], layouts: Sequence[LeafLayout], params: PyTree, *args: Any) -> Any:
        """The loss of leaves that are blocks along these axes: the last is partitioned around the others."""
        if not axes:
            return self.inner(params, *args)
        axis, num = axes[-1], axis_size(axes[-1])
        leaves, treedef = tree_flatten(params)
        rest, rest_def = tree_flatten(args)
        shapes = [whole_shape(x, leaf.shape, leaf.compute, axis) for x, leaf in zip(leaves, layouts, strict=True)]
        tensors = [x for x in rest if isinstance(x, Tensor)]
        static = tuple(None if isinstance(x, Tensor) else x for x in rest)
        told = tuple((tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors)
        seen = tuple(x.dtype for x in leaves), tuple((type(x), x) for x in static), told, _autocast(leaves)
        key = (self.planner, axes, treedef, tuple(shapes), rest_def, *seen)
        if key not in self._programs:
            around = functools.partial(self._along, axes[:-1], layouts)
            call = FlatLoss(around, treedef, rest_def, static, len(leaves))
            price = _VALUE_PRICE if self.sequence else 0.0
            made = _made(call, axis, num, leaves, layouts, shapes, tensors, price)
            if len(axes) > 1:
                refuse_uneven([x.program for x in self._programs.values() if x.program.axis in axes[:-1]])
            self._programs[key] = made
        ready = self._programs[key]
        return ready.result(run_program(ready.program, [*leaves, *tensors]))

    def as_text(self) -> str:
        """Of each signature that was run or lowered, every collective with its bytes and the line that asks for it."""
        return "\n\n".join(program_text(x.program) for x in self._programs.values())

    def programs(self) -> list[PartitionProgram]:
        """What was made, a program a signature."""
        return [x.program for x in self._programs.values()]


def bind(unwrapped: Unwrapped, planner: Planner) -> Unwrapped:
    """Gives the partitioned losses among a step's transforms their leaves.

    Raises:
        ValueError: the axis cuts the batch.
    """
    loss = _bound(unwrapped.loss, planner)
    mixed = of_whole_batch(loss)
    return unwrapped._replace(loss=loss, mixed=mixed if isinstance(mixed, Mixed) else unwrapped.mixed)


def _bound(f: Any, planner: Planner) -> Any:
    if isinstance(f, Partitioned):
        for axis in set(f.axes) & set(planner.batch_axes):
            raise ValueError(
                f"partition(loss, axes={f.axes!r}): the batch is cut along {axis!r}, which every rank must have the"
                " whole of; pass batch=P('dp'), or P(), and the same rows to all ranks along it."
            )
        return dataclasses.replace(f, planner=planner, _programs=f._programs)
    if isinstance(f, Accumulated | Mixed):
        return dataclasses.replace(f, inner=_bound(f.inner, planner))
    return f


@dataclasses.dataclass(frozen=True)
class _PreparedLoss:
    """A program, and what its results are put back into."""

    program: PartitionProgram
    treedef: Any

    def result(self, flat: Sequence[Any]) -> Any:
        return tree_unflatten(self.treedef, list(flat))


@dataclasses.dataclass
class FlatLoss:
    """The loss as a function of a flat list of tensors."""

    inner: Callable[..., Any]
    treedef: Any
    rest_def: Any
    static: tuple[Any, ...]
    num_leaves: int
    out_def: Any = None
    out: Any = None

    def __call__(self, *xs: Tensor) -> list[Tensor]:
        leaves = [x.requires_grad_() if x.is_floating_point() or x.is_complex() else x for x in xs[: self.num_leaves]]
        tensors = iter(xs[self.num_leaves :])
        rest = tree_unflatten(self.rest_def, [next(tensors) if x is None else x for x in self.static])
        out, self.out_def = tree_flatten(self.inner(tree_unflatten(self.treedef, leaves), *rest))
        refuse_functions(out)
        self.out = [None if isinstance(x, Tensor) else x for x in out]
        return [x for x in out if isinstance(x, Tensor)]


def _made(
    call: FlatLoss,
    axis: str,
    num: int,
    leaves: Sequence[Any],
    layouts: Sequence[LeafLayout],
    shapes: Sequence[tuple[int, ...]],
    tensors: Sequence[Tensor],
    value_price: float,
) -> _PreparedLoss:
    """Captures the forward and plans it. Reads no values, and sends nothing."""
    gm = captured_forward(call, leaves, shapes, tensors)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    forms = {}
    for node, leaf, shape in zip(inputs, layouts, shapes, strict=False):
        dim = next((d for d in range(len(leaf.compute)) if axis in leaf.compute.dim_axes(d)), None)
        if dim is not None:
            forms[node] = cut(dim, shape[dim], num)
    trained = set(inputs[: len(leaves)])
    trained |= {n for n, x in zip(inputs[len(leaves) :], tensors, strict=True) if x.requires_grad}
    given = trained.__contains__, constants_of(gm)
    program = partition_graph(gm.graph, axis, num, forms, *given, value_price=value_price)
    outputs = iter(program.outputs)
    program.outputs = [next(outputs) if x is None else (False, x) for x in call.out]
    return _PreparedLoss(program, call.out_def)


def captured_forward(
    call: FlatLoss, leaves: Sequence[Any], shapes: Sequence[Sequence[int]], tensors: Sequence[Tensor]
) -> GraphModule:
    """The graph of a loss whose leaves have these shapes, fit to be partitioned. Reads no values."""
    with _disable_current_modes(), apart(), looping(noted_loop):
        blank = [torch.empty(s, dtype=x.dtype, device="meta") for s, x in zip(shapes, leaves, strict=True)]
        device = next((x.device for x in leaves if x.device.type != "meta"), torch.device("cpu"))
        return prepare(capture(call, [*fakes(blank, device), *fakes(tensors, device)], Noting(), differentiable=True))


def _autocast(leaves: Sequence[Any]) -> Any:
    """What autocast makes of products: it is a part of what was captured."""
    kinds = sorted({x.device.type for x in leaves})
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


def constants_of(gm: GraphModule) -> Callable[[Any], Tensor]:
    """What the constants of a graph are."""

    def find(node: Any) -> Tensor:
        x: Any = gm
        for name in node.target.split("."):
            x = getattr(x, name)
        return x

    return find
