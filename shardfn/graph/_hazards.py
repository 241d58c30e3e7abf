"""Memory that the nodes of a graph read and write, and the nodes that may therefore change places.

Nodes have a partial order, made of the rules below. Any order of the graph within the partial order computes the same
bits:

    data             a user comes after its inputs
    read after write, write after read, write after write: of a single memory, through any alias
    in flight        a transfer's operands count as read, and its result as written, until its `wait`
    stops            nodes that write, transfer or draw at random stay on their side of an op that may end the program
    messages         sends, receives and their waits keep their order, by which no two ranks wait for each other
    channels         gathers among themselves, reductions among themselves and the loss's own collectives keep
                     their order, as do random ops: so all ranks issue alike; a gather whose result is gathered again
                     (the first of two hops) is on a channel of its own, so that it may run ahead of those

A view reads no memory. Only the readers tie a view to the memory's values.
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from shardfn._torch import OpOverload

from ._op import by_identity
from ._ops import PSUM_SCATTER, SENT, WAIT, find_op, op_of
from ._transfers import is_fetch, is_gather, is_message, is_start, is_wait, start_of
from ._values import tensors_of, written_by

# Pseudo-memories, for orders that no memory carries.
_GATHER, _REDUCE, _COLLECTIVE, _RANDOM, _EFFECT, _FAR, _MESSAGE = -1, -2, -3, -4, -5, -6, -7


class Memory:
    """Memory that each node of a graph shows, reads and writes. Memories are small numbers in order of birth.

    Attributes:
        order: nodes.
        position: index in `order`.
        inputs: inputs of each node.
        mutated: memories that an op overwrites, by the op's schema.
        given: memories of placeholders.
        sizes: bytes of each memory.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.order: list[Node] = list(gm.graph.nodes)
        self.position = {n: i for i, n in enumerate(self.order)}
        self._parent: list[int] = []
        self.sizes: list[int] = []
        self._number: dict[object, int] = {}
        self._raw: dict[Node, tuple[int, ...]] = {}
        # By node the abstract value, and the memories of the value. Passes over the same draft share the cache.
        self._known: dict[Node, tuple[Any, Sequence[tuple[int, Any]]]] = gm.meta.get("draft", {})
        # A snapshot: a pass may edit the graph and still ask.
        self.inputs: dict[Node, list[Node]] = {n: n.all_input_nodes for n in self.order}
        acts = {n: _acts_of(n.target) if n.op == "call_function" else _NEVER for n in self.order}
        self._waits: dict[Node, Node] = {}
        for node in self.order:
            self._raw[node] = self._list_numbers(node)
            if acts[node].waits:
                self._waits[node] = start_of(node)
                self._unite_wait(node)
            elif node.target is operator.getitem and is_wait_input(node):
                self._unite_wait(node)
        self._shown = {n: self._find_all(raw) for n, raw in self._raw.items()}
        # From here on all memories that are the same have been united.
        self._view = {n: acts[n].may_view and self._is_view(n) for n in self.order}
        self._writes = {n: self._memories_of(written_by(n)) for n in self.order if acts[n].writes}
        self.mutated = {m for memories in self._writes.values() for m in memories}
        self.given = {m for n in self.order if n.op == "placeholder" for m in self._shown[n]}

    def shown(self, node: Node) -> tuple[int, ...]:
        """Returns the memories of the node's values."""
        return self._shown[node]

    def is_view(self, node: Node) -> bool:
        """Returns whether the node is a view of existing memory, or takes a value out of a tuple."""
        return self._view[node]

    def mutates(self, node: Node) -> tuple[int, ...]:
        """Returns the memories that the node overwrites, by the op's schema."""
        return self._writes.get(node, ())

    def reads(self, node: Node) -> tuple[int, ...]:
        """Returns the memories with contents that the node needs.

        For a wait, also the memories that the transfer reads.
        """
        if self._view[node]:
            return ()
        start = self._waits.get(node)
        return self._memories_of(self.inputs[node] if start is None else [*self.inputs[node], *self.inputs[start]])

    def writes(self, node: Node) -> tuple[int, ...]:
        """Returns the memories that the node overwrites.

        A wait also writes the memory of the transfer's result.
        """
        start = self._waits.get(node)
        if start is None:
            return self.mutates(node)
        return _drop_repeats((*self._memories_of(self.inputs[node]), *self.mutates(start)))

    def find(self, memory: int) -> int:
        """Returns the representative of all memories that were found to be the same."""
        while self._parent[memory] != memory:
            self._parent[memory] = memory = self._parent[self._parent[memory]]
        return memory

    def unite(self, one: int, other: int) -> int:
        """Records that two memories are the same. Earlier results of `shown` are not changed."""
        one, other = sorted((self.find(one), self.find(other)))
        self._parent[other] = one
        self.sizes[one] = max(self.sizes[one], self.sizes[other])
        return one

    @functools.cached_property
    def far(self) -> set[Node]:
        """Returns the first gathers of gathers in two hops."""
        behind: dict[Node, set[Node]] = {}
        out: set[Node] = set()
        for node in self.order:
            found = {start for n in self.inputs[node] if n in behind for start in behind[n]}
            if is_gather(node):
                out |= found
            elif is_wait(node) and is_gather(start_of(node)):
                behind[node] = {start_of(node)}
            elif found and (is_copy(node) or self._view[node]):
                behind[node] = found
        return out

    def _memories_of(self, nodes: Sequence[Node]) -> tuple[int, ...]:
        if len(nodes) == 1:
            return self._shown[nodes[0]]
        return _drop_repeats(m for n in nodes for m in self._shown[n])

    def _find_all(self, memories: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the representatives of these memories, each once."""
        if len(memories) == 1:
            return memories if self._parent[memories[0]] == memories[0] else (self.find(memories[0]),)
        return _drop_repeats(map(self.find, memories))

    def _list_numbers(self, node: Node) -> tuple[int, ...]:
        if node.op == "output":
            return ()
        # By the storage of the abstract value. Aliases share a storage, as real tensors do.
        if "val" in node.meta:
            return tuple([self._new_memory(key, storage) for key, storage in self._storages_of(node)])
        if node.op != "call_function":
            return (self._new_memory((node.op, node.target)),)
        if isinstance(node.target, OpOverload) and not node.target._schema.returns:
            return ()
        # An op without an abstract value may return its arguments.
        own = self._new_memory(node)
        for m in [m for n in self.inputs[node] for m in self._raw[n]]:
            self.unite(own, m)
        return (own,)

    def _storages_of(self, node: Node) -> Sequence[tuple[int, Any]]:
        """Returns the storages of the node's abstract value, with addresses. Cached for a draft."""
        val, known = node.meta["val"], self._known.get(node)
        if known is None or known[0] is not val:
            storages = [t.untyped_storage() for t in tensors_of(node)]
            known = self._known[node] = (val, [(x._cdata, x) for x in storages])
        return known[1]

    def _new_memory(self, key: object, storage: Any = None) -> int:
        found = self._number.get(key)
        if found is None:
            found = self._number[key] = len(self._parent)
            self._parent.append(found)
            self.sizes.append(0 if storage is None else storage.nbytes())
        return found

    def _unite_wait(self, node: Node) -> None:
        """Unites the memory of a wait with the memory of the transfer. Abstract values may not show the connection."""
        start = start_of(node)
        others = list(node.all_input_nodes)
        if start.target is PSUM_SCATTER and len(start.args[1]) == 1:  # pyright: ignore[reportArgumentType]
            others.append(start.all_input_nodes[0])
        for m in [m for n in others for m in self._raw[n]]:
            for own in self._raw[node]:
                self.unite(own, m)

    def _is_view(self, node: Node) -> bool:
        if node.target is operator.getitem:
            return True
        mine, shown = self._shown[node], self._shown
        if len(mine) == 1:
            return any([mine[0] in shown[n] for n in self.inputs[node]])
        return bool(mine) and {m for n in self.inputs[node] for m in shown[n]}.issuperset(mine)


class _Acts(NamedTuple):
    """Possible effects of an op: waits, returns a view, overwrites memory."""

    waits: bool
    may_view: bool
    writes: bool


_NEVER = _Acts(waits=False, may_view=False, writes=False)


@by_identity
def _acts_of(target: Any) -> _Acts:
    op = find_op(target)
    moves = op.channel or op.move is not None or op.waits
    looks = isinstance(target, OpOverload) and not moves and not target._schema.is_mutable
    return _Acts(op.waits, looks or target is operator.getitem, bool(op.writes))


def _drop_repeats(memories: Iterable[int]) -> tuple[int, ...]:
    """Returns the memories without repetitions, in order."""
    return tuple(dict.fromkeys(memories))


def is_wait_input(node: Node) -> bool:
    """Returns whether the node takes a collective out of a tuple of several."""
    return any(is_start(n) for n in node.all_input_nodes)


def keeps_its_place(node: Node) -> bool:
    """Returns whether a node has an effect: writes, transfers, draws at random or acts outside the graph."""
    if is_fetch(node):
        return False  # a matter of this rank only, and repeatable
    return (
        bool(written_by(node)) or is_start(node) or is_wait(node) or bool(_turns_of(node)) or node.op == "placeholder"
    )


def dependences(memory: Memory, *, channels: bool = True) -> dict[Node, list[Node]]:
    """Returns for each node the nodes that must come before, in the graph's order.

    Args:
        memory: facts about the graph.
        channels: whether gathers, and reductions, keep their order.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x, y: (x * 2, y.copy_(x), x.add_(1)), tracing_mode="fake")(torch.ones(2), torch.ones(2))
        >>> {n.name: [p.name for p in before] for n, before in dependences(Memory(gm)).items()}["add_"]
        ['x_1', 'mul', 'copy_']
    """
    last: dict[int, Node] = {}
    readers: dict[int, list[Node]] = {}
    out: dict[Node, list[Node]] = {}
    for node in memory.order:
        turns, writes = _turns_of(node), memory.writes(node)
        # Nodes that must not run if the program stops before, and must have run if the program stops afterwards.
        # Transfers are among these nodes: a rank that stops must have started exactly the transfers that other ranks
        # wait for.
        stopped = (_EFFECT,) if writes or _RANDOM in turns or is_start(node) else ()
        if turns:
            turns = (_FAR,) if node in memory.far else turns
            turns = tuple(t for t in turns if channels or t not in (_GATHER, _REDUCE, _FAR))
        before = dict.fromkeys(memory.inputs[node])
        reads = (*memory.reads(node), *stopped)
        for m in (*reads, *turns):
            if m in last:
                before[last[m]] = None
        for m in (*writes, *turns):
            before.update(dict.fromkeys([*readers.pop(m, ()), *([last[m]] if m in last else ())]))
            last[m] = node
        for m in reads:
            readers.setdefault(m, []).append(node)
        # A node may read and write the same memory.
        before.pop(node, None)
        out[node] = sorted(before, key=memory.position.__getitem__) if len(before) > 1 else list(before)
    return out


def is_stop(node: Node) -> bool:
    """Returns whether the program may end at the node, or the node has an unknown effect."""
    return _EFFECT in _turns_of(node)


def dependents(before: dict[Node, list[Node]]) -> dict[Node, list[Node]]:
    """Returns the same order in reverse: for each node, the nodes that must come after."""
    out: dict[Node, list[Node]] = {n: [] for n in before}
    for node, earlier in before.items():
        for n in earlier:
            out[n].append(node)
    return out


def legal_order(wish: Sequence[Node], before: dict[Node, list[Node]]) -> list[Node]:
    """Returns the legal order nearest to `wish`.

    Each node is at the node's place in `wish`, or earlier if a node that needs the first node is earlier.

    Example:
        >>> import torch
        >>> graph = torch.fx.Graph()
        >>> a, b = graph.placeholder("a"), graph.placeholder("b")
        >>> legal_order([b, a], {a: [], b: [a]})
        [a, b]
    """
    done: set[Node] = set()
    out: list[Node] = []
    for root in wish:
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [] if node in done else [n for n in before[node] if n not in done]
            stack.extend(reversed(missing))
            if not missing:
                stack.pop()
                if node not in done:
                    done.add(node)
                    out.append(node)
    return out


def put_off(order: Sequence[Node], before: dict[Node, list[Node]], lazy: set[Node]) -> list[Node]:
    """Returns the order with each `lazy` node directly before the first node that must come later."""
    busy = [n for n in order if n not in lazy and n.op != "output"]
    return legal_order([*busy, *(n for n in order if n in lazy), order[-1]], before)


def put_forward(order: Sequence[Node], before: dict[Node, list[Node]], eager: set[Node]) -> list[Node]:
    """Returns the order with each `eager` node directly after the last node that must come earlier."""
    first = [n for n in order if n.op == "placeholder"]
    busy = [n for n in order if n not in eager and n.op != "placeholder"]
    late = [n for n in order if n in eager]
    # The same problem, read from the end.
    after = {n: later[::-1] for n, later in dependents(before).items()}
    out = legal_order([*reversed(busy), *reversed(late), *reversed(first)], after)
    return [*first, *(n for n in reversed(out) if n.op != "placeholder")]


def ready_after(order: Sequence[Node], before: dict[Node, list[Node]], memory: Memory) -> dict[Node, int]:
    """Returns for each node the index in `order` after which the node could run, if nodes that only bring inputs moved.

    Such nodes are copies, views, fetches, and the first hops of gathers in two hops.
    """
    at = {n: i for i, n in enumerate(order)}
    free: dict[Node, int] = {}
    out: dict[Node, int] = {}
    far = memory.far
    for node in memory.order:
        out[node] = max((free[p] for p in before[node]), default=-1)
        brings = is_copy(node) or is_fetch(node) or node in far or (is_wait(node) and start_of(node) in far)
        free[node] = out[node] if brings or memory.is_view(node) else at[node]
    return out


def is_copy(node: Node) -> bool:
    """Returns whether a node only copies, casts, packs or encodes, and may run next to the transfer of the value."""
    return op_of(node).copies


@by_identity
def _turn_of(target: Any) -> tuple[int, ...]:
    op = find_op(target)
    if op.channel == "gather":
        return (_GATHER,)
    if op.channel == "reduce":
        return (_REDUCE,)
    if op.channel == "loss":
        return (_COLLECTIVE,)
    if op.channel == "between" or target is SENT:
        return (_MESSAGE,)
    if target is operator.getitem or not isinstance(target, OpOverload):
        return () if getattr(target, "__module__", "") in ("_operator", "builtins", "math") else (_EFFECT,)
    if target.namespace == "_c10d_functional":
        return () if op.waits else (_COLLECTIVE,)
    if op.draws:
        return (_RANDOM,)
    return (_EFFECT,) if op.effects else ()


def _turns_of(node: Node) -> tuple[int, ...]:
    if node.op != "call_function":
        return ()
    if node.target is WAIT and is_message(start_of(node)):
        return (_MESSAGE,)
    return _turn_of(node.target)


def is_random(node: Node) -> bool:
    """Returns whether the node draws from torch's generator, or may do more than compute."""
    return any(t in (_RANDOM, _EFFECT, _COLLECTIVE) for t in _turns_of(node))
