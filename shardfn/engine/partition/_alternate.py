"""Megatron's layout for any program: weights of products are cut by columns and by rows, in turn.

A weight that multiplies a whole value is cut by columns, and so is the result. The next weight multiplies the result,
and is cut by rows, and the products are summed. For example, the first layer of an MLP is cut by columns and the second
by rows. A lookup table is cut by rows. The search of layouts starts here and prices this layout like any other, so the
layout need not be good.
"""

from typing import Any

import torch
from torch.fx import Node

from shardfn.graph import WHOLE, Form, cut

from ._partition_values import PlannedValue, Scope

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm, _ATEN.bmm}
_POINTWISE = {_ATEN.add, _ATEN.mul, _ATEN.sub}


def alternate(scope: Scope, num: int) -> dict[PlannedValue, Form]:
    """Returns forms of the inputs of a scope that this layout covers. See above."""
    found: dict[PlannedValue, Form] = {}
    spread: set[PlannedValue] = set()  # values computed from a product that is cut by columns, before the next product

    def settle_form(value: PlannedValue, dim: int) -> Form:
        leaf, dims = _leaf_of(value, scope)
        if leaf is None or dims[dim] is None:
            return WHOLE
        size = leaf.seen.shape[dims[dim]]
        return found.setdefault(leaf, cut(dims[dim], size, num) if size > 1 else WHOLE)

    for node in scope.nodes:
        operands, packet = scope.operands[node], getattr(node.target, "overloadpacket", None)
        wide = any(v in spread for v in operands)
        weight = operands[1] if packet in _PRODUCTS and _leaf_of(operands[1], scope)[0] else None
        if weight is not None:
            settle_form(weight, -2 if operands[0] in spread else -1)
            wide = operands[0] not in spread
        elif packet is _ATEN.embedding:
            settle_form(operands[0], 0)
        elif packet in _POINTWISE and wide:
            for value in operands:
                if value not in spread and len(value.seen.shape) == 1:
                    settle_form(value, 0)
        if wide:
            spread.update(v for v in scope.made[node] if v is not None)
    return found


def _leaf_of(value: PlannedValue, scope: Scope) -> tuple[PlannedValue | None, list[Any]]:
    """Returns the input that a value is a transposed view or cast of, and the input's dim for each dim of the value."""
    turns: list[Node] = []
    while value.part_of is not None:
        turns.append(value.node)
        value = value.part_of
    if value not in scope.inputs:
        return None, []
    dims: list[Any] = list(range(len(value.seen.shape)))
    for node in reversed(turns):
        args: Any = node.args
        packet = getattr(node.target, "overloadpacket", None)
        if packet is _ATEN.t:
            dims.reverse()
        elif packet is _ATEN.transpose:
            dims[args[1]], dims[args[2]] = dims[args[2]], dims[args[1]]
        elif packet is _ATEN.permute:
            dims = [dims[d] for d in args[1]]
        elif packet is _ATEN.unsqueeze:
            dims.insert(args[1] % (len(dims) + 1), None)
        elif packet not in (_ATEN._to_copy, _ATEN.alias, _ATEN.clone, _ATEN.expand):
            return None, []
    return value, dims
