"""`StepRun`: the parts of a single step on this rank's blocks, which an eager call and a capture run alike.

The eager calls follow (a step, its gradients, and the update by gradients), and then the metrics of a step: the global
loss, the norm of the averaged gradient, and the aux values of the loss.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from shardfn.collectives import StoppedError, local, psum
from shardfn.core import PyTree, RankError, StoredValue, tree_leaves, tree_map
from shardfn.engine.agreement import Comms, named_range
from shardfn.engine.loss import Finish, wrapped_like
from shardfn.engine.plan import Chunks, Plan
from shardfn.engine.transfers import (
    BackwardResult,
    Blocks,
    FoundGradients,
    Metrics,
    StepParts,
    as_tree,
    by_leaf,
    measured,
    scaled,
    sum_all_squares,
    sum_values,
)
from shardfn.optim import sum_exactly
from shardfn.state import OverlappedUpdate, TrainState, peek_blocks, scale_of, taken

from ._run_backward import run_backward
from ._update import StateBlocks, blocks_of, early, next_state, update_in

Out = TypeVar("Out")
New = TypeVar("New")


@runtime_checkable
class Executor(Protocol[Out, New]):
    """Runs one step. Made for one state and one batch. Each part is called once, in the order of `one_step`."""

    def differentiate(self) -> Out:
        """Returns the loss and the gradients of the global batch. Reads the state, and does not write to it."""
        ...

    def measure(self, out: Out) -> tuple[Metrics, Tensor | None]:
        """Returns the metrics, equal on all ranks, and the factor that gradients still lack, or None."""
        ...

    def choose(self, metrics: Metrics, update: Callable[[], New]) -> New:
        """Returns the state that `update` makes, or the old state if the step is skipped; notes it in the metrics."""
        ...

    def update(self, out: Out, scale: Tensor | None) -> New:
        """Returns the new state. This is the first part that may write to the old state."""
        ...


def one_step(run: Executor[Out, New]) -> tuple[New, Metrics]:
    """Runs one step, and returns the new state and the metrics."""
    out = run.differentiate()
    metrics, scale = run.measure(out)
    return run.choose(metrics, lambda: run.update(out, scale)), metrics


@dataclasses.dataclass
class StepRun:
    """An `Executor` on blocks, whose new state is the new blocks of params, optimizer state and model state.

    Attributes:
        parts: loss, optimizer and flags of the step.
        plan: layout.
        comms: communicators.
        read: gives the blocks of params and model state, which are not written to.
        write: context manager with all blocks of the state, for the update to write to.
        args: batch of this rank, and a key if the loss takes one.
        loss_scale: factor of the loss. None means 1.
        even: whether all ranks hold batches of the same shapes.
        ahead: update of some leaves during the backward, or None without one.
        metrics: metrics of the step, when they are measured.
        received: whether a trainable leaf has a gradient, or no leaf is trainable.
    """

    parts: StepParts
    plan: Plan
    comms: Comms
    read: Callable[[], tuple[Sequence[StoredValue], PyTree]]
    write: Callable[[], AbstractContextManager[StateBlocks]]
    args: tuple[Any, ...]
    loss_scale: Tensor | None
    even: bool
    ahead: OverlappedUpdate | None = None
    metrics: Metrics = dataclasses.field(default_factory=dict)
    received: bool = False

    @staticmethod
    def of_blocks(
        parts: StepParts,
        plan: Plan,
        comms: Comms,
        blocks: StateBlocks,
        args: tuple[Any, ...],
        scale: Tensor | None,
        *,
        even: bool,
    ) -> "StepRun":
        """Returns the run of a step on these blocks, which it may write to."""

        def write() -> AbstractContextManager[StateBlocks]:
            return contextlib.nullcontext(blocks)

        return StepRun(parts, plan, comms, lambda: (blocks[0], blocks[2]), write, args, scale, even)

    @staticmethod
    def of_state(
        parts: StepParts, plan: Plan, comms: Comms, state: TrainState, args: tuple[Any, ...], *, even: bool
    ) -> "StepRun":
        """Returns the run of a step on a state, which an update consumes if the step donates."""

        def read() -> tuple[Sequence[StoredValue], PyTree]:
            return [x.held for x in tree_leaves(state.params)], peek_blocks(state.model_state)

        def write() -> AbstractContextManager[StateBlocks]:
            return taken(blocks_of(state), donate=parts.donate)

        return StepRun(parts, plan, comms, read, write, args, scale_of(state), even)

    def differentiate(self) -> BackwardResult:
        blocks, kept = self.read()
        out = run_backward(
            self.plan,
            self.comms,
            blocks,
            self.parts,
            self.args,
            even=self.even,
            model_state=kept,
            loss_scale=self.loss_scale,
            ahead=self.ahead,
        )
        self.received = out.reducer.received or not self.plan.trained
        return out

    def measure(self, out: BackwardResult) -> tuple[Metrics, Tensor | None]:
        with exact(self.plan):
            self.metrics, scale = measure(self.plan, out, self.loss_scale)
        return self.metrics, scale

    def choose(self, metrics: Metrics, update: Callable[[], StateBlocks]) -> StateBlocks:
        if self.parts.skips:
            torch.ops.shardfn.stop_unless(metrics["finite"], list(metrics.values()))
        return update()

    def update(self, out: BackwardResult, scale: Tensor | None) -> StateBlocks:
        with named_range("reduce"), torch.no_grad():
            grads = out.reducer.gradients()
        parts, channels = self.parts, self.comms.channels
        with named_range("update"), exact(self.plan):
            return update_in(
                self.plan,
                channels,
                parts.optimizer,
                self.write(),
                grads.take,
                model_state=out.model_state,
                finish=parts.finish,
                scale=scale,
                ahead=self.ahead,
            )

    def gradients(self) -> tuple[Blocks, PyTree, Metrics]:
        """Returns the gradients times the factor of `measure`, the new model state, and the metrics."""
        out = self.differentiate()
        metrics, scale = self.measure(out)
        del metrics["skipped"]
        with torch.no_grad():
            return scaled(self.plan, out.reducer.gradients().take_all(), scale), out.model_state, metrics


class UpdateArgs(NamedTuple):
    """The arguments of an update besides the state.

    Attributes:
        grads: tree as `gradients` returns it.
        model_state: tree of `GlobalTensor`s. None keeps the model state of the state.
        finite: whether the loss and the gradients were finite where they were computed.
    """

    grads: PyTree
    model_state: PyTree = None
    finite: Tensor | bool = True

    def finish(self, parts: StepParts) -> Finish | None:
        """Returns the end of the step for the model state that is passed. The model state of the state stays."""
        return None if self.model_state is None else parts.finish


# Makes the new state, of this rank's gradients by leaf and of the model state before the end of the step.
Apply = Callable[[Comms, TrainState, Blocks, PyTree], TrainState]


def run_step(
    parts: StepParts, plan: Plan, comms: Comms, state: TrainState, args: tuple[Any, ...], even: bool
) -> tuple[TrainState, Metrics]:
    """Runs one step. The mesh must be bound.

    Args:
        parts: loss, optimizer and flags of the step.
        plan: layout.
        comms: communicators.
        state: current state; consumed if the step donates.
        args: batch of this rank, and a key if the loss takes one.
        even: whether all ranks hold batches of the same shapes.
    """
    run = StepRun.of_state(parts, plan, comms, state, args, even=even)
    known = not parts.skips and parts.table is None
    before = contextlib.nullcontext() if plan.at_home else early(plan, parts.optimizer, state, decided=known)
    try:
        with before as run.ahead:
            new, metrics = one_step(run)
    except StoppedError as stopped:
        return skipped(state, tuple(run.metrics), stopped)
    return next_state(plan, state, new), metrics


def run_gradients(
    parts: StepParts, plan: Plan, comms: Comms, state: TrainState, args: tuple[Any, ...], even: bool
) -> FoundGradients:
    """Computes the gradients of one global batch, and does not change the state; for arguments see `run_step`."""
    grads, kept, metrics = StepRun.of_state(parts, plan, comms, state, args, even=even).gradients()
    return found_of(plan, grads, kept, state, metrics)


def run_update(
    parts: StepParts, plan: Plan, comms: Comms, state: TrainState, passed: UpdateArgs, apply: Apply
) -> tuple[TrainState, Metrics]:
    """Returns the state after an update by gradients, which are consumed if the step donates.

    The mesh must be bound.

    Args:
        parts: loss, optimizer and flags of the step.
        plan: layout.
        comms: communicators.
        state: current state; consumed if the step donates and the update is not skipped.
        passed: the gradients, and the values that come with them.
        apply: makes the new state.
    """
    with exact(plan), torch.no_grad(), taken(passed.grads, donate=parts.donate) as held:
        grads = by_leaf(plan, held)
        metrics = measured(plan, grads, passed.finite, scale_of(state))
        if parts.skips and not _is_finite_everywhere(comms, metrics):
            metrics["skipped"] = torch.ones_like(metrics["skipped"])
            return state, metrics
        kept = state.model_state if passed.model_state is None else passed.model_state
        return apply(comms, state, grads, local(kept)), metrics


def skipped(state: TrainState, names: Sequence[str], stopped: StoppedError) -> tuple[TrainState, Metrics]:
    """Returns the old state and the metrics of a step that stopped before it wrote anything."""
    metrics = dict(zip(names, stopped.carried, strict=True))
    metrics["skipped"] = torch.ones_like(metrics["skipped"])
    return state, metrics


def found_of(plan: Plan, grads: Blocks, kept: PyTree, old: TrainState, metrics: Metrics) -> FoundGradients:
    """Returns the result of `gradients`: the model state of the loss shares no memory with the state's own."""
    theirs = {x.local.untyped_storage()._cdata for x in tree_leaves(old.model_state)}
    own = tree_map(lambda x: x.clone() if x.untyped_storage()._cdata in theirs else x.detach(), kept)
    return FoundGradients(as_tree(plan, grads), wrapped_like(tree_leaves(own), old.model_state), metrics)


