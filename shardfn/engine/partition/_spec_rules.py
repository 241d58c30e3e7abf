"""The rules by which a search for specs begins and is kept short.

    alternate          Megatron's layout for any program: weights of products are cut by columns and by rows, in turn
    free_leaf          a leaf whose form the search chooses on the way
    tie_equal_layers   equal layers: operations that are repeated, each time on other leaves

Megatron: a weight that multiplies a whole value is cut by columns, and so is the result. The next weight multiplies the
result, and is cut by rows, and the products are summed. For example, the first layer of an MLP is cut by columns and
the second by rows. A lookup table is cut by rows. The search prices this layout like any other, so the layout need not
be good.

A program of many equal layers is searched as a program of two. For example, of 32 layers the second represents layers 2
to 32, and the second layer's bytes are counted 31 times. This is exact for plans in which all layers but the first do
the same, and leaves at the same place of equal layers have the same form.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from shardfn.graph import WHOLE, Form, cut

from ._states import Held, SearchedPlan
from ._values import PlannedValue, Scope, find_last_uses, results

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


class _Repetition(NamedTuple):
    """Operations `start` to `stop`. Each from `start + period` on is like the operation `period` before."""

    start: int
    stop: int
    period: int


def tie_equal_layers(scope: Scope, ends: Sequence[PlannedValue]) -> list[list[PlannedValue]]:
    """Shortens a scope to two layers of each run of equal layers. See above.

    Args:
        scope: program outside of all loops, changed in place.
        ends: values that the program must have in the end.

    Returns:
        The groups of inputs at the same place of equal layers.
    """
    tied: list[list[PlannedValue]] = []
    done: set[_Repetition] = set()
    while True:
        run = _find_longest(scope, done)
        if run is None:
            return tied
        done.add(run)
        found = _find_same_inputs(scope, run)
        if found is not None and _shorten_run(scope, run, ends):
            tied += found
            done.clear()


def _find_longest(scope: Scope, done: set[_Repetition]) -> _Repetition | None:
    """Returns the longest run of three layers or more that is not in `done`."""
    kinds: dict[Any, int] = {}
    keys = torch.tensor([kinds.setdefault(_kind_of(n, scope), len(kinds)) for n in scope.nodes])
    best: _Repetition | None = None
    for period in range(4, len(keys) // 3 + 1):
        same = torch.cat([torch.tensor([False]), keys[period:] == keys[:-period], torch.tensor([False])])
        steps = same[1:].int() - same[:-1].int()
        starts, stops = (steps == 1).nonzero().flatten(), (steps == -1).nonzero().flatten()
        for start, length in zip(starts.tolist(), (stops - starts).tolist(), strict=True):
            run = _Repetition(start, start + length + period, period)
            if (
                length >= 2 * period
                and run not in done
                and (best is None or length > best.stop - best.start - best.period)
            ):
                best = run
    return best


def _kind_of(node: Node, scope: Scope) -> Any:
    given = tuple((v.seen.shape, v.seen.itemsize, v.differentiable) for v in scope.operands[node])
    static = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: None)
    return (
        node.target,
        repr(static),
        given,
        tuple(None if x is None else x.shape for x in results(node)),
        node.meta.get("no_grad"),
        scope.weights.get(node, 1),
        node if node in scope.loops or node in scope.weights else None,
    )


def _find_same_inputs(scope: Scope, run: _Repetition) -> list[list[PlannedValue]] | None:
    """Returns the inputs that correspond in a run's layers.

    None if some operations do not read corresponding values.
    """
    nodes = scope.nodes
    place = {v: (i, k) for i, n in enumerate(nodes) for k, v in enumerate(scope.made[n]) if v is not None}
    group: dict[PlannedValue, list[PlannedValue]] = {}
    for i in range(run.start + run.period, run.stop):
        pairs = zip(scope.operands[nodes[i]], scope.operands[nodes[i - run.period]], strict=True)
        for now, before in pairs:
            if now is before:
                continue  # a value that all layers share
            if now in place:
                at, k = place[now]
                if place.get(before) == (at - run.period, k):
                    continue
                if i < run.start + 2 * run.period and at >= run.start:
                    continue  # the first layer reads the value from outside, the second from the first
                return None
            if before in place:
                return None
            together = group.setdefault(before, [before])
            if group.setdefault(now, together) is not together:
                return None
            if now not in together:
                together.append(now)
    return [list(x) for x in {id(x): x for x in group.values()}.values()]


def _shorten_run(scope: Scope, run: _Repetition, ends: Sequence[PlannedValue]) -> bool:
    """Leaves two layers if possible, and returns whether: later operations must only read the last layer."""
    start, period = run.start, run.period
    num = (run.stop - start) // period
    last, second = start + (num - 1) * period, start + period
    dropped = scope.nodes[second + period : last + period]
    stand_in: dict[PlannedValue, PlannedValue] = {}
    for j in range(period):
        made = zip(scope.made[scope.nodes[last + j]], scope.made[scope.nodes[second + j]], strict=True)
        stand_in |= {now: kept for now, kept in made if now is not None and kept is not None}
    gone = {v for n in dropped for v in scope.made[n] if v is not None} - stand_in.keys()
    rest = scope.nodes[last + period :]
    early = {v for n in scope.nodes[start : second + period] for v in scope.made[n] if v is not None}
    read = {v for n in rest for v in scope.operands[n]} | set(ends)
    if read & (gone | early) or set(ends) & stand_in.keys():
        return False
    for node in rest:
        scope.operands[node] = [stand_in.get(v, v) for v in scope.operands[node]]
        for v in scope.made[node]:
            if v is not None:
                v.look_at = stand_in.get(v.look_at, v.look_at) if v.look_at is not None else None
                v.part_of = stand_in.get(v.part_of, v.part_of) if v.part_of is not None else None
    scope.weights |= dict.fromkeys(scope.nodes[second : second + period], num - 1)
    scope.nodes = scope.nodes[: second + period] + rest
    find_last_uses(scope, ends)
    return True
