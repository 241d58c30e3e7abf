"""`GradientTransformation`: the noun of the room, its needs, and its identity.

An optimizer is a pair of pure functions, `init` and `update`, as in optax. Beside them it may carry `apply`: the same
mathematics written into the buffers it is given. Law: `apply(g, s, p) == (p + u, s')` where `u, s' = update(g, s, p)`.
And one value, `needs`, states its conditions for being applied to a part of a tree, or on one of many ranks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import GlobalTensor
from shardfn.core import Mesh, P, StoredValue, explains_attributes

from ._types import Grain, OptState, Params, Specs, Updates


class WholeLeaf(GlobalTensor):
    """A leaf as a step shows it to a rule: whole, without data, with the spec of the rows that are updated.

    Attributes:
        own: the axes along which ranks compute with elements of their own, as with their experts: the gradient has no
            mean there.

    Example:
        >>> from shardfn.core import Mesh, P
        >>> mesh = Mesh({"dp": 2, "ep": 2}, torch.device("cpu"), abstract=True)
        >>> leaf = WholeLeaf(torch.empty(4, device="meta"), torch.Size([8]), P(("ep", "dp")), mesh, ("ep",))
        >>> leaf.own
        ('ep',)
    """

    __slots__ = ("own",)

    def __init__(self, local: StoredValue, shape: torch.Size, spec: P, mesh: Mesh, own: tuple[str, ...]) -> None:
        super().__init__(local, shape, spec, mesh)
        self.own = own

    def with_block(self, block: StoredValue) -> "WholeLeaf":
        """The same leaf with another block."""
        return WholeLeaf(block, self.shape, self.spec, self.mesh, self.own)


def rows_over(leaf: GlobalTensor, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of `axes` along which ranks keep rows of a leaf, and compute with the whole."""
    own = leaf.own if isinstance(leaf, WholeLeaf) else ()
    return tuple(a for a in leaf.mesh.axes(leaf.spec.axes) if a in axes and a not in own)


class Phase(NamedTuple):
    """The next step of a rule that averages gradients itself.

    Attributes:
        name: the name of the phase; a rule has few.
        local: whether the rule gets each rank's own gradients and does the averaging. If not, it gets averaged ones,
            like any rule.
    """

    name: str
    local: bool


class Phases(NamedTuple):
    """The phases of a rule that averages gradients itself.

    Attributes:
        axes: the mesh axes over which it averages.
        next: `next(state) -> Phase`, of the step that comes next; the same on all ranks. Read on the host. In a phase
            that is `local` the gradients that the rule gets are whole, also where parameters are rows of leaves, and
            their mean over `axes` is the gradient. A leaf of its state that is not kept as its parameter's rows are is
            made by `init` as a `GlobalTensor`; `update` is given its block.
        is_last: whether the rule knows where its steps lead, so that no rule after it may change them.
        by_leaf: whether it takes the mean of a leaf over those of `axes` that are not the leaf's own: see `WholeLeaf`.
            If not, a step refuses leaves that are cut along some of `axes`, such as experts.
    """

    axes: tuple[str, ...]
    next: Callable[[OptState], Phase]
    is_last: bool = False
    by_leaf: bool = False


class Measure(NamedTuple):
    """The one thing that a rule of a finer granularity may need of the whole tree.

    Attributes:
        of: `of(block) -> Tensor`, 0-d: for a leaf's local block; it adds up over blocks.
        additive: whether `Needs.specialize` looks at no more of the measures than their sum.
        ahead: `ahead(state) -> bool`: whether the step that comes next only keeps its measures, for a later one; so it
            can begin before they are known. None = it never does. Read on the host.
    """

    of: Callable[[Tensor], Tensor]
    additive: bool = False
    ahead: Callable[[OptState], bool] | None = None


