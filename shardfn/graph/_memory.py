"""The memory of a captured step over time and by kind, from the lifetimes of its values in the graph's order."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from shardfn.core import dtype_name

from ._exact_rows import balanced_shares
from ._ops import ROWS_TO_DEVICE, TO_DEVICE, op_of
from ._transfers import MemoryMove, Transfer, made_bytes, memory_of, moves, sources, transfers
from ._values import phases_of, storage_of, tensors_of, where_of, written_by

# Lifetimes of the memory of a captured step: when the graph, run in order, allocates and frees each piece.
#
# A value dies after the last use, and memory after the last value that shows the memory. Placeholders belong to the
# caller and constants to the graph, and live throughout. Outputs live to the end. A transfer holds the operands until
# the wait, and further memory:
#
#     all_gather    the result, from start to its last use
#     psum_scatter  the blocks that arrive, (ranks - 1) of them on the first and the last rank. For two ranks the
#                   blocks become the result, else the result is added at the wait
#     psum          a packed copy of its parts, which becomes the result
#
# A token counts as the bytes on disk that the token names.


@dataclasses.dataclass
class Block:
    """Piece of memory, alive from a first to a last node.

    Attributes:
        nbytes: size.
        maker: node that makes the block.
        born: position in the graph of the node at which the block comes to life, or -1 for memory that is there before.
        dies: position of the last node at which the block is alive.
        holders: nodes with values that show the block. Empty for buffers inside a transfer.
        operand: purpose of a buffer inside a transfer.
    """

    nbytes: int
    maker: Node
    born: int
    dies: int
    holders: list[Node] = dataclasses.field(default_factory=list)
    operand: str = ""


def blocks_of(gm: GraphModule, sent: Sequence[Transfer]) -> list[Block]:
    """Returns every piece of memory of the step, in the order of birth.

    Args:
        gm: captured step.
        sent: transfers between ranks.
    """
    nodes = list(gm.graph.nodes)
    at = {n: i for i, n in enumerate(nodes)}
    blocks = _memories_of(nodes, at)
    hidden: list[Block] = []
    for local in moves(gm):
        _hold_operands(local, at, blocks)
    for move in sent:
        _hold_operands(move, at, blocks)
        if move.wait is not None:
            if move.node.target is torch.ops.shardfn.psum_scatter_start.default:
                hidden += _arriving_buffers(move, at, blocks)
    out = [*blocks.values(), *hidden]
    return sorted((b for b in out if b.nbytes), key=lambda b: b.born)


def _memories_of(nodes: Sequence[Node], at: Mapping[Node, int]) -> dict[int, Block]:
    """Returns the memory that the values show, by identity."""
    end, blocks = len(nodes) - 1, dict[int, Block]()
    for i, node in enumerate(nodes):
        given = node.op in ("placeholder", "get_attr")
        last = end if given else max((at[u] for u in node.users), default=i)
        for tensor in tensors_of(node):
            storage = storage_of(tensor)
            if storage not in blocks:
                blocks[storage] = Block(made_bytes(node, tensor), node, -1 if given else i, last)
            block = blocks[storage]
            block.dies = max(block.dies, last)
            if not block.holders or block.holders[-1] is not node:
                block.holders.append(node)
    return blocks


def _hold_operands(move: Transfer | MemoryMove, at: Mapping[Node, int], blocks: Mapping[int, Block]) -> None:
    if move.wait is None or move.node.target is torch.ops.shardfn.psum_start.default:
        return  # the transfer sends a packed copy
    for node in move.node.all_input_nodes:
        for tensor in tensors_of(node):
            block = blocks[storage_of(tensor)]
            block.dies = max(block.dies, at[move.wait])


def _arriving_buffers(move: Transfer, at: Mapping[Node, int], blocks: Mapping[int, Block]) -> list[Block]:
    """Returns the buffers of a psum_scatter. The result is allocated at the wait."""
    assert move.wait is not None
    start, wait = at[move.node], at[move.wait]
    result = blocks[storage_of(tensors_of(move.node)[0])]
    index, n, size = int(move.node.args[2]), move.num_ranks, move.dtype.itemsize  # pyright: ignore[reportArgumentType]
    own = move.sizes[index] * size
    if n == 1:
        flat = blocks[storage_of(tensors_of(move.node.all_input_nodes[0])[0])]
        flat.dies, result.nbytes = max(flat.dies, result.dies), 0
        return []
    result.born = wait
    rows = n - 1 if index in (0, n - 1) else n
    # With two ranks the sum overwrites the block that arrives.
    made = [Block(rows * own, move.node, start, wait - 1 if rows == 1 else wait, operand="arriving")]
    if size == 2:
        # A 32-bit total and a row cast to be added to the total. With several rows the result is a separate block.
        wide = 2 * 4 * move.sizes[index] - (own if rows > 1 else 0)
        made.append(Block(wide, move.wait, wait, wait, operand="32-bit sum"))
    return made


KINDS: tuple[str, ...] = ("params", "grads", "optimizer", "gathered", "activations", "batch", "temporaries", "other")
MEMORIES: tuple[str, ...] = ("device", "host", "disk")

_DECODE, _ALL_TO_ALL = torch.ops.shardfn.decode.default, torch.ops.shardfn.all_to_all_start.default


@dataclasses.dataclass(frozen=True)
class Live:
    """Piece of memory that is alive at the peak.

    Attributes:
        name: node that makes the piece.
        kind: kind, as in `KINDS`.
        nbytes: size.
        shape: shape of the value that made the piece. Empty for buffers inside an op.
        dtype: dtype.
        leaf: path of the leaf, or the purpose of a buffer.
        where: user's line.
    """

    name: str
    kind: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    leaf: str
    where: str


@dataclasses.dataclass(frozen=True)
class MemoryAnalysis:
    """Memory of a step on a rank, in bytes.

    Attributes:
        peak: most bytes alive at once on the device. The fields below are about the device, except for the last two.
        by_kind: kind -> bytes alive at the peak. The sum is `peak`.
        max_by_kind: kind -> most bytes of the kind that are alive at any time.
        node: node that runs at the peak.
        where: user's line there.
        phase: phase there.
        timeline: bytes alive after each node, in the graph's order.
        begins: phase -> position of the phase's first op in the timeline.
        largest: largest pieces alive at the peak, largest first.
        by_memory: "device", "host", "disk" -> most bytes alive there at once, each at a separate time.
        max_by_memory: "device", "host", "disk" -> kind -> most bytes of the kind that are alive there at any time.
    """

    peak: int
    by_kind: Mapping[str, int]
    max_by_kind: Mapping[str, int]
    node: str
    where: str
    phase: str
    timeline: tuple[int, ...]
    begins: Mapping[str, int]
    largest: tuple[Live, ...]
    by_memory: Mapping[str, int]
    max_by_memory: Mapping[str, Mapping[str, int]]

    def __str__(self) -> str:
        """Returns a table: kinds, then the largest pieces."""
        head = f"peak {_format_mib(self.peak)} in {self.phase} at {self.node}" + (
            f" ({self.where})" if self.where else ""
        )
        kinds = [
            f"  {k:<12} {_format_mib(self.by_kind[k])}   (at most {_format_mib(self.max_by_kind[k])})"
            for k in KINDS
            if self.max_by_kind[k]
        ]
        rows = [
            f"  {_format_mib(v.nbytes)}  {v.kind:<11} {v.dtype}{list(v.shape)} {v.leaf or v.name}" for v in self.largest
        ]
        return "\n".join([head, *kinds, *self._other_kinds(), "largest:", *rows])

    def _other_kinds(self) -> list[str]:
        """Returns a line for each other kind of memory that is used."""
        used = [m for m in MEMORIES[1:] if self.by_memory[m]]
        shown = {m: [f"{k} {_format_mib(n)}" for k, n in self.max_by_memory[m].items() if n] for m in used}
        return [f"{m} peak {_format_mib(self.by_memory[m])} ({', '.join(shown[m])})" for m in used]


def memory_analysis(gm: GraphModule, *, largest: int = 20, balanced: bool = False) -> MemoryAnalysis:
    """Returns the peak of live tensor bytes of a captured step, by kind and over time.

    live(i) = sum of the blocks born at or before node i that die at or after node i, and the scratch of i. peak = max_i
    live(i), for each memory. Kinds: arguments are `params`, `optimizer`, `batch` (or `other`). Results of gathers and
    of fetches for the loss are `gathered`. Values made in the backward for the update or for a sum over ranks are
    `grads`. Values made in the forward and used in the backward are `activations`. Results that no node reads are
    `other`. The rest is `temporaries`.

    Args:
        gm: captured step.
        largest: number of the largest pieces at the peak to list.
        balanced: whether this rank's share of rows of an exchange counts, as with equally busy experts. Applies to rows
            that the step holds exactly (`exact_rows`). Else the most rows that may come count.

    Returns:
        The analysis. `print` shows a table.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1) * 2, tracing_mode="fake")(torch.ones(1000))
        >>> memory_analysis(gm).peak
        12000
    """
    nodes, sent, phases = list(gm.graph.nodes), transfers(gm), phases_of(gm)
    blocks = blocks_of(gm, sent)
    if balanced:
        shares = balanced_shares(gm)
        blocks = [_shrink_block(b, shares) for b in blocks]
    kinds = _kinds_of(blocks, sent, phases)
    walks = {m: _walk_in(m, nodes, blocks, kinds) for m in MEMORIES}
    walk, pairs = walks["device"], _select_blocks("device", blocks, kinds)
    at, scratch = walk.at, _scratch_in("device", nodes)
    alive = [(b, k) for b, k in pairs if b.born <= at <= b.dies]
    top = sorted(alive, key=lambda pair: -pair[0].nbytes)[:largest]
    return MemoryAnalysis(
        peak=walk.peak,
        by_kind=_sum_by_kind(alive, scratch[at]),
        max_by_kind=walk.most,
        node=nodes[at].name,
        where=where_of(nodes[at]),
        phase=phases[nodes[at]],
        timeline=tuple(walk.timeline),
        begins=_phase_begins(nodes, phases),
        largest=tuple(_describe_live(b, k) for b, k in top),
        by_memory={m: max(w.peak, 0) for m, w in walks.items()},
        max_by_memory={m: w.most for m, w in walks.items()},
    )


def _shrink_block(block: Block, shares: Mapping[Node, float]) -> Block:
    share = next((shares[h] for h in block.holders if h in shares), 1.0)
    return dataclasses.replace(block, nbytes=math.ceil(block.nbytes * share))


def _phase_begins(nodes: Sequence[Node], phases: Mapping[Node, str]) -> dict[str, int]:
    begins: dict[str, int] = {}
    for i, node in enumerate(nodes):
        if node.op == "call_function":
            begins.setdefault(phases[node], i)
    return begins


# Running through the graph.


@dataclasses.dataclass
class _RunningTotals:
    """Running totals: the peak with the peak's position, and the peak of each kind."""

    at: int
    peak: int
    most: dict[str, int]
    timeline: list[int]


