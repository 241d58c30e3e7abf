"""Sharding rules of views and of ops that move elements: from cut dims of operands to cut dims of results."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from ._einsum_rules import Dims, Labels, align_dims, list_strategies
from ._forms import PARTIAL, VARYING, WHOLE, Form, OpUse, Parts, Ranks, Rule, Run, Strategy, blocks, multiple_of, whole


def _move_dims(use: OpUse, order: Sequence[object]) -> Labels:
    """Returns labels for an operand with dims that keep the elements. `order` labels the result's dims."""
    x = use.operands[0]
    return Labels((tuple(range(x.ndim)),), (tuple(order),), together=(0,))


def label_transpose(use: OpUse) -> Labels:
    """Labels `t`, `transpose`, `permute`, `movedim` of aten."""
    order = list(range(use.operands[0].ndim))
    rest = use.args[1:]
    if not rest:
        order.reverse()
    elif isinstance(rest[0], int):
        a, b = rest
        order[a], order[b] = order[b], order[a]
    else:
        order = [d % len(order) for d in rest[0]]
    return _move_dims(use, order)


def label_unsqueeze(use: OpUse) -> Labels:
    """Labels a new dim of size 1."""
    order: list[object] = list(range(use.operands[0].ndim))
    order.insert(use.args[1] % use.outs[0].ndim, None)
    return _move_dims(use, order)


def label_squeeze(use: OpUse) -> Labels:
    """Labels an op that drops dims of size 1."""
    x = use.operands[0]
    named = use.args[1] if len(use.args) > 1 else list(range(x.ndim))
    dims = {d % max(x.ndim, 1) for d in ([named] if isinstance(named, int) else named)}
    labels = _move_dims(use, [i for i, size in enumerate(x.shape) if i not in dims or size != 1])
    # By shape: a block may be of size 1 where the dim is larger.
    return dataclasses.replace(labels, run=_call_with_local_shape(use, "reshape"))


def label_expand(use: OpUse) -> Labels:
    """Labels repeated dims of size 1. The shape, an argument, becomes the shape of this rank's part."""
    x, out = use.operands[0], use.outs[0]
    own = align_dims(x, out)
    sizes: Dims = tuple(i if i in own and out.shape[i] > 1 else None for i in range(out.ndim))
    return Labels((own,), (sizes,), run=_call_with_local_shape(use, "expand"))


def label_repeat(use: OpUse) -> Labels:
    """Labels a repetition. Dims that are written several times must not be cut."""
    x, out = use.operands[0], use.outs[0]
    own = tuple(i if i is not None and use.args[1][i] == 1 else None for i in align_dims(x, out))
    return Labels((own,), (tuple(i if i in own else None for i in range(out.ndim)),))


def label_other_dims(at: int, default: int = 0, name: str = "dim") -> Callable[[OpUse], Labels]:
    """Returns a labelling of all dims except the dim along which the op takes or joins parts.

    For example `slice`, `split`, `cat`, `unbind`, `select`, `cumsum`.
    """

    def label_op(use: OpUse) -> Labels:
        x = max(use.operands, key=lambda one: one.ndim)
        dim = use.arg(at, name, default) % max(x.ndim, 1)
        own: Dims = tuple(None if i == dim and not _is_untouched(use, dim) else i for i in range(x.ndim))
        fewer = tuple(i for i in range(x.ndim) if i != dim)
        outs = tuple(own if out.ndim == x.ndim else fewer for out in use.outs)
        # Joined with other values, an empty value of a single dim has no effect.
        ins = tuple(own if one.ndim == x.ndim else (None,) * one.ndim for one in use.operands)
        return Labels(ins, outs, together=tuple(range(len(use.operands))))

    return label_op


def label_scatter(use: OpUse) -> Labels:
    """Labels `slice_scatter` and `select_scatter`: all dims except the dim along which a part is replaced."""
    x, new = use.operands
    dim = use.arg(2, "dim", 0) % x.ndim
    own: Dims = tuple(None if i == dim else i for i in range(x.ndim))
    return Labels((own, own if new.ndim == x.ndim else own[:dim] + own[dim + 1 :]), (own,), together=(0, 1))


def label_stack(use: OpUse) -> Labels:
    """Labels `stack`: a new dim, along which the operands lie."""
    own: Dims = tuple(range(use.operands[0].ndim))
    order: list[object] = list(own)
    order.insert(use.arg(1, "dim", 0) % use.outs[0].ndim, None)
    every = tuple(range(len(use.operands)))
    return Labels((own,) * len(every), (tuple(order),), together=every)


