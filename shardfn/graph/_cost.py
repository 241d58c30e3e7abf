"""Costs of a captured step: operations, bytes and traffic, and the time on a given cluster.

A node takes max(flops / rate, bytes / bandwidth), a transfer latency + sent / bandwidth. `estimate` lets the graph run
on these clocks. A lane computes in the graph's order. Each link carries transfers in sequence, from the moment of the
start. A wait stops the computation until the transfer has arrived.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from shardfn.collectives import Traffic
from shardfn.core import dtype_name, is_device

from ._device import Cluster, Device, Link
from ._formulas import torch_flops
from ._ops import op_of
from ._transfers import MemoryMove, Transfer, is_start, is_wait, moves, transfers
from ._values import PHASES, is_view, num_bytes, phases_of, tensors_of, where_of, written_by

# Floating-point operations and bytes of a node of a captured graph.


def node_flops(node: Node) -> int:
    """Returns the floating-point operations of `node`, for example 2 m n k for a product of [m, k] and [k, n].

    By torch's table (`torch.utils.flop_counter`), and for CPU attention. Pointwise ops count 0: bytes determine the
    time of pointwise ops. Attention counts every pair of tokens, causal or not, as is the custom.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda a: a @ a.t(), tracing_mode="fake")(torch.ones(4, 3))
        >>> sum(node_flops(n) for n in gm.graph.nodes)
        96
    """
    if node.op != "call_function":
        return 0
    formula = op_of(node).flops or torch_flops().flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


def node_bytes(node: Node) -> int:
    """Returns the bytes that `node` reads and writes: operands and results once, or 0 for views and transfers.

    Lookups (such as `embedding`, `gather`) read only the elements that are returned.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda a: a.t() + 1, tracing_mode="fake")(torch.ones(4, 3))
        >>> [(n.name, node_bytes(n)) for n in gm.graph.nodes][1:3]
        [('t', 0), ('add', 96)]
    """
    if node.op != "call_function" or is_start(node) or is_wait(node) or is_view(node):
        return 0
    written = [t for n in written_by(node) for t in tensors_of(n)]
    made = written or tensors_of(node)
    wrote = sum(map(num_bytes, made))
    if op_of(node).lookup:
        return 2 * wrote
    return wrote + sum(num_bytes(t) for n in node.all_input_nodes for t in tensors_of(n))


def arithmetic(node: Node) -> torch.dtype:
    """Returns the dtype in which `node` multiplies, the dtype of the first floating-point operand."""
    operands = [t for n in node.all_input_nodes for t in tensors_of(n)] or tensors_of(node)
    return next((t.dtype for t in operands if t.is_floating_point()), torch.float32)


@dataclasses.dataclass(frozen=True)
class CostAnalysis:
    """Costs of a step on a rank.

    Attributes:
        flops: floating-point operations.
        flops_by_phase: phase -> operations.
        bytes: bytes that ops read and write in memory.
        bytes_by_phase: phase -> bytes.
        transfers: (collective, axes) -> (calls, bytes sent), as the traffic counter counts transfers.
        moves: (from, to) -> (moves, bytes) between "device", "host" and "disk", as the ledger counts moves.
    """

    flops: int
    flops_by_phase: Mapping[str, int]
    bytes: int
    bytes_by_phase: Mapping[str, int]
    transfers: Mapping[tuple[str, str], tuple[int, int]]
    moves: Mapping[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def sent(self) -> int:
        """Returns the bytes sent by all collectives."""
        return sum(sent for _, sent in self.transfers.values())

    @property
    def traffic(self) -> Traffic:
        """Returns the transfers as `count_traffic` would count, except that dtypes are not separated."""
        return Traffic({(op, tuple(axes.split(","))): [n, sent] for (op, axes), (n, sent) in self.transfers.items()})

    def __str__(self) -> str:
        """Returns a table: phases, then collectives, then moves."""
        phases = [f"  {p:<9} {self.flops_by_phase[p]:>20,} flops {self.bytes_by_phase[p]:>20,} bytes" for p in PHASES]
        moves = [f"  {op} over {axes}: {n} calls, {sent:,} bytes" for (op, axes), (n, sent) in self.transfers.items()]
        moves += [f"  {src} -> {dst}: {n} moves, {nbytes:,} bytes" for (src, dst), (n, nbytes) in self.moves.items()]
        return "\n".join([f"{self.flops:,} flops, {self.bytes:,} bytes", *phases, *moves])


@dataclasses.dataclass(frozen=True)
class Event:
    """Bar of a timeline.

    Attributes:
        name: node.
        lane: "compute", "wait", the axes of a transfer, or the way of a move, for example "host -> device".
        start: seconds since the step began.
        seconds: duration.
        where: user's line.
        detail: op, for a transfer also bytes and leaves.
    """

    name: str
    lane: str
    start: float
    seconds: float
    where: str = ""
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Time of a step on a cluster.

    Attributes:
        seconds: time of the whole step.
        compute: seconds in which the device computes, or the step without any transfer.
        communication: axes -> seconds with transfers on the wire, and, under keys such as "host -> device", seconds of
            moves.
        exposed: axes -> seconds in which the computation waits for transfers.
        mfu: flops / seconds / the device's rate in the dtype of most of the operations.
        events: timeline.
    """

    seconds: float
    compute: float
    communication: Mapping[str, float]
    exposed: Mapping[str, float]
    mfu: float
    events: tuple[Event, ...] = dataclasses.field(repr=False)