def _walk_in(memory: str, nodes: Sequence[Node], blocks: Sequence[Block], kinds: Sequence[str]) -> _RunningTotals:
    chosen = _select_blocks(memory, blocks, kinds)
    return _walk_blocks([b for b, _ in chosen], [kind for _, kind in chosen], _scratch_in(memory, nodes))


def _select_blocks(memory: str, blocks: Sequence[Block], kinds: Sequence[str]) -> list[tuple[Block, str]]:
    return [(b, kind) for b, kind in zip(blocks, kinds, strict=True) if memory_of(b.maker) == memory]


def _scratch_in(memory: str, nodes: Sequence[Node]) -> list[int]:
    return [scratch_bytes(n) if memory_of(n) == memory else 0 for n in nodes]


def _walk_blocks(blocks: Sequence[Block], kinds: Sequence[str], scratch: Sequence[int]) -> _RunningTotals:
    born, dead = _births_and_deaths(blocks, kinds, len(scratch))
    now = {k: sum(n for kind, n in born[-1] if kind == k) for k in KINDS}
    total, walk = sum(now.values()), _RunningTotals(0, -1, dict(now), [])
    for i, extra in enumerate(scratch):
        for kind, nbytes in born[i] if i < len(scratch) else ():
            now[kind] += nbytes
            total += nbytes
            walk.most[kind] = max(walk.most[kind], now[kind])
        walk.most["temporaries"] = max(walk.most["temporaries"], now["temporaries"] + extra)
        if total + extra > walk.peak:
            walk.at, walk.peak = i, total + extra
        for kind, nbytes in dead[i]:
            now[kind] -= nbytes
            total -= nbytes
        walk.timeline.append(total)
    return walk


