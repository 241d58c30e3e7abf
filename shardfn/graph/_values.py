"""Metadata of a captured graph: the tensors of a node, with memory, views, writes and phases."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from ._op import written_arguments

PHASES: tuple[str, ...] = ("forward", "backward", "update")


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in `value`, which may nest lists and tuples.

    Example:
        >>> import torch
        >>> len(tensors_in([torch.ones(2), (None, torch.ones(3))]))
        2
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_in(v)]
    return []


def tensors_of(node: Node) -> list[Tensor]:
    """Returns the abstract tensors that `node` produces. The output node produces none."""
    return [] if node.op == "output" else tensors_in(node.meta.get("val"))


def storage_of(tensor: Tensor) -> int:
    """Returns the identity of a tensor's memory, equal for a tensor and the tensor's views."""
    return tensor.untyped_storage()._cdata


def num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements.

    Example:
        >>> import torch
        >>> num_bytes(torch.ones(3, 2, dtype=torch.bfloat16))
        12
    """
    return tensor.numel() * tensor.element_size()


def written_by(node: Node) -> list[Node]:
    """Returns the nodes that show memory that `node` overwrites."""
    if node.op != "call_function":
        return []
    out: list[Node] = []
    for position, name in written_arguments(node.target):
        value = node.kwargs.get(name, node.args[position] if position < len(node.args) else None)
        out += [n for n in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(n, Node)]
    return out


def overwritten(gm: GraphModule) -> set[int]:
    """Returns the memories (`storage_of` abstract values) that a node overwrites while other nodes may read there."""
    nodes = [node for node in gm.graph.nodes if node.meta.get("overwrites") != "dead"]
    return {storage_of(x) for node in nodes for of in written_by(node) for x in tensors_of(of)}


def is_view(node: Node) -> bool:
    """Returns whether `node` is a view of existing memory. A view reads and writes no byte."""
    if node.op != "call_function" or written_arguments(node.target):
        return node.op != "call_function"
    mine = {storage_of(t) for t in tensors_of(node)}
    return mine <= {storage_of(t) for n in node.all_input_nodes for t in tensors_of(n)}


def phases_of(gm: GraphModule) -> dict[Node, str]:
    """Returns the phase of each node.

    A node's mark. A node without a mark is "forward" before the first "forward" mark, and "update" afterwards.

    A graph without marks is all forward.
    """
    phases: dict[Node, str] = {}
    seen = not any(n.meta.get("phase") == "forward" for n in gm.graph.nodes)
    rest = "forward" if seen else "update"
    for node in gm.graph.nodes:
        marked = node.meta.get("phase")
        seen = seen or marked == "forward"
        phases[node] = marked or (rest if seen else "forward")
    return phases


def where_of(node: Node) -> str:
    """Returns the user's line, empty if unknown."""
    return node.meta.get("where") or ""


def part_of(node: Node) -> str:
    """Returns in words the pipeline stage, action and microbatch of the node, empty outside of pipelines."""
    return node.meta.get("part", "")


def axes_size(mesh_shape: Mapping[str, int], axes: str) -> int:
    """Returns the number of ranks along axes such as "dp,tp". A missing axis counts 1.

    Example:
        >>> axes_size({"dp": 2, "tp": 3}, "dp,tp")
        6
    """
    size = 1
    for name in axes.split(","):
        size *= mesh_shape.get(name, 1)
    return size
