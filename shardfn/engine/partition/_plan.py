"""Captures a call of a loss, as a call with whole leaves, and plans the call without data or messages."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardfn._torch import disable_current_modes
from shardfn.capture import capture, fakes
from shardfn.collectives import axis_size
from shardfn.core import PyTree, tree_flatten, tree_unflatten
from shardfn.engine.plan import LeafView
from shardfn.graph import cut
from shardfn.nn import as_ops, looping

from ._capture import Noting, apart, prepare, record_loop, refuse_functions
from ._graph import partition_graph
from ._other_axis_ops import EveryRank
from ._program import PartitionProgram


@dataclasses.dataclass
class FlatLoss:
    """Loss as a function of a flat list of tensors.

    Attributes:
        inner: loss.
        treedef: structure of the parameters.
        rest_def: structure of the other arguments.
        static: leaves of the other arguments, with None in place of tensors.
        able: whether a gradient may arrive, for each tensor of the other arguments.
        num_leaves: number of leaves of the parameters.
        out_def: structure of the last result.
        out: leaves of the last result, with None in place of tensors.
    """

    inner: Callable[..., Any]
    treedef: Any
    rest_def: Any
    static: tuple[Any, ...]
    able: tuple[bool, ...]
    num_leaves: int
    out_def: Any = None
    out: Any = None

    def __call__(self, *xs: Tensor) -> list[Tensor]:
        leaves = [x.requires_grad_() if x.is_floating_point() or x.is_complex() else x for x in xs[: self.num_leaves]]
        others = zip(xs[self.num_leaves :], self.able, strict=True)
        tensors = iter([x.requires_grad_() if able else x for x, able in others])
        rest = tree_unflatten(self.rest_def, [next(tensors) if x is None else x for x in self.static])
        out, self.out_def = tree_flatten(self.inner(tree_unflatten(self.treedef, leaves), *rest))
        refuse_functions(out)
        self.out = [None if isinstance(x, Tensor) else x for x in out]
        return [x for x in out if isinstance(x, Tensor)]


@dataclasses.dataclass(frozen=True)
class LossCall:
    """Call of a loss.

    Attributes:
        loss: loss.
        leaves: leaves of the parameters.
        views: block of a whole tensor that each leaf is.
        tensors: other arguments.
        whole: axes along which the loss sees whole leaves. The call is planned along the first axis.
        value_price: see `partition_graph`.
    """

    loss: FlatLoss
    leaves: Sequence[Any]
    views: Sequence[LeafView]
    tensors: Sequence[Tensor]
    whole: tuple[str, ...]
    value_price: float = 0.0

    @staticmethod
    def of(
        loss: Callable[..., Any],
        params: PyTree,
        args: Sequence[Any],
        views: Sequence[LeafView],
        whole: tuple[str, ...],
        value_price: float = 0.0,
    ) -> "LossCall":
        """Returns the call `loss(params, *args)`, with the tensors among `args` separated from the rest."""
        leaves, treedef = tree_flatten(params)
        rest, rest_def = tree_flatten(tuple(args))
        tensors = [x for x in rest if isinstance(x, Tensor)]
        static = tuple(None if isinstance(x, Tensor) else x for x in rest)
        able = tuple(x.requires_grad for x in tensors)
        flat = FlatLoss(loss, treedef, rest_def, static, able, len(leaves))
        return LossCall(flat, leaves, views, tensors, whole, value_price)

    def captured(self) -> GraphModule:
        """Returns the graph, as seen by the rank from which the mesh is bound."""
        return captured_forward(self.loss, self.leaves, [v.along(self.whole) for v in self.views], self.tensors)

    def trained(self, inputs: Sequence[Node]) -> Callable[[Node], bool]:
        """Returns whether a gradient may arrive at an input of the graph."""
        num = len(self.leaves)
        others = {n for n, able in zip(inputs[num:], self.loss.able, strict=True) if able}
        return {*inputs[:num], *others}.__contains__

    def planned(self, gm: GraphModule, every_rank: EveryRank | None = None) -> PartitionProgram:
        """Returns the program of the graph. `every_rank` narrows the strategies down."""
        axis, inputs = self.whole[0], [n for n in gm.graph.nodes if n.op == "placeholder"]
        forms, num = {}, axis_size(axis)
        for node, view in zip(inputs, self.views, strict=False):
            dim = next((d for d in range(len(view.spec)) if axis in view.spec.dim_axes(d)), None)
            if dim is not None:
                forms[node] = cut(dim, node.meta["val"].shape[dim], num)
        how = self.trained(inputs), constants_of(gm)
        program = partition_graph(gm.graph, axis, num, forms, *how, value_price=self.value_price, every_rank=every_rank)
        outputs = iter(program.outputs)
        program.outputs = [next(outputs) if x is None else (False, x) for x in self.loss.out]
        return program


def captured_forward(
    call: FlatLoss, leaves: Sequence[Any], shapes: Sequence[Sequence[int]], tensors: Sequence[Tensor]
) -> GraphModule:
    """Returns the graph of a loss with leaves of these shapes, ready to be partitioned. Reads no values."""
    with disable_current_modes(), apart(), looping(record_loop), as_ops():
        blank = [torch.empty(s, dtype=x.dtype, device="meta") for s, x in zip(shapes, leaves, strict=True)]
        device = next((x.device for x in leaves if x.device.type != "meta"), torch.device("cpu"))
        return prepare(capture(call, [*fakes(blank, device), *fakes(tensors, device)], Noting(), differentiable=True))


def constants_of(gm: GraphModule) -> Callable[[Any], Tensor]:
    """Finds the constants of a graph, by node."""

    def find_constant(node: Any) -> Tensor:
        x: Any = gm
        for name in node.target.split("."):
            x = getattr(x, name)
        return x

    return find_constant
