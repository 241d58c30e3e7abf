"""The two halves of a step: its gradients, as a tree, and the update that takes them.

    gradients   differentiate, measure, and the factor that gradients still lack     reads the state
    update      measure, choose, update                                              writes it

`step == update . gradients`, bit for bit: both halves are the parts of `one_step`, cut between measure and choose.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import Agreed, GlobalTensor, local
from shardfn.core import PyTree, RankError, raise_all, tree_leaves, tree_map
from shardfn.engine.agreement import Comms
from shardfn.engine.loss import Finish, wrapped_like
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import (
    Blocks,
    Executor,
    Found,
    Metrics,
    Outcome,
    StepParts,
    as_tree,
    by_leaf,
    measured,
    scaled,
)
from shardfn.optim import summing_exactly
from shardfn.state import TrainState, scale_of, taken

from ._eager_step import EagerStep
from ._update import update


class Passed(NamedTuple):
    """The arguments of an update besides the state.

    Attributes:
        grads: a tree as `gradients` returns it.
        model_state: a tree of `GlobalTensor`s; None keeps that of the state.
        finite: whether the loss and the gradients were finite where they were computed.
    """

    grads: PyTree
    model_state: PyTree = None
    finite: Tensor | bool = True

    def finish(self, parts: StepParts) -> Finish | None:
        """The end of the step for the model state that is passed; that of the state stays."""
        return None if self.model_state is None else parts.finish


class GradientCall(NamedTuple):
    """The gradients of a loss, which ranks agree on and then compute.

    Attributes:
        run: computes them for the state that was admitted, or for one that has, besides, the model state that another
            loss has left.
        known: whether this rank already has the results of a first call; see `Agreed`.
    """

    run: Callable[[Comms, Agreed, TrainState], Found]
    known: tuple[bool, bool] = (True, True)


# The new state, of this rank's gradients by leaf and the blocks of the model state before the end of the step.
Apply = Callable[[Comms, TrainState, Blocks, PyTree], TrainState]


def run_gradients(
    parts: StepParts, plan: Plan, comms: Comms, state: TrainState, args: tuple[Any, ...], even: bool
) -> Found:
    """The gradients of one global batch; the state is read and not changed. The mesh must be bound.

    Args:
        parts: loss, optimizer and flags of the step.
        plan: the layout.
        comms: the communicators.
        state: the current state.
        args: this rank's batch, and a key if the loss takes one.
        even: whether all ranks hold batches of the same shapes.
    """
    with exact(plan):
        grads, kept, metrics = gradients_of(EagerStep(parts, plan, comms, state, args, even, None), plan)
    return Found(as_tree(plan, grads), kept_apart(kept, state.model_state), metrics)


def gradients_of(run: Executor[Outcome, Any], plan: Plan) -> tuple[Blocks, PyTree, Metrics]:
    """The first half of `one_step`: gradients with the factor that they lack, the new model state, and the metrics."""
    out = run.differentiate()
    metrics, scale = run.measure(out)
    del metrics["skipped"]
    with torch.no_grad():
        return scaled(plan, out.reducer.gradients().take_all(), scale), out.model_state, metrics


def run_update(
    parts: StepParts, plan: Plan, comms: Comms, state: TrainState, passed: Passed, apply: Apply
) -> tuple[TrainState, Metrics]:
    """The state after an update by gradients, which are consumed if the step donates. The mesh must be bound.

    Args:
        parts: loss, optimizer and flags of the step.
        plan: the layout.
        comms: the communicators.
        state: the current state; consumed if the step donates and the update is not skipped.
        passed: the gradients, and the values that come with them.
        apply: makes the new state.
    """
    with exact(plan), torch.no_grad(), taken(passed.grads, donate=parts.donate) as held:
        grads = by_leaf(plan, held)
        metrics = measured(plan, grads, passed.finite, scale_of(state))
        if parts.skips and not _all_finite(comms, metrics):
            metrics["skipped"] = torch.ones_like(metrics["skipped"])
            return state, metrics
        kept = state.model_state if passed.model_state is None else passed.model_state
        return apply(comms, state, grads, local(kept)), metrics


def apply_eagerly(parts: StepParts, plan: Plan, finish: Finish | None) -> Apply:
    """An eager update, with the end of the step for the model state."""

    def apply(comms: Comms, state: TrainState, grads: Blocks, model_state: PyTree) -> TrainState:
        channels = comms.channels
        return update(plan, channels, parts, state, grads.pop, model_state=model_state, finish=finish, scale=None)

    return apply


def exact(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    """A context in which sums of squares do not depend on the number of ranks, if the plan has canonical sums."""
    return contextlib.nullcontext() if plan.chunks is None else summing_exactly()


def kept_apart(blocks: PyTree, old: PyTree) -> PyTree:
    """The model state that a loss has returned, as global tensors without memory of the state's own."""
    theirs = {x.local.untyped_storage()._cdata for x in tree_leaves(old)}
    own = tree_map(lambda x: x.clone() if x.untyped_storage()._cdata in theirs else x.detach(), blocks)
    return wrapped_like(tree_leaves(own), old)


def refuse_own_averages(plan: Plan) -> None:
    """Refuses to open a step whose optimizer averages gradients itself in the phase of the plan.

    Raises:
        ValueError: names the phase and the axes.
    """
    if plan.num_left > 1:
        phase = "" if plan.phase is None else f" in its phase {plan.phase.name!r}"
        raise ValueError(
            f"the optimizer averages gradients over {plan.left_axes} itself{phase}, so each rank would get gradients of"
            " its own rows. Call step(state, batch) in this phase, or use an optimizer that does not average."
        )


def check_passed_state(new: PyTree, old: PyTree) -> None:
    """Refuses a model state whose leaves are not like those of the state.

    Raises:
        ValueError: lists every such leaf.
    """
    pairs = list(zip(tree_leaves(new), tree_leaves(old), strict=True))
    raise_all(
        ValueError,
        "the model state is not like that of the state:",
        [
            f"leaf {k} is {tuple(x.shape)} {x.dtype}; in the state it is {tuple(y.shape)} {y.dtype}"
            for k, (x, y) in enumerate(pairs)
            if not isinstance(x, GlobalTensor) or x.shape != y.shape or x.dtype != y.dtype
        ],
    )


def _all_finite(comms: Comms, metrics: Metrics) -> bool:
    """Whether the update goes ahead: all ranks must find the same, or some would wait for others that skip it.

    Raises:
        RankError: they do not; names the ranks.
    """
    found = list(comms.control.exchange(int(bool(metrics["finite"]))))
    if len(set(found)) > 1:
        ranks = [rank for rank, x in enumerate(found) if not x]
        raise RankError(
            f"ranks {ranks} find gradients that are not finite, and the others do not; gradients of leaves that ranks"
            " share must be changed alike on all of them."
        )
    return bool(found[0])