_Events = list[list[tuple[str, int]]]


def _births_and_deaths(blocks: Sequence[Block], kinds: Sequence[str], count: int) -> tuple[_Events, _Events]:
    """Returns the blocks allocated at each node, and the blocks freed after each node.

    The last entry of the allocated blocks has the blocks that exist before the step. Blocks that are alive at the last
    node outlive the step.
    """
    born: _Events = [[] for _ in range(count + 1)]
    dead: _Events = [[] for _ in range(count)]
    for block, kind in zip(blocks, kinds, strict=True):
        born[block.born].append((kind, block.nbytes))
        if block.dies < count - 1:
            dead[block.dies].append((kind, block.nbytes))
    return born, dead


def _sum_by_kind(alive: Sequence[tuple[Block, str]], scratch: int) -> dict[str, int]:
    sums = dict.fromkeys(KINDS, 0)
    for block, kind in alive:
        sums[kind] += block.nbytes
    sums["temporaries"] += scratch
    return sums


def _describe_live(block: Block, kind: str) -> Live:
    maker = block.maker
    # Memory that rows do not fill is larger than the block.
    fits = [t for t in tensors_of(maker) if t.untyped_storage().nbytes() >= block.nbytes]
    value = min(fits, key=lambda t: t.untyped_storage().nbytes(), default=None)
    shown = value is not None and not block.operand
    shape = tuple(value.shape) if value is not None and shown else ()
    leaf = maker.meta.get("leaf", "") or block.operand
    dtype = dtype_name(value.dtype) if value is not None and shown else "bytes"
    return Live(maker.name, kind, block.nbytes, shape, dtype, leaf, where_of(maker))


