"""A captured step as text: a line per node, under a heading for each phase."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from shardfn.core import dtype_name

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
