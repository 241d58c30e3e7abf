"""Sharding rules of kernels, and of products of groups of rows with a matrix each, as in layers of experts.

Inputs and outputs are cut as in a plain product. Where the matrices are cut, each rank multiplies the rows of the
rank's groups and has zeros in all other rows, so that the result is a sum over ranks: expert parallelism only by specs,
for ranks that hold the same rows. A second product reads the rows that the first product has made, without a message
between.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.kernels import DimLabels, KernelOp

from ._einsum_rules import Labels, list_strategies
from ._forms import VARYING, Form, Operand, OpUse, Owner, Ranks, Rule, Run, Strategy, whole

# Sharding rules of ops between the products of experts, where each rank has the rows of the rank's groups.
#
# Such a value is a sum over ranks, and each row is zeros on all ranks but the owner. An op that makes zeros of zeros
# keeps such rows, also where the op is not linear. For example, an activation between two products needs no sum, and a
# single sum is taken after both products. After any other pointwise op, such as a bias of each row, the rows of other
# ranks are filled with zeros again.


# (how the op is used, which operands have own rows) -> whether the result has own rows, too.
Keeps = Callable[[OpUse, list[bool]], bool]


def keep_rows(rule: Rule, keeps: Keeps) -> Rule:
    """Returns a rule, with own rows for results of operands with own rows."""

    def apply_rule(use: OpUse) -> list[Strategy]:
        return [*rule(use), *_keep_own_rows(use, keeps)]

    return apply_rule


def clear_rows(rule: Rule, keeps: Keeps = lambda use, have: False) -> Rule:
    """Returns a rule as `keep_rows` does. Where zeros do not stay zeros, other ranks' rows are cleared after the op.

    For pointwise ops that are finite at 0, with finite derivatives. Otherwise a cleared row would have a NaN as
    gradient.
    """

    def apply_rule(use: OpUse) -> list[Strategy]:
        kept = _keep_own_rows(use, keeps)
        return [*rule(use), *(kept or [_clear_strategy(use, x) for x in _keep_own_rows(use, lambda use, have: True)])]

    return apply_rule


def starts_of(owner: Owner, sizes: Tensor) -> Tensor:
    """Returns the first row of each group, and the row after the last group."""
    return torch.nn.functional.pad(sizes.long() if owner.ends else sizes.cumsum(0), (1, 0))


def _clear_strategy(use: OpUse, kept: Strategy) -> Strategy:
    (owned,) = kept.outs
    assert owned.owner is not None
    return kept._replace(run=_clear_rows(use.target, owned.owner), beside=(owned.owner.sizes,))


def _clear_rows(op: Any, owner: Owner) -> Run:
    def run_cleared(ranks: Ranks, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        *given, sizes = args
        y, bounds = op(*given, **kwargs), starts_of(owner, sizes)
        start, stop = ranks.bounds(owner.num, owner.multiple)
        row = torch.arange(len(y), device=y.device)
        own = (row >= bounds[start]) & (row < bounds[stop])
        return torch.where(own.view(-1, *(1,) * (y.ndim - 1)), y, 0)

    return run_cleared


def _keep_own_rows(use: OpUse, keeps: Keeps) -> list[Strategy]:
    owned = next((form for form in use.forms if form.kind == "rows"), None)
    if owned is None:
        return []
    have = [form == owned for form in use.forms]
    apart = any(form.kind == "rows" and form != owned for form in use.forms)
    whole = all(_has_rows(x, out) for x, h in zip(use.operands, have, strict=True) if h for out in use.outs)
    if apart or not whole or not keeps(use, have):
        return []
    ins: tuple[Form, ...] = tuple(owned if h else VARYING for h in have)
    return [Strategy(ins, (owned,) * len(use.outs))]


def _has_rows(x: Operand, out: Operand) -> bool:
    """Returns whether the rows of a result are the rows of an operand."""
    return x.ndim == out.ndim and x.shape[:1] == out.shape[:1]


def is_single_operand(use: OpUse, have: list[bool]) -> bool:
    """Returns whether the op has a single operand, for ops that make zeros of zeros."""
    del use
    return len(have) == 1


def has_any_rows(use: OpUse, have: list[bool]) -> bool:
    """Returns whether any operand has own rows, for products, where a single such factor is enough."""
    del use
    return any(have)


def has_all_rows(use: OpUse, have: list[bool]) -> bool:
    """Returns whether both operands have own rows, for sums of two values."""
    return len(have) == 2 and all(have)


def is_along_columns(use: OpUse, have: list[bool]) -> bool:
    """Returns whether an op takes parts along a dim other than the rows."""
    at = 1 if use.target.__name__.startswith("slice") else 2
    return have[0] and use.arg(at, "dim", 0) % use.operands[0].ndim != 0


# (ranks, rows, matrices, ends of the groups, arguments of the op) -> product
_Multiply = Callable[[Ranks, Tensor, Tensor, Tensor, Sequence[Any]], Tensor]


def kernel_rule(kernel: KernelOp) -> Rule:
    """Returns the rule of a kernel, by the labels of dims in the kernel's record."""

    def apply_rule(use: OpUse) -> list[Strategy]:
        given = kernel.sharding(*use.args) if callable(kernel.sharding) else kernel.sharding
        assert given is not None
        out = [whole(use), *list_strategies(use, _read_labels(given, len(use.operands)))]
        return [*out, *_cut_matrices(use, _multiply_by_sizes(use.target), ends=False)] if given.grouped else out

    return apply_rule


