"""Cuts a captured graph into regions of arithmetic, a kernel each, and determines where each region runs.

The nodes that a schedule orders stay in place: transfers with waits, ops that write in place, matrix products and
attention. Pointwise ops, reductions and views move in between. Connected nodes form a region. A region runs directly
before the first fixed node that needs the region. So no fixed node moves.
"""

import dataclasses
import itertools
import operator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardfn._torch import INDUCTOR_ROUNDS

from ._exact_rows import can_join_kernel
from ._ops import op_of
from ._transfers import is_wait
from ._values import num_bytes, storage_of, tensors_of, written_by

# Not compiled for a CPU where torch's compiler does not round as eager code does.
_ROUNDED = (torch.bfloat16, torch.float16)
_DTYPES = (*_ROUNDED, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)


@dataclasses.dataclass(frozen=True)
class Region:
    """Arithmetic that becomes a single call.

    Attributes:
        nodes: arithmetic, in order. Views in between are made inside.
        inputs: values that the region reads, made outside. No input is a view.
        outputs: values read outside. Each has separate memory: views of outputs are made outside.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of inputs and outputs.

        Example:
            >>> Region((), (), ()).num_bytes
            0
        """
        return sum(_bytes_of(node) for node in (*self.inputs, *self.outputs))


def cut(gm: GraphModule, *, min_nodes: int = 2, min_bytes: int = 1 << 16) -> list[Node | Region]:
    """Returns the graph's nodes in order of execution, with regions in place of the nodes of regions.

    The order of all nodes outside regions is the graph's, except that views are made just before the first use. A
    region runs later than the region's nodes did only if the peak of live bytes does not rise. A node joins an earlier
    region only if the value is small (for example a bias gradient, summed where the summed gradient is made).

    Args:
        gm: flat graph of aten ops. Nodes without `meta["val"]` stay nodes.
        min_nodes: lower limit. Regions with fewer ops of arithmetic stay nodes.
        min_bytes: lower limit. Regions that read and write fewer bytes stay nodes, as the kernel would not repay
            compilation.

    Returns:
        A pure function of the graph, so equal on all ranks.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: ((x + 1).sin() @ x).cos().exp(), tracing_mode="fake")(torch.ones(3, 3))
        >>> [len(s.nodes) if isinstance(s, Region) else s.name for s in cut(gm, min_bytes=0)]
        ['x_1', 2, 'mm', 2, 'output']
    """
    # A single pass, in the graph's order: a group may be joined until a node that stays in place needs the group.
    groups = _NodeGroups(gm)
    for node in gm.graph.nodes:
        groups.take(node)
    return _sort_steps(groups, min_nodes, min_bytes)


def peel(node: Node) -> Node:
    """Returns the value that `node` is a view of, or `node` if `node` is not a view.

    Example:
        >>> graph = torch.fx.Graph()
        >>> x = graph.placeholder("x")
        >>> peel(graph.call_function(torch.ops.aten.view.default, (x, [-1]))) is x
        True
    """
    while is_view(node):
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node


def is_view(node: Node) -> bool:
    """Returns whether the node is only a view of the first argument.

    Example:
        >>> graph = torch.fx.Graph()
        >>> is_view(graph.placeholder("x"))
        False
    """
    op = op_of(node)
    return op.views == 0 and not op.waits and node.all_input_nodes == [node.args[0]]


# Which nodes fuse.


def _can_fuse(node: Node) -> bool:
    op = op_of(node)
    if not (op.pointwise or op.fuses) or getattr(node.target, "namespace", "") != "aten":
        return False
    if op.writes or op.draws or is_view(node) or node.meta.get("op_by_op"):
        return False
    around = (node, *node.all_input_nodes)
    if not all(map(can_join_kernel, around)):
        return False  # a kernel works in a single memory, and only the device's memory is worth a kernel
    near = [tensors_of(n) for n in around]
    return all(near) and all(_is_plain(t) for tensors in near for t in tensors)


