"""`pipeline`: a loss of equal layers, whose layers lie on the ranks along an axis."""

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
    """Returns a loss of a first function, equal layers and a last function, whose layers may lie on different ranks.

        h = first(params, batch);  for p in layers:  h = block(p, h);  return last(params, h, batch)

    The batch is cut into microbatches along dim 0. The loss computes the lines above for each microbatch and returns
    the mean, as `accumulate` does. In a step on a mesh that has `axis`, each rank along it stores and runs some of the
    layers, in the order of a schedule; activations and their gradients go from rank to rank. For that the layers'
    leaves are stacked along dim 0 and have specs `P(axis)`. No other leaf has `axis` in its spec. The axis need not
    divide the number of layers.

    All ranks along `axis` get the same rows. Only the first rank runs `first`, and only the last one runs `last`. The
    gradient of a leaf that several stages use, such as tied embeddings, is summed over them once. ZeRO cuts leaves
    along other axes.

    Ranks send `h`, a tree of tensors; floating-point ones have gradients. A layer must return the structure, shapes and
    dtypes that it takes. With a key, each function takes it as its last argument; layer l gets `fold_in(key, l)`.

    In a step with `has_state` each function takes its part of the model state, a `PipelineState`, after its parameters,
    and returns it with its result: `block(p, state, h[, key]) -> (h, state)`.

    For tensor parallelism of functions that are written for one device use `partition`: around the whole loss, which
    plans each stage as one, or around some of the functions, which plans each by itself, for one layer's leaves.

    Outside of a step of a mesh with `axis` (in `step.apply`, `sharded`, `torch.func`) stages run one after another.

    Args:
        first: `first(params, batch[, key]) -> h`.
        block: `block(p, h[, key]) -> h`; p has one layer's leaves. May be `remat(f)`, `offload(f)` or `partition(f)`.
            For layers whose leaves differ: a list of such functions, one for each layer, cut evenly into stages. Their
            leaves are then a list with a tree for each function and are not stacked. No leaf has `axis` in its spec,
            and each rank has all of them.
        last: `last(params, h, batch[, key])`, and returns a loss: a 0-d tensor or a `WeightedMean`, with `has_aux` also
            an aux.
        blocks: the stacked layers: their key in params, or a function that takes them from params. With several chunks
            they are a list with one stack per chunk, one after another.
        axis: the axis along which the stages lie.
        num_microbatches: the number of microbatches; must divide the rows of the batch.
        num_chunks: the number of stages on each rank.
        schedule: a name of `schedules.SCHEDULES`: "gpipe", "1f1b", "interleaved" (of several chunks), or one that
            splits backwards: "zb-h1", "zb-v", "dualpipe-v" (the last two of two chunks), or a schedule, for the axis's
            number of ranks and for `num_microbatches`. Where its stages go down the ranks and up again, the second
            stack has its layers in reverse order.
        layers_per_stage: the number of layers of each rank, for stacks with unused rows (`pad_layers`). None: every row
            is a layer, cut evenly. `schedules.balance` computes it from the cost of each layer.

    Raises:
        ValueError: the schedule is unknown, or has another number of chunks. Also when a step is built or begins: the
            schedule would never end (`schedules.ScheduleError`, with the ranks that wait in a circle). A spec does not
            fit. There are fewer layers than stages, or microbatches do not divide the batch.

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
            " more, and leave layers_per_stage out; make one function of those that are to be a stage's together."
        )
    loss = PipelinedLayers(*how, block) if callable(block) else PipelinedFunctions(*how, functions)
    return Accumulated(loss, num_microbatches) if num_microbatches > 1 else loss


def per_stage_of(layers_per_stage: Sequence[int] | None, num_chunks: int) -> tuple[int, ...] | None:
    """Returns the numbers of layers of each stage, if they are not even.

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
    """From the numbers of ranks and microbatches to a schedule.

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
