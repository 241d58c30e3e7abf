"""Sharding rules of views that join and divide dims: where the blocks of a cut dim lie afterwards.

A view keeps the order of elements, so for a group of dims that are joined or divided only the order of a block's
elements matters. Dim `i` of a group has `before` elements of the dims to the left and `after` elements of the dims to
the right. As a separate dim the group is [before, size, after], and a cut of dim i by p parts has `before p` parts, all
cut equally. For example, [6, 4] cut along the 6 becomes [24] cut in multiples of 4.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from ._forms import PARTIAL, Form, OpUse, Parts, Ranks, Run, Strategy, blocks, multiple_of, whole

_ATEN = torch.ops.aten


def shard_view(use: OpUse) -> list[Strategy]:
    """Returns the strategies of `view`, `reshape`: a cut passes where blocks end between elements of a result's dim."""
    if use.target.__name__ == "view.dtype":
        return [whole(use)]
    out: list[Strategy] = [whole(use), Strategy((PARTIAL,), (PARTIAL,))]
    x, y = use.operands[0].shape, use.outs[0].shape
    for p, q in _group_dims(x, y):
        for i, j in ((i, j) for i in p for j in q if x[i] > 1 and y[j] > 1):
            out += _pass_cut(use, p, q, i, j)
    return [s._replace(run=call_with_local_shape(use, "reshape")(s.outs)) for s in out]


def _pass_cut(use: OpUse, p: range, q: range, i: int, j: int) -> Iterator[Strategy]:
    """Turns a cut of dim i of the group p into a cut of dim j of the group q."""
    x, y = use.operands[0].shape, use.outs[0].shape
    lead, into_lead = math.prod(x[p.start : i]), math.prod(y[q.start : j])
    each, into = math.prod(x[i + 1 : p.stop]), math.prod(y[j + 1 : q.stop])
    for form in _cuts_to_try(use, i, each, into, own_only=lead > 1):
        if len(set(form.parts)) > 1:
            if (lead, each, into_lead, into) == (1, 1, 1, 1):
                yield Strategy((form,), (use.cut(j, y[j], 1, form.parts),))
            continue
        parts, rest = divmod(lead * max(len(form.parts), 1), into_lead)
        if rest or y[j] % parts:
            continue
        held = [n * each for n in blocks(x[i], use.num, form)[0]]
        if any(n % into for n in held):
            continue
        one = y[j] // parts
        multiple = multiple_of(one, [n // into for n in held])
        if multiple is not None:
            into_parts: Parts = ((one, multiple),) * parts if parts > 1 else ()
            yield Strategy((form,), (use.cut(j, y[j], multiple, into_parts),))


def _cuts_to_try(use: OpUse, dim: int, each: int, into: int, *, own_only: bool) -> list[Form]:
    """Returns the cuts of the operand along a dim to try.

    The operand's cut, and, for the first dim of a group, other cuts that may pass.
    """
    size, form = use.operands[0].shape[dim], use.forms[0]
    own = [form] if form.kind == "cut" and form.dim == dim else []
    if own_only:
        return own
    multiples = [g for g in {1, into // math.gcd(each, into)} if size % g == 0]
    return sorted({*own, *(use.cut(dim, size, g) for g in multiples)})


def _group_dims(a: Sequence[int], b: Sequence[int]) -> list[tuple[range, range]]:
    """Returns runs of dims with the same number of elements, without empty values."""
    out: list[tuple[range, range]] = []
    i = j = 0
    while 0 not in a and i < len(a) and j < len(b):
        i0, j0, m, n = i, j, a[i], b[j]
        i, j = i + 1, j + 1
        while m != n:
            if m < n:
                m, i = m * a[i], i + 1
            else:
                n, j = n * b[j], j + 1
        out.append((range(i0, i), range(j0, j)))
    return out


def whole_look(node: Node) -> Run | None:
    """Returns the function for a view of a whole value. Strides may differ from the capture's.

    None: the op is called.
    """
    if node.target not in (_ATEN.view.default, _ATEN._unsafe_view.default):
        return None
    return lambda ranks, args, kwargs: args[0].reshape(args[1])


def call_with_local_shape(use: OpUse, name: str) -> Callable[[tuple[Form, ...]], Run]:
    """Calls a method with the shape of this rank's result, where the program has the shape of the whole."""

    def make_run(outs: tuple[Form, ...]) -> Run:
        def call_method(ranks: Ranks, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            del kwargs
            return getattr(args[0], name)(ranks.local(use.outs[0].shape, outs[0]))

        return call_method

    return make_run
