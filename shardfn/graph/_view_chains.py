"""Chains of views that show all elements of a tensor in order.

A single view of the first tensor can replace such a chain.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.fx import Node

from ._exact_rows import has_short_rows
from ._regions import Region, is_view
from ._values import storage_of, tensors_of

_RESIZES = (torch.ops.aten.resize_, torch.ops.aten.resize_as_, torch.ops.aten.set_)


def whole_views(steps: Sequence[Node | Region]) -> dict[Node, Node]:
    """Returns by view the earliest value with all elements of the view in the same order.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: ((x + 1).view(2, 3)[None][0].t(),), tracing_mode="fake")(torch.ones(6))
        >>> {node.name: of.name for node, of in whole_views(list(gm.graph.nodes)).items()}
        {'view': 'add', 'unsqueeze': 'add', 'select': 'add'}
    """
    first: dict[Node, Node] = {}
    bases: dict[Node, tuple[Node, ...]] = {}  # by view, all viewed values, the earliest first
    # Tensors that get another shape differ from the captured tensors.
    reshaped = {
        storage_of(x) for step in steps if _is_reshaping(step) for n in step.all_input_nodes for x in tensors_of(n)
    }
    for step in steps:
        of = _viewed_node(step) if isinstance(step, Node) else None
        if isinstance(step, Node) and of is not None and reshaped.isdisjoint(map(storage_of, tensors_of(step))):
            bases[step] = (*bases.get(of, ()), of)
            base = next((base for base in bases[step] if _shows_all(step, base)), None)
            if base is not None:
                first[step] = base
    return first


def list_needed(steps: Sequence[Node | Region], first: dict[Node, Node]) -> list[Node | Region]:
    """Returns the steps without views that no other step reads. Views in `first` are read from the first value."""
    read: set[Node] = set()
    kept: list[Node | Region] = []
    for step in reversed(steps):
        if isinstance(step, Node) and step not in read and is_view(step) and not _is_reshaping(step):
            continue
        kept.append(step)
        read.update(reads(step, first))
    return kept[::-1]


def reads(step: Node | Region, first: Mapping[Node, Node]) -> Sequence[Node]:
    """Returns the values that a step reads."""
    if isinstance(step, Region):
        return step.inputs
    return [first[step]] if step in first else step.all_input_nodes


def _viewed_node(node: Node) -> Node | None:
    # `as_strided` counts in memory, and strides at run time may be others.
    of = node.args[0] if is_view(node) and node.target is not torch.ops.aten.as_strided.default else None
    return of if isinstance(of, Node) else None


def _is_reshaping(step: Node | Region) -> TypeGuard[Node]:
    """Returns whether a step changes the shape of a tensor, or the tensor's memory, in place."""
    target: Any = step.target if isinstance(step, Node) else None
    return torch.Tag.inplace_view in getattr(target, "tags", ()) or getattr(target, "overloadpacket", None) in _RESIZES


def _shows_all(node: Node, of: Node) -> bool:
    x, y = of.meta.get("val"), node.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or has_short_rows(node):
        return False
    if x.dtype != y.dtype or x.numel() != y.numel() or not all(type(size) is int for size in (*x.shape, *y.shape)):
        return False
    one_memory = storage_of(x) == storage_of(y) and x.storage_offset() == y.storage_offset()
    # The marks of `conj` and of a negative view are a part of the value.
    one_value = x.is_conj() == y.is_conj() and x.is_neg() == y.is_neg()
    return one_memory and one_value and is_dense(x) and is_dense(y)


def is_dense(x: torch.Tensor) -> bool:
    """Returns whether the strides are the strides of `view`, also in dims of a single element."""
    return x.stride() == torch.empty(x.shape, device="meta").stride()