def exact(plan: Plan) -> AbstractContextManager[Any]:
    """Returns a context in which sums of squares do not depend on the number of ranks, for canonical sums."""
    return contextlib.nullcontext() if plan.chunks is None else sum_exactly()


def _is_finite_everywhere(comms: Comms, metrics: Metrics) -> bool:
    """Returns whether the update goes ahead: ranks must find the same, or some would wait for others that skip it.

    Raises:
        RankError: ranks differ. The message names the ranks.
    """
    found = list(comms.control.exchange(int(bool(metrics["finite"]))))
    if len(set(found)) > 1:
        ranks = [rank for rank, x in enumerate(found) if not x]
        raise RankError(
            f"ranks {ranks} find gradients that are not finite, and the others do not. Gradients of leaves that ranks"
            " share must be changed alike on all of them."
        )
    return bool(found[0])


def measure(plan: Plan, out: BackwardResult, loss_scale: Tensor | None = None) -> tuple[Metrics, Tensor | None]:
    """Returns the metrics of a step, equal on all ranks, and the factor that gradients still lack, or None.

    The gradients passed in are multiplied by `loss_scale`.

    Raises:
        ValueError: an aux has the name of one of the step's own metrics.
    """
    like = out.total
    # In float64, like all sums here: a count or a total of tokens must not be rounded.
    count = torch.tensor(float(out.num_microbatches), dtype=torch.float64, device=like.device)
    row = [out.total, count if out.weight is None else out.weight]
    row += [x for pair in out.aux.values() for x in pair]
    if out.reducer.chunks is not None:
        return _measure_chunks(plan, out.reducer.chunks, out, loss_scale)
    squares = _sum_squares(plan, out)
    # Values that are summed over the batch's axes, nearly always all of them, travel together.
    own = squares.pop(plan.batch_axes, torch.zeros_like(count))
    *rest, own = psum(torch.stack([x.to(torch.float64) for x in [*row, own]]), plan.batch_axes)
    sums = torch.stack(rest)
    norm = torch.sqrt(own + sum(psum(x, axes) for axes, x in squares.items()))
    return _compute_metrics(plan, out, sums, norm, loss_scale)


