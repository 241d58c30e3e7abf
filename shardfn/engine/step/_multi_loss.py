"""Several losses of one state: each with its own batch and its own trainable leaves. Their gradients are added.

    gradient of a leaf = the sum over the losses that train it

A leaf may be used by all of them and trained by one, as the critic of a GAN is. The state, and so the layout of every
leaf, is the same for all losses. Their plans differ in the leaves that get a gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import Agreed, AnyControl
from shardfn.core import PyTree, raise_all, tree_leaves
from shardfn.engine.execution import ProgramCall, StepPrograms, exact, global_mean, step_lines
from shardfn.engine.loss import Loss, Unwrapped
from shardfn.engine.plan import Plan, Planner
from shardfn.engine.transfers import (
    Blocks,
    FoundGradients,
    Metrics,
    StepParts,
    added,
    as_tree,
    by_leaf,
    measured,
)
from shardfn.state import TrainState, scale_of

from ._run_call import AdmittedBatch


class Objective(NamedTuple):
    """A loss among several of a single step, and the leaves that it trains.

    Attributes:
        loss: loss as `sharded_step` takes it.
        trainable: a prefix tree of bools for params: the leaves that this loss trains. It may use the others. None: all
            leaves that the step trains.

    Example:
        >>> import torch
        >>> import shardfn as sf
        >>> losses = {
        ...     "fit": lambda p, x: (p["w"] * x).sum(),
        ...     "bias": sf.Objective(lambda p, x: (p["w"] * p["b"] * x).sum(), {"w": False, "b": True}),
        ... }
        >>> step = sf.sharded_step(losses, sf.optim.sgd(0.1))
        >>> state = step.init({"w": torch.ones(1), "b": torch.ones(1)})
        >>> grads, metrics = step.gradients(state, {"fit": torch.ones(1), "bias": torch.full((1,), 3.0)})
        >>> grads["w"].full_tensor(), grads["b"].full_tensor(), metrics["bias/loss"]
        (tensor([1.]), tensor([3.]), tensor(3.))
    """

    loss: Loss
    trainable: PyTree = None


class StepLoss(NamedTuple):
    """One loss of a step.

    Attributes:
        unwrapped: the loss.
        parts: parts of a step of this loss only.
        planner: annotations of the loss.
        programs: gradients of the loss, eager or captured.
    """

    unwrapped: Unwrapped
    parts: StepParts
    planner: Planner
    programs: StepPrograms

    @staticmethod
    def of(unwrapped: Unwrapped, parts: StepParts, planner: Planner) -> "StepLoss":
        """Returns the source of a loss."""
        return StepLoss(unwrapped, parts, planner, StepPrograms(parts, unwrapped.jitted))


class LossCall(NamedTuple):
    """The part of one loss in an admitted call of its step.

    Attributes:
        name: name of the loss; "" in a step of one loss.
        source: the loss.
        plan: layout of the loss.
        rows: batch of the loss.
        call: call of the gradients of the loss.
    """

    name: str
    source: StepLoss
    plan: Plan
    rows: AdmittedBatch
    call: ProgramCall[FoundGradients]


def batches_of(names: Sequence[str], batch: PyTree) -> dict[str, PyTree]:
    """By loss, its batch.

    Raises:
        ValueError: losses have no batch, or there are batches of no loss.
    """
    if tuple(names) == ("",):
        return {"": batch}
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a step over several losses takes a dict with a batch for each of {list(names)}; got a"
            f" {type(batch).__name__}."
        )
    problems = [f"{name!r} has no batch" for name in names if name not in batch]
    problems += [f"{name!r} is not a loss; there are {list(names)}" for name in batch if name not in names]
    raise_all(ValueError, "a step over several losses takes a dict with a batch for each:", problems)
    return {name: batch[name] for name in names}


def facts_of(calls: Sequence[LossCall]) -> tuple[tuple[bool, bool], tuple[str, tuple[int, ...]]]:
    """Returns what a call with a batch for each loss asks of the agreement: see `AdmittedCall`, known and facts."""
    if len(calls) == 1:
        return calls[0].call.known, (calls[0].rows.text, calls[0].rows.sizes)
    at_even = all(x.call.known[0] for x in calls)
    text = "\n".join(f"of {x.name!r}:\n{x.rows.text}" for x in calls)
    return (at_even, at_even), (text, tuple(n for x in calls for n in x.rows.sizes))


def agreed_on_each(control: AnyControl, calls: Sequence[LossCall], agreed: Agreed) -> list[Agreed]:
    """Returns the agreement on each loss, given the agreement on all losses. Collective."""
    if len(calls) == 1 or agreed.even:
        return [agreed for _ in calls]
    ends = [sum(len(x.rows.sizes) for x in calls[: k + 1]) for k in range(len(calls))]
    cut = [[row[end - len(x.rows.sizes) : end] for row in agreed.sizes] for x, end in zip(calls, ends, strict=True)]
    even = [len(set(rows)) == 1 for rows in cut]
    # Where some batches are even and others not, only now is it clear which graphs are wanted.
    mine = sum(x.call.known[0 if e else 1] << n for n, (x, e) in enumerate(zip(calls, even, strict=True)))
    there = control.exchange(mine)
    ready = [all(x >> n & 1 for x in there) for n in range(len(calls))]
    return [Agreed(e, (r, r), () if e else tuple(rows)) for e, r, rows in zip(even, ready, cut, strict=True)]


def combined(
    plan: Plan, found: Mapping[str, FoundGradients], calls: Sequence[LossCall], state: TrainState
) -> FoundGradients:
    """Returns the sum of the gradients of several losses, the last model state, and the metrics of all.

    The mesh must be bound.

    Args:
        plan: the layout, in which all leaves are trained that a loss trains.
        found: gradients by loss; consumed.
        calls: the calls.
        state: the state.
    """
    total: Blocks = {}
    with torch.no_grad(), exact(plan):
        for own in calls:
            leaves = [x.donate() for x in tree_leaves(found[own.name].grads)]
            total = added(plan, total, by_leaf(own.plan, leaves))
        metrics = measured(plan, total, True, scale_of(state))
    del metrics["skipped"]
    losses = [x.metrics["loss"] for x in found.values()]
    finite = torch.stack([metrics["finite"], *(x.metrics["finite"] for x in found.values())]).all()
    out: Metrics = {"loss": sum_of(losses), **metrics, "finite": finite}
    for name, one in found.items():
        out |= {f"{name}/{key}": x for key, x in one.metrics.items() if key != "loss_scale"}
    last = found[calls[-1].name].model_state
    return FoundGradients(as_tree(plan, total), last, out)


def check_alike_losses(sources: Mapping[str, StepLoss]) -> None:
    """Refuses losses that would keep one state in different ways.

    Raises:
        ValueError: lists the losses that differ from the first.
    """
    (first, one), *others = sources.items()
    problems = []
    for name, other in others:
        mixed = [x.unwrapped.mixed and (x.unwrapped.mixed.policy, x.unwrapped.mixed.loss_scale) for x in (one, other)]
        if mixed[0] != mixed[1]:
            problems.append(f"{name!r} has another precision policy or loss scale than {first!r}")
        if (one.unwrapped.jitted is None) != (other.unwrapped.jitted is None):
            problems.append(f"{name!r} is {'jitted' if other.unwrapped.jitted else 'eager'}, unlike {first!r}")
        if (one.parts.table is None) != (other.parts.table is None):
            problems.append(f"of {name!r} and {first!r} one is a pipeline")
    raise_all(ValueError, "the losses of one step keep one state, so that these must agree:", problems)


def lines_of(sources: Mapping[str, StepLoss], plan: Plan, key: Tensor | None, state_specs: PyTree) -> list[str]:
    """Returns the facts on which ranks agree before the first transfer, besides the layout.

    One a line, for each loss.
    """
    out: list[str] = []
    for name, x in sources.items():
        mask = [] if name == "" else [f"loss {name!r}, trainable {x.planner.trainable!r}, batch {x.planner.batch!r}"]
        out += [*mask, *step_lines(x.unwrapped, x.parts, plan, key, state_specs)]
    return out


def mean_of(sources: Mapping[str, StepLoss]) -> Callable[..., Tensor]:
    """Returns the mean loss over the batch of all ranks, `mean(params, [model_state,] batch[, key])`.

    For several losses, the sum.
    """
    means = {
        name: global_mean(x.parts.loss, x.planner.batch_axes, has_aux=x.parts.has_aux, has_state=x.parts.has_state)
        for name, x in sources.items()
    }
    if tuple(means) == ("",):
        return means[""]
    at = int(next(iter(sources.values())).parts.has_state)

    def total(params: PyTree, *args: Any) -> Tensor:
        own = batches_of(tuple(means), args[at])
        return sum_of([mean(params, *args[:at], own[name], *args[at + 1 :]) for name, mean in means.items()])

    return total


def sum_of(losses: Sequence[Tensor]) -> Tensor:
    """Returns the sum of 0-d losses, in the dtype of the first."""
    return torch.stack([x.to(losses[0].dtype) for x in losses]).sum()
