"""`GradientTransformation`: the noun of the room, with its identity and its two readings.

An optimizer is a pair of pure functions, `init` and `update`, as in optax. Beside them it may carry `apply`: the same
mathematics written into the buffers it is given. Law: `apply(g, s, p) == (p + u, s')` where `u, s' = update(g, s, p)`.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.core import tree_flatten, tree_unflatten

from ._kernels import foreach_add_
from ._leaves import check_shapes, leaves_like, wide
from ._types import Grain, OptState, Params, Specs, Updates


class Phase(NamedTuple):
    """What a rule that averages for itself does in its next step.

    Attributes:
        name: of the phase; there are few.
        local: whether it is given each rank's own gradients and averages what it makes of them; if not, it is given
            averaged ones, as any rule is.
    """

    name: str
    local: bool


class GradientTransformation(NamedTuple):
    """A rule from gradients to updates.

    Attributes:
        init: `init(params) -> state`.
        update: `update(updates, state, params=None, *, specs=None) -> (updates, state)`. Pure. `specs` is a tree like
            params whose leaves are `P`: how each local block is cut out of its global leaf; None = leaves are whole.
        apply: `apply(grads, state, params, *, specs=None) -> (params, state)`: the same in place. It may overwrite the
            buffers of all three arguments. None = there is no faster way than `update` and an addition.
        rewrite: `update` that may overwrite the buffers of the updates it is given; None = there is none. The in-place
            form of a `chain` uses it.
        grain: the smallest part of a tree that the rule can step for itself, and with the same bits: "element" (an
            element's step depends on that element, on counters and on hyperparameters), "leaf" (on its leaf), "tree"
            (on everything). See `in_pieces`. A rule that says less than "tree" keeps its counters in state leaves that
            `init` also makes for a tree without leaves.
        measure: the one thing that a rule of a finer grain may need of the whole tree: a 0-d tensor for a leaf's local
            block, which adds up over blocks. None = it needs nothing.
        decide: `decide(params) -> rule`: the rule for the tree `params` of whole leaves (shapes and dtypes only), and
            for blocks and parts of it: each function of the tree that it was made with, of a mask or of labels, is
            asked here and no more. A rule made of others decides these. None = the rule itself, for it has none.
        given: `given(params, stats) -> rule`: the rule for parts of the tree `params` (shapes only), in a step whose
            measures are `stats`, one entry a leaf. None = the rule itself, for it looks at neither. A rule with a phase
            has `given(params, stats, phase)`, the rule for steps in that phase (None = in any; the rule then asks the
            state). `params` are then the whole blocks, and as `GlobalTensor`s without data, where it is known how the
            rows are cut out of leaves.
        additive: whether `given` looks at no more of `stats` than their sum.
        measures_ahead: `measures_ahead(state) -> bool`: whether the step that comes next only keeps its measures, for a
            later one; so it can begin before they are known. None = it never does. Read on the host.
        over: the mesh axes over which the rule averages for itself.
        phase: `phase(state) -> Phase`, of the step that comes next; the same on all ranks. A rule has it if it has
            `over`. In a phase that is `local` the gradients that it gets are whole, also where parameters are rows of
            leaves, and their mean over `over` is the gradient. A leaf of its state that is not kept as its parameter's
            rows are is made by `init` as a `GlobalTensor`; `update` is given its block.
        last: whether the rule knows where its steps lead, so that no rule after it may change them.

    References:
        Babuschkin et al., The DeepMind JAX Ecosystem (optax), 2020, https://github.com/google-deepmind/optax
    """

    init: Callable[[Params], OptState]
    update: Callable[..., tuple[Updates, OptState]]
    apply: Callable[..., tuple[Params, OptState]] | None = None
    rewrite: Callable[..., tuple[Updates, OptState]] | None = None
    grain: Grain = "tree"
    measure: Callable[[Tensor], Tensor] | None = None
    decide: "Callable[[Params], GradientTransformation] | None" = None
    given: "Callable[..., GradientTransformation] | None" = None
    additive: bool = False
    measures_ahead: Callable[[OptState], bool] | None = None
    over: tuple[str, ...] = ()
    phase: Callable[[OptState], Phase] | None = None
    last: bool = False


class EmptyState(NamedTuple):
    """The state of a rule that remembers nothing."""


def coarsest(grains: Iterable[Grain]) -> Grain:
    """The grain of rules that work together.

    Example:
        >>> coarsest(["element", "leaf"])
        'leaf'
    """
    found = set(grains)
    return "tree" if "tree" in found else "leaf" if "leaf" in found else "element"


def decided(tx: GradientTransformation, params: Params) -> GradientTransformation:
    """`tx` for a tree of whole leaves, and for blocks and parts of it: its functions of the tree are asked here.

    `sharded_step` does so. Needed where you apply a rule to blocks yourself, inside a `shard_map` say.

    Args:
        tx: any rule.
        params: the tree of whole leaves; only shapes and dtypes count, so tensors on the meta device will do.

    Returns:
        A rule whose masks and labels are fixed.

    Raises:
        ValueError: a mask does not match `params`, or its function looks at more than shapes and dtypes.

    Example:
        >>> from shardfn.optim import add_decayed_weights
        >>> tx = add_decayed_weights(0.5, lambda params: [x.shape[0] > 2 for x in params])
        >>> block = [torch.ones(2)]
        >>> decided(tx, [torch.empty(4, device="meta")]).update(block, (), block)[0]
        [tensor([1.5000, 1.5000])]
    """
    return tx if tx.decide is None else tx.decide(params)


def given(
    tx: GradientTransformation, params: Params, stats: Tensor | None = None, phase: Phase | None = None
) -> GradientTransformation:
    """`tx` for parts of the tree `params`, and in a phase; see `GradientTransformation.given`."""
    if tx.given is None:
        return tx
    return tx.given(params, stats) if tx.phase is None else tx.given(params, stats, phase)


def refuse_phases(who: str, *txs: GradientTransformation) -> None:
    """Refuses rules that average for themselves, where their leaves would not be all leaves, or not this step's.

    Raises:
        ValueError: there is one; says of which axes.
    """
    own = [i for i, tx in enumerate(txs) if tx.phase is not None]
    if own:
        raise ValueError(
            f"{who} takes no rule that averages gradients for itself, as rule {own[0]} does over {txs[own[0]].over};"
            " put such a rule outside, or use its own options."
        )


def stateless(update: Callable[..., Updates], grain: Grain = "tree") -> GradientTransformation:
    """A rule without memory, from `update(updates, params, specs) -> updates`.

    Args:
        update: the function.
        grain: how finely the rule may be applied.

    Example:
        >>> negate = stateless(lambda updates, params, specs: [-u for u in updates])
        >>> negate.update([1.0], negate.init([0.0]))
        ([-1.0], EmptyState())
    """

    def init(params: Params) -> EmptyState:
        del params
        return EmptyState()

    def step(
        updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        return update(updates, params, specs), state

    return GradientTransformation(init, step, grain=grain)


def identity() -> GradientTransformation:
    """The rule that changes nothing: `u = g`.

    Example:
        >>> identity().update({"w": 1.0}, EmptyState())
        ({'w': 1.0}, EmptyState())
    """
    return stateless(lambda updates, params, specs: updates, "element")


def apply_updates(params: Params, updates: Updates) -> Params:
    """The stepped parameters `p + u`, in the dtypes of `params`. Pure.

    Args:
        params: tree of tensors.
        updates: tree of the same structure and shapes.

    Returns:
        A tree like `params`.

    Raises:
        ValueError: the trees differ in structure or shapes.

    Example:
        >>> apply_updates([torch.ones(2)], [torch.tensor([1.0, -1.0])])
        [tensor([2., 0.])]
    """
    ps, treedef = tree_flatten(params)
    us = leaves_like(updates, treedef, "updates", "params")
    check_shapes(treedef, ps, updates=us)
    return tree_unflatten(treedef, [(wide(p) + u).to(p.dtype) for p, u in zip(ps, us, strict=True)])


def inplace(tx: GradientTransformation) -> Callable[..., tuple[Params, OptState]]:
    """The in-place form of `tx`: its own `apply`, or `update` and then an addition into the parameters' buffers.

    Args:
        tx: any rule.

    Returns:
        `f(grads, state, params, *, specs=None) -> (params, state)`, which donates its arguments.

    Example:
        >>> w = torch.ones(2)
        >>> _ = inplace(identity())([torch.ones(2)], EmptyState(), [w])
        >>> w
        tensor([2., 2.])
    """
    if tx.apply is not None:
        return tx.apply

    @torch.no_grad()
    def apply(grads: Updates, state: OptState, params: Params, *, specs: Specs = None) -> tuple[Params, OptState]:
        updates, state = tx.update(grads, state, params, specs=specs)
        ps, treedef = tree_flatten(params)
        us = leaves_like(updates, treedef, "updates", "params")
        check_shapes(treedef, ps, updates=us)
        if ps:
            foreach_add_(ps, us)
        return params, state

    return apply
