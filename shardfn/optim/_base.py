"""`GradientTransformation`: a rule from gradients to updates, with needs, and the identity.

An optimizer is a pair of pure functions, `init` and `update`, as in optax. An optional `apply` computes the same, and
writes into the given buffers. Law: `apply(g, s, p) == (p + u, s')` where `u, s' = update(g, s, p)`. The value `needs`
states the conditions for applying the rule to a part of a tree, or on one of many ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import collectives, core
from shardfn.core import Mesh, P

Params = core.PyTree
Updates = core.PyTree
OptState = core.PyTree
Specs = core.PyTree
Mask = core.PyTree | Callable[[Params], core.PyTree]
# The smallest part of a tree that a rule can step separately.
Grain = Literal["element", "leaf", "tree"]
# A user-defined rule: `(init, update)`, the two fields of optax's GradientTransformation.
Pair = tuple[Callable[..., Any], Callable[..., Any]]
Count = int | Int[Tensor, ""]
Schedule = Callable[[Any], Float[Tensor, ""]]
# A hyperparameter: a tensor where a transform is to map or differentiate over it.
Number = float | int | Float[Tensor, ""]
LearningRate = float | int | Float[Tensor, ""] | Schedule


class WholeLeaf(collectives.GlobalTensor):
    """Leaf as a step shows the leaf to a rule: whole, without data, with the spec of the updated rows.

    Attributes:
        own: axes along which ranks hold different elements, for example different experts. Gradients are not averaged
            over these axes.
        unreduced: axes along which each rank has a gradient of its rows of the batch, whose mean is the gradient of the
            leaf. See `reduce_gradient`. Empty unless the rule averages gradients in this step (see `Phases`).

    Example:
        >>> from shardfn.core import Mesh, P
        >>> mesh = Mesh({"dp": 2, "ep": 2}, torch.device("cpu"), abstract=True)
        >>> leaf = WholeLeaf(torch.empty(4, device="meta"), torch.Size([8]), P(("ep", "dp")), mesh, ("ep",))
        >>> leaf.own
        ('ep',)
    """

    __slots__ = ("own", "unreduced")

    def __init__(
        self,
        local: core.StoredValue,
        shape: torch.Size,
        spec: P,
        mesh: Mesh,
        own: tuple[str, ...],
        unreduced: tuple[str, ...] = (),
    ) -> None:
        super().__init__(local, shape, spec, mesh)
        self.own, self.unreduced = own, unreduced

    def with_block(self, block: core.StoredValue) -> "WholeLeaf":
        """Returns the same leaf with another block."""
        return WholeLeaf(block, self.shape, self.spec, self.mesh, self.own, self.unreduced)


def rows_over(leaf: collectives.GlobalTensor, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes along which ranks keep rows of a leaf, but compute with the whole leaf in a mean over `axes`.

    These are all axes of the rows, or none if the rows are cut along other axes than `axes`. For example, rows along
    ("node", "gpu") are not contiguous for a rank of "gpu", so a mean over "node" is of the whole leaf.
    """
    own = leaf.own if isinstance(leaf, WholeLeaf) else tuple(a for a in leaf.spec.axes if a not in axes)
    rows = tuple(a for a in leaf.mesh.axes(leaf.spec.axes) if a not in own)
    return rows if set(rows) & set(axes) else ()


def reduce_gradient(grad: Tensor, leaf: WholeLeaf) -> Tensor:
    """Returns this rank's rows of the averaged gradient of a leaf. For a rule that averages gradients (see `Phases`).

    Right for every placement of the leaf: a mean over `leaf.unreduced`, and then the rows by `leaf.spec`. Collective.

    Args:
        grad: gradient of this rank's rows of the batch, whole along `leaf.unreduced`.
        leaf: leaf, as `Needs.bind_stats` is given the leaf.

    Example:
        >>> from shardfn.core import Mesh, P
        >>> mesh = Mesh({}, torch.device("cpu"), abstract=True)
        >>> leaf = WholeLeaf(torch.empty(2, device="meta"), torch.Size([2]), P(), mesh, ())
        >>> reduce_gradient(torch.ones(2), leaf)
        tensor([1., 1.])
    """
    grad = collectives.pmean(grad, leaf.unreduced) if grad.numel() and leaf.unreduced else grad
    rows = rows_over(leaf, leaf.unreduced)
    for dim in range(grad.ndim):
        grad = collectives.take_own_block(grad, tuple(a for a in leaf.spec.dim_axes(dim) if a in rows), dim=dim)
    return grad


