"""`fused`: the in-place form of a rule, by a kernel for lists of leaves, with results that do not depend on positions.

torch's fused kernels for CPUs work on vectors and finish a leaf's last elements one by one, with another rounding (for
example, a product and a sum are a single fused operation only in the vector form). So the same element would step
differently at the end of a chunk and in the middle of a leaf. Here the ends of all leaves are joined into a padded leaf
of whole vectors.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import foreach_copy_
from shardfn.core import tree_flatten

from . import _base as base
from ._chain import check_chain
from ._leaves import (
    Columns,
    check_shapes,
    check_state,
    group_columns,
    leaves_like,
    split_columns,
    stage_columns,
    unstage_columns,
)

_CAST = 1 << 18  # elements a thread: a megabyte of cast gradient; smaller pieces pay more for their launches
_LANES = 64  # elements: a multiple of every vector width, and of the cache line that divides the work among threads
_SMALL = 1 << 10  # elements: a smaller leaf with an end is joined whole, as a view costs more than its copy


def fused(
    who: str,
    kernel: Callable[[Columns, bool, torch.device, Any], None],
    advance: Callable[[base.OptState], Any],
    *,
    num: int,
    at: int = 0,
    kind: type | None = None,
    fields: Sequence[str] = (),
    flags: Callable[..., Sequence[bool]] | None = None,
    widen: Callable[[Tensor], bool] | None = None,
    narrow: bool = False,
) -> Callable[..., tuple[base.Params, base.OptState]]:
    """Returns `apply` of a chain: checks, columns of the same dtype, and a call of the kernel for each group of leaves.

    Args:
        who: name of the rule, for errors.
        kernel: `kernel(columns, decays, device, numbers)`: steps leaves of a single device and dtype in place. The
            columns are parameters, the fields of the state, and gradients.
        advance: `advance(state) -> numbers`: advances the counters and returns the numbers of the step.
        num: number of rules of the chain.
        at: index of the rule whose state has the fields.
        kind: type of this state.
        fields: fields of this state, trees like params.
        flags: function from the flattened params to a bool a leaf: whether the leaf decays. None: no leaf.
        widen: see `stage_columns`.
        narrow: see `stage_columns`.
    """

    @torch.no_grad()
    def apply_fn(
        grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        check_chain(who, state, num)
        if kind is not None:
            check_state(who, state[at], kind)
        ps, treedef = tree_flatten(params)
        gs = leaves_like(grads, treedef, "grads", "params")
        own = {x: leaves_like(getattr(state[at], x), treedef, f"state.{x}", "params") for x in fields}
        check_shapes(treedef, ps, grads=gs, **own)
        # The kernel expects rows of a single dtype. `unstage_columns` writes staged copies back.
        columns, copies = stage_columns([ps, *own.values(), gs], widen=widen, narrow=narrow)
        on = [False] * len(ps) if flags is None else flags(params, ps, treedef, specs)
        numbers = advance(state)
        keys = list(zip(on, [g.dtype for g in columns[-1]], strict=True))
        for ((decays, _), device, _), group in group_columns(columns, keys).items():
            kernel(group, decays, device, numbers)
        unstage_columns(copies)
        return params, state

    return apply_fn


def pad_for_fused(columns: Columns) -> Iterator[Columns]:
    """Yields the columns in all forms for a fused kernel, and writes ends back after each.

    Args:
        columns: a list for each role, gradients last. Leaves are contiguous, and on a single device. All have the same
            dtype, except gradients: those are cast in pieces that fit a core's cache.

    Yields: Columns of the same dtype, each for a single call of a kernel. All columns but the last are written through.
    """
    if not columns[0]:
        return
    dtype = columns[0][0].dtype
    if columns[-1][0].dtype == dtype:
        yield from _align_columns(columns)
        return
    pieces = list(split_columns(columns, _CAST * torch.get_num_threads()))
    # One buffer for all: memory that is freed and taken again for each piece may be fresh, zeroed pages each time.
    scratch = torch.empty(max(_total_numel(grads) for *_, grads in pieces), dtype=dtype, device=columns[0][0].device)
    for *piece, grads in pieces:
        cast = [x.view_as(g) for x, g in zip(_split_ends(scratch, grads), grads, strict=True)]
        foreach_copy_(cast, grads)
        yield from _align_columns([*piece, cast])


def _align_columns(columns: Columns) -> Iterator[Columns]:
    first = columns[0]
    if first[0].device.type != "cpu" or not any(x.numel() % _LANES for x in first):
        yield columns
        return
    sizes = [*map(Tensor.numel, first)]
    starts = [_start_of_end(n) for n in sizes]
    bodies = [[_leaf_body(x, n, k) for x, n, k in zip(column, sizes, starts, strict=True) if k] for column in columns]
    ends = [[_leaf_end(x, n, k) for x, n, k in zip(column, sizes, starts, strict=True) if k < n] for column in columns]
    joined = [_join_ends(column) for column in ends]
    yield [[*body, end] for body, end in zip(bodies, joined, strict=True)]
    # The bodies are views, written in place. Ends were copied into a single leaf, and are copied back.
    for end, join in zip(ends[:-1], joined, strict=False):
        foreach_copy_(end, _split_ends(join, end))


def _start_of_end(n: int) -> int:
    """Returns the index at which the end of a leaf of `n` elements begins: the rest after whole vectors."""
    return n if n % _LANES == 0 else 0 if n < _SMALL else n // _LANES * _LANES


def _leaf_body(x: Tensor, n: int, start: int) -> Tensor:
    """Returns the part of a leaf that fills whole vectors of the kernel: the leaf without its last elements."""
    return x if start == n else x.view(-1).narrow(0, 0, start)


def _leaf_end(x: Tensor, n: int, start: int) -> Tensor:
    return x.view(-1).narrow(0, start, n - start) if start else x.view(-1)


def _join_ends(ends: list[Tensor]) -> Tensor:
    return torch.cat([*ends, ends[0].new_zeros(-_total_numel(ends) % _LANES)])


def _split_ends(flat: Tensor, like: list[Tensor]) -> tuple[Tensor, ...]:
    return flat[: _total_numel(like)].split([*map(Tensor.numel, like)])


def _total_numel(leaves: list[Tensor]) -> int:
    return sum(map(Tensor.numel, leaves))