def _is_untouched(use: OpUse, dim: int) -> bool:
    """Returns whether a slice takes all of the dim, at any length."""
    if use.target.__name__ != "slice.Tensor":
        return False
    start, stop, step = use.arg(2, "start"), use.arg(3, "end"), use.arg(4, "step", 1)
    return start in (None, 0) and step == 1 and (stop is None or stop >= 2**62)


def label_pad(use: OpUse) -> Labels:
    """Labels the dims that get no padding."""
    x, pad = use.operands[0], use.args[1]
    touched = {x.ndim - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]}
    own: Dims = tuple(None if i in touched else i for i in range(x.ndim))
    linear = (0,) if not use.arg(2, "value", 0) else ()
    return Labels((own,), (own,), together=linear)


# Lookups.


def shard_embedding(use: OpUse) -> list[Strategy]:
    """Returns the strategies of `embedding`: dims of the indices, columns of the table, or rows with local look-ups."""
    table, index = use.operands
    if use.arg(3, "scale_grad_by_freq", False) or use.arg(4, "sparse", False):
        return [whole(use)]  # the gradient counts all indices
    columns = index.ndim
    labels = Labels(((None, columns), tuple(range(columns))), (tuple(range(columns + 1)),), linear=(0,))
    out = [whole(use), *list_strategies(use, labels)]
    if use.arg(2, "padding_idx", -1) < 0 and table.shape[0] > 1:
        form = use.forms[0]
        multiple = form.multiple if form.kind == "cut" and form.dim == 0 else 1
        rows = use.cut(0, table.shape[0], multiple)
        out.append(Strategy((rows, VARYING), (PARTIAL,), _look_up_own(table.shape[0], rows.multiple)))
    return out


