"""Pipelines: losses of equal layers, unmodified modules, and stages with unequal numbers of layers.

`pipeline`: a loss of equal layers on the ranks along an axis.

`pipeline_module`: a loss of an unmodified module, with layers on the ranks along an axis.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardfn import core, engine
from shardfn.modules import LayeredFunction
from shardfn.schedules import PipelineSchedule, named_schedule


def pad_layers(stack: core.PyTree, layers_per_stage: Sequence[int]) -> core.PyTree:
    """Returns a stack with unused rows added, so that each stage has as many rows as the longest stage.

    Ranks along an axis have equal blocks of a leaf. For stages of unequal numbers of layers, `pipeline` and
    `pipeline_module` take `layers_per_stage`, and stacks with rows that no stage runs: for example 9 rows for 2, 3 and
    3 layers, with the third row unused. Gradients of unused rows are zeros, and norms do not count such rows.

    Args:
        stack: tree of tensors [L, ...].
        layers_per_stage: numbers of layers of each stage, in order, for example from `schedules.balance`. The sum is L.

    Raises:
        ValueError: the sum is not L. Every leaf is listed.

    Example:
        >>> import torch
        >>> pad_layers({"w": torch.tensor([1.0, 2.0, 3.0])}, (1, 2))
        {'w': tensor([1., 0., 2., 3.])}
    """
    _check_stages(stack, sum(layers_per_stage), layers_per_stage)
    return _frozen_as(stack, engine.padded(stack, layers_per_stage))


def unpad_layers(stack: core.PyTree, layers_per_stage: Sequence[int]) -> core.PyTree:
    """Returns the layers of a stack from `pad_layers`, for another number of stages or a checkpoint.

    Args:
        stack: tree of tensors.
        layers_per_stage: numbers of layers, see `pad_layers`.

    Raises:
        ValueError: the stack has another number of rows. Every leaf is listed.

    Example:
        >>> import torch
        >>> unpad_layers(torch.tensor([1.0, 0.0, 2.0, 3.0]), (1, 2))
        tensor([1., 2., 3.])
    """
    _check_stages(stack, len(layers_per_stage) * max(layers_per_stage, default=0), layers_per_stage)
    return _frozen_as(stack, engine.unpadded(stack, layers_per_stage))


def _frozen_as(stack: core.PyTree, made: core.PyTree) -> core.PyTree:
    """Returns the leaves of `made`, frozen where the leaves of the stack are frozen."""
    return core.tree_map(lambda x, y: core.frozen(y) if core.is_frozen(x) else y, stack, made)


def _check_stages(stack: core.PyTree, rows: int, layers_per_stage: Sequence[int]) -> None:
    if not layers_per_stage or min(layers_per_stage) < 1:
        raise ValueError(f"every stage has a layer, got layers_per_stage={tuple(layers_per_stage)}.")
    pairs = core.named_leaves(stack, "stack")
    core.raise_all(
        ValueError,
        f"layers_per_stage={tuple(layers_per_stage)} is for {rows} rows:",
        [f"{path} has {x.shape[0]}" for path, x in pairs if x.shape[0] != rows],
    )


def pipeline(
    first: Callable[..., core.PyTree],
    block: Callable[..., core.PyTree] | Sequence[Callable[..., core.PyTree]],
    last: Callable[..., Any],
    *,
    blocks: str | Callable[[core.PyTree], Any] = "blocks",
    axis: str = "pp",
    num_microbatches: int = 1,
    num_chunks: int = 1,
    schedule: str | PipelineSchedule = "1f1b",
    layers_per_stage: Sequence[int] | None = None,
) -> engine.Accumulated | engine.PipelinedLayers | engine.PipelinedFunctions:
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
        engine.check_order("pipeline", f, deep=True)
    if num_microbatches < 1 or num_chunks < 1:
        raise ValueError(
            f"pipeline: num_microbatches and num_chunks must be at least 1, got {num_microbatches} and {num_chunks}."
        )
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
    loss = engine.PipelinedLayers(*how, block) if callable(block) else engine.PipelinedFunctions(*how, functions)
    return engine.Accumulated(loss, num_microbatches) if num_microbatches > 1 else loss


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
                f"num_chunks must be {schedule.num_chunks} for the schedule {schedule.name}, got {num_chunks}."
            )
        return lambda num_ranks, num_microbatches: schedule
    return named_schedule(schedule, num_chunks)


def pipeline_module(
    loss: Callable[..., Any],
    function: LayeredFunction,
    *,
    axis: str = "pp",
    num_microbatches: int = 1,
    schedule: str | PipelineSchedule = "1f1b",
    layers_per_stage: Sequence[int] | None = None,
    adapters: engine.LeafAdapters | None = None,
) -> engine.Accumulated | engine.PipelinedModule | engine.Partitioned:
    """Returns a loss of an unmodified module with layers on several ranks: `pipeline` of a module.

        params, apply = from_module(module, layers="model.layers")
        loss(params, batch)  is the mean of the loss over microbatches

    In a step on a mesh with `axis`, each rank along `axis` stores and runs some of the layers: the leaves in
    `params["model.layers"]` have specs `P(axis)`, and no other leaf has `axis` in the spec. Each rank runs the module's
    forward around the rank's layers: without data up to the first of these layers, whose first argument is then the
    tensor from the previous rank. So the model's code is used unchanged, and one tensor per microbatch goes from rank
    to rank. Each rank computes the other arguments of layers, such as masks and rotary angles. Parameters behind such
    arguments are tied.

    Layers may differ, for example dense layers before mixtures of experts. Layers with leaves of other names or shapes
    are stacked by kind, and all ranks run the layers in order: either the evenly cut stacks of all kinds give each rank
    consecutive layers, or the kind with the most layers is cut, and the leaves of a kind without `axis` in the specs
    are whole on all ranks. Only the first rank uses the parts before the layers, and only the last rank uses the parts
    behind.

    A layer that reads values of tensors, such as a mixture of experts, may return a tensor or a tuple. A rank learns
    the form of the result from the rank's layers.

    Args:
        loss: `loss(params, batch[, key])`, which calls `function`, or a result of `function.keyed`, once.
            `partition(loss)` is equivalent to `partition(pipeline_module(loss, ...))`.
        function: function from `from_module(module, layers=...)`.
        axis: axis along which the stages lie.
        num_microbatches: number of microbatches, which must divide the rows of the batch.
        schedule: "gpipe" or "1f1b", or a schedule of `shardfn.schedules`.
        layers_per_stage: numbers of layers as for `pipeline`, for a padded `params["model.layers"]` with layers of one
            kind.
        adapters: adapters of the module's leaves. The parameters are then
            `{"base": params, "lora": adapters.init(key)}`, with `adapters.specs`, and `loss` gets the module's
            parameters with the adapters inside. Layers are of the same kind.

    Raises:
        TypeError: `function` was made without naming the layers.
        ValueError: as in `pipeline`, or layers of several kinds have adapters. Also when a step is built: a rank would
            have layers of several kinds that are not consecutive. Also when a step runs: the result of a layer is used
            outside of the next layer, layers do not run once each, in order, or transformers records outputs of all
            layers.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from shardfn.modules import from_module
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        ...     def forward(self, x):
        ...         for layer in self.layers:
        ...             x = torch.tanh(layer(x))
        ...         return x
        >>> params, apply = from_module(Net(), layers="layers")
        >>> {name: tuple(x.shape) for name, x in params["layers"].items()}
        {'weight': (4, 3, 3), 'bias': (4, 3)}
        >>> loss = pipeline_module(lambda p, x: apply(p, x).square().mean(), apply, num_microbatches=2)
        >>> loss(params, torch.zeros(4, 3)).shape
        torch.Size([])

    References: Huang et al., GPipe, 2018, https://arxiv.org/abs/1811.06965
    """
    engine.check_order("pipeline", loss, deep=True)
    if not isinstance(function, LayeredFunction):
        raise TypeError(
            "pipeline_module(loss, function) expected a function made with from_module(module, layers=...), where"
            f" layers is the name of a list of layers, got a {type(function).__name__}."
        )
    if num_microbatches < 1:
        raise ValueError(f"pipeline_module needs a microbatch, got num_microbatches={num_microbatches}.")
    if layers_per_stage is not None and len(function.kinds.kinds) > 1:
        raise ValueError(
            f"pipeline_module(layers_per_stage={tuple(layers_per_stage)}) must have layers of a single kind, got"
            f" {len(function.kinds.kinds)} kinds. Leave layers_per_stage out: the stacks are then cut evenly."
        )
    if adapters is not None and len(function.kinds.kinds) > 1:
        raise ValueError(
            f"pipeline_module(adapters=...): the layers are of {len(function.kinds.kinds)} kinds, and adapters are of"
            " one. Write the layers as functions: sf.pipeline(first, block, last)."
        )
    table, path, per_stage = schedule_of(schedule, 1), function.path, per_stage_of(layers_per_stage, 1)
    whole = loss.inner if isinstance(loss, engine.Partitioned) else loss
    blocks = (
        functools.partial(_find_layers, path) if adapters is None else functools.partial(_adapt_params, path, adapters)
    )
    made = engine.PipelinedModule(blocks, axis, table, 1, False, per_stage, whole, function, adapters)
    piped = engine.Accumulated(made, num_microbatches) if num_microbatches > 1 else made
    return dataclasses.replace(loss, inner=piped) if isinstance(loss, engine.Partitioned) else piped


def _find_layers(path: str, params: core.PyTree) -> core.PyTree:
    if path not in params:
        raise ValueError(
            f"pipeline_module(loss, function): params must have the function's layers at {path!r}, got"
            f" {sorted(params)}. Pass the parameters of from_module. Pass adapters separately: adapters=lora."
        )
    return params[path]


def _adapt_params(path: str, adapters: engine.LeafAdapters, params: core.PyTree) -> core.PyTree:
    if set(params) != {"base", "lora"}:
        raise ValueError(
            f"pipeline_module(adapters=...): params have {sorted(params)}. Pass {{'base': params, 'lora': adapters}}."
        )
    own = {name: params["lora"][name] for name, site in adapters.sites.items() if site.entries[0] == path}
    return {"base": _find_layers(path, params["base"]), "lora": own}