class Needs(NamedTuple):
    """The facts about a rule that a step needs to apply it; `join_needs` joins those of several rules.

    Attributes:
        granularity: the smallest part of a tree that the rule can update separately with bitwise identical results:
            "element" (an element's step depends on that element, on counters and on hyperparameters), "leaf" (on its
            leaf), "tree" (on everything). See `in_pieces`. A rule with a finer granularity than "tree" keeps its
            counters in state leaves that `init` also makes for a tree without leaves.
        measure: a number computed of each leaf's gradient before a step; None means none.
        decide: `decide(params) -> rule`: the rule for the tree `params` of whole leaves (shapes and dtypes only), and
            for blocks and parts of it: each function of the tree that it was made with, of a mask or of labels, is
            called here and not again. None = the rule itself, which has no such functions.
        specialize: `specialize(params, stats, phase) -> rule`: the rule for parts of the tree `params` (shapes only),
            in a step whose measures are `stats`, one entry a leaf, and in that phase; each may be None = not known.
            None = the rule itself, for it looks at none of them. Where a rule has phases, `params` are the whole
            blocks, and as `WholeLeaf`s, where it is known how the rows are cut out of leaves.
        phases: of a rule that averages gradients itself; else None.
        whole: whether the rule can only be applied to whole leaves, as its `update` takes no specs. Set by
            `as_transformation`.
        donates: whether `update` takes `donate=True`, with which it may overwrite its updates.
        ascends: whether its updates point along the gradient, so that a learning rate has to follow it in a chain. A
            step refuses such a rule alone: parameters plus these updates would raise the loss. A rule that treats
            leaves differently has a function: `ascends(params)`, whether they do for each leaf. See `ascending`.
    """

    granularity: Grain = "tree"
    measure: Measure | None = None
    decide: "Callable[[Params], GradientTransformation] | None" = None
    specialize: "Callable[[Params, Tensor | None, Phase | None], GradientTransformation] | None" = None
    phases: Phases | None = None
    whole: bool = False
    donates: bool = False
    ascends: bool | Callable[[Params], Sequence[bool]] = False


_BY_STEP = "The step updates the parameters: state, metrics = sf.sharded_step(loss, optimizer)(state, batch)."


@explains_attributes(
    step=_BY_STEP,
    zero_grad=f"Leave it out. {_BY_STEP}",
    param_groups="Rules for some leaves are made by optim.multi_transform; a rate that changes is a schedule.",
    state_dict="Its state is a part of the step's: sf.checkpoint.save(directory, state).",
    load_state_dict="Its state is a part of the step's: sf.checkpoint.restore(directory, state).",
)
class GradientTransformation(NamedTuple):
    """A rule from gradients to updates.

    Attributes:
        init: `init(params) -> state`.
        update: `update(updates, state, params=None, *, specs=None) -> (updates, state)`. Pure. `specs` is a tree like
            params whose leaves are `P`: how each local block is cut out of its global leaf; None = leaves are whole.
            For one that takes no `specs` see `as_transformation`.
        apply: `apply(grads, state, params, *, specs=None) -> (params, state)`: the same in place. It may overwrite the
            buffers of all three arguments. None = there is no faster way than `update` and an addition.
        needs: its `Needs`; the default is right for any rule.

    Example:
        >>> def update(updates, state, params=None, *, specs=None):
        ...     return [u / 2 for u in updates], state
        >>> halve = GradientTransformation(lambda params: (), update, needs=Needs(granularity="element"))
        >>> halve.update([1.0], halve.init([0.0]))
        ([0.5], ())

    References:
        Babuschkin et al., The DeepMind JAX Ecosystem (optax), 2020, https://github.com/google-deepmind/optax
    """

    init: Callable[[Params], OptState]
    update: Callable[..., tuple[Updates, OptState]]
    apply: Callable[..., tuple[Params, OptState]] | None = None
    needs: Needs = Needs()


class EmptyState(NamedTuple):
    """The state of a rule that remembers nothing."""


def stateless(update: Callable[..., Updates], granularity: Grain = "tree") -> GradientTransformation:
    """A rule without memory, from `update(updates, params, specs) -> updates`.

    Args:
        update: the function.
        granularity: how finely the rule may be applied.

    Example:
        >>> negate = stateless(lambda updates, params, specs: [-u for u in updates])
        >>> negate.update([1.0], negate.init([0.0]))
        ([-1.0], EmptyState())
    """

    def init_fn(params: Params) -> EmptyState:
        del params
        return EmptyState()

    def update_fn(
        updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        return update(updates, params, specs), state

    return GradientTransformation(init_fn, update_fn, needs=Needs(granularity))


def identity() -> GradientTransformation:
    """The rule that changes nothing: `u = g`.

    Example:
        >>> identity().update({"w": 1.0}, EmptyState())
        ({'w': 1.0}, EmptyState())
    """
    rule = stateless(lambda updates, params, specs: updates)
    return rule._replace(needs=Needs("element", ascends=True))