def _compute_metrics(
    plan: Plan, out: BackwardResult, sums: Tensor, norm: Tensor, loss_scale: Tensor | None
) -> tuple[Metrics, Tensor | None]:
    """Returns the metrics from the global sums of loss, weight and pairs of aux, and from the gradients' norm."""
    # Division by the weight or the loss scale is a factor, which is put on last.
    scale = None
    if out.weight is not None:
        scale = 1.0 / sums[1]
    if loss_scale is not None:
        scale = (1.0 if scale is None else scale) / loss_scale.to(norm)
    if scale is not None:
        norm = norm * scale
    aux = ((name, sums[2 + 2 * k] / sums[3 + 2 * k]) for k, name in enumerate(out.aux))
    return named((sums[0] / sums[1]).to(out.total.dtype), norm, aux, loss_scale), scale


def _measure_chunks(
    plan: Plan, chunks: Chunks, out: BackwardResult, loss_scale: Tensor | None
) -> tuple[Metrics, Tensor | None]:
    """`measure`, with sums that do not depend on the number of ranks."""
    store = out.reducer.store
    by_axes: dict[tuple[str, ...], list[StoredValue]] = {}
    for unit in store.units:
        by_axes.setdefault(plan.units_by_norm[unit], []).append(store.share(unit))
    norm = sum_all_squares(dict(sorted(by_axes.items()))).sqrt()
    return _compute_metrics(plan, out, sum_values(out.values, chunks, plan.batch_axes), norm, loss_scale)


