"""`chain`: rules one after another."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor, local
from shardfn.core import raise_all, tree_leaves, tree_map, tree_paths

from ._base import GradientTransformation, Phase, coarsest, decided, given, identity, inplace
from ._types import Grain, OptState, Params, Specs, Updates

Rule = Callable[..., tuple[Updates, OptState]]


def chain(*txs: GradientTransformation) -> GradientTransformation:
    """The composition `u = tx_n(... tx_2(tx_1(g)))`.

    In place, all but the last run `update` (or `rewrite`), and the last runs its `apply`: so put the optimizer last.
    The grain is the coarsest of the rules'; a rule that measures the tree must come first, else the grain is "tree".

    Args:
        txs: the rules, first applied first; none at all is the identity.

    Returns:
        A rule whose state is the tuple of the states.

    Raises:
        ValueError: (on use) the state is not a tuple of as many states.

    Example:
        >>> from shardfn.optim import clip, sgd
        >>> tx = chain(clip(1.0), sgd(0.5))
        >>> tx.update([torch.tensor([4.0])], tx.init([torch.zeros(1)]))[0]
        [tensor([-0.5000])]
    """
    txs = txs or (identity(),)
    last = inplace(txs[-1])

    speaks = _communicates(txs)

    def init(params: Params) -> OptState:
        states = tuple(tx.init(params) for tx in txs)
        _check_early(states[:speaks] if speaks else ())
        return states

    def through(
        rules: Sequence[Rule], updates: Updates, state: OptState, params: Params, specs: Specs
    ) -> tuple[Updates, tuple[OptState, ...]]:
        check_chain("chain", state, len(txs))
        states = []
        for rule, inner in zip(rules, state, strict=False):
            updates, new = rule(updates, inner, params, specs=specs)
            states.append(new)
        return updates, tuple(states)

    def update(
        updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        return through([tx.update for tx in txs], updates, state, params, specs)

    @torch.no_grad()
    def apply(grads: Updates, state: OptState, params: Params, *, specs: Specs = None) -> tuple[Params, OptState]:
        updates, states = through([tx.rewrite or tx.update for tx in txs[:-1]], grads, state, params, specs)
        params, new = last(updates, state[-1], params, specs=specs)
        return params, (*states, new)

    def on(params: Params, stats: Tensor | None, phase: Phase | None = None) -> GradientTransformation:
        rest = [given(tx, params, phase=phase) for tx in txs[1:]]
        rule = chain(given(txs[0], params, stats, phase), *rest)

        def init(rows: Params) -> OptState:
            _check_whole(txs[:speaks], params, whole.over)
            return rule.init(rows)

        return rule if speaks is None else rule._replace(init=init)

    measured_late = any(tx.measure is not None for tx in txs[1:])
    grain: Grain = "tree" if measured_late else coarsest(tx.grain for tx in txs)
    first = txs[0]
    whole = GradientTransformation(
        init, update, apply, grain=grain, measure=first.measure, given=on, additive=first.additive
    )
    if any(tx.decide is not None for tx in txs):
        whole = whole._replace(decide=lambda params: chain(*(decided(tx, params) for tx in txs)))
    if (ahead := first.measures_ahead) is not None:
        whole = whole._replace(measures_ahead=lambda state: ahead(state[0]))
    if speaks is None:
        return whole
    ask = txs[speaks].phase
    assert ask is not None
    whole = whole._replace(over=txs[speaks].over, phase=lambda state: ask(state[speaks]), last=txs[-1].last)
    return whole


def _communicates(txs: Sequence[GradientTransformation]) -> int | None:
    """Which of the rules averages for itself.

    Raises:
        ValueError: several do; or one before it needs the norm of gradients that are not averaged yet; or one comes
            after a rule that has to be the last.
    """
    own = [i for i, tx in enumerate(txs) if tx.phase is not None]
    if not own:
        return None
    if len(own) > 1:
        raise ValueError(f"rules {own} of a chain all average gradients for themselves; only one can.")
    early = [i for i, tx in enumerate(txs[: own[0]]) if tx.measure is not None]
    if early:
        raise ValueError(
            f"rules {early} of a chain need the norm of the gradient, but rule {own[0]} averages for itself, so that"
            " each rank would use the norm of its own; clip elements (optim.clip) in place of norms, or do without."
        )
    if txs[own[0]].last and own[0] + 1 < len(txs):
        raise ValueError(
            f"rule {own[0]} of a chain steps each rank alone and takes ranks together again by where it has stepped to,"
            f" so that none may change its steps; put rules {list(range(own[0] + 1, len(txs)))} before it."
        )
    return own[0]


def _check_early(states: Sequence[OptState]) -> None:
    """Refuses rules before one that averages for itself, if they remember gradients.

    Raises:
        ValueError: which they are.
    """
    keeping = [i for i, state in enumerate(states) if any(x.is_floating_point() for x in tree_leaves(state))]
    if keeping:
        raise ValueError(
            f"rules {keeping} of a chain remember gradients, but rule {len(states)} averages for itself, so that each"
            " rank would remember its own, as what is taken to be one state; put them after it, or do without."
        )


def _check_whole(txs: Sequence[GradientTransformation], params: Params, over: Sequence[str]) -> None:
    """Refuses rules before one that averages for itself, if they look at parameters of which ZeRO keeps rows.

    Raises:
        ValueError: which rules they are, and which parameters.
    """
    cuts = zip(tree_paths(params, "params"), tree_leaves(params), strict=True)
    cut = [path for path, x in cuts if isinstance(x, GlobalTensor) and set(x.mesh.axes(x.spec.axes)) & set(over)]
    looking = [i for i, tx in enumerate(txs) if _looks_at_params(tx, local(params))] if cut else []
    if looking:
        raise_all(
            ValueError,
            f"rules {looking} of a chain look at parameters, but rule {len(txs)} averages for itself over {over}, so"
            " that it and they get whole gradients, of parameters that ZeRO keeps in pieces over the same axes; decay"
            " weights by its own weight_decay, put them after it, or use Zero(axis=...) with other axes. These are:",
            cut,
        )


def _looks_at_params(tx: GradientTransformation, params: Params) -> bool:
    """Whether a rule asks for more of parameters than their shape and dtype. Tried with zeros that take no memory."""
    zeros = tree_map(lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape), params)
    try:
        tx.update(zeros, tx.init(zeros), tree_map(lambda x: x.as_subclass(_Watched), zeros))
    except _LookedAtError:
        return True
    return False


class _LookedAtError(Exception):
    """A rule looked at parameters."""


class _Watched(Tensor):
    """A parameter at which nobody may look."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == "__get__" or func in _SHAPE:
                return func(*args, **(kwargs or {}))
        raise _LookedAtError


_SHAPE = {Tensor.numel, Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__}


def check_chain(who: str, state: OptState, num: int) -> None:
    """`state` is a chain's: a tuple of `num` states.

    Raises:
        ValueError: it is not.
    """
    if type(state) is not tuple or len(state) != num:
        what = f"a tuple of {len(state)}" if type(state) is tuple else f"a {type(state).__name__}"
        raise ValueError(
            f"{who} keeps a tuple of {num} states, but was given {what}; pass the state that init(params) returned."
        )
