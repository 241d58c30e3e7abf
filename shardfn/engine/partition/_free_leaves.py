"""Leaves with forms that a search chooses on the way: the first values, and the chosen forms."""

from collections.abc import Mapping

import torch
from torch.fx import Node

from shardfn.graph import WHOLE, Form, cut

from ._partition_states import Held, SearchedPlan
from ._partition_values import PlannedValue, Scope

_UNBIND = torch.ops.aten.unbind


def free_leaf() -> Held:
    """Returns a leaf with a form still to be found."""
    return Held(WHOLE, frozenset(), free=True)


def settled(plan: SearchedPlan, scope: Scope, start: Mapping[PlannedValue, Held], num: int) -> dict[PlannedValue, Form]:
    """Returns the forms in which the first operations that read free leaves take them."""
    found: dict[PlannedValue, Form] = {}
    for node in scope.nodes:
        choice = plan.choices[node]
        loop = scope.loops.get(node)
        read = list(zip(scope.operands[node] if loop is None else loop.carry, choice.strategy.ins, strict=True))
        if choice.plan is not None:
            read += [(v.outer, f) for v, f in choice.plan.outside if v.outer is not None]
        for value, form in read:
            if value in start and start[value].free and value not in found:
                size = value.seen.shape[form.dim] if form.kind == "cut" else 0
                found[value] = cut(form.dim, size, num) if form.kind == "cut" else WHOLE
    return found


def leaves_of_loops(scope: Scope) -> set[PlannedValue]:
    """Returns the inputs that are split into the layers of a loop, and read by nothing else."""
    users: dict[PlannedValue, list[Node]] = {}
    for node in scope.nodes:
        for value in scope.operands[node]:
            users.setdefault(value, []).append(node)

    def is_apart(node: Node) -> bool:
        of_layers: bool = getattr(node.target, "overloadpacket", None) is _UNBIND and (*node.args[1:], 0)[0] in (0,)
        made = [v for v in scope.made[node] if v is not None]
        return of_layers and all(n in scope.loops for v in made for n in users.get(v, [node]))

    return {v for v in scope.inputs if v in users and all(map(is_apart, users[v]))}