def named(loss: Tensor, norm: Tensor, aux: Iterable[tuple[str, Tensor]], loss_scale: Tensor | None) -> Metrics:
    """Returns the metrics of a step, as if it is not skipped.

    Args:
        loss: the mean over the global batch.
        norm: norm of the averaged gradient.
        aux: names and means.
        loss_scale: the one that was used.

    Raises:
        ValueError: an aux has the name of one of the step's own metrics.
    """
    metrics = {"loss": loss, "grad_norm": norm.to(torch.float32)}
    metrics["finite"] = torch.isfinite(metrics["loss"]) & torch.isfinite(metrics["grad_norm"])
    metrics["skipped"] = torch.zeros_like(metrics["finite"])
    if loss_scale is not None:
        metrics["loss_scale"] = loss_scale.clone()
    for name, mean in aux:
        if name in metrics:
            raise ValueError(f"aux[{name!r}] has the name of a metric of the step. Choose another.")
        metrics[name] = mean.to(torch.float32)
    return metrics


def _sum_squares(plan: Plan, out: BackwardResult) -> dict[tuple[str, ...], Tensor]:
    """By the axes along which they are disjoint, this rank's sum of squares of the summed gradients.

    If the optimizer reduces a leaf's gradient, the mean of the squares of ranks' own gradients: n times their summand.
    """
    kinds: dict[tuple[tuple[str, ...], int], list[int]] = {}
    store = out.reducer.store
    for unit in store.units:  # in one order, so that the sum has the same bits
        kinds.setdefault((plan.units_by_norm[unit], plan.summands_by_unit[unit]), []).append(unit)
    sums: dict[tuple[str, ...], Tensor] = {}
    for (axes, num), own in kinds.items():
        x = store.squares(own).to(out.total.device, torch.float64).sum()
        x = x if num == 1 else x * num
        sums[axes] = sums[axes] + x if axes in sums else x
    return sums