class Phase(NamedTuple):
    """Kind of the next step of a rule that averages gradients.

    Attributes:
        name: name of the phase, such as "warmup".
        local: whether the rule gets local gradients of each rank and averages. If not, the rule gets averaged
            gradients, like any rule.
    """

    name: str
    local: bool


class Phases(NamedTuple):
    """Phases of a rule that averages gradients.

    Attributes:
        axes: mesh axes over which the rule averages.
        next: `next(state) -> Phase`, phase of the next step, equal on all ranks. Read on the host. In a `local` phase
            the rule gets whole gradients, also where parameters are rows of leaves, and makes the mean over the leaf's
            `unreduced` axes itself, exactly (`reduce_gradient`) or by other messages. If a leaf of the state has
            another placement than the parameter's rows, `init` makes a `GlobalTensor`, and `update` gets the block. A
            jitted step has a graph for each phase.
        is_last: whether the rule depends on the parameters after the step, so that no later rule may change the
            updates.
    """

    axes: tuple[str, ...]
    next: Callable[[OptState], Phase]
    is_last: bool = False


class Measure(NamedTuple):
    """A number of the whole tree that a rule of a finer granularity may need, such as the norm.

    Attributes:
        of: `of(block) -> Tensor`, 0-d: measure of a leaf's local block. The sum over blocks is the measure of the leaf.
        additive: whether `Needs.bind_stats` uses only the sum of the measures.
        ahead: `ahead(state) -> bool`: whether the next step only stores the measures for a later step, and so can begin
            before the measures are known. None: never. Read on the host.
    """

    of: Callable[[Tensor], Tensor]
    additive: bool = False
    ahead: Callable[[OptState], bool] | None = None


class Needs(NamedTuple):
    """Facts about a rule that a step needs. `join_needs` joins the needs of several rules.

    Attributes:
        granularity: the smallest part of a tree that the rule can update separately with bitwise identical results:
            "element" (an element's step depends on that element, on counters and on hyperparameters), "leaf" (on the
            leaf), "tree" (on everything). See `in_pieces`. A rule with a finer granularity than "tree" keeps counters
            in state leaves that `init` also makes for a tree without leaves.
        measure: a number computed of each leaf's gradient before a step. None: no measure.
        resolve_masks: `resolve_masks(params) -> rule`: the rule for the tree `params` of whole leaves (shapes and
            dtypes only), and for blocks and parts of the tree. All functions of the tree, such as masks and labels, are
            called here and not again. None: the rule has no such functions.
        bind_stats: `bind_stats(params, stats, phase) -> rule`: the rule for parts of the tree `params` (shapes only),
            in a step with measures `stats`, one entry a leaf, and in that phase. Each may be None (unknown). None: the
            rule uses none of the three. For a rule with phases, `params` are the whole blocks, as `WholeLeaf`s if the
            specs of the rows are known.
        phases: phases of a rule that averages gradients, else None.
        whole: whether the rule can only be applied to whole leaves, because `update` takes no specs. Set by
            `as_transformation`.
        donates: whether `update` accepts `donate=True`, a permission to overwrite the updates.
        ascends: whether the updates point along the gradient, so that a learning rate must follow in a chain. A step
            refuses such a rule without a learning rate: parameters plus updates would raise the loss. A rule that
            treats leaves differently has a function `ascends(params)` with a bool for each leaf. See `find_ascending`.
    """

    granularity: Grain = "tree"
    measure: Measure | None = None
    resolve_masks: "Callable[[Params], GradientTransformation] | None" = None
    bind_stats: "Callable[[Params, Tensor | None, Phase | None], GradientTransformation] | None" = None
    phases: Phases | None = None
    whole: bool = False
    donates: bool = False
    ascends: bool | Callable[[Params], Sequence[bool]] = False


_BY_STEP = "The step updates the parameters: state, metrics = sf.sharded_step(loss, optimizer)(state, batch)."


@core.explains_attributes(
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
            params of `P`, the spec of each block. None: leaves are whole. For an `update` without `specs` see
            `as_transformation`.
        apply: `apply(grads, state, params, *, specs=None) -> (params, state)`: the same in place, with permission to
            overwrite the buffers of all three arguments. None: `update` and an addition are used.
        needs: needs of the rule. The default is right for any rule.

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
    """State of a rule without memory."""


def stateless(update: Callable[..., Updates], granularity: Grain = "tree") -> GradientTransformation:
    """Returns a rule without memory, made of `update(updates, params, specs) -> updates`.

    Args:
        update: the function.
        granularity: smallest part of a tree that the rule may be applied to.

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