def _is_plain(value: Tensor) -> bool:
    sizes = (*value.shape, *value.stride())
    static = all(type(size) is int for size in sizes)
    if value.dtype in _ROUNDED and value.device.type == "cpu" and not INDUCTOR_ROUNDS:
        return False
    return static and value.dtype in _DTYPES and value.layout == torch.strided and value.numel() > 0


def _storages_of(node: Node) -> list[int]:
    return [storage_of(t) for t in tensors_of(node)]


def _bytes_of(node: Node) -> int:
    return sum(map(num_bytes, tensors_of(node)))


def _written_arguments(node: Node) -> list[Node]:
    """Returns the arguments that a node writes. A wait counts as writing the operands and what the start writes."""
    if not is_wait(node):
        return written_by(node)
    return [*node.all_input_nodes, *(n for start in node.all_input_nodes for n in written_by(start))]


class _LiveValues:
    """Ends of the storages in the graph's order, and the bytes alive at each node without arguments."""

    def __init__(self, gm: GraphModule) -> None:
        nodes = list(gm.graph.nodes)
        self.last: dict[int, int] = {}
        self.size: dict[int, int] = {}
        born: dict[int, int] = {}
        for i, node in enumerate(nodes):
            for value in tensors_of(node):
                key = storage_of(value)
                # The caller's memory counts 0, as it is there in any order.
                given = nodes[born.setdefault(key, i)].op == "placeholder"
                self.size[key] = 0 if given else value.untyped_storage().nbytes()
            for used in (node, *node.all_input_nodes):
                self.last.update(dict.fromkeys(_storages_of(used), i))
        change = [0] * (len(nodes) + 1)
        for key, start in born.items():
            change[start] += self.size[key]
            change[self.last[key] + 1] -= self.size[key]
        self.at = list(itertools.accumulate(change))
        self.peak = max(self.at)


