"""Edits graphs as copies, with metadata, so that a pass leaves the argument unchanged.

Only a draft is changed in place.

A new node gets an abstract value by running the op on the abstract values of the arguments. So memory is shared in the
metadata exactly where memory is shared at run time.
"""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from shardfn._torch import detect_fake_mode, make_graph_module, use_lazy_graph_module
from shardfn.collectives import in_runs

from ._hazards import Memory
from ._values import tensors_of


def draft_graph(gm: GraphModule) -> GraphModule:
    """Returns a private copy, a draft.

    Passes change a draft in place until `settle_graph` is called. A draft must not run before.

    A draft saves time: a copy of the step of a trillion parameters takes a second, and there are nine passes.
    """
    out = reorder_graph(gm, list(gm.graph.nodes))[0]
    out.meta["draft"] = {}  # a cache of `Memory`
    return out


def settle_graph(gm: GraphModule) -> GraphModule:
    """Ends a draft: from now on passes copy the graph, as any other graph."""
    gm.meta.pop("draft", None)
    return gm


def reorder_graph(gm: GraphModule, order: Sequence[Node]) -> tuple[GraphModule, dict[Node, Node]]:
    """Returns a copy with the nodes in `order`, and a dict from old nodes to new. A draft is reordered in place.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1, x * 2), tracing_mode="fake")(torch.ones(2))
        >>> x, add, mul, out = gm.graph.nodes
        >>> [n.name for n in reorder_graph(gm, [x, mul, add, out])[0].graph.nodes]
        ['x_1', 'mul', 'add', 'output']
    """
    if "draft" in gm.meta:
        _rearrange_nodes(gm.graph, order)
        return gm, dict(zip(order, order, strict=True))
    graph, new = Graph(), dict[Node, Node]()
    for node in order:
        new[node] = copy_node(graph, node, new.__getitem__)
    return finish(gm, graph), new


def _rearrange_nodes(graph: Graph, order: Sequence[Node]) -> None:
    kept = set(order)
    for node in reversed(list(graph.nodes)):
        if node not in kept:
            graph.erase_node(node)
    last = graph._root
    for node in order:
        if last.next is not node:
            last.append(node)
        last = node


def copy_node(graph: Graph, node: Node, transform: Callable[[Node], Node]) -> Node:
    """Copies a node as `graph.node_copy(node, transform)`, several times as fast: nested arguments are not searched."""
    out = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
    out.args = map_arg(node.args, transform)  # pyright: ignore[reportAttributeAccessIssue]
    if node.kwargs:
        out.kwargs = map_arg(node.kwargs, transform)  # pyright: ignore[reportAttributeAccessIssue]
    out.meta = copy.copy(node.meta)
    return out


def finish(gm: GraphModule, graph: Graph) -> GraphModule:
    """Returns a module like `gm` that runs `graph`. The module's Python is written at the first run."""
    graph._codegen = copy.deepcopy(gm.graph._codegen)
    with use_lazy_graph_module(True):
        out = make_graph_module(gm, graph)
    out.meta = dict(gm.meta)
    return out


def call(
    graph: Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, like: Node
) -> Node:
    """Adds a node at the insertion point, with an abstract value, and with `like`'s phase, line and way of running.

    Args:
        graph: graph to edit.
        target: op.
        args: arguments.
        kwargs: keyword arguments.
        like: node to replace.
    """
    node = graph.create_node("call_function", target, args, dict(kwargs or {}), target._schema.name.split("::")[1])
    node.meta.update({k: like.meta[k] for k in ("phase", "where", "memory", "op_by_op") if k in like.meta})
    node.meta["val"] = abstract_value(node)
    return node


def abstract_value(node: Node) -> Any:
    """Returns the node's result for the abstract values of the arguments."""
    values: Any = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    args, kwargs = values
    if node.target is operator.getitem:
        return args[0][args[1]]
    mode = detect_fake_mode([t for n in node.all_input_nodes for t in tensors_of(n)])
    assert callable(node.target)
    with torch.no_grad(), mode if mode is not None else torch.device("meta"):
        target, args = in_runs(node.target, args)
        return target(*args, **kwargs)


def revalue(node: Node, old: Node, changed: set[Node], memory: Memory) -> None:
    """Computes a node's abstract value again if the node shows memory of a `changed` node.

    The node then becomes a `changed` node, too.

    Args:
        node: node of the edited graph. To be called on all nodes in order.
        old: node before the edit.
        changed: nodes of the edited graph whose abstract value is other memory than before.
        memory: facts about the graph before the edit.
    """
    if node in changed or not any(n in changed for n in node.all_input_nodes):
        return
    if memory.is_view(old) or _returns_argument(node):
        node.meta["val"] = abstract_value(node)
        changed.add(node)


def _returns_argument(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)
