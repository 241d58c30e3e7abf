"""Exchanges of rows with exactly the rows that come, in graphs whose ops on these rows run one by one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from shardfn._torch import OpOverload
from shardfn.core import is_device

from ._edit import reorder_graph
from ._hazards import Memory
from ._ops import WAIT, op_of
from ._reuse import value_numbers
from ._transfers import memory_of, start_of
from ._values import tensors_of

_START = torch.ops.shardfn.ragged_all_to_all_start.default
_ARRIVED, _ROWS_AS = torch.ops.shardfn.arrived_rows.default, torch.ops.shardfn.rows_as.default
_ROWS = 5  # the argument of `_START` that has the number of rows


def exact_rows(gm: GraphModule) -> GraphModule:
    """Lets exchanges return only the received rows, instead of the largest possible number, if all users allow it.

    For example, a rank of a mixture of experts that gets 700 of at most 4096 rows computes 700. Values with the mark
    `arrived_rows` have the rows that came by the table, and so have values made row by row. Such values may be shorter
    than in the graph if no op needs the whole size. The column `rows` of the op table says what an op needs:

        "each"     row i of the result is made of row i of the operands, as of pointwise ops
        "places"   row i of the result is made of the rows that row i of the second operand names
        "first"    row i of the result is made of row i of the first operand; other operands are whole
        "sum"      a sum over groups of rows, which fill the operands up to the rows in use
        "sent"     only the rows that other operands name are read
        "like"     the result has the number of rows of the second operand

    An op without an entry, or a graph that returns such a value, keeps all values of the table at the whole size.
    Abstract values keep the whole size. So a compiler of static shapes must leave out the nodes of `has_short_rows`.

    Args:
        gm: captured step, scheduled.

    Returns:
        A new graph with the same bits, or the same graph if no exchange changes.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1,), tracing_mode="fake")(torch.ones(2))
        >>> exact_rows(gm) is gm
        True
    """
    walk = _walk_graph(gm)
    starts = [] if walk is None else walk.exact()
    if walk is None or not starts:
        return gm
    out, new = reorder_graph(gm, list(gm.graph.nodes))
    for start in starts:
        new[start].update_arg(_ROWS, -1)
    for node in walk.short():
        new[node].meta["short_rows"] = True
    return out


def balanced_shares(gm: GraphModule) -> dict[Node, float]:
    """Returns by value of `exact_rows` the share of rows in use, if each rank gets as many rows as the rank sends.

    Args:
        gm: captured step, before `exact_rows`.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> balanced_shares(make_fx(lambda x: (x + 1,), tracing_mode="fake")(torch.ones(2)))
        {}
    """
    walk = _walk_graph(gm)
    return {} if walk is None else {n: walk.balanced_share(n) for n in walk.short()}


def has_short_rows(node: Node) -> bool:
    """Returns whether the value of a node, in a graph of `exact_rows`, may have fewer rows than the abstract value.

    Example:
        >>> has_short_rows(torch.fx.Graph().placeholder("x"))
        False
    """
    return node.meta.get("short_rows", False)


def can_join_kernel(node: Node) -> bool:
    """Returns whether a kernel of several ops may have the value of a node: in the device's memory, with all rows."""
    return is_device(memory_of(node)) and not has_short_rows(node)


def _walk_graph(gm: GraphModule) -> "_Walk | None":
    """Returns the walk through a graph, or None if no rows come by an exchange."""
    return _Walk(Memory(gm)) if any(n.target is _ARRIVED for n in gm.graph.nodes) else None


