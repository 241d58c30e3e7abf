"""Sharding rules of ops between the products of experts, where each rank has the rows of the rank's groups.

Such a value is a sum over ranks, and each row is zeros on all ranks but the owner. An op that makes zeros of zeros
keeps such rows, also where the op is not linear. For example, an activation between two products needs no sum, and a
single sum is taken after both products. After any other pointwise op, such as a bias of each row, the rows of other
ranks are filled with zeros again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._forms import VARYING, Form, Operand, OpUse, Owner, Ranks, Rule, Run, Strategy

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