class _Group:
    """Group of connected nodes, open until a fixed node needs a node of the group."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.reads: dict[int, None] = {}
        self.slot: int | None = None


class _NodeGroups:
    """Takes the nodes one by one, and assigns each to a group."""

    def __init__(self, gm: GraphModule) -> None:
        self.live = _LiveValues(gm)
        self.index = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.of: dict[Node, _Group] = {}
        self.all: list[_Group] = []
        self.open: list[_Group] = []
        self.fixed: list[Node] = []
        self.written: dict[int, int] = {}
        self.unknown = -1

    def take(self, node: Node) -> None:
        """Puts the node into a group, or fixes the node."""
        maker = node.args[0] if node.target is operator.getitem else None
        if isinstance(maker, Node) and maker in self.of:
            self.of[node] = self.of[maker]
            self.of[node].nodes.append(node)
        elif _can_fuse(node):
            self._join_group(node)
        elif not is_view(node):
            self._fix_node(node)

    def _join_group(self, node: Node) -> None:
        given = [peel(n) for n in node.all_input_nodes]
        near = [g for g in self.open if any(self.of.get(n) is g for n in given)]
        group = near[0] if near else self._earlier_group(node, given) or self._open_group()
        for other in near[1:]:
            self._merge_groups(group, other)
        self.of[node] = group
        group.nodes.append(node)
        group.reads.update(dict.fromkeys(s for n in given if self.of.get(n) is not group for s in _storages_of(n)))

    def _open_group(self) -> _Group:
        group = _Group()
        self.all.append(group)
        self.open.append(group)
        return group

    def _merge_groups(self, into: _Group, other: _Group) -> None:
        self.of.update(dict.fromkeys(other.nodes, into))
        into.nodes = sorted(into.nodes + other.nodes, key=self.index.__getitem__)
        into.reads |= other.reads
        self.open.remove(other)
        self.all.remove(other)

    def _earlier_group(self, node: Node, given: list[Node]) -> _Group | None:
        """Returns the closed group that the node can still join.

        Inputs exist there, unchanged, and the value is small.
        """
        groups = [self.of[n] for n in given if n in self.of]
        if not groups or _bytes_of(node) * 8 > max(_bytes_of(n) for n in given):
            return None
        group = max(groups, key=lambda g: g.slot or 0)
        slot = group.slot or 0
        there = all(
            self.of[n] is group if n in self.of and self.of[n].slot == slot else self._time_of(n) < slot for n in given
        )
        unchanged = all(max(self.written.get(s, -1), self.unknown) < slot for n in given for s in _storages_of(n))
        same = node.meta.get("phase") == group.nodes[0].meta.get("phase")
        return group if there and unchanged and same else None

    def _time_of(self, node: Node) -> int:
        slot = self.of[node].slot if node in self.of else self.index[node]
        return self.index[node] if slot is None else slot

    def _fix_node(self, node: Node) -> None:
        at = self.index[node]
        needed = {id(self.of[n]) for n in map(peel, node.all_input_nodes) if n in self.of}
        written = _written_arguments(node)
        storages = {s for n in written for s in _storages_of(n)}
        unknown = any(not _storages_of(n) for n in written)
        self.unknown = at if unknown else self.unknown
        self.written.update(dict.fromkeys(storages, at))
        for group in list(self.open):
            # The node overwrites an input of the group, or needs values of the group: the group runs directly before.
            if unknown or id(group) in needed or not storages.isdisjoint(group.reads):
                self._close_group(group, at)
        growth = [max(0, self._live_growth(group, at)) for group in self.open]
        if any(growth) and self.live.at[at] + sum(growth) > self.live.peak:
            for group, more in zip(list(self.open), growth, strict=True):
                if more:
                    self._close_group(group, at)
        self.fixed.append(node)

    def _close_group(self, group: _Group, at: int) -> None:
        group.slot = at
        self.open.remove(group)

    def _live_growth(self, group: _Group, at: int) -> int:
        """Returns the additional bytes alive at `at` if the group runs after `at`."""
        kept = sum(self.live.size[s] for s in group.reads if self.live.last[s] < at)
        made = {s for node in group.nodes for s in _storages_of(node)}
        return kept - sum(self.live.size[s] for s in made if self.live.last[s] >= at)


# From groups to the list of steps.


def _sort_steps(groups: _NodeGroups, min_nodes: int, min_bytes: int) -> list[Node | Region]:
    timed: list[tuple[float, Node | Region]] = [(groups.index[node], node) for node in groups.fixed]
    for group in groups.all:
        region = _make_region(group)
        if not region.outputs:
            continue
        if _num_ops(region) >= min_nodes and region.num_bytes >= min_bytes:
            assert group.slot is not None
            # Between two nodes of the graph, before the node that closed the group.
            timed.append((group.slot - 0.5, region))
        else:
            timed += [(groups.index[node], node) for node in group.nodes]
    steps: list[Node | Region] = []
    seen: set[Node] = set()
    for _, step in sorted(timed, key=lambda pair: pair[0]):
        _append_with_views(step, steps, seen)
    return steps


def _append_with_views(step: Node | Region, steps: list[Node | Region], seen: set[Node]) -> None:
    # Views are made where first read. A view inside a region is made again after the region.
    for given in step.inputs if isinstance(step, Region) else step.all_input_nodes:
        if is_view(given) and given not in seen:
            seen.add(given)
            _append_with_views(given, steps, seen)
    steps.append(step)


def _num_ops(region: Region) -> int:
    return sum(op_of(node).weight for node in region.nodes if node.target is not operator.getitem)


def _make_region(group: _Group) -> Region:
    mine = set(group.nodes)
    inputs = dict.fromkeys(r for n in group.nodes for r in map(peel, n.all_input_nodes) if r not in mine)
    outputs = [n for n in group.nodes if _is_read_outside(n, mine)]
    return Region(tuple(group.nodes), tuple(inputs), tuple(outputs))


def _is_read_outside(node: Node, mine: set[Node]) -> bool:
    readers = list(node.users)
    while readers:
        user = readers.pop()
        if user in mine:
            continue
        if not is_view(user):
            return True
        readers.extend(user.users)
    return False
