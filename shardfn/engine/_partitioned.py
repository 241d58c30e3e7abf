"""What `partition` makes: a loss that is written for one device along an axis, run on blocks.

It is bound by what shards it, a step or `sharded`, to the compute specs of its leaves. Called with blocks, it captures
the forward of the loss once a signature, with the shapes that the leaves have as wholes along the axis, plans it by the
sharding rules of the op table, and runs it on the blocks. What it runs are operations of torch and the primitives of
the table, so that the backward, ZeRO, remat and a capture around it take it as any other loss.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from shardfn.capture import capture, fakes
from shardfn.collectives import axis_size
from shardfn.core import P, PyTree, tree_flatten, tree_unflatten
from shardfn.graph import PartitionProgram, cut, partition_graph, prepare, program_text
from shardfn.leaves import LeafLayout
from shardfn.nn import looping

from ._accumulated import Accumulated, of_whole_batch
from ._levels import Transform
from ._loss import Loss
from ._mixed import Mixed
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
        axes: the mesh axis along which it is partitioned.
        sequence: whether values between blocks stay cut where that sends about as much.
        planner: what binds it to leaves; None: nothing has yet.
    """

    transform: ClassVar[str] = "partition"

    inner: Loss
    axes: str
    sequence: bool = False
    planner: Planner | None = None
    _programs: dict[Any, "_PreparedLoss"] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __call__(self, params: PyTree, *args: Any) -> Any:
        """The loss of this rank's blocks, the same on all ranks along the axis."""
        num = axis_size(self.axes)
        if num == 1:
            return self.inner(params, *args)
        if self.planner is None:
            raise ValueError(
                f"partition(loss, axes={self.axes!r}) is called on {num} ranks, and nothing says how its leaves are"
                " cut; give it to sharded_step or sharded, with specs."
            )
        leaves, treedef = tree_flatten(params)
        rest, rest_def = tree_flatten(args)
        layouts = self.planner.seen_as(treedef, leaves).leaves
        shapes = [_shape(x, leaf.shape, leaf.compute, self.axes) for x, leaf in zip(leaves, layouts, strict=True)]
        tensors = [x for x in rest if isinstance(x, Tensor)]
        static = tuple(None if isinstance(x, Tensor) else x for x in rest)
        told = tuple((tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors)
        seen = tuple(x.dtype for x in leaves), tuple((type(x), x) for x in static), told, _autocast(leaves)
        key = (self.planner, treedef, tuple(shapes), rest_def, *seen)
        if key not in self._programs:
            call = FlatLoss(self.inner, treedef, rest_def, static, len(leaves))
            price = _VALUE_PRICE if self.sequence else 0.0
            self._programs[key] = _made(call, self.axes, num, leaves, layouts, shapes, tensors, price)
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
        if f.axes in planner.batch_axes:
            raise ValueError(
                f"partition(loss, axes={f.axes!r}): the batch is cut along {f.axes!r}, which every rank must have the"
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


def _shape(x: Tensor, shape: Sequence[int], spec: P, axis: str) -> tuple[int, ...]:
    """The shape of a leaf that is whole along the axis, and a block along others."""
    out = list(x.shape)
    for d in range(len(spec)):
        if axis in spec.dim_axes(d):
            if spec.dim_axes(d) != (axis,):
                raise ValueError(
                    f"partition(axes={axis!r}): a leaf of shape {tuple(shape)} has spec {spec!r}, which cuts dim {d}"
                    f" along several axes; cut it along {axis!r} alone."
                )
            out[d] = shape[d]
    return tuple(out)