def _format_mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


# Kinds of memory.


def _kinds_of(blocks: Sequence[Block], moves: Sequence[Transfer], phases: Mapping[Node, str]) -> list[str]:
    gathered, summed = _transferred_nodes(moves)
    return [_kind_of(b, gathered, summed, phases) for b in blocks]


def _kind_of(block: Block, gathered: set[Node], summed: set[Node], phases: Mapping[Node, str]) -> str:
    maker = block.maker
    if maker.op != "call_function":
        kind = maker.meta.get("kind", "other")
        return kind if kind in KINDS else "other"
    brought = maker.target in (TO_DEVICE, ROWS_TO_DEVICE) and phases[maker] != "update"
    if brought or maker.target is _DECODE or any(h in gathered for h in block.holders):
        return "gathered"
    if block.operand or any(h in summed for h in block.holders):
        return "grads" if phases[maker] != "forward" else "temporaries"
    used = {"output" if u.op == "output" else phases[u] for h in block.holders for u in h.users}
    return _kind_by_use(phases[maker], used)


def _kind_by_use(made: str, used: set[str]) -> str:
    if made == "backward" and used & {"update", "output"}:
        return "grads"
    if made == "forward" and "backward" in used:
        return "activations"
    return "other" if "output" in used else "temporaries"


def _transferred_nodes(moves: Sequence[Transfer]) -> tuple[set[Node], set[Node]]:
    """Returns the nodes that show gathered values, and the nodes that show sums over ranks or parts of sums."""
    gathered, summed = set[Node](), set[Node]()
    for move in moves:
        mine = {move.node} if move.wait is None else {move.node, move.wait}
        if move.op == "all_gather":
            gathered |= mine
            if move.node.target is torch.ops.shardfn.all_gather_into_start.default:
                gathered.add(move.node.all_input_nodes[0])
        elif move.op in ("psum_scatter", "all_reduce") or move.node.target is _ALL_TO_ALL:
            summed |= mine
            for operand in move.node.all_input_nodes:
                summed.update([operand, *sources(operand)])
    return gathered, summed


def scratch_bytes(node: Node) -> int:
    """Returns the bytes that `node` holds while running, beyond arguments and results.

    Operands of a pointwise op in another dtype than the dtype of the arithmetic are cast whole. Other ops cast row by
    row. Off the CPU kernels cast element by element, and the result is 0.

    Args:
        node: node of a captured graph.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: x + torch.ones(4).double(), tracing_mode="fake")(torch.ones(4))
        >>> [scratch_bytes(n) for n in gm.graph.nodes if n.name == "add"]
        [32]
    """
    if node.op != "call_function" or _device_of(node) != "cpu":
        return 0
    op = op_of(node)
    if op.scratch is not None:
        return op.scratch(node)
    return _is_cast(node) if op.pointwise else 0


def _device_of(node: Node) -> str:
    first = next((t for n in node.all_input_nodes for t in tensors_of(n)), None)
    return first.device.type if first is not None else ""


def _is_cast(node: Node) -> int:
    operands = [t for n in node.all_input_nodes for t in tensors_of(n)]
    if len({t.dtype for t in operands}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (t.dtype for t in operands))
    written = [t for n in written_by(node) for t in tensors_of(n)]
    # An operand written in place is cast to be read, and the result is cast back from another buffer.
    return sum(t.numel() * common.itemsize for t in (*operands, *written) if t.dtype != common and t.dim())
