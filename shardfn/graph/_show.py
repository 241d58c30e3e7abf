"""A captured step as text, and as pictures.

A text has a line per node, under a heading for each phase. Pictures show compute and transfers over time, and memory.
Matplotlib is imported when needed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import GraphModule, Node

from shardfn.core import dtype_name

from ._cost import Estimate, Event
from ._memory import KINDS, MemoryAnalysis
from ._transfers import Transfer, crossing, is_message, is_move, is_wait, start_of, transferred_bytes, transfers
from ._values import part_of, phases_of, tensors_of, where_of


def as_text(gm: GraphModule) -> str:
    """Returns the step as readable text. The same graph gives the same text.

    A placeholder shows the leaf, a transfer the collective, axes, bytes and leaves, and any other node the op and
    arguments. All nodes show dtypes and shapes, and the user's line where known.

    Args:
        gm: captured step.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda a: a.t() + 1, tracing_mode="fake")(torch.ones(4, 3))
        >>> print(as_text(gm))
        a_1: float32[4, 3] = input
        # forward
        t: float32[3, 4] = aten.t(a_1)
        add: float32[3, 4] = aten.add.Tensor(t, 1)
        return add
    """
    moves = {t.node: t for t in transfers(gm)}
    lines: list[str] = []
    heading = ""
    for node, phase in phases_of(gm).items():
        title = f"{phase}: {part_of(node)}" if part_of(node) else phase
        if node.op == "call_function" and title != heading:
            heading = title
            lines.append(f"# {title}")
        lines.append(_format_node(node, moves))
    return "\n".join(lines)


def _format_node(node: Node, moves: dict[Node, Transfer]) -> str:
    if node.op == "output":
        return f"return {_format_value(node.args[0]).removeprefix('(').removesuffix(')')}"
    where = where_of(node)
    text = f"{node.name}: {_format_types(tensors_of(node))} = {_right_side(node, moves)}"
    return f"{text}  # {where}" if where else text


def _right_side(node: Node, moves: dict[Node, Transfer]) -> str:
    if node.op == "placeholder":
        known = [str(node.meta[k]) for k in ("kind", "leaf") if k in node.meta]
        return " ".join(["input", *known])
    if node.op == "get_attr":
        return f"constant {node.target}"
    if node in moves:
        return _format_move(node, moves[node])
    if is_move(node):
        src, dst, _ = crossing(node)
        return f"start {src} -> {dst}({_format_value(tuple(node.all_input_nodes))}) {transferred_bytes(node)} bytes"
    if is_wait(node) and start_of(node) in moves:
        move = moves[start_of(node)]
        if is_message(move.node):
            return f"wait({_format_value(node.args[0])}) for {_format_message(move)}"
        return f"wait({_format_value(node.args[0])}) for {move.op} over {move.axes}"
    return f"{_format_op(node)}({_format_arguments(node)})"


def _format_message(move: Transfer) -> str:
    """Returns the other rank of a message, by the rank's index along the axes, and the tag."""
    peer, tag = move.node.args[-3:-1]
    return f"{move.op} {'to' if move.op == 'send' else 'from'} {peer} along {move.axes} (message {tag})"


def _format_move(node: Node, move: Transfer) -> str:
    operands = _format_value(tuple(node.all_input_nodes))
    if is_message(node):
        what = f"{dtype_name(move.dtype)} {_format_sizes(move.sizes)}"
        return f"start {_format_message(move)}{operands if move.op == 'send' else ''} {what}, {move.sent} bytes"
    leaves = f": {', '.join(move.leaves)}" if move.leaves else ""
    what = f"{dtype_name(move.dtype)} {_format_sizes(move.sizes)}"
    return f"start {move.op}{operands} over {move.axes} ({move.num_ranks} ranks) {what}, {move.sent} bytes{leaves}"


def _format_sizes(sizes: Sequence[int]) -> str:
    """Returns the sizes as text. Equal sizes become a product, since a mesh may have a thousand ranks."""
    return f"[{len(sizes)} x {sizes[0]}]" if len(sizes) > 1 and len(set(sizes)) == 1 else str(list(sizes))


def _format_types(tensors: Sequence[Tensor]) -> str:
    shown = [f"{dtype_name(t.dtype)}[{', '.join(map(str, t.shape))}]" for t in tensors]
    return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"


def _format_op(node: Node) -> str:
    text = str(node.target)
    return (text if "." in text else getattr(node.target, "__name__", text)).removesuffix(".default")


def _format_arguments(node: Node) -> str:
    named = [f"{k}={_format_value(v)}" for k, v in node.kwargs.items()]
    return ", ".join([*map(_format_value, node.args), *named])


def _format_value(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(map(_format_value, value))})"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    return str(value)


# Writes a timeline as a Chrome trace, for chrome://tracing or https://ui.perfetto.dev.