def _read_labels(given: DimLabels, num: int) -> Labels:
    """Returns the labels of an op that was called with `num` tensors. Terms of tensors left out at the end drop out."""
    ins, outs = (
        [tuple(None if label == "." else label for label in term) for term in side.split(",")]
        for side in given.labels.split("->")
    )
    linear = tuple(i for i in given.linear if i < num)
    return Labels(tuple(ins[:num]), tuple(outs), sums=given.sums, linear=linear)


def shard_grouped_mm(use: OpUse) -> list[Strategy]:
    """Returns the strategies of `aten::_grouped_mm(a, b, offs)`: a [m, k] and b [e, k, n], or a [k, m] and b [m, n]."""
    out = [whole(use)]
    if len(use.operands) != 3 or use.operands[0].ndim != 2 or use.arg(3, "bias") is not None:
        return out
    alone = use.arg(4, "out_dtype") is None

    def make_run(outs: tuple[Form, ...]) -> Run | None:
        del outs
        return lambda ranks, args, kwargs: _padded_grouped_mm(*args, **kwargs)

    if use.operands[1].ndim == 3:
        labels = Labels(((None, "k"), (None, "k", "n"), (None,)), ((None, "n"),), sums=alone, linear=(0,), run=make_run)
        return [*out, *list_strategies(use, labels), *_cut_matrices(use, _grouped_mm_by_ends, ends=True)]
    labels = Labels((("k", None), (None, "n"), (None,)), ((None, "k", "n"),), linear=(0, 1), run=make_run)
    return [*out, *list_strategies(use, labels)]


def _cut_matrices(use: OpUse, multiply: _Multiply, *, ends: bool) -> list[Strategy]:
    w, form = use.operands[1], use.forms[1]
    if w.shape[0] < 2:
        return []
    own = use.cut(0, w.shape[0], form.multiple if form.kind == "cut" and form.dim == 0 else 1)
    owner = Owner(_name_of(use, 2), ends, w.shape[0], own.multiple)
    run, rows = _rows_of_own(owner, use.outs[0], multiply), Form("rows", owner=owner)
    return [Strategy((x, own, VARYING), (rows,), run) for x in (VARYING, *(f for f in use.forms[:1] if f == rows))]


def _name_of(use: OpUse, at: int) -> str:
    """Returns the name of an operand, the third of the op's arguments."""
    return next(x.name for x in (*use.args, *use.kwargs.values()) if isinstance(x, Operand) and x.number == at)


def _rows_of_own(owner: Owner, out: Operand, multiply: _Multiply) -> Run:
    """Returns a run that multiplies only the rows of this rank's groups.

    The rows are moved to the front, multiplied, and moved back.
    """

    def multiply_own(ranks: Ranks, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        x, own, sizes, *rest = (*args, *kwargs.values())
        start, stop = ranks.bounds(owner.num, owner.multiple)
        if start == stop:  # zeros that depend on both operands, since all ranks' gradients take part in sums
            return x[:, :0] @ x.new_zeros(0, out.shape[1]) + own.sum()
        bounds = starts_of(owner, sizes)
        first, num = bounds[start], bounds[stop] - bounds[start]
        row = torch.arange(len(x), device=x.device)
        front = torch.where((row < num)[:, None], x[(row + first).clamp(max=len(x) - 1)], 0)
        y = multiply(ranks, front, own, bounds[start + 1 : stop + 1] - first, rest)
        back = row - first
        here = (back >= 0) & (back < num)
        return torch.where(here[:, None], y[torch.where(here, back, 0)], 0)

    return multiply_own


def _multiply_by_sizes(op: Any) -> _Multiply:
    def multiply_sizes(ranks: Ranks, x: Tensor, w: Tensor, ends: Tensor, rest: Sequence[Any]) -> Tensor:
        return (ranks.functions.get(op) or op)(x, w, ends - torch.nn.functional.pad(ends[:-1], (1, 0)), *rest)

    return multiply_sizes


def _grouped_mm_by_ends(ranks: Ranks, x: Tensor, w: Tensor, ends: Tensor, rest: Sequence[Any]) -> Tensor:
    del ranks, rest
    return _padded_grouped_mm(x, w, ends.int())


def _padded_grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Runs `_grouped_mm` on inputs and outputs of any number. Torch takes only multiples of 16 bytes."""
    step = 16 // a.element_size()
    k, n = a.shape[b.ndim == 3], b.shape[-1]
    more_k, more_n = (max(-(-size // step), 1) * step - size for size in (k, n))
    if b.ndim == 2:  # rows of any number: columns of a must not be neighbours
        a = torch.nn.functional.pad(a.t(), (0, more_k)).contiguous().t()
        b = torch.nn.functional.pad(b, (0, more_n))
    elif more_k or more_n:
        a, b = torch.nn.functional.pad(a, (0, more_k)), torch.nn.functional.pad(b, (0, more_n, 0, more_k))
    out = torch.ops.aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    return out[..., :n] if b.ndim == 3 else out[:, :k, :n]
