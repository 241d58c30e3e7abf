"""Shortens the lifetimes of values."""

import operator

from torch.fx import GraphModule, Node

from ._edit import reorder_graph
from ._hazards import Memory, dependences, keeps_its_place, put_off
from ._ops import op_of


def free_at_last_use(gm: GraphModule) -> GraphModule:
    """Shortens lifetimes without changing the order of transfers, of writes or of arithmetic.

    Constants, views, and casts of smaller values or of placeholders are made just before the first use. Several results
    of an op are unpacked at once, so that unused results die. Unused nodes are removed, except writes, transfers and
    random draws.

        z = zeros(1000)                  y = x.relu()
        c = x.float()  # unused          z = zeros(1000)
        y = x.relu()               =>    w = z + y
        w = z + y

    Args:
        gm: captured step.

    Returns:
        A new graph with the same bits.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def f(x):
        ...     z, unused = torch.zeros(2), x.double()
        ...     return (x.relu() + z,)
        >>> gm = make_fx(f, tracing_mode="fake")(torch.ones(2))
        >>> [n.name for n in gm.graph.nodes]
        ['x_1', 'zeros', '_to_copy', 'relu', 'add', 'output']
        >>> [n.name for n in free_at_last_use(gm).graph.nodes]
        ['x_1', 'relu', 'zeros', 'add', 'output']
    """
    memory = Memory(gm)
    order = _find_alive(memory)
    before = dependences(memory)
    kept = set(order)
    before = {n: [p for p in before[n] if p in kept] for n in order}
    lazy = {n for n in order if _is_cheap(n, memory)}
    return reorder_graph(gm, put_off(_unpack_early(order, memory), before, lazy))[0]


def _find_alive(memory: Memory) -> list[Node]:
    alive: set[Node] = set()
    for node in reversed(memory.order):
        # Backwards: a node's users have been decided when its turn comes.
        if node in alive or node.op == "output" or keeps_its_place(node):
            alive.update((node, *node.all_input_nodes))
    return [n for n in memory.order if n in alive]


def _unpack_early(order: list[Node], memory: Memory) -> list[Node]:
    """Puts each result of an op with several results directly behind the op."""
    held: dict[Node, list[Node]] = {}
    for node in order:
        if _takes_result(node, memory):
            held.setdefault(node.all_input_nodes[0], []).append(node)
    return [m for n in order if not _takes_result(n, memory) for m in (n, *held.get(n, ()))]


def _takes_result(node: Node, memory: Memory) -> bool:
    """Returns whether the node takes a result of an op with several results that is no view."""
    return node.target is operator.getitem and not memory.is_view(node.all_input_nodes[0])


def _is_cheap(node: Node, memory: Memory) -> bool:
    op = op_of(node)
    if op.constant:
        return True
    if memory.is_view(node):
        return not _takes_result(node, memory)
    if not op.casts:
        return False
    source = node.all_input_nodes[0]
    return _is_given(source, memory) or _held_bytes(source, memory) < _held_bytes(node, memory)


def _is_given(node: Node, memory: Memory) -> bool:
    while memory.is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _held_bytes(node: Node, memory: Memory) -> int:
    return sum(memory.sizes[m] for m in memory.shown(node))