def _look_up_own(size: int, multiple: int) -> Run:
    def look_up(ranks: Ranks, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        del kwargs
        table, index = args[:2]
        start, stop = ranks.bounds(size, multiple)
        inside = ((index >= 0) & (index < size)).all()
        torch.ops.shardfn.check(inside, True, f"an index of an embedding is not in [0, {size})")
        own = (index >= start) & (index < stop)
        if stop == start:
            return table.sum() * index.new_zeros((*index.shape, table.shape[1]), dtype=table.dtype)
        at = (index - start).clamp(0, stop - start - 1)
        return table[at].masked_fill(~own.unsqueeze(-1), 0)

    return look_up


def label_index_select(use: OpUse) -> Labels:
    """Labels `index_select`: all dims but the selected dim, and the dim of the indices."""
    x, dim = use.operands[0], use.args[1] % max(use.operands[0].ndim, 1)
    own: Dims = tuple(None if i == dim else i for i in range(x.ndim))
    index = ("index",) if use.operands[1].ndim else ()
    name = index[0] if index else None
    return Labels((own, index), (tuple(name if i == dim else i for i in range(x.ndim)),), linear=(0,))


def label_gather(use: OpUse) -> Labels:
    """Labels `gather`: dims other than the gathered dim, where the indices go over the whole dim."""
    x, dim = use.operands[0], use.args[1] % max(use.operands[0].ndim, 1)
    index = use.operands[1]
    alike = [i != dim and x.shape[i] == index.shape[i] for i in range(index.ndim)]
    own: Dims = tuple(i if same else None for i, same in enumerate(alike))
    return Labels((own, own), (own,), linear=(0,))


def label_index(use: OpUse) -> Labels:
    """Labels `x[..., index, ...]` with tensors in neighbouring dims: the other dims, and the dims of the indices."""
    x, out = use.operands[0], use.outs[0]
    at = [i for i, one in enumerate(use.args[1]) if one is not None]
    wide = max((s.ndim for s in use.operands[1:]), default=0)
    none = Labels(tuple((None,) * s.ndim for s in use.operands), ((None,) * out.ndim,), linear=(0,))
    if at != list(range(at[0], at[0] + len(at))):
        return none
    own: list[object] = [None if i in at else ("x", i) for i in range(x.ndim)]
    result: list[object] = [*own[: at[0]], *(("index", k) for k in range(wide)), *own[at[0] + len(at) :]]
    ins: list[Dims] = [tuple(own)]
    for s in use.operands[1:]:
        lead = wide - s.ndim
        fits = [out.shape[at[0] + k + lead] == size for k, size in enumerate(s.shape)]
        ins.append(tuple(("index", k + lead) if fit else None for k, fit in enumerate(fits)))
    return dataclasses.replace(none, ins=tuple(ins), outs=(tuple(result),))


def shard_constant(use: OpUse) -> list[Strategy]:
    """Returns the strategy of constants: whole. Operands may have any form, as only shapes are used."""
    return [Strategy(tuple(use.forms), (WHOLE,) * len(use.outs))]


def shard_constant_like(rule: Rule) -> Rule:
    """Returns a rule for constants of an operand's shape, whole where each rank's operand has the whole shape."""

    def apply_rule(use: OpUse) -> list[Strategy]:
        return [*rule(use), *([] if use.forms[0].kind == "cut" else shard_constant(use))]

    return apply_rule


# Sharding rules of ops that split a dim, or join values along a dim: a dim whose parts are cut separately.
#
# Queries, keys and values that come of the same projection lie in sequence along the last dim. Where a rank holds a
# block of each, the rank has a part of each without sending anything. For example, `split` of [3 D] cut by parts of
# [D, D, D] gives three values cut along D. `cat` is the way back.


def shard_split(at: int) -> Callable[[OpUse], list[Strategy]]:
    """Returns the rule of `slice`, `split`, `split_with_sizes`, with the dim at `at`.

    Other dims, and parts of the dim.
    """
    label = label_other_dims(at)

    def apply_rule(use: OpUse) -> list[Strategy]:
        out = [whole(use), *list_strategies(use, label(use))]
        x, form = use.operands[0], use.forms[0]
        dim = use.arg(at, "dim", 0) % max(x.ndim, 1)
        if not (form.kind == "cut" and form.dim == dim and form.parts):
            return out
        pieces = _find_pieces(use, x.shape[dim], form.parts)
        if pieces is not None:
            outs = tuple(use.cut(dim, sum(s for s, _ in form.parts[a:b]), 1, form.parts[a:b]) for a, b in pieces)
            out.append(Strategy((form,), outs, _take_parts(form, x.shape[dim], pieces, single=at == 1)))
        return out

    return apply_rule


def _find_pieces(use: OpUse, size: int, parts: Parts) -> list[tuple[int, int]] | None:
    """Returns the range of parts that each result consists of, or None if a result cuts through a part."""
    ends = [0, *itertools.accumulate(n for n, _ in parts)]
    if use.target.__name__ == "slice.Tensor":
        start, stop, step = use.arg(2, "start") or 0, use.arg(3, "end"), use.arg(4, "step", 1)
        stop = size if stop is None else stop
        bounds = [tuple(min(max(n + size if n < 0 else n, 0), size) for n in (start, stop))]
        if step != 1:
            return None
    else:
        given: Any = use.args[1]
        sizes = [min(given, size - i) for i in range(0, size, given)] if isinstance(given, int) else list(given)
        stops = list(itertools.accumulate(sizes))
        bounds = [(stop - n, stop) for n, stop in zip(sizes, stops, strict=True)]
    if any(a not in ends or b not in ends or a >= b for a, b in bounds):
        return None
    return [(ends.index(a), ends.index(b)) for a, b in bounds]


def _take_parts(form: Form, size: int, pieces: Sequence[tuple[int, int]], *, single: bool) -> Run:
    def take_pieces(ranks: Ranks, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        del kwargs
        ends = [0, *itertools.accumulate(ranks.own(size, form))]
        found = [args[0].narrow(form.dim, ends[a], ends[b] - ends[a]) for a, b in pieces]
        return found[0] if single else found

    return take_pieces


def shard_cat(use: OpUse) -> list[Strategy]:
    """Returns the strategies of `cat`.

    Other dims, or each operand is cut along the dim, and is a part of the result.
    """
    out = [whole(use), *list_strategies(use, label_other_dims(1)(use))]
    dim = use.arg(1, "dim", 0) % max(use.outs[0].ndim, 1)
    alike = all(x.ndim == use.outs[0].ndim for x in use.operands)
    if not alike or not any(f.kind == "cut" and f.dim == dim for f in use.forms):
        return out
    ins = tuple(
        f if f.kind == "cut" and f.dim == dim else use.cut(dim, x.shape[dim])
        for x, f in zip(use.operands, use.forms, strict=True)
    )
    parts = [p for x, f in zip(use.operands, ins, strict=True) for p in f.parts or ((x.shape[dim], f.multiple),)]
    out.append(Strategy(ins, (use.cut(dim, use.outs[0].shape[dim], 1, tuple(parts)),)))
    return out


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
    return [s._replace(run=_call_with_local_shape(use, "reshape")(s.outs)) for s in out]


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


def _call_with_local_shape(use: OpUse, name: str) -> Callable[[tuple[Form, ...]], Run]:
    """Calls a method with the shape of this rank's result, where the program has the shape of the whole."""

    def make_run(outs: tuple[Form, ...]) -> Run:
        def call_method(ranks: Ranks, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            del kwargs
            return getattr(args[0], name)(ranks.local(use.outs[0].shape, outs[0]))

        return call_method

    return make_run