class _Walk:
    """Goes through a graph in order, and notes the table of rows of each value.

    A table is the number of the table's value.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory, self._number = memory, value_numbers(memory)
        self._table: dict[Node, int] = {}
        self._starts: dict[int, list[Node]] = {}
        self._whole: set[int] = set()
        for node in memory.order:
            if node.target is _ARRIVED:
                self._note_exchange(node)
        for node in memory.order:
            self._visit_node(node)

    def exact(self) -> list[Node]:
        """Returns the exchanges with exactly the rows that come in the result."""
        return [s for table, starts in self._starts.items() if table not in self._whole for s in starts]

    def short(self) -> list[Node]:
        """Returns the values that may have fewer rows than in the graph."""
        return [n for n, table in self._table.items() if table in self._starts and table not in self._whole]

    def balanced_share(self, node: Node) -> float:
        """Returns the rows that this rank sends, as a share of the rows that may come."""
        start = self._starts[self._table[node]][0]
        sent = len(next(iter(tensors_of(start.all_input_nodes[0]))))
        return min(sent / max(int(start.args[_ROWS]), 1), 1.0)  # pyright: ignore[reportArgumentType]

    def _note_exchange(self, mark: Node) -> None:
        """Notes the exchange that makes the marked value, if any."""
        wait = mark.args[0]
        while isinstance(wait, Node) and wait.target is not WAIT and self._memory.is_view(wait):
            wait = wait.args[0]
        if not isinstance(wait, Node) or wait.target is not WAIT or start_of(wait).target is not _START:
            return
        table, start = self._table_of(mark), start_of(wait)
        known = self._table.setdefault(wait, table)
        if known != table:
            self._whole |= {known, table}
        elif start not in self._starts.setdefault(table, []):
            self._starts[table].append(start)

    def _table_of(self, mark: Node) -> int:
        return self._number[mark.args[1]]  # pyright: ignore[reportArgumentType]

    def _visit_node(self, node: Node) -> None:
        if node in self._table:  # the wait for an exchange
            return
        tables = {self._table[n] for n in node.all_input_nodes if n in self._table}
        if not tables:
            if node.target is _ARRIVED:  # a value of whole size is used although rows may be missing
                self._whole.add(self._table_of(node))
            return
        rule = _RULES.get(_rows_of(node))
        keeps = None if rule is None or len(tables) > 1 else rule(node, self._is_short)
        if keeps is None or (node.target is _ARRIVED and self._table_of(node) not in tables):
            self._whole |= tables | ({self._table_of(node)} if node.target is _ARRIVED else set())
        if keeps is not False:
            self._table[node] = min(tables)

    def _is_short(self, node: Any) -> bool:
        return node in self._table


# Rules: True, the result has only the rows in use. False, the result has the whole size. None, the op needs the whole
# size.

_Short = Callable[[Any], bool]


def _rows_of(node: Node) -> str:
    op = op_of(node)
    return op.rows or ("each" if op.pointwise else "")


def _check_each(node: Node, short: _Short) -> bool | None:
    results = list(tensors_of(node))
    if not results or _dim_of(node) == 0:
        return None
    num, ndim = {len(x) for x in results if x.dim()}, {x.dim() for x in results}
    alike = len(num) == 1 and len(ndim) == 1
    return True if alike and all(_can_fit(n, short, *num, *ndim) for n in node.all_input_nodes) else None


def _can_fit(operand: Node, short: _Short, num: int, ndim: int) -> bool:
    """Returns whether an operand has only the result's rows in use, or is the same for all rows."""
    values = list(tensors_of(operand))
    if short(operand):
        return all(x.dim() == ndim and len(x) == num for x in values)
    return all(x.dim() < ndim or len(x) == 1 for x in values)


def _dim_of(node: Node) -> int:
    """Returns the dim that an op works along, or -1."""
    target = node.target
    if not isinstance(target, OpOverload):
        return -1
    names = [a.name for a in target._schema.arguments]
    if "dims" in names:  # of a permutation
        return 0 if _argument_of(node, names, "dims")[0] != 0 else -1
    if "dim" not in names:
        return -1
    first = next(iter(tensors_of(node)))
    return _argument_of(node, names, "dim") % max(first.dim(), 1)


def _argument_of(node: Node, names: Sequence[str], name: str) -> Any:
    at = names.index(name)
    default = node.target._schema.arguments[at].default_value  # pyright: ignore
    return node.args[at] if at < len(node.args) else node.kwargs.get(name, default)


def _check_places(node: Node, short: _Short) -> bool | None:
    source, places, *rest = node.args
    others = [n for n in rest if isinstance(n, Node)]
    return True if short(places) and all(map(short, others)) and isinstance(source, Node) else None


def _check_first(node: Node, short: _Short) -> bool | None:
    operand = node.args[0]
    if not short(operand) or any(map(short, _nodes_after(node, 1))) or _dim_of(node) == 0:
        return None
    num = {len(x) for n in (operand, node) for x in tensors_of(n)}  # pyright: ignore[reportArgumentType]
    return True if len(num) == 1 else None


def _check_sum(node: Node, short: _Short) -> bool | None:
    first = node.args[:2]
    return False if all(map(short, first)) and not any(map(short, _nodes_after(node, 2))) else None


def _check_sent(node: Node, short: _Short) -> bool | None:
    return False if short(node.args[0]) and not any(map(short, _nodes_after(node, 1))) else None


def _check_as_like(node: Node, short: _Short) -> bool | None:
    x, like = (next(iter(tensors_of(n))) for n in node.args)  # pyright: ignore[reportArgumentType]
    return True if short(node.args[1]) and len(x) == len(like) else None


def _nodes_after(node: Node, start: int) -> Iterator[Node]:
    return (n for n in node.args[start:] if isinstance(n, Node))


_RULES: dict[str, Callable[[Node, _Short], bool | None]] = {
    "each": _check_each,
    "places": _check_places,
    "first": _check_first,
    "sum": _check_sum,
    "sent": _check_sent,
    "like": _check_as_like,
}