def chrome_trace(events: Estimate | Sequence[Event], *, name: str = "step") -> dict[str, Any]:
    """Returns the events in Chrome's trace format.

    A lane for compute and waiting, and a lane for the transfers along each axes.

    Args:
        events: an estimate, or events that were measured.
        name: name of the process in the trace.

    Returns:
        A dict to be written with `json.dump`. Times are in microseconds.

    Example:
        >>> trace = chrome_trace([Event("mm", "compute", 0.0, 1e-3), Event("gather", "dp", 0.0, 2e-3)])
        >>> [(e["name"], e["tid"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
        [('mm', 0, 1000.0), ('gather', 1, 2000.0)]

    References:
        Google, Trace Event Format, 2016,
        https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    bars = list(events.events if isinstance(events, Estimate) else events)
    names = ["compute", *dict.fromkeys(e.lane for e in bars if e.lane not in _FIRST_LANE)]
    lanes = {lane: i for i, lane in enumerate(names)} | dict.fromkeys(_FIRST_LANE, 0)
    head = [_label_lane("process_name", 0, name)] + [
        _label_lane("thread_name", i, _lane_title(n)) for i, n in enumerate(names)
    ]
    return {"traceEvents": [*head, *(_event_bar(e, lanes[e.lane]) for e in bars)], "displayTimeUnit": "ms"}


_FIRST_LANE = ("compute", "wait")


def _lane_title(lane: str) -> str:
    return lane if lane == "compute" else f"transfers over {lane}"


def _label_lane(kind: str, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": lane, "args": {"name": name}}


def _event_bar(event: Event, lane: int) -> dict[str, Any]:
    shown = {k: v for k, v in (("where", event.where), ("detail", event.detail)) if v}
    name = f"wait: {event.name}" if event.lane == "wait" else event.name
    times = {"ts": round(event.start * 1e6, 3), "dur": round(event.seconds * 1e6, 3)}
    return {"ph": "X", "name": name, "cat": event.lane, "pid": 0, "tid": lane, **times, "args": shown}


if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {
    "compute": "#5b93d3",
    "wait": "#d9d9d9",
    "all_gather": "#e58a3c",
    "psum_scatter": "#6fb35f",
    "psum": "#9a7bc0",
}
_OTHER = "#8a8a8a"


def picture_of_time(found: Estimate) -> "Figure":
    """Draws lanes of compute and waiting, of the transfers along each axes and of moves, over predicted milliseconds.

    Raises:
        ImportError: matplotlib is not installed.
    """
    lanes = ["compute", *dict.fromkeys(e.lane for e in found.events if e.lane not in ("compute", "wait"))]
    figure = _format_height(1.2 + 0.5 * len(lanes))
    axes, known = figure.add_subplot(), set[str]()
    for event in found.events:
        here = event.lane in ("compute", "wait")
        kind = event.lane if here else event.detail.partition(" ")[0]
        row, span = 0 if here else lanes.index(event.lane), (event.start * 1e3, event.seconds * 1e3)
        label = "_" if kind in known else kind
        axes.broken_barh([span], (row - 0.4, 0.8), facecolors=_COLORS.get(kind, _OTHER), label=label)
        known.add(kind)
    axes.set_yticks(range(len(lanes)), [lanes[0], *(x if "->" in x else f"transfers over {x}" for x in lanes[1:])])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds, predicted")
    axes.set_title(f"{found.seconds * 1e3:.3g} ms a step, and {found.compute * 1e3:.3g} ms compute")
    if known:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def picture_of_memory(found: MemoryAnalysis) -> "Figure":
    """Draws the bytes alive on the device after each op, with the phases, and next to the curve the peak by kind.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _format_height(3.6)
    over, at_peak = figure.subplots(1, 2, width_ratios=[3, 1])
    mib = [nbytes / (1 << 20) for nbytes in found.timeline]
    over.fill_between(range(len(mib)), mib, color=_COLORS["compute"], alpha=0.5)
    over.axhline(found.peak / (1 << 20), color="black", linewidth=0.8, linestyle="--")
    over.set_ylim(bottom=0)
    for phase, at in found.begins.items():
        over.axvline(at, color="grey", linewidth=0.8, linestyle=":")
        over.text(at, 0, f" {phase}", fontsize=8)
    over.set_xlabel("ops, in the order in which they run")
    over.set_ylabel("MiB alive")
    over.set_title(f"peak {found.peak / (1 << 20):,.3g} MiB in {found.phase} at {found.node}")
    kinds = [kind for kind in KINDS if found.by_kind[kind]]
    at_peak.barh(kinds, [found.by_kind[kind] / (1 << 20) for kind in kinds], color=_COLORS["compute"])
    at_peak.invert_yaxis()
    at_peak.set_xlabel("MiB at the peak")
    return figure


def _format_height(height: float) -> Any:
    try:
        from matplotlib.figure import Figure  # an extra dependency, as slow to import as shardfn
    except ImportError as error:
        raise ImportError(
            "pictures are drawn with matplotlib, which must be installed: pip install 'shardfn[train]'."
        ) from error
    return Figure(figsize=(9, height), layout="constrained")
