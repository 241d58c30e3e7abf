"""`pipeline`: a loss of equal layers on the ranks along an axis."""

from collections.abc import Callable, Sequence
from typing import Any

from shardfn.core import PyTree
from shardfn.engine import Accumulated, PipelinedFunctions, PipelinedLayers, check_order
from shardfn.schedules import PipelineSchedule, named_schedule


def pipeline(
    first: Callable[..., PyTree],
    block: Callable[..., PyTree] | Sequence[Callable[..., PyTree]],
    last: Callable[..., Any],
    *,
    blocks: str | Callable[[PyTree], Any] = "blocks",
    axis: str = "pp",
    num_microbatches: int = 1,
    num_chunks: int = 1,
    schedule: str | PipelineSchedule = "1f1b",
    layers_per_stage: Sequence[int] | None = None,
) -> Accumulated | PipelinedLayers | PipelinedFunctions:
    """Returns a loss of a first function, layers on several ranks, and a last function.

        h = first(params, batch);  for p in layers:  h = block(p, h);  return last(params, h, batch)

    The batch is cut into microbatches along dim 0. The loss computes the lines above for each microbatch and returns
    the mean, as `accumulate` does. In a step on a mesh that has `axis`, each rank along `axis` stores and runs some of
    the layers, in the order of a schedule. Activations and gradients go from rank to rank. The layers' leaves must be
    stacked along dim 0, with specs `P(axis)`. No other leaf has `axis` in the spec. The axis need not divide the number
    of layers: for example 7 layers on 3 ranks are 3, 3 and 1.

    All ranks along `axis` get the same rows. Only the first rank runs `first`, and only the last rank runs `last`. The
    gradient of a leaf that several stages use, such as tied embeddings, is summed over the stages once. ZeRO cuts
    leaves along other axes.

    Ranks send `h`, a tree of tensors. Floating-point tensors have gradients. A layer must return the structure, shapes
    and dtypes of its input. With a key, each function takes a key as the last argument. Layer l gets `fold_in(key, l)`.

    In a step with `has_state` each function takes a part of the model state, a `PipelineState`, after the parameters,
    and returns the new part with the result: `block(p, state, h[, key]) -> (h, state)`.

    For tensor parallelism of functions written for a single device use `partition`: around the whole loss, to plan each
    stage as a whole, or around some of the functions, to plan each function separately, for a single layer's leaves.

    Outside of a step of a mesh with `axis` (in `step.apply`, `sharded`, `torch.func`) stages run in sequence.

    Args:
        first: `first(params, batch[, key]) -> h`.
        block: `block(p, h[, key]) -> h`, where p has one layer's leaves. The function may be `remat(f)`, `offload(f)`
            or `partition(f)`. For layers with different leaves: a list with a function for each layer, cut evenly into
            stages. The leaves are then a list with a tree for each function and are not stacked. No leaf has `axis` in
            the spec, and each rank has all leaves.
        last: `last(params, h, batch[, key])`, with a loss as the result: a 0-d tensor or a `WeightedMean`, with
            `has_aux` also an aux.
        blocks: key of the stacked layers in params, or a function from params to the layers. With several chunks the
            layers are a list with a stack for each chunk, in sequence.
        axis: axis along which the stages lie.
        num_microbatches: number of microbatches, which must divide the rows of the batch.
        num_chunks: number of stages on each rank.
        schedule: name in `schedules.SCHEDULES`: "gpipe", "1f1b", "interleaved" (of several chunks), or a schedule with
            split backwards: "zb-h1", "zb-v", "dualpipe-v" (the last two of two chunks), or a schedule, for the axis's
            number of ranks and for `num_microbatches`. Where the stages go down the ranks and up again, the second
            stack has the layers in reverse order.
        layers_per_stage: numbers of layers of each rank, for stacks with unused rows (`pad_layers`). None means that
            every row is a layer, cut evenly. `schedules.balance` computes the numbers from the cost of each layer.

    Raises:
        ValueError: the schedule is unknown, or has another number of chunks. Also when a step is built or begins: the
            schedule would be a deadlock (`schedules.ScheduleError`, with the ranks that wait in a circle). A spec does
            not fit. There are fewer layers than stages, or microbatches do not divide the batch.

    Example:
        >>> import torch
        >>> params = {"blocks": {"w": torch.tensor([2.0, 3.0])}, "bias": torch.tensor(1.0)}
        >>> loss = pipeline(
        ...     lambda params, x: x + params["bias"], lambda p, h: h * p["w"], lambda params, h, x: h.mean()
        ... )
        >>> loss(params, torch.tensor([0.0, 1.0]))
        tensor(9.)

    References:
        Huang et al., GPipe, 2018, https://arxiv.org/abs/1811.06965
        Narayanan et al., Efficient Large-Scale Language Model Training, 2021, https://arxiv.org/abs/2104.04473
    """
    functions = (block,) if callable(block) else tuple(block)
    for f in (first, *functions, last):
        check_order("pipeline", f, deep=True)
    if num_microbatches < 1 or num_chunks < 1:
        raise ValueError(f"pipeline needs a microbatch and a chunk, got {num_microbatches} and {num_chunks}.")
    table = schedule_of(schedule, num_chunks)
    turns = (schedule if isinstance(schedule, PipelineSchedule) else table(2, 4)).turns
    per_stage = per_stage_of(layers_per_stage, num_chunks)
    found = blocks if callable(blocks) else lambda params: params[blocks]
    how = found, axis, table, num_chunks, turns, per_stage, first, last
    if not callable(block) and (per_stage is not None or not functions):
        raise ValueError(
            f"a pipeline of {len(functions)} functions with layers_per_stage={layers_per_stage}: give a function or"
            " more, and leave layers_per_stage out. Make one function of those that are to be a stage's together."
        )
    loss = PipelinedLayers(*how, block) if callable(block) else PipelinedFunctions(*how, functions)
    return Accumulated(loss, num_microbatches) if num_microbatches > 1 else loss


def per_stage_of(layers_per_stage: Sequence[int] | None, num_chunks: int) -> tuple[int, ...] | None:
    """Returns the numbers of layers of each stage, or None where the layers are cut evenly.

    Raises:
        ValueError: a stage has no layer, or ranks have several stages.
    """
    if layers_per_stage is None:
        return None
    if num_chunks > 1 or not layers_per_stage or min(layers_per_stage) < 1:
        raise ValueError(
            f"layers_per_stage={tuple(layers_per_stage)} with num_chunks={num_chunks}: every stage has a layer, and"
            " every rank one stage."
        )
    return tuple(layers_per_stage)


def schedule_of(schedule: str | PipelineSchedule, num_chunks: int) -> Callable[[int, int], PipelineSchedule]:
    """Returns a function from the numbers of ranks and microbatches to a schedule.

    Raises:
        ValueError: the name is unknown, or the schedule has another number of chunks.
    """
    if isinstance(schedule, PipelineSchedule):
        if schedule.num_chunks != num_chunks:
            raise ValueError(
                f"the schedule {schedule.name} is of {schedule.num_chunks} chunks, not {num_chunks}; pass"
                f" num_chunks={schedule.num_chunks}."
            )
        return lambda num_ranks, num_microbatches: schedule
    return named_schedule(schedule, num_chunks)
