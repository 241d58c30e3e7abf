"""Sharding rules of ops that treat some dims equally: dims have labels, and a cut label is cut in all operands.

A label names a dim of each operand and result that has the label. Products, pointwise ops, reductions, norms, lookups
and attention differ only in labels, for example `mk, kn -> mn`. A label that no result has is summed over.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ._forms import PARTIAL, VARYING, Form, Operand, OpUse, Parts, Run, Strategy, whole

# A label for each dim, or None for a dim that must not be cut.
Dims = tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class Labels:
    """Labels of an op's dims.

    Attributes:
        ins: labels of each operand's dims.
        outs: labels of each result's dims.
        sums: whether a label that no result has may be cut, since the op is a sum over the label.
        linear: operands in which the op is linear, each separately. The result is partial if such an operand is.
        together: operands in which the op is linear if taken together, as a sum is.
        run: see `Strategy`. A function of the forms of the results.
    """

    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    sums: bool = False
    linear: tuple[int, ...] = ()
    together: tuple[int, ...] = ()
    run: Callable[[tuple[Form, ...]], Run | None] = lambda outs: None


def rule_of_labels(label: Callable[[OpUse], Labels]) -> Callable[[OpUse], list[Strategy]]:
    """Returns the rule of an op with labels."""

    def apply_rule(use: OpUse) -> list[Strategy]:
        return [whole(use), *list_strategies(use, label(use))]

    return apply_rule


def list_strategies(use: OpUse, labels: Labels) -> list[Strategy]:
    """Returns the strategies that cut a label, and the strategies that leave a sum to be taken."""
    out: list[Strategy] = []
    for name, size in _label_sizes(use, labels).items():
        summed = not any(name in dims for dims in labels.outs)
        if size < 2 or (summed and not labels.sums):
            continue
        for way in _ways_to_cut(use, labels, name):
            ins = tuple(_form_of(use, x, dims, name, way) for x, dims in zip(use.operands, labels.ins, strict=True))
            outs = tuple(
                PARTIAL if summed else _form_of(use, x, dims, name, way)
                for x, dims in zip(use.outs, labels.outs, strict=True)
            )
            if all(form != VARYING for form in outs):
                out.append(Strategy(ins, outs, labels.run(outs)))
    every = range(len(use.operands))
    for chosen in (*((i,) for i in labels.linear), *([labels.together] if labels.together else [])):
        outs = (PARTIAL,) * len(use.outs)
        out.append(Strategy(tuple(PARTIAL if i in chosen else VARYING for i in every), outs, labels.run(outs)))
    return out


def _form_of(use: OpUse, x: Operand, dims: Dims, name: object, way: tuple[int, Parts]) -> Form:
    return use.cut(dims.index(name), x.shape[dims.index(name)], *way) if name in dims else VARYING


def _label_sizes(use: OpUse, labels: Labels) -> dict[object, int]:
    sides = (*zip(use.operands, labels.ins, strict=True), *zip(use.outs, labels.outs, strict=True))
    return {name: size for x, dims in sides for name, size in zip(dims, x.shape, strict=True) if name is not None}


def _ways_to_cut(use: OpUse, labels: Labels, name: object) -> list[tuple[int, Parts]]:
    """Returns the multiples and parts by which operands are cut along a label, and the plain way."""
    found: set[tuple[int, Parts]] = {(1, ())}
    for form, dims in zip(use.forms, labels.ins, strict=True):
        if form.kind == "cut" and dims[form.dim] == name:
            found.add((form.multiple, form.parts))
    return sorted(found)


# Labels of families.


def label_broadcast(use: OpUse) -> Labels:
    """Labels a pointwise op by the dims of the results, to which operands are broadcast."""
    out = use.outs[0]
    ins = tuple(align_dims(x, out) for x in use.operands)
    return Labels(ins, tuple(tuple(range(x.ndim)) for x in use.outs))


def align_dims(x: Operand, out: Operand) -> Dims:
    """Returns labels of an operand's dims: the dims of the result to which the operand's dims are broadcast."""
    lead = out.ndim - x.ndim
    return tuple(i + lead if size == out.shape[i + lead] else None for i, size in enumerate(x.shape))


def label_sum(use: OpUse) -> Labels:
    """Labels an op that is pointwise and linear in all operands together, if all operands are tensors."""
    labels = label_broadcast(use)
    every = tuple(range(len(use.operands)))
    alone = len(every) == len(use.args)
    # A partial operand that is broadcast stays a summand. A number would be added on every rank.
    return dataclasses.replace(labels, together=every if alone else ())


def label_unary(use: OpUse) -> Labels:
    """Labels an op of a single operand that is pointwise and linear."""
    return dataclasses.replace(label_broadcast(use), together=(0,))


def label_product_of_elements(use: OpUse) -> Labels:
    """Labels a product with a number, or of two tensors: a sum that is scaled may be taken afterwards."""
    labels = label_broadcast(use)
    if len(use.operands) == 1:
        return dataclasses.replace(labels, together=(0,))
    single = [i for i, x in enumerate(use.operands) if all(s == 1 for s in x.shape)]
    return dataclasses.replace(labels, linear=tuple(i for i in (0, 1) if 1 - i in single))


def label_quotient(use: OpUse) -> Labels:
    """Labels a quotient, linear in the dividend."""
    labels = label_broadcast(use)
    small = len(use.operands) == 1 or all(s == 1 for s in use.operands[1].shape)
    first = isinstance(use.args[0], Operand)
    plain = use.kwargs.get("rounding_mode") is None
    return dataclasses.replace(labels, linear=(0,) if small and first and plain else ())


def label_product(*terms: str) -> Callable[[OpUse], Labels]:
    """Returns the labelling of products, for example `product("mk", "kn", "mn")`."""
    ins, out = tuple(tuple(t) for t in terms[:-1]), tuple(terms[-1])
    return lambda use: Labels(ins, (out,), sums=True, linear=(0,))


def label_all_but(dims: Callable[[OpUse], Sequence[int]]) -> Callable[[OpUse], Labels]:
    """Labels an op that computes along some dims, not to be cut, for each index of the other dims.

    Results have all dims.
    """

    def label_op(use: OpUse) -> Labels:
        x = use.operands[0]
        closed = {d % max(x.ndim, 1) for d in dims(use)}
        own: Dims = tuple(None if i in closed else i for i in range(x.ndim))
        return Labels(tuple(own for _ in use.operands), tuple(own for _ in use.outs))

    return label_op


# Sharding rules of transfers along another axis. For this axis, such a transfer leaves most dims unchanged.


def convert_form(x: Any, axis: str, before: Any, after: Any, shape: Any) -> Any:
    """Target of a node: a value of this `shape` goes from form to form along an axis outside of this graph.

    A graph's arguments are plain: forms are tuples here.
    """


def label_sent(use: OpUse) -> Labels:
    """Labels the dims that the other axis does not cut. The op is a sum of blocks, so partial values stay partial."""
    before, after = (Form(*form) for form in use.args[2:4])
    cut = {form.dim for form in (before, after) if form.kind == "cut"}
    own: Dims = tuple(None if i in cut else i for i in range(use.operands[0].ndim))
    return Labels((own,), (own,), together=(0,))
