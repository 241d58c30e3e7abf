"""`in_pieces`: an optimizer applied part by part, with the bits of the whole.

Optimizer state on a host or on a disk is stepped in chunks: while a chunk is updated, the next chunk is read, and the
previous chunk is written. A rule's `granularity` limits the size of chunks. `begin` computes the values that depend on
the whole tree: measures (one `psum`), masks, and counters. Counters advance once, in `begin`.

Law: `begin`, `apply` on parts that cover the tree, and `end` give the result of `inplace(tx)` on the whole, bit for
bit.

A counter is a leaf of the state that `init` also makes for a tree without leaves.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn import core

from . import _base as base
from . import _norm as norm
from ._leaves import spec_leaves
from ._needs import bind_stats, resolve_masks
from ._pair import inplace

Entries = tuple[tuple[Any, ...], ...]


class Pieces(NamedTuple):
    """An optimizer that is applied part by part.

    A part is a tree like the whole params with `None` for absent leaves. A present leaf is whole, or if `granularity`
    is "element", rows `leaf[a:b]`. A part of the state has the same leaves with the same rows, and the counters. For
    example, `{"w": w[0:512], "b": None}` is a part of `{"w": w, "b": b}`.

    Attributes:
        granularity: "element", "leaf", or "tree": then the only part is the whole.
        measure: `measure(grad, spec=None) -> Tensor`, 0-d: the number that `begin` needs of each leaf's gradient (the
            local block, whole). None: no number is needed. Inside `sum_exactly` a sum of squares is over all blocks
            of the leaf, of that spec, and so collective.
        begin: `begin(state, stats=(), *, specs=None) -> token`, once a step, before any `apply`: `stats` are the
            measures in the order of the leaves. The counters are read from `state`, whole or a part. `begin` includes
            the `psum`. With `stats=None`, for a rule that measures ahead, there is no `psum`, and the token is only for
            `apply`. `end` then needs a token of another `begin` of the same step, with the measures.
        apply: `apply(token, grads, state, params, *, specs=None) -> (params, state)`: steps one part. The buffers of
            the last three arguments may be overwritten, so parts must not share memory. The counters in `state` are
            neither read nor advanced.
        end: `end(token, state) -> state`: the state, whole or a part, with the counters advanced.
    """

    granularity: base.Grain
    measure: Callable[..., Tensor] | None
    begin: Callable[..., "ChunkedStep"]
    apply: Callable[..., tuple[base.Params, base.OptState]]
    end: Callable[["ChunkedStep", base.OptState], base.OptState]


class ChunkedStep(NamedTuple):
    """Step of an optimizer that is applied to parts of the tree in turn.

    Attributes:
        rule: optimizer to apply to each part in this step.
        old: counters before the step.
        new: counters after the step, or None while measures such as the global norm are unknown.
    """

    rule: base.GradientTransformation
    old: tuple[Tensor, ...]
    new: tuple[Tensor, ...] | None


def in_pieces(tx: base.GradientTransformation | base.Pair, params: base.Params) -> Pieces:
    """Returns `tx` applied part by part: bit-identical to `inplace(tx)` on the whole tree.

    Args:
        tx: any rule. The rule's `granularity` limits the size of parts.
        params: the whole tree as `inplace(tx)` would be given it (local blocks, None for frozen leaves). Only shapes
            and dtypes are used, so tensors on the meta device are sufficient.

    Returns:
        A `Pieces`.

    Raises:
        ValueError: a mask does not match `params`, or (on use) a part has a leaf that the tree lacks, or cuts a leaf
            more finely than the granularity allows, measures are missing, or the state has other counters.

    Example:
        >>> from shardfn.optim import chain, clip_by_global_norm, sgd
        >>> tx = chain(clip_by_global_norm(1.0), sgd(1.0))
        >>> params, grads = torch.zeros(2), torch.tensor([3.0, 4.0])
        >>> pieces, state = in_pieces(tx, [params]), tx.init([params])
        >>> token = pieces.begin(state, [pieces.measure(grads)])
        >>> for rows in (slice(0, 1), slice(1, 2)):
        ...     _ = pieces.apply(token, [grads[rows]], state, [params[rows]])
        >>> params
        tensor([-0.6000, -0.8000])

    References:
        Rajbhandari et al., ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning, 2021,
        https://arxiv.org/abs/2104.07857
    """
    whole = core.tree_map(lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"), params)
    tx = resolve_masks(tx, whole)
    granularity, measure = tx.needs.granularity, tx.needs.measure
    squares = measure is not None and measure.of is norm.block_squares
    check = _make_checker(whole, granularity)
    if granularity == "tree":
        return _step_whole(tx, check)
    # The state for a tree without leaves has only counters, as `Needs.granularity` demands.
    entries, skeleton = _find_counters(bind_stats(tx, whole), whole)

    @torch.no_grad()
    def begin_fn(state: base.OptState, stats: Sequence[Tensor] | None = (), *, specs: base.Specs = None) -> ChunkedStep:
        if stats is None and measure is not None and not (measure.ahead and measure.ahead(state)):
            raise ValueError("begin got no measures, but the rule needs the measures of this step's gradients.")
        cuts = None if squares and norm.is_exact() else specs  # else the measures are over all blocks already
        rule = bind_stats(tx, whole, _measure_tree(whole, stats, cuts) if measure else None)
        old = tuple(c.clone() for c in _read_counters(state, entries))
        # A step of no leaves: only the counters advance, as in the whole step.
        nothing = core.tree_map(lambda p: None, whole)
        advanced = inplace(rule)(nothing, core.tree_unflatten(skeleton, [c.clone() for c in old]), nothing)[1]
        return ChunkedStep(
            rule, old, None if measure is not None and stats is None else _read_counters(advanced, entries)
        )

    @torch.no_grad()
    def apply_fn(
        token: ChunkedStep, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        check(params)
        # Each part steps from the counters before the step, in copies, because a rule advances the given counters.
        own = _read_counters(state, entries)
        state = _write_counters(state, entries, [c.clone() for c in token.old])
        params, state = inplace(token.rule)(grads, state, params, specs=specs)
        return params, _write_counters(state, entries, own)

    def end_fn(token: ChunkedStep, state: base.OptState) -> base.OptState:
        if token.new is None:
            raise ValueError("this token was begun without measures. End with a token of a `begin` with measures.")
        return _write_counters(state, entries, token.new)

    def measure_fn(grad: Tensor, spec: core.P | None = None) -> Tensor:
        assert measure is not None
        if squares and norm.is_exact():
            return norm.leaf_squares([grad], None if spec is None else [spec])[0]
        return measure.of(grad)

    return Pieces(granularity, measure and measure_fn, begin_fn, apply_fn, end_fn)


def _step_whole(tx: base.GradientTransformation, check: Callable[[core.PyTree], None]) -> Pieces:
    def begin_fn(state: base.OptState, stats: Sequence[Tensor] | None = (), *, specs: base.Specs = None) -> ChunkedStep:
        del state, stats, specs
        return ChunkedStep(tx, (), ())

    def apply_fn(
        token: ChunkedStep, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        check(params)
        return inplace(token.rule)(grads, state, params, specs=specs)

    def end_fn(token: ChunkedStep, state: base.OptState) -> base.OptState:
        del token
        return state

    return Pieces("tree", None, begin_fn, apply_fn, end_fn)


def _measure_tree(
    whole: core.PyTree, stats: Sequence[Tensor] | None, specs: base.Specs
) -> Float[Tensor, " num_leaves"] | None:
    """Returns the measures of all leaves, over all blocks."""
    if stats is None:
        return None
    num = len(core.tree_leaves(whole))
    if len(stats) != num:
        raise ValueError(
            f"begin expected a measure for each of {num} leaves, got {len(stats)}. Pass pieces.measure(grad) of each,"
            " in order."
        )
    local = torch.stack(list(stats)) if stats else torch.zeros(0)
    return local if specs is None or not stats else norm.over_blocks(local, spec_leaves(specs, whole))


def _find_counters(rule: base.GradientTransformation, whole: core.PyTree) -> tuple[Entries, Any]:
    """Returns the places of counters in a state, and the structure of a state with only counters."""
    skeleton = rule.init(core.tree_map(lambda p: None, whole))
    return tuple(core.tree_entries(skeleton)), core.tree_flatten(skeleton)[1]


def _read_counters(state: base.OptState, entries: Entries) -> tuple[Tensor, ...]:
    at = dict(zip(core.tree_entries(state), core.tree_leaves(state), strict=True))
    missing = [f"state has no counter at {'.'.join(map(str, e))}" for e in entries if e not in at]
    core.raise_all(
        ValueError, "a state is not this optimizer's; pass the result of init(params), or a part of it:", missing
    )
    return tuple(at[e] for e in entries)


def _write_counters(state: base.OptState, entries: Entries, counters: Sequence[Tensor]) -> base.OptState:
    at = dict(zip(entries, counters, strict=True))
    leaves, treedef = core.tree_flatten(state)
    return core.tree_unflatten(treedef, [at.get(e, x) for e, x in zip(core.tree_entries(state), leaves, strict=True)])


def _make_checker(whole: core.PyTree, granularity: base.Grain) -> Callable[[core.PyTree], None]:
    """Returns a function that refuses parts that do not belong to `whole`, or are too fine for `granularity`."""
    wants, treedef = core.tree_flatten(whole, none_is_leaf=True)
    paths = (
        core.tree_paths(whole, "params", is_leaf=lambda x: x is None)
        if None in wants
        else core.tree_paths(whole, "params")
    )

    def check_part(part: core.PyTree) -> None:
        slots, own = core.tree_flatten(part, none_is_leaf=True)
        if own != treedef:
            raise ValueError(
                f"a part of params is {own}, but the whole is {treedef}. Keep every container, and put None for a leaf"
                " that is not in the part."
            )
        rows = zip(paths, slots, wants, strict=True)
        problems = [problem for path, x, want in rows if (problem := _find_problem(path, x, want, granularity))]
        core.raise_all(ValueError, f"not a part that an optimizer of granularity {granularity!r} can step:", problems)

    return check_part


def _find_problem(path: str, x: Any, want: Any, granularity: base.Grain) -> str:
    if x is None:
        return f"{path} is missing; give the whole tree at once" if granularity == "tree" and want is not None else ""
    if want is None:
        return f"{path} is given, but is None in the whole tree"
    if x.shape == want.shape:
        return ""
    got, full = tuple(x.shape), tuple(want.shape)
    if not (got and full and got[1:] == full[1:] and got[0] <= full[0]):
        return f"{path} has shape {got}, which is no rows of {full}; cut along the first dimension"
    return "" if granularity == "element" else f"{path} has shape {got}, rows of {full}; give the whole leaf"
