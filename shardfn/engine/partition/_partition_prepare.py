"""Rewrites a captured forward before the partition: removes writes, and separates products from added terms.

Ops that cannot be rewritten are refused, with the user's lines.
"""

from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from shardfn.core import raise_all
from shardfn.graph import known_op, where_of, without_writes

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.addmm.default: _ATEN.mm.default, _ATEN.baddbmm.default: _ATEN.bmm.default}
# Checks, without an effect on values. By name, since shardfn's check is defined later.
_CHECKS = {"aten._assert_async.msg", "shardfn.check.default"}


def prepare(gm: GraphModule) -> GraphModule:
    """Rewrites a captured forward. See above.

    Raises:
        ValueError: there are ops whose write no operation replaces, or that draw without a key, send, or have an
            effect. The message lists all with the user's lines.
    """
    refused = list(_find_refused(gm)) or list(without_writes(gm))
    raise_all(ValueError, "partition(loss) cannot hold these operations of the loss:", refused)
    for node in list(gm.graph.nodes):
        if node.target in _PRODUCTS and not (node.kwargs or node.args[3:]):
            _split_addmm(gm.graph, node)
    gm.graph.eliminate_dead_code()
    return gm


def _find_refused(gm: GraphModule) -> Iterator[str]:
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
            yield f"{where}: {node.target} fixes where elements lie, which differs in a block; use views of dims"


def _draws_nothing(node: Node) -> bool:
    names = [a.name for a in node.target._schema.arguments]  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" in names and not given.get("dropout_p")


def _split_addmm(graph: Graph, node: Node) -> None:
    """Replaces `addmm(b, x, y)` by `mm(x, y) + b`, so that the sum over ranks can be taken in between."""
    added, x, y = node.args
    with graph.inserting_before(node):
        product = graph.call_function(_PRODUCTS[node.target], (x, y))  # pyright: ignore[reportArgumentType]
        total = graph.call_function(_ATEN.add.Tensor, (product, added))
    product.meta, total.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
