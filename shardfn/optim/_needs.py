"""Needs: how they are answered, and how those of rules that work together join.

| need | of rules in turn (`chain`) | side by side (`masked`) | around one |
| --- | --- | --- | --- |
| `granularity` | the coarsest; "tree" if a later one measures | the coarsest; "tree" if they measure two things | its |
| `measure` | the first's | the one that they share | its |
| `decide` | each decides on all leaves | each on its own | it does |
| `given` | all get the phase, the first the measures | each those of its own leaves | it gets all |
| `phases` | those of the one that has any | refused | its |
| `whole` | if one is | if one is | if it is |
| `donates` | no | no | no |
| `ascends` | where all do | each of its own leaves; those of none do | no, but that of `master_weights` and `delayed` |
"""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from shardfn.core import tree_leaves

from ._base import GradientTransformation, Measure, Needs, Phase, Phases
from ._pair import as_transformation
from ._types import Grain, OptState, Pair, Params

Views = Sequence[tuple[Params, Tensor | None]]


def coarsest(grains: Iterable[Grain]) -> Grain:
    """Returns the granularity of rules that work together.

    Example:
        >>> coarsest(["element", "leaf"])
        'leaf'
    """
    found = set(grains)
    return "tree" if "tree" in found else "leaf" if "leaf" in found else "element"


def decided(tx: GradientTransformation | Pair, params: Params) -> GradientTransformation:
    """`tx` for a tree of whole leaves, and for blocks and parts of it: its functions of the tree are called here.

    `sharded_step` does so. Needed where you apply a rule to blocks yourself, for example inside a `shard_map`.

    Args:
        tx: any rule.
        params: the tree of whole leaves. Only shapes and dtypes count, so tensors on the meta device will do.

    Returns:
        A rule whose masks and labels are fixed.

    Raises:
        ValueError: a mask does not match `params`, or its function looks at more than shapes and dtypes.

    Example:
        >>> import torch
        >>> from shardfn.optim import add_decayed_weights
        >>> tx = add_decayed_weights(0.5, lambda params: [x.shape[0] > 2 for x in params])
        >>> block = [torch.ones(2)]
        >>> decided(tx, [torch.empty(4, device="meta")]).update(block, (), block)[0]
        [tensor([1.5000, 1.5000])]
    """
    tx = as_transformation(tx)
    return tx if tx.needs.decide is None else as_transformation(tx.needs.decide(params))


def given(
    tx: GradientTransformation, params: Params, stats: Tensor | None = None, phase: Phase | None = None
) -> GradientTransformation:
    """`tx` for parts of the tree `params`, in a step with these measures and phase. See `Needs.specialize`."""
    return tx if tx.needs.specialize is None else tx.needs.specialize(params, stats, phase)


def ascending(tx: GradientTransformation, params: Params) -> list[bool]:
    """Returns whether the updates of `tx` point along the gradient, for each leaf of `params`. See `Needs.ascends`.

    Args:
        tx: the rule.
        params: a tree. Only structure, shapes and dtypes count.

    Example:
        >>> from shardfn.optim import masked, sgd
        >>> ascending(masked(sgd(0.1), {"a": True, "b": False}), {"a": 1.0, "b": 2.0})
        [False, True]
    """
    of = tx.needs.ascends
    return [of] * len(tree_leaves(params)) if isinstance(of, bool) else list(of(params))


def join_needs(
    rules: Iterable[GradientTransformation],
    rebuild: Callable[..., GradientTransformation],
    *,
    states: Callable[[OptState], Sequence[OptState]] = lambda state: (state,),
    sees: Callable[[Params, Tensor | None], Views] | None = None,
    own: Callable[[Params], GradientTransformation] | None = None,
    in_turn: bool = True,
) -> Needs:
    """Returns the needs of a rule that is made of others.

    Args:
        rules: the others.
        rebuild: `rebuild(*rules)`: the same rule, made of these.
        states: `states(state)`: the states of the others. The default fits a rule around one other, without a state of
            its own.
        sees: `sees(params, stats)`: the leaves of a tree and their measures that each of the rules gets. None = all
            leaves; measures go to the first only.
        own: `own(params) -> rule`: the same rule, whose own functions of the tree have been called on whole leaves.
            None = it has no such functions.
        in_turn: whether each gets the updates of the one before it, else each has leaves of its own.

    Returns:
        Their needs, joined by the table of this file.

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

    def default_views(params: Params, stats: Tensor | None) -> Views:
        # Only the first sees the measured gradients. The next gets the updates of the first.
        return [(params, stats if i == 0 else None) for i in range(len(rules))]

    look = sees or default_views

    def decide_rules(params: Params) -> GradientTransformation:
        if own is not None:
            # First its own functions, then those of the rules inside: `own` gives a rule that has no more of its own.
            return decided(own(params), params)
        return rebuild(*(decided(rule, p) for rule, (p, _) in zip(rules, look(params, None), strict=True)))

    def specialize_rules(params: Params, stats: Tensor | None, phase: Phase | None) -> GradientTransformation:
        return rebuild(*(given(rule, p, s, phase) for rule, (p, s) in zip(rules, look(params, stats), strict=True)))

    measure, one = _chain_measure(rules, states) if in_turn else _side_by_side(rules)
    granularity = coarsest(rule.needs.granularity for rule in rules) if one else "tree"
    whole = any(rule.needs.whole for rule in rules)
    return Needs(granularity, measure, decide_rules, specialize_rules, _find_phases(rules, states), whole)


def _chain_measure(
    rules: Sequence[GradientTransformation], states: Callable[[OptState], Sequence[OptState]]
) -> tuple[Measure | None, bool]:
    """Returns the first's measure, and whether no other has one: a later one would measure the updates of the first."""
    measure, *late = (rule.needs.measure for rule in rules)
    if measure is not None and (ahead := measure.ahead) is not None:
        measure = measure._replace(ahead=lambda state: ahead(states(state)[0]))
    return measure, not any(late)


def _side_by_side(rules: Sequence[GradientTransformation]) -> tuple[Measure | None, bool]:
    """Their measure, and whether it is the same for all: leaves are measured before they are divided among rules."""
    # By the function: rules that take the same measure share it.
    kinds = dict.fromkeys(rule.needs.measure.of for rule in rules if rule.needs.measure is not None)
    return next((Measure(of) for of in kinds), None), len(kinds) < 2


def _find_phases(
    rules: Sequence[GradientTransformation], states: Callable[[OptState], Sequence[OptState]]
) -> Phases | None:
    """Those of the one rule that has any."""
    own = [(i, rule.needs.phases) for i, rule in enumerate(rules) if rule.needs.phases is not None]
    if not own:
        return None
    [(i, phases)] = own
    return phases._replace(next=lambda state: phases.next(states(state)[i]))


def refuse_phases(who: str, *txs: GradientTransformation) -> None:
    """Refuses rules that average for themselves, where their leaves would not be all leaves, or not this step's.

    Raises:
        ValueError: a rule averages for itself; the message names its axes.
    """
    for i, tx in enumerate(txs):
        if tx.needs.phases is not None:
            raise ValueError(
                f"{who} takes no rule that averages gradients for itself, as rule {i} does over"
                f" {tx.needs.phases.axes}; put such a rule outside, or use its own options."
            )
