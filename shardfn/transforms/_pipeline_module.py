"""`pipeline_module`: a loss of an unmodified module, with layers on the ranks along an axis."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardfn.core import PyTree
from shardfn.engine import Accumulated, LeafAdapters, Partitioned, PipelinedModule, check_order
from shardfn.modules import LayeredFunction
from shardfn.schedules import PipelineSchedule

from ._pipeline import per_stage_of, schedule_of


def pipeline_module(
    loss: Callable[..., Any],
    function: LayeredFunction,
    *,
    axis: str = "pp",
    num_microbatches: int = 1,
    schedule: str | PipelineSchedule = "1f1b",
    layers_per_stage: Sequence[int] | None = None,
    adapters: LeafAdapters | None = None,
) -> Accumulated | PipelinedModule | Partitioned:
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

    References:
        Huang et al., GPipe, 2018, https://arxiv.org/abs/1811.06965
    """
    check_order("pipeline", loss, deep=True)
    if not isinstance(function, LayeredFunction):
        raise TypeError(
            f"pipeline_module(loss, function): function is a {type(function).__name__}; make it by"
            " from_module(module, layers=...), with the name of its list of layers."
        )
    if num_microbatches < 1:
        raise ValueError(f"pipeline_module needs a microbatch, got num_microbatches={num_microbatches}.")
    if layers_per_stage is not None and len(function.kinds.kinds) > 1:
        raise ValueError(
            f"pipeline_module(layers_per_stage={tuple(layers_per_stage)}): the layers are of"
            f" {len(function.kinds.kinds)} kinds, and their stacks are cut evenly; leave it out."
        )
    if adapters is not None and len(function.kinds.kinds) > 1:
        raise ValueError(
            f"pipeline_module(adapters=...): the layers are of {len(function.kinds.kinds)} kinds, and adapters are of"
            " one. Write the layers as functions: sf.pipeline(first, block, last)."
        )
    table, path, per_stage = schedule_of(schedule, 1), function.path, per_stage_of(layers_per_stage, 1)
    whole = loss.inner if isinstance(loss, Partitioned) else loss
    blocks = (
        functools.partial(_find_layers, path) if adapters is None else functools.partial(_adapt_params, path, adapters)
    )
    made = PipelinedModule(blocks, axis, table, 1, False, per_stage, whole, function, adapters)
    piped = Accumulated(made, num_microbatches) if num_microbatches > 1 else made
    return dataclasses.replace(loss, inner=piped) if isinstance(loss, Partitioned) else piped


def _find_layers(path: str, params: PyTree) -> PyTree:
    if path not in params:
        raise ValueError(
            f"pipeline_module(loss, function): params have {sorted(params)}, and the function's layers are at {path!r};"
            " pass the parameters of from_module themselves; or, with adapters beside them, adapters=lora."
        )
    return params[path]


def _adapt_params(path: str, adapters: LeafAdapters, params: PyTree) -> PyTree:
    if set(params) != {"base", "lora"}:
        raise ValueError(
            f"pipeline_module(adapters=...): params have {sorted(params)}. Pass {{'base': params, 'lora': adapters}}."
        )
    own = {name: params["lora"][name] for name, site in adapters.sites.items() if site.entries[0] == path}
    return {"base": _find_layers(path, params["base"]), "lora": own}
