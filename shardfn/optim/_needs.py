"""Needs of rules: resolves needs for a tree, and joins the needs of several rules.

| need | of rules in turn (`chain`) | side by side (`masked`) | around one |
| --- | --- | --- | --- |
| `granularity` | the coarsest; "tree" if a later one measures | the coarsest; "tree" if they measure two things | its |
| `measure` | the first's | the one that they share | its |
| `resolve_masks` | each decides on all leaves | each on its own | it does |
| `bind_stats` | all get the phase, the first the measures | each those of its own leaves | it gets all |
| `phases` | those of the one that has any | refused | its |
| `whole` | if one is | if one is | if it is |
| `donates` | no | no | no |
| `ascends` | where all do | each of its own leaves; those of none do | no, but that of `master_weights` and `delayed` |
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from shardfn.core import tree_leaves

from . import _base as base
from ._base import GradientTransformation
from ._pair import as_transformation

Views = Sequence[tuple[base.Params, Tensor | None]]


def find_coarsest(grains: Iterable[base.Grain]) -> base.Grain:
    """Returns the granularity of rules that work together.

    Example:
        >>> find_coarsest(["element", "leaf"])
        'leaf'
    """
    found = set(grains)
    return "tree" if "tree" in found else "leaf" if "leaf" in found else "element"


def resolve_masks(tx: GradientTransformation | base.Pair, params: base.Params) -> GradientTransformation:
    """Returns `tx` for a tree of whole leaves, and for blocks and parts of the tree.

    Masks and labels that are functions of the tree are called here.

    `sharded_step` calls `resolve_masks`. Needed if your code applies a rule to blocks, such as inside a `shard_map`.

    Args:
        tx: any rule.
        params: the tree of whole leaves. Only shapes and dtypes count, so tensors on the meta device are sufficient.

    Returns:
        The corresponding `GradientTransformation`, with fixed masks and labels.

    Raises:
        ValueError: a mask does not match `params`, or a function of the tree uses more than shapes and dtypes.

    Example:
        >>> import torch
        >>> from shardfn.optim import add_decayed_weights
        >>> tx = add_decayed_weights(0.5, lambda params: [x.shape[0] > 2 for x in params])
        >>> block = [torch.ones(2)]
        >>> resolve_masks(tx, [torch.empty(4, device="meta")]).update(block, (), block)[0]
        [tensor([1.5000, 1.5000])]
    """
    tx = as_transformation(tx)
    return tx if tx.needs.resolve_masks is None else as_transformation(tx.needs.resolve_masks(params))


def bind_stats(
    tx: GradientTransformation, params: base.Params, stats: Tensor | None = None, phase: base.Phase | None = None
) -> GradientTransformation:
    """Returns `tx` for parts of the tree `params`, in a step with these measures and phase. See `Needs.bind_stats`."""
    return tx if tx.needs.bind_stats is None else tx.needs.bind_stats(params, stats, phase)


def find_ascending(tx: GradientTransformation, params: base.Params) -> list[bool]:
    """Returns whether the updates of `tx` point along the gradient, for each leaf of `params`. See `Needs.ascends`.

    Args:
        tx: the wrapped optimizer.
        params: tree. Only structure, shapes and dtypes are used.

    Example:
        >>> from shardfn.optim import masked, sgd
        >>> find_ascending(masked(sgd(0.1), {"a": True, "b": False}), {"a": 1.0, "b": 2.0})
        [False, True]
    """
    of = tx.needs.ascends
    return [of] * len(tree_leaves(params)) if isinstance(of, bool) else list(of(params))


def add_measure(
    needs: base.Needs, inner: base.Measure | None, of: Callable[[Tensor], Tensor], bind: Callable[..., Any]
) -> base.Needs:
    """Returns the needs of a wrapper that measures gradients for its decision, such as their norm.

    Steps measure a single value. If the inner rule needs another value, the wrapper gets whole trees.

    Args:
        needs: needs that the wrapper has from the inner rule.
        inner: the measure of the inner rule.
        of: function of a block. The values of all blocks are summed.
        bind: `bind_stats` of the wrapper.
    """
    if inner is None or inner.of is of:
        return needs._replace(measure=base.Measure(of, additive=True), bind_stats=bind)
    return needs._replace(measure=None, granularity="tree")


def join_needs(
    rules: Iterable[GradientTransformation],
    rebuild: Callable[..., GradientTransformation],
    *,
    states: Callable[[base.OptState], Sequence[base.OptState]] = lambda state: (state,),
    sees: Callable[[base.Params, Tensor | None], Views] | None = None,
    own: Callable[[base.Params], GradientTransformation] | None = None,
    in_turn: bool = True,
) -> base.Needs:
    """Returns the needs of a rule that is made of inner rules.

    Args:
        rules: inner rules.
        rebuild: `rebuild(*rules)`: the same rule, made of other inner rules.
        states: `states(state)`: states of the inner rules. The default is for a wrapper of a single rule without
            additional state.
        sees: `sees(params, stats)`: leaves of a tree and measures that each of the rules gets. None: all leaves. Only
            the first rule gets measures.
        own: `own(params) -> rule`: the same rule, after the rule's functions of the tree were called on whole leaves.
            None: no such functions.
        in_turn: whether each rule gets the updates of the previous rule. Else each rule has separate leaves.

    Returns:
        The needs, joined by the table of this file.

    Example:
        >>> from shardfn.optim import clip_by_global_norm, sgd
        >>> def twice(inner):
        ...     def update(updates, state, params=None, *, specs=None):
        ...         updates, state = inner.update(updates, state, params, specs=specs)
        ...         return [2 * u for u in updates], state
        ...     return GradientTransformation(inner.init, update, needs=join_needs([inner], twice))
        >>> twice(sgd(0.1)).needs.granularity, twice(clip_by_global_norm(1.0)).needs.measure.additive
        ('element', True)
    """
    rules = tuple(rules)

    def default_views(params: base.Params, stats: Tensor | None) -> Views:
        # Only the first sees the measured gradients. The next gets the updates of the first.
        return [(params, stats if i == 0 else None) for i in range(len(rules))]

    look = sees or default_views

    def decide_rules(params: base.Params) -> GradientTransformation:
        if own is not None:
            # First the functions of this rule (`own` returns a rule without such functions), then the functions of
            # inner rules.
            return resolve_masks(own(params), params)
        return rebuild(*(resolve_masks(rule, p) for rule, (p, _) in zip(rules, look(params, None), strict=True)))

    def specialize_rules(params: base.Params, stats: Tensor | None, phase: base.Phase | None) -> GradientTransformation:
        return rebuild(
            *(bind_stats(rule, p, s, phase) for rule, (p, s) in zip(rules, look(params, stats), strict=True))
        )

    measure, one = _chain_measure(rules, states) if in_turn else _side_by_side(rules)
    granularity = find_coarsest(rule.needs.granularity for rule in rules) if one else "tree"
    whole = any(rule.needs.whole for rule in rules)
    return base.Needs(granularity, measure, decide_rules, specialize_rules, _find_phases(rules, states), whole)


def _chain_measure(
    rules: Sequence[GradientTransformation], states: Callable[[base.OptState], Sequence[base.OptState]]
) -> tuple[base.Measure | None, bool]:
    """Returns the first rule's measure, and whether no later rule has a measure.

    A later rule would measure the updates of the first.
    """
    measure, *late = (rule.needs.measure for rule in rules)
    if measure is not None and (ahead := measure.ahead) is not None:
        measure = measure._replace(ahead=lambda state: ahead(states(state)[0]))
    return measure, not any(late)


def _side_by_side(rules: Sequence[GradientTransformation]) -> tuple[base.Measure | None, bool]:
    """Returns the common measure, and whether the measure is the same for all rules.

    Leaves are measured before the division among rules.
    """
    # By the function: rules with the same measure share the result.
    kinds = dict.fromkeys(rule.needs.measure.of for rule in rules if rule.needs.measure is not None)
    return next((base.Measure(of) for of in kinds), None), len(kinds) < 2


def _find_phases(
    rules: Sequence[GradientTransformation], states: Callable[[base.OptState], Sequence[base.OptState]]
) -> base.Phases | None:
    """Returns the phases of the rule that has phases, or None."""
    own = [(i, rule.needs.phases) for i, rule in enumerate(rules) if rule.needs.phases is not None]
    if not own:
        return None
    [(i, phases)] = own
    return phases._replace(next=lambda state: phases.next(states(state)[i]))


def refuse_phases(who: str, *txs: GradientTransformation) -> None:
    """Refuses rules that average gradients, where a rule would not get all leaves, or not this step's leaves.

    Raises:
        ValueError: a rule averages gradients. The message names the axes.
    """
    for i, tx in enumerate(txs):
        if tx.needs.phases is not None:
            raise ValueError(
                f"{who} cannot wrap a rule that averages gradients itself, such as rule {i}, which averages over"
                f" {tx.needs.phases.axes}. Put that rule outside, or use its options."
            )
