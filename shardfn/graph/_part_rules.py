"""Sharding rules of ops that split a dim, or join values along a dim: a dim whose parts are cut separately.

Queries, keys and values that come of the same projection lie one after another along the last dim. Where a rank holds a
block of each, the rank has a part of each without sending anything. For example, `split` of [3 D] cut by parts of [D,
D, D] gives three values cut along D. `cat` is the way back.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ._forms import Form, OpUse, Parts, Ranks, Run, Strategy, whole
from ._labelled import list_strategies
from ._shape_rules import label_other_dims


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
