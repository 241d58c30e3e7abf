"""Finds the leaves of a transfer: leaves whose elements the transfer moves, or leaves that the sum updates."""

from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from ._ops import op_of
from ._values import is_view


def leaves_behind(own: Any) -> tuple[str, ...]:
    """Returns the paths of the leaves that a transfer's operand, a node or a list of nodes, is made of, in order.

    Leaves in `node.meta["gradient_of"]`, where a capture has noted leaves, count too.
    """
    names: dict[str, None] = {}
    for operand in own if isinstance(own, (list, tuple)) else [own]:
        found = [operand, *sources(operand)] if isinstance(operand, Node) else []
        names.update({n.meta["leaf"]: None for n in reversed(found) if n.op == "placeholder" and "leaf" in n.meta})
        names.update({n.meta["gradient_of"]: None for n in reversed(found) if "gradient_of" in n.meta})
    return tuple(names)


class Updates:
    """Follows a reduced gradient to the optimizer's op that takes the gradient. The op names the parameter, too."""

    def __init__(self, gm: GraphModule) -> None:
        self._takers: dict[Node, dict[Node, int]] = {}
        for node in gm.graph.nodes:
            if node.op == "call_function" and getattr(node.target, "__name__", "").startswith("_fused_"):
                self._takers[node] = {g: i for i, g in enumerate(node.args[1])}

    def leaves_after(self, wait: Node, limit: int = 4096) -> tuple[str, ...]:
        """Returns the paths of the parameters that the value of `wait` updates."""
        stack, seen, names = [wait], {wait}, dict[str, None]()
        while stack and len(seen) < limit:
            node = stack.pop()
            for user in node.users:
                if user in self._takers:
                    names.update(dict.fromkeys(self._find_leaf(user, node)))
                elif user not in seen and _keeps_identity(user) and user.args[0] is node:
                    seen.add(user)
                    stack.append(user)
        return tuple(names)

    def _find_leaf(self, taker: Node, grad: Node) -> tuple[str, ...]:
        at = self._takers[taker].get(grad)
        if at is None:
            return ()
        param = taker.args[0][at]  # pyright: ignore[reportOptionalSubscript, reportArgumentType, reportIndexIssue]
        found = [param, *sources(param)] if isinstance(param, Node) else []
        return tuple(n.meta["leaf"] for n in found if n.op == "placeholder" and "leaf" in n.meta)


def sources(node: Node) -> Iterator[Node]:
    """Yields the nodes that a value's elements come from by cuts, joins, casts, codes, transfers or copies."""
    stack, seen = list(node.all_input_nodes) if _is_moving(node) else [], {node}
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        yield n
        if _is_moving(n):
            stack.extend(n.all_input_nodes)


def _is_moving(node: Node) -> bool:
    """Returns whether `node` moves elements and computes nothing with them."""
    return node.op == "call_function" and (op_of(node).carries or is_view(node))


def _keeps_identity(node: Node) -> bool:
    """Returns whether the result is still a gradient of the same leaves: cut, cast, scaled, or summed while encoded."""
    op = op_of(node)
    return op.scales or op.views == 0
