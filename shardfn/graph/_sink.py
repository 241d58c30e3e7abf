"""Moves waits down to the first use of their values."""

from collections.abc import Callable, Iterable

from torch.fx import GraphModule, Node

from ._edit import reorder_graph
from ._hazards import Memory, dependences, put_off
from ._ops import MOVE_WAIT, SENT
from ._transfers import is_wait


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
