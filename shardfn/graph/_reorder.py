"""Orders of nodes: values are released at the last use, and waits come as late as possible."""

import operator
from collections.abc import Callable, Iterable

from torch.fx import GraphModule, Node

from ._edit import reorder_graph
from ._hazards import Memory, dependences, keeps_its_place, put_off
from ._ops import MOVE_WAIT, SENT, op_of
from ._transfers import is_wait


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
    """Returns whether the node takes a result of an op with several results that is not a view."""
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
    return _is_given(source, memory) or _resident_bytes(source, memory) < _resident_bytes(node, memory)


def _is_given(node: Node, memory: Memory) -> bool:
    while memory.is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _resident_bytes(node: Node, memory: Memory) -> int:
    return sum(memory.sizes[m] for m in memory.shown(node))


# Moves waits down to the first use of their values.


def sink_waits(gm: GraphModule) -> GraphModule:
    """Moves each wait, and the views of the result, down to just before the first use.

    The computation between start and wait then overlaps with the transfer. A wait passes neither a use of the value,
    through any alias, nor a write to the transfer's operands. Waits for moves between memories, and for sends to other
    stages, stay where the program has the waits, since these waits bound the transfers in flight.

        h = all_gather_start(own)        h = all_gather_start(own)
        w = wait(h)                      y = x * 2
        v = w.view(2, 2)           =>    w = wait(h)
        y = x * 2                        v = w.view(2, 2)
        z = y @ v                        z = y @ v

    Args:
        gm: captured step.

    Returns:
        A new graph with the same nodes and the same bits.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def f(own, x):
        ...     w = torch.ops.shardfn.wait(torch.ops.shardfn.all_gather_start(own, [1, 1], "dp"))
        ...     return (x * 2 + w,)
        >>> gm = make_fx(f, tracing_mode="fake")(torch.ones(1), torch.ones(2))
        >>> [n.name for n in gm.graph.nodes][2:]
        ['all_gather_start', 'wait', 'mul', 'add', 'output']
        >>> [n.name for n in sink_waits(gm).graph.nodes][2:]
        ['all_gather_start', 'mul', 'wait', 'add', 'output']
    """
    memory = Memory(gm)
    lazy = waits_and_views(memory, lambda n: is_wait(n) and n.target not in (MOVE_WAIT, SENT))
    order = put_off(memory.order, dependences(memory), lazy)
    return reorder_graph(gm, order)[0]


def waits_and_views(memory: Memory, which: Callable[[Node], bool]) -> set[Node]:
    """Returns the nodes that `which` accepts, and the views of the results of such nodes."""
    lazy: set[Node] = set()
    for node in memory.order:
        if which(node) or (memory.is_view(node) and _has_all(lazy, node.all_input_nodes)):
            lazy.add(node)
    return lazy


def _has_all(nodes: set[Node], wanted: Iterable[Node]) -> bool:
    return all(n in nodes for n in wanted)
