"""Loops over layers in the graph of a forward.

The graph has the body once, and a node that runs the body for each layer.

    given ... = loop_input()                  placeholders of the carry and of the layer's x
    ...                                       the body; meta["loop"] of each node is the loop's mark
    out = looped(carry, layers, given, ends)  the last carry, then the ys of each layer

`ends` are the nodes of the returned carry and y.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from ._values import where_of


def loop_input() -> Any:
    """Target of a node that is a placeholder of a body's argument."""


def looped(carry: Any, layers: Any, given: Any, ends: Any) -> Any:
    """Target of a node that runs a body, as the node's `meta["body"]` marks."""


@dataclasses.dataclass(eq=False)
class LoopMark:
    """Mark of the loop that a node is a part of. Nodes of an inner loop have the inner loop's mark."""


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """Operations that a loop runs for each layer.

    Attributes:
        nodes: operations in order, without operations of inner loops.
        given: placeholders of the carry and of x.
        num_carry: number of placeholders of the carry.
        ends: nodes of the returned carry, then of y.
        outside: nodes of the surrounding graph that the body uses, directly or in inner loops.
    """

    nodes: list[Node]
    given: list[Node]
    num_carry: int
    ends: list[Node]
    outside: list[Node]


def bodies_of(graph: Graph) -> tuple[list[Node], dict[Node, Body]]:
    """Returns the nodes outside of all loops, in order, and the body of each loop, by the node that runs the body.

    Raises:
        ValueError: a value that a body makes is used outside of the body. The message has the line.
    """
    within: dict[LoopMark | None, list[Node]] = {None: []}
    for node in graph.nodes:
        # A constant is the same for all layers, and the constant's node may serve several bodies.
        mark = None if node.op == "get_attr" else node.meta.get("loop")
        within.setdefault(mark, []).append(node)
    bodies: dict[Node, Body] = {}
    for node in graph.nodes:  # inner loops end before the surrounding loops
        if node.target is looped:
            bodies[node] = _add_body(node, within.get(node.meta["body"], []), bodies)
    for nodes in within.values():
        _check_scope(nodes, bodies)
    return within[None], bodies


def reads(node: Node, bodies: dict[Node, Body]) -> list[Node]:
    """Returns the surrounding nodes that a node needs."""
    if node.target is not looped:
        return node.all_input_nodes
    args: Any = node.args
    return list(dict.fromkeys([*args[0], *(n for x in args[1] for n in x), *bodies[node].outside]))


def _add_body(node: Node, nodes: Sequence[Node], bodies: dict[Node, Body]) -> Body:
    args: Any = node.args
    carry, _, given, ends = args
    own = {*nodes}
    needed = dict.fromkeys(n for inner in nodes for n in reads(inner, bodies))
    needed |= dict.fromkeys(ends)
    kept = [n for n in nodes if n.target is not loop_input]
    outside = [n for n in needed if n not in own]
    return Body(kept, list(given), len(carry), list(ends), outside)


def _check_scope(nodes: Sequence[Node], bodies: dict[Node, Body]) -> None:
    """Refuses uses, outside of a body, of values that the body has made and does not return."""
    for node in nodes:
        mark = node.meta.get("loop") if node.op != "get_attr" else None
        for n in reads(node, bodies):
            made_in = None if n.op == "get_attr" else n.meta.get("loop")
            if made_in is not None and made_in is not mark and not _is_around(made_in, node, bodies):
                raise ValueError(
                    f"{where_of(n) or 'a line unknown'}: a tensor that the function of a scan has made is"
                    " used outside of the function, and must be in the carry or in y. Return the tensor,"
                    " since the function's Python runs for one layer only."
                )


def _is_around(mark: LoopMark, node: Node, bodies: dict[Node, Body]) -> bool:
    """Returns whether a node is in a loop inside the loop of this mark."""
    here = node.meta.get("loop")
    while here is not None and here is not mark:
        here = next((n.meta.get("loop") for n in bodies if n.meta["body"] is here), None)
    return here is mark
