"""What a captured forward is made into before it is partitioned: without writes, products apart from their sums.

What cannot be made so is refused, with its line.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shardfn.core import raise_all

from ._loops import loop_input
from ._ops import known_op
from ._values import where_of

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.addmm.default: _ATEN.mm.default, _ATEN.baddbmm.default: _ATEN.bmm.default}
# What only looks; by their names, since ours is defined later.
_CHECKS = {"aten._assert_async.msg", "shardfn.check.default"}


def prepare(gm: GraphModule) -> GraphModule:
    """Rewrites a captured forward; see above.

    Raises:
        ValueError: lists ops that write to a value of which there are other looks, draw without a key, send, or have an
            effect, with their lines.
    """
    raise_all(ValueError, "partition(loss) cannot hold these operations of the loss:", list(_refused(gm)))
    for node in list(gm.graph.nodes):
        if known_op(node.target).writes and node.op == "call_function":
            _without_write(gm.graph, node)
    for node in list(gm.graph.nodes):
        if node.target in _PRODUCTS and not (node.kwargs or node.args[3:]):
            _apart(gm.graph, node)
    gm.graph.eliminate_dead_code()
    return gm


def _refused(gm: GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        op, where = known_op(node.target), where_of(node) or "a line unknown"
        space = getattr(node.target, "namespace", "aten")
        if str(node.target) in _CHECKS:
            continue
        if op.channel or space in ("_c10d_functional", "c10d", "shardfn", "shardfn_memory"):
            yield f"{where}: {node.target}, which sends; leave the collectives of the loss to partition, or to specs"
        elif op.draws and not _draws_nothing(node):
            yield f"{where}: {node.target} draws from torch's generator; draw by a key, sf.nn.dropout(key, ...)"
        elif op.effects:
            yield f"{where}: {node.target}, which returns nothing; leave it out"
        elif node.target is _ATEN.as_strided.default:
            yield f"{where}: {node.target} says where elements lie, which is otherwise in a block; use views of dims"
        elif op.writes and _functional(node) is None:
            yield f"{where}: {node.target} writes to a value; use the operation that returns a new one"
        elif op.writes and _of_another_loop(node):
            yield f"{where}: {node.target} in a scan writes to a value from outside; return it in the carry"
        elif op.writes and _seen_otherwise(node):
            yield (
                f"{where}: {node.target} writes to a value of which there are views; write to a clone(), or use the"
                " operation that returns a new value"
            )


def _draws_nothing(node: Node) -> bool:
    names = [a.name for a in node.target._schema.arguments]  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" in names and not given.get("dropout_p")


def _functional(node: Node) -> Any:
    """The op that returns what this one writes."""
    packet, overload = str(node.target).rsplit(".", 1)
    name = packet.removeprefix("aten.")
    base = getattr(_ATEN, name.removesuffix("_"), None) if name.endswith("_") else None
    found = getattr(base, overload, None)
    written, val = node.args[0], node.meta.get("val")
    if found is None or not isinstance(written, Node) or not isinstance(val, Tensor):
        return None
    # What it returns may be of another dtype than what it would write to: a comparison, say.
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    made = found(*args, **kwargs)
    same = isinstance(made, Tensor) and made.dtype == val.dtype and made.shape == val.shape
    return found if same and len(known_op(node.target).writes) == 1 else None


def _seen_otherwise(node: Node) -> bool:
    """Whether what is written is an input, or shares its memory with another value."""
    written: Any = node.args[0]
    views = known_op(written.target).views if written.op == "call_function" else 0
    looks = [u for u in written.users if u is not node and known_op(u.target).views is not None]
    own = [u for u in looks if not known_op(u.target).writes]
    return (views is not None and not known_op(written.target).writes) or bool(own)


def _of_another_loop(node: Node) -> bool:
    written: Any = node.args[0]
    return written.meta.get("loop") is not node.meta.get("loop") or written.target is loop_input


def _without_write(graph: Graph, node: Node) -> None:
    written: Any = node.args[0]
    later = False
    users: list[Node] = []
    for other in graph.nodes:
        if later and other in written.users:
            users.append(other)
        later = later or other is node
    with graph.inserting_before(node):
        new = graph.call_function(_functional(node), node.args, dict(node.kwargs))
    new.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(written, new)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _apart(graph: Graph, node: Node) -> None:
    """`addmm(b, x, y)` as `mm(x, y) + b`, so that the sum over ranks may stand between."""
    added, x, y = node.args
    with graph.inserting_before(node):
        product = graph.call_function(_PRODUCTS[node.target], (x, y))  # pyright: ignore[reportArgumentType]
        total = graph.call_function(_ATEN.add.Tensor, (product, added))
    product.meta, total.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
