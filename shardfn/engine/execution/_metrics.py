"""The metrics of a step: the global loss, the norm of the averaged gradient, and the loss's aux."""

from collections.abc import Iterable

import torch
from torch import Tensor

from shardfn.collectives import psum
from shardfn.engine.plan import Chunks, Plan
from shardfn.engine.transfers import Metrics, Outcome, summed_squares, summed_values


def measure(plan: Plan, out: Outcome, loss_scale: Tensor | None = None) -> tuple[Metrics, Tensor | None]:
    """The metrics of a step, equal on all ranks; and the factor that gradients still lack, or None.

    The gradients passed in are multiplied by `loss_scale`.

    Raises:
        ValueError: an aux has the name of one of the step's own metrics.
    """
    like = out.total
    # In float64, like all sums here: a count or a total of tokens must not be rounded.
    count = torch.tensor(float(out.num_microbatches), dtype=torch.float64, device=like.device)
    row = [out.total, count if out.weight is None else out.weight]
    row += [x for pair in out.aux.values() for x in pair]
    if plan.chunks is not None:
        return _of_chunks(plan, plan.chunks, out, loss_scale)
    squares = _squares(plan, out)
    # Values that are summed over the batch's axes, nearly always all of them, travel together.
    own = squares.pop(plan.batch_axes, torch.zeros_like(count))
    *rest, own = psum(torch.stack([x.to(torch.float64) for x in [*row, own]]), plan.batch_axes)
    sums = torch.stack(rest)
    norm = torch.sqrt(own + sum(psum(x, axes) for axes, x in squares.items()))
    return _made_of(plan, out, sums, norm, loss_scale)


def _made_of(
    plan: Plan, out: Outcome, sums: Tensor, norm: Tensor, loss_scale: Tensor | None
) -> tuple[Metrics, Tensor | None]:
    """The metrics, of the global sums of loss, weight and the pairs of aux, and of the norm as gradients come."""
    # Division by the weight or the loss scale is a factor, which is put on last.
    scale = None
    if out.weight is not None:
        scale = plan.num_left / sums[1]
    if loss_scale is not None:
        scale = (1.0 if scale is None else scale) / loss_scale.to(norm)
    if scale is not None:
        norm = norm * scale
    aux = ((name, sums[2 + 2 * k] / sums[3 + 2 * k]) for k, name in enumerate(out.aux))
    return named((sums[0] / sums[1]).to(out.total.dtype), norm, aux, loss_scale), scale


def _of_chunks(plan: Plan, chunks: Chunks, out: Outcome, loss_scale: Tensor | None) -> tuple[Metrics, Tensor | None]:
    """`measure`, with sums that do not depend on the number of ranks."""
    store = out.reducer.store
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for unit in store.units:
        x = store.share(unit)
        assert isinstance(x, Tensor)
        by_axes.setdefault(plan.units_by_norm[unit], []).append(x)
    squares = [summed_squares(x, axes) for axes, x in sorted(by_axes.items())]
    norm = torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)
    return _made_of(plan, out, summed_values(out.values, chunks, plan.batch_axes), norm, loss_scale)


def named(loss: Tensor, norm: Tensor, aux: Iterable[tuple[str, Tensor]], loss_scale: Tensor | None) -> Metrics:
    """The metrics of a step, as if it is not skipped.

    Args:
        loss: the mean over the global batch.
        norm: of the averaged gradient.
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
            raise ValueError(f"aux[{name!r}] has the name of a metric of the step; choose another.")
        metrics[name] = mean.to(torch.float32)
    return metrics


def _squares(plan: Plan, out: Outcome) -> dict[tuple[str, ...], Tensor]:
    """By the axes along which they are disjoint, this rank's sum of squares of the summed gradients.

    Where an optimizer averages them itself: the mean of the squares of ranks' own gradients.
    """
    kinds: dict[tuple[tuple[str, ...], int], list[int]] = {}
    store = out.reducer.store
    for unit in store.units:  # in one order, so that the sum has the same bits
        kinds.setdefault((plan.units_by_norm[unit], plan.added_by_unit[unit]), []).append(unit)
    sums: dict[tuple[str, ...], Tensor] = {}
    for (axes, added), own in kinds.items():
        x = store.squares(own).to(out.total.device, torch.float64).sum()
        x = x if plan.num_left == 1 else x / (plan.num_left * added)
        sums[axes] = sums[axes] + x if axes in sums else x
    return sums