def cost_analysis(gm: GraphModule) -> CostAnalysis:
    """Returns operations, bytes and traffic of a captured step.

    Args:
        gm: captured step.

    Returns:
        Totals, by phase, and by collective and axes.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda a: (a @ a.t()).exp(), tracing_mode="fake")(torch.ones(4, 3))
        >>> cost = cost_analysis(gm)
        >>> cost.flops, cost.bytes
        (96, 288)
    """
    flops, moved = collections.Counter(dict.fromkeys(PHASES, 0)), collections.Counter(dict.fromkeys(PHASES, 0))
    for node, phase in phases_of(gm).items():
        flops[phase] += node_flops(node)
        moved[phase] += node_bytes(node)
    # A receiver sends nothing.
    traffic = _sum_by_key(((t.op, t.axes), t.sent) for t in transfers(gm) if t.op != "receive")
    local = _sum_by_key(((m.src, m.dst), m.nbytes) for m in moves(gm))
    return CostAnalysis(sum(flops.values()), dict(flops), sum(moved.values()), dict(moved), traffic, local)


def _sum_by_key(entries: Iterable[tuple[tuple[str, str], int]]) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns for each key the number of entries and the sum."""
    out: dict[tuple[str, str], tuple[int, int]] = {}
    for key, nbytes in entries:
        count, total = out.get(key, (0, 0))
        out[key] = count + 1, total + nbytes
    return out


def transfer_seconds(transfer: Transfer, link: Link) -> float:
    """Returns the time of `transfer`: latency + sent / bandwidth, and 0 for a single rank.

    A receive counts as if the message were sent when the receive starts, since the time of other stages is not known
    here.
    """
    nbytes = transfer.sizes[0] * transfer.dtype.itemsize if transfer.op == "receive" else transfer.sent
    return link.seconds(nbytes) if transfer.num_ranks > 1 else 0.0


def _compute_seconds(node: Node, flops: int, device: Device) -> float:
    computing = flops / device.rate(dtype_name(arithmetic(node))) if flops else 0.0
    return max(computing, node_bytes(node) / device.bandwidth)


def estimate(gm: GraphModule, cluster: Cluster) -> Estimate:
    """Returns the time of a captured step on `cluster`, by a simulated run with a compute lane and a lane per link.

    Computation on the host is assumed to run at the device's rates. Moves run on the cluster's `host` and `disk` links,
    a wire a direction, and take no time without a link.

    Args:
        gm: captured step. `gm.meta["mesh_shape"]` lays the ranks out over the cluster's nodes.
        cluster: rates, as measured by `calibrate` or from a table.

    Returns:
        Seconds, the exposed part of the communication, the model flops utilisation, and the timeline.

    Raises:
        ValueError: an axis is not in the mesh, or the device has no rate for a dtype.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from shardfn.graph._device import Cluster, Device, Link
        >>> wire = Link(bandwidth=1e9, latency=0.0)
        >>> box = Cluster(Device("box", 1, {"float32": 96.0}, 1e9), 1, wire, wire)
        >>> gm = make_fx(lambda a: a @ a.t(), tracing_mode="fake")(torch.ones(4, 3))
        >>> estimate(gm, box).seconds
        1.0
    """
    run = _Clocks(gm, cluster)
    for node in gm.graph.nodes:
        run.step(node)
    rate = run.rate()
    seconds = max([run.now, *run.free.values()])
    mfu = sum(run.flops.values()) / seconds / rate if seconds and rate else 0.0
    return Estimate(seconds, run.compute, dict(run.busy), dict(run.exposed), mfu, tuple(run.events))


class _Clocks:
    """Clocks of the lanes and links of a simulated run."""

    def __init__(self, gm: GraphModule, cluster: Cluster) -> None:
        self._cluster, self._shape = cluster, gm.meta.get("mesh_shape", {})
        self._moves = {t.node: t for t in transfers(gm)}
        self._local = {m.node: m for m in moves(gm)}
        self._arrives: dict[Node, tuple[float, str, Event]] = {}
        self.now = self.compute = 0.0
        self.free: dict[Link | str, float] = {}
        self.busy: dict[str, float] = collections.defaultdict(float)
        self.exposed: dict[str, float] = collections.defaultdict(float)
        self.flops: dict[torch.dtype, int] = collections.defaultdict(int)
        self.events: list[Event] = []

    def step(self, node: Node) -> None:
        if node in self._moves:
            self._start_transfer(self._moves[node])
        elif node in self._local:
            self._start_move(self._local[node])
        elif is_wait(node):
            self._wait_for(node)
        else:
            self._compute_node(node)

    def rate(self) -> float:
        if not any(self.flops.values()):
            return 0.0
        return self._cluster.device.rate(dtype_name(max(self.flops, key=lambda d: self.flops[d])))

    def _start_transfer(self, move: Transfer) -> None:
        if move.num_ranks == 1:
            return
        link = self._cluster.link(self._shape, move.axes)
        detail = f"{move.op} {move.sent} bytes {' '.join(move.leaves)}".strip()
        self._start_on_lane(
            move, link, move.axes, transfer_seconds(move, link), (f"{move.op} over {move.axes}", detail)
        )

    def _start_move(self, move: MemoryMove) -> None:
        """Adds a move between memories. Each direction has a separate link."""
        link = self._cluster.host if any(map(is_device, (move.src, move.dst))) else self._cluster.disk
        if link is not None:
            way = f"{move.src} -> {move.dst}"
            self._start_on_lane(move, way, way, link.seconds(move.nbytes), (way, f"{move.nbytes} bytes"))

    def _start_on_lane(
        self, move: Transfer | MemoryMove, wire: Link | str, lane: str, took: float, say: tuple[str, str]
    ) -> None:
        begin = max(self.now, self.free.get(wire, 0.0))
        self.free[wire] = begin + took
        self.busy[lane] += took
        self.exposed[lane] += 0.0
        if move.wait is not None:
            waits = Event(move.wait.name, "wait", 0.0, 0.0, move.where, say[0])
            self._arrives[move.wait] = (begin + took, lane, waits)
        self.events.append(Event(move.node.name, lane, begin, took, move.where, say[1]))

    def _wait_for(self, node: Node) -> None:
        if node not in self._arrives:
            return
        arrives, lane, event = self._arrives.pop(node)
        late = arrives - self.now
        if late > 0:
            self.exposed[lane] += late
            self.events.append(dataclasses.replace(event, start=self.now, seconds=late))
            self.now = arrives

    def _compute_node(self, node: Node) -> None:
        flops = node_flops(node)
        took = _compute_seconds(node, flops, self._cluster.device)
        if flops:
            self.flops[arithmetic(node)] += flops
        if took:
            self.events.append(Event(node.name, "compute", self.now, took, where_of(node), str(node.target)))
            self.now += took
            self.compute += took
