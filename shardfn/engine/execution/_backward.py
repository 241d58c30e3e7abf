"""One step's loss and gradients: storage -> compute, the user's loss, and the transpose, action by action."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import TransportError
from shardfn.core import PyTree, RankError, StoredValue, tree_map
from shardfn.engine.agreement import (
    Comms,
    described,
    open_channels,
    rounds_of,
)
from shardfn.engine.loss import Loss, microbatches
from shardfn.engine.pipeline import Staged, pipelined_in
from shardfn.engine.plan import Plan, UseOrder
from shardfn.engine.transfers import (
    Course,
    Gatherer,
    Outcome,
    StepParts,
    Whole,
    accumulation,
    check_capture,
    chunks_of,
    enter,
    watch_of,
)
from shardfn.leaves import LeafBook, opened
from shardfn.state import Ahead

from ._check_canonical import check_canonical
from ._performer import Performer


def run_forward(plan: Plan, comms: Comms, blocks: Sequence[StoredValue], key: Any, f: Callable[[PyTree], Any]) -> Any:
    """`f(params)` without gradients, with the leaves as a loss sees them; leaves that it returns come whole."""
    open_channels(comms, plan)
    kept, blocks = blocks, plan.by_layer(blocks)
    watch = watch_of(plan, kept, first=key not in plan.learnt.use_orders)
    gatherer = _gatherer(plan, comms, blocks, plan.learnt.use_order(key), keep=False)
    book = LeafBook(gatherer.whole, plan.layers, watch)
    with _sending_errors(gatherer, comms), torch.no_grad():
        params, _ = enter(plan, blocks, book, None)
        gatherer.begin_phase()
        out = tree_map(opened, f(params))
        watch.check("the function")
        gatherer.end_phase(ask=True)
    gatherer.close()
    check_capture(plan, blocks, book, "the function")
    return out


def run_backward(
    plan: Plan,
    comms: Comms,
    blocks: Sequence[StoredValue],
    parts: StepParts,
    args: tuple[Any, ...],
    *,
    even: bool,
    model_state: PyTree = (),
    loss_scale: Tensor | None = None,
    ahead: Ahead | None = None,
) -> Outcome:
    """The loss and the summed gradients of one global batch, by the actions of the step's schedule.

    Args:
        plan: the layout.
        comms: the communicators.
        blocks: this rank's block of each parameter.
        parts: the loss, and the order in which its microbatches run.
        args: this rank's batch, and a key if the loss takes one.
        even: whether all ranks hold batches of the same shapes; if not, the loss must be a `WeightedMean`.
        model_state: a tree of this rank's blocks, for a loss that takes one.
        loss_scale: the factor of the gradients; None means 1.
        ahead: an update that uses gradients as soon as they are complete; stopped if they must be divided by a weight.
    """
    open_channels(comms, plan, _late_axes(plan, parts))
    watch, blocks = watch_of(plan, blocks, first=not plan.learnt.compared), plan.by_layer(blocks)
    gatherer = _gatherer(plan, comms, blocks, plan.learnt.use_order("step"))
    check_canonical(plan, parts)
    chunks = plan.chunks
    if chunks is None:
        loss, batches = microbatches(parts.loss, args[0])
    else:
        loss, batches = parts.loss, chunks_of(plan, chunks, args[0], even=even)
        parts = dataclasses.replace(parts, schedule=accumulation(len(batches)))
    course = _course(plan, comms, parts, loss, batches, args[1:], model_state)
    book = LeafBook(gatherer.whole, plan.layers, watch)
    performer = Performer(plan, comms, course, len(batches), gatherer, book, ahead)
    with _sending_errors(gatherer, comms), torch.enable_grad():
        performer.enter(blocks, even=even, model_state=model_state, loss_scale=loss_scale)
        for action in course.actions:
            with course.named(action):
                performer.perform(action)
        return performer.finish(blocks, model_state)


def _course(
    plan: Plan,
    comms: Comms,
    parts: StepParts,
    loss: Loss,
    batches: list[Any],
    rest: tuple[Any, ...],
    model_state: PyTree,
) -> Course:
    if parts.table is None:
        return Whole(loss, batches, rest, parts.has_aux, parts.schedule)
    return Staged(plan, comms, loss, parts.table, batches, rest, parts.has_aux, model_state)


def _late_axes(plan: Plan, parts: StepParts) -> tuple[str, ...]:
    """The axes along which ranks run different actions at the same time."""
    staged = pipelined_in(parts.loss)
    if parts.table is None or staged is None:
        return ()
    return (staged.axis,)


def _gatherer(
    plan: Plan, comms: Comms, blocks: Sequence[StoredValue], order: UseOrder, *, keep: bool = True
) -> Gatherer:
    return Gatherer(
        plan.layers,
        plan.gather_units,
        blocks,
        comms.channels,
        rounds_of(comms, plan),
        order,
        plan.zero.pace.prefetch_bytes,
        plan.mesh.device,
        keep=keep,
    )


@contextlib.contextmanager
def _sending_errors(gatherer: Gatherer, comms: Comms) -> Iterator[None]:
    """If connections cannot be closed, sends an error to the other ranks in their next round, then raises it."""
    try:
        yield
    except Exception as error:
        if comms.meets and not isinstance(error, RankError | TransportError):
            gatherer.fail(described(error))
        raise
