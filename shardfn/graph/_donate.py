"""Turns pure updates into updates in place, in memory that is not read afterwards."""

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from shardfn._torch import OpOverload

from ._edit import abstract_value, reorder_graph, revalue
from ._hazards import Memory, is_stop
from ._ops import find_op
from ._transfers import is_gather
from ._values import tensors_of


def donate(gm: GraphModule, *, temporaries: bool = True) -> GraphModule:
    """Turns elementwise ops into in-place ops where the first operand dies there: `add -> add_`, foreach ops too.

    The operand must be contiguous, of the result's shape and dtype, and in memory of a temporary or of a placeholder
    that `gm.meta["donated"]` names. No node may read this memory later, nor a transfer in flight. So an optimizer
    written as pure functions runs in the buffers of the given state. Before a `stop_unless` placeholders stay.

        m = mu * 0.9                     m = mu.mul_(0.9)
        m1 = m + g                =>     m1 = m.add_(g)
        p1 = p - m1                      p1 = p.sub_(m1)

    Args:
        gm: captured step.
        temporaries: whether to write again memory that the step made. A back end that fuses such ops needs no memory
            between the ops, and does better without.

    Returns:
        A new graph with the same bits in all outputs. The contents of donated placeholders are undefined afterwards.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda p, g: (p - g * 2,), tracing_mode="fake")(torch.ones(2), torch.ones(2))
        >>> gm.meta["donated"] = {"p_1"}
        >>> [n.name for n in gm.graph.nodes], [str(n.target) for n in donate(gm).graph.nodes][2:-1]
        (['p_1', 'g_1', 'mul', 'sub', 'output'], ['aten.mul.Tensor', 'aten.sub_.Tensor'])
    """
    memory = Memory(gm)
    chosen = _Owners(memory, set(gm.meta.get("donated", ())), temporaries).chosen
    out, new = reorder_graph(gm, memory.order)
    changed: set[Node] = set()
    for node in memory.order:
        if node in chosen:
            changed |= _write_in_place(node, chosen[node], new)
        else:
            revalue(new[node], node, changed, memory)
    return out


def _write_in_place(node: Node, twin: Any, new: dict[Node, Node]) -> set[Node]:
    """Replaces the node by the in-place op. A list op returns nothing, so the operands become the results."""
    here = new[node]
    here.target = twin
    here.meta["overwrites"] = "dead"  # the memory is read later only through the node's result
    here.meta["val"] = abstract_value(here)
    operands: Any = node.args[0]
    if not isinstance(operands, list | tuple):
        return {here}
    here.meta["val"] = None
    for item in list(node.users):  # users of a draft change
        at: Any = item.args[1]
        kept = new[operands[at]]
        new[item].replace_all_uses_with(kept)
        new[item].graph.erase_node(new[item])
        new[item] = kept
    return {new[n] for n in _first_operands(node)}


class _Owners:
    """Walks through the graph, and records which node may overwrite which memory.

    Attributes:
        chosen: nodes that become in-place, with the op to use.
    """

    def __init__(self, memory: Memory, donated: set[str], temporaries: bool) -> None:
        self._memory, self._temporaries = memory, temporaries
        # The position of the last read, by memory. `_unite_results` updates the positions.
        self._last = {m: i for i, n in enumerate(memory.order) for m in memory.reads(n)}
        # A program that stops must leave the state unchanged.
        self._stop = max((i for i, n in enumerate(memory.order) if is_stop(n)), default=-1)
        self._foreign: set[int] = set()
        for node in memory.order:
            self._foreign.update(_not_owned(node, donated, memory))
        self.chosen: dict[Node, Any] = {}
        for i, node in enumerate(memory.order):
            twin = in_place_twin(node)
            if twin is not None and self._can_donate(node, i):
                self.chosen[node] = twin
                self._unite_results(node)

    def _memories_of(self, node: Node) -> list[int]:
        return [self._memory.find(m) for m in self._memory.shown(node)]

    def _can_donate(self, node: Node, i: int) -> bool:
        first = _first_operands(node)
        owned = [m for n in first for m in self._memories_of(n)]
        if not first or len(set(owned)) != len(first) or len(self._memory.shown(node)) != len(first):
            return False
        if any(m in self._foreign or self._last.get(m, i) > i for m in owned):
            return False
        given = [m in self._memory.given for m in owned]
        if any(given) if i < self._stop else not self._temporaries and not all(given):
            return False
        # An operand may be used twice, element by element. No other operand may share the overwritten memory.
        others = [n for n in _other_operands(node) if n is not node.args[0]]
        if any(m in owned for n in others for m in self._memories_of(n)):
            return False
        listed = isinstance(node.args[0], list | tuple)
        return _can_hold(first, node) and (not listed or all(u.target is operator.getitem for u in node.users))

    def _unite_results(self, node: Node) -> None:
        for source, made in zip(_first_operands(node), self._memory.shown(node), strict=True):
            here, there = self._memories_of(source)[0], self._memory.find(made)
            last = self._last.get(there, -1)
            root = self._memory.unite(here, there)
            self._last[root] = last
            if there in self._foreign:
                self._foreign.add(root)


def in_place_twin(node: Node) -> Any:
    """Returns the op that writes the result of an elementwise node into the first argument.

    None if there is no such op.

    Example:
        >>> graph = torch.fx.Graph()
        >>> in_place_twin(graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),)))
        <OpOverload(op='aten.relu_', overload='default')>
    """
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return None
    if target.namespace == "shardfn_kernels":
        return find_op(target).in_place
    if target.namespace != "aten":
        return None
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    elementwise = torch.Tag.pointwise in target.tags or name.startswith("_foreach_")
    if not elementwise or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    twin = getattr(getattr(torch.ops.aten, name + "_", None), overload, None)
    return twin if twin is not None and _has_same_arguments(target._schema, twin._schema) else None


def _has_same_arguments(pure: Any, twin: Any) -> bool:
    mine = [(a.name, str(a.type)) for a in pure.arguments]
    return twin.is_mutable and mine == [(a.name, str(a.type)) for a in twin.arguments]


def _first_operands(node: Node) -> list[Node]:
    first = node.args[0] if node.args else None
    found = first if isinstance(first, list | tuple) else [first]
    return [n for n in found if isinstance(n, Node)]


def _other_operands(node: Node) -> list[Node]:
    rest: list[Node] = []
    map_arg((node.args[1:], node.kwargs), rest.append)
    return rest


def _can_hold(first: list[Node], node: Node) -> bool:
    before = [t for n in first for t in tensors_of(n)]
    after = tensors_of(node)
    if len(before) != len(after):
        return False
    pairs = zip(before, after, strict=True)
    return all(a.is_contiguous() and b.is_contiguous() and a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def _not_owned(node: Node, donated: set[str], memory: Memory) -> tuple[int, ...]:
    """Returns the memories that must not be overwritten: inputs not donated, constants, and values still being sent."""
    if node.op == "placeholder":
        return () if node.name in donated else memory.shown(node)
    if node.op == "get_attr":
        return memory.shown(node)
    if not is_gather(node):
        return ()
    # The rank's block is sent until the channel's next gather, for which there is no wait.
    return tuple(m for n in node.all_input_nodes for m in memory.shown(n) if m not in memory.given)
