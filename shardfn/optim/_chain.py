"""`chain` and `named_chain`: rules in sequence."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn import core
from shardfn.collectives import GlobalTensor, local

from . import _base as base
from ._needs import find_ascending, join_needs
from ._pair import as_transformation, inplace

Rule = Callable[..., tuple[base.Updates, base.OptState]]


def chain(*rules: base.GradientTransformation | base.Pair) -> base.GradientTransformation:
    """Returns the composition `u = tx_n(... tx_2(tx_1(g)))`.

    In place, the last rule runs `apply` and all other rules run `update`. So put the optimizer last. The granularity is
    the coarsest of the rules'. A rule that measures the tree must come first, else the granularity is "tree".

    Args:
        rules: rules in the order of application. Without rules, the identity.

    Returns:
        The corresponding `GradientTransformation`, with the tuple of the states as state.

    Raises:
        ValueError: (on use) the state is not a tuple with a state for each rule.

    Example:
        >>> from shardfn.optim import clip, sgd
        >>> tx = chain(clip(1.0), sgd(0.5))
        >>> tx.update([torch.tensor([4.0])], tx.init([torch.zeros(1)]))[0]
        [tensor([-0.5000])]
    """
    txs = tuple(map(as_transformation, rules)) or (base.identity(),)
    last, speaks = inplace(txs[-1]), _find_communicating(txs)

    def init_fn(params: base.Params) -> base.OptState:
        states = tuple(tx.init(params) for tx in txs)
        _check_early(states[:speaks] if speaks else ())
        return states

    def apply_rules(
        rules: Sequence[Rule], updates: base.Updates, state: base.OptState, params: base.Params, specs: base.Specs
    ) -> tuple[base.Updates, tuple[base.OptState, ...]]:
        check_chain("chain", state, len(txs))
        states = []
        for rule, inner in zip(rules, state, strict=False):
            updates, new = rule(updates, inner, params, specs=specs)
            states.append(new)
        return updates, tuple(states)

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        return apply_rules([tx.update for tx in txs], updates, state, params, specs)

    @torch.no_grad()
    def apply_fn(
        grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        updates, states = apply_rules([_donating_update(tx) for tx in txs[:-1]], grads, state, params, specs)
        params, new = last(updates, state[-1], params, specs=specs)
        return params, (*states, new)

    # A chain's state is the tuple of the rules' states, in order.
    needs = join_needs(txs, chain, states=lambda state: state)._replace(ascends=_ascends_by_leaf(txs))
    if speaks is None:
        return base.GradientTransformation(init_fn, update_fn, apply_fn, needs)

    def specialize_chain(
        params: base.Params, stats: Tensor | None, phase: base.Phase | None
    ) -> base.GradientTransformation:
        assert needs.bind_stats is not None and needs.phases is not None
        rule, over = needs.bind_stats(params, stats, phase), needs.phases.axes

        def init_rows(rows: base.Params) -> base.OptState:
            _check_whole(txs[:speaks], params, over)
            return rule.init(rows)

        return rule._replace(init=init_rows)

    return base.GradientTransformation(init_fn, update_fn, apply_fn, needs._replace(bind_stats=specialize_chain))


def named_chain(*args: tuple[str, base.GradientTransformation | base.Pair]) -> base.GradientTransformation:
    """Returns a `chain` of named rules. The state is a dict: name -> the rule's state.

    Args:
        *args: pairs (name, rule), first applied first.

    Returns:
        The corresponding `GradientTransformation`.

    Raises:
        TypeError: an argument is not such a pair.
        ValueError: no rule is given, or two rules have the same name, or (on use) the state is not a dict of these
            names.

    Example:
        >>> from shardfn.optim import scale_by_learning_rate, trace
        >>> tx = named_chain(("momentum", trace(0.9)), ("rate", scale_by_learning_rate(0.5)))
        >>> updates, state = tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))
        >>> updates, state["momentum"].trace
        ([tensor([-0.5000])], [tensor([1.])])
    """
    wrong = [repr(x) for x in args if not (isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str))]
    if wrong:
        raise TypeError(f"named_chain expected pairs (name, rule), got {', '.join(wrong)}.")
    names = tuple(name for name, _ in args)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"named_chain needs rules of different names, got {list(names)}.")
    return _with_named_states(names, chain(*(tx for _, tx in args)))


def _with_named_states(names: tuple[str, ...], inner: base.GradientTransformation) -> base.GradientTransformation:
    """Returns a chain whose state has names."""

    def states_of(state: base.OptState) -> tuple[base.OptState, ...]:
        if not isinstance(state, dict) or set(state) != set(names):
            own = sorted(state) if isinstance(state, dict) else f"a {type(state).__name__}"
            raise ValueError(
                f"named_chain expected the states {sorted(names)}, got {own}. Pass the state that init(params)"
                " returned."
            )
        return tuple(state[name] for name in names)

    def name_states(states: base.OptState) -> dict[str, base.OptState]:
        return dict(zip(names, states, strict=True))

    def init_fn(params: base.Params) -> base.OptState:
        return name_states(inner.init(params))

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        updates, states = inner.update(updates, states_of(state), params, specs=specs)
        return updates, name_states(states)

    def apply_fn(
        grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        params, states = inplace(inner)(grads, states_of(state), params, specs=specs)
        return params, name_states(states)

    needs = join_needs([inner], lambda rule: _with_named_states(names, rule), states=lambda state: (states_of(state),))
    return base.GradientTransformation(init_fn, update_fn, apply_fn, needs._replace(ascends=inner.needs.ascends))


def _ascends_by_leaf(txs: Sequence[base.GradientTransformation]) -> bool | Callable[[base.Params], Sequence[bool]]:
    """Returns whether all rules ascend, for each leaf if the rules differ.

    A descending rule reverses updates, or stops updates.
    """
    all_ascend = [tx.needs.ascends for tx in txs]
    if False in all_ascend:
        return False
    if all(x is True for x in all_ascend):
        return True
    return lambda params: [all(of) for of in zip(*(find_ascending(tx, params) for tx in txs), strict=True)]


def _donating_update(tx: base.GradientTransformation) -> Rule:
    """Returns the `update` for updates that are not needed afterwards."""
    return functools.partial(tx.update, donate=True) if tx.needs.donates else tx.update


def _find_communicating(txs: Sequence[base.GradientTransformation]) -> int | None:
    """Returns the index of the rule that averages gradients, or None.

    Raises:
        ValueError: several rules average, or an earlier rule needs (or might need) the norm of gradients that are not
            averaged yet, or a rule follows a rule that must be the last.
    """
    own = [(i, tx.needs.phases) for i, tx in enumerate(txs) if tx.needs.phases is not None]
    if not own:
        return None
    if len(own) > 1:
        raise ValueError(f"rules {[i for i, _ in own]} of a chain all average gradients for themselves. Only one can.")
    [(at, phases)] = own
    early = [i for i, tx in enumerate(txs[:at]) if tx.needs.measure is not None]
    if early:
        raise ValueError(
            f"rules {early} of a chain need the norm of the gradient, but rule {at} averages gradients itself, so each"
            " rank would use a different norm. Clip elements with optim.clip, or leave these rules out."
        )
    blind = [i for i, tx in enumerate(txs[:at]) if tx.needs.whole]
    if blind:
        raise ValueError(
            f"rules {blind} of a chain have an update without `specs` and may need whole gradients, but rule {at}"
            " averages gradients itself, so each rank would pass different gradients. Put these rules after it, or"
            " declare that they"
            ' treat every element equally: GradientTransformation(init, update, needs=Needs(granularity="element")).'
        )
    if phases.is_last and at + 1 < len(txs):
        raise ValueError(
            f"rule {at} of a chain lets each rank step separately and later averages the steps, so no other rule may"
            f" change the steps. Put rules {list(range(at + 1, len(txs)))} before it."
        )
    return at


def _check_early(states: Sequence[base.OptState]) -> None:
    """Refuses rules with memory of gradients before a rule that averages gradients.

    Raises:
        ValueError: there are such rules. The message lists all.
    """
    # Counters are the same on all ranks, even if gradients differ.
    keeping = [i for i, state in enumerate(states) if any(x.is_floating_point() for x in core.tree_leaves(state))]
    if keeping:
        raise ValueError(
            f"rules {keeping} of a chain remember gradients, but rule {len(states)} averages gradients itself, so each"
            " rank would have a different state. Put these rules after it, or leave them out."
        )


def _check_whole(txs: Sequence[base.GradientTransformation], params: base.Params, over: Sequence[str]) -> None:
    """Refuses rules before an averaging rule that use the values of parameters that ZeRO keeps as rows.

    Raises:
        ValueError: there are such rules. The message lists the rules and the parameters.
    """
    cuts = core.named_leaves(params, "params")
    cut = [path for path, x in cuts if isinstance(x, GlobalTensor) and base.rows_over(x, over)]
    looking = [i for i, tx in enumerate(txs) if _looks_at_params(tx, local(params))] if cut else []
    if looking:
        core.raise_all(
            ValueError,
            f"rules {looking} of a chain look at parameters, but rule {len(txs)} averages for itself over {over}, so"
            " that it and they get whole gradients, of parameters that ZeRO keeps in pieces over the same axes; decay"
            " weights by its own weight_decay, put them after it, or use Zero(axis=...) with other axes. These are:",
            cut,
        )


def _looks_at_params(tx: base.GradientTransformation, params: base.Params) -> bool:
    """Returns whether a rule uses more of parameters than shape and dtype.

    The rule is tried with zeros without memory.
    """
    zeros = core.tree_map(lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape), params)
    try:
        tx.update(zeros, tx.init(zeros), core.tree_map(lambda x: _NotLookedAt.empty(x.shape, x.dtype, x.device), zeros))
    except _LookedAtError:
        return True
    return False


class _LookedAtError(Exception):
    """A rule looked at parameters."""


class _NotLookedAt(core.MetadataTensor):
    """A parameter that raises an error when a rule looks at its values."""

    @classmethod
    def on_values(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _LookedAtError


def check_chain(who: str, state: base.OptState, num: int) -> None:
    """Checks that `state` is a chain's state: a tuple of `num` states.

    Raises:
        ValueError: the state is not such a tuple.
    """
    if type(state) is not tuple or len(state) != num:
        what = f"a tuple of {len(state)}" if type(state) is tuple else f"a {type(state).__name__}"
        raise ValueError(
            f"{who} expected a tuple of {num} states, got {what}. Pass the state that init(params) returned."
        )
