"""The pure step: `(weights, cache, step) -> (tokens, log probabilities, cache, top, *further results)` of a plan.

It runs op by op, or as a captured graph, and holds nothing. With lanes it is the step of a part of the ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn import kernels
from shardfn.collectives import ppermute
from shardfn.core import PyTree

from ._cache import CacheLayout, LaneAxis
from ._decoder import Decoder, SourceEncoder
from ._draw_rows import draw_tokens, find_top
from ._image_rows import ImageRule
from ._lane_tensors import gather_parts, take_step
from ._layouts import Layout
from ._tensors import FillTensors, StepTensors


def run_step(
    decoder: Decoder,
    layout: Layout,
    further: Sequence[str | int],
    weights: PyTree,
    cache: list[Tensor],
    step: StepTensors,
    *,
    carry: Tensor | None = None,
    handed: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, list[Tensor], Any, *tuple[Tensor | None, ...]]:
    """Runs the pure step: `(weights, cache, step) -> (tokens, log probabilities, cache, top, *further results)`.

    `top` has the most probable tokens and their log probabilities in an extended step, and is empty otherwise.
    """
    bodies = decoder.cache.make_bodies(cache, step, **_find_kinds(decoder.images, step))
    given: dict[str, Any] = {} if step.images is None else {"images": (step.images.rows, step.images.features)}
    shifts = None if step.images is None else step.images.shifts
    positions = step.positions if shifts is None else step.positions + shifts
    if layout.masked:
        given["mask"] = step.slots >= decoder.cache.read_block(cache)  # padding writes to block 0
    if carry is not None and handed is not None:
        given["carry"] = carry
    found = layout.outputs(weights, step.tokens, positions, step.rows, bodies, step.low, **given)
    if handed is not None:
        assert found.carry is not None
        handed.append(found.carry)
    drawn = draw_tokens(found.logits, step)
    results = {"hidden": lambda: found.hidden, "experts": found.experts, "logits": lambda: found.logits}
    more = (found.state_after(x) if isinstance(x, int) else results[x]() for x in further)
    return *drawn, cache, find_top(found.logits, step), *more


def run_part(
    lanes: LaneAxis,
    num: int,
    run: Callable[..., Any],
    weights: PyTree,
    cache: list[Tensor],
    steps: PyTree,
    carry: Tensor | None = None,
) -> tuple[Any, ...]:
    """Runs the pure step of this rank's part, and returns the results of all parts."""
    handed = list[Tensor]()
    given: dict[str, Any] = {} if carry is None else {"carry": carry, "handed": handed}
    tokens, logprobs, cache, *rest = run(weights, cache, take_step(steps, lanes), **given)
    tokens, logprobs, top, *more = gather_parts((tokens, logprobs, *rest), lanes, num)
    pairs = [(i, i + 1) for i in range(num - 1)]
    return tokens, logprobs, cache, top, *(ppermute(x, lanes.axis, pairs) for x in handed), *more


def fill_source(
    form: CacheLayout, sources: SourceEncoder, weights: PyTree, cache: list[Tensor], fill: FillTensors
) -> tuple[list[Tensor]]:
    """Writes the keys and values of a source into the layers of cross attention."""
    found = sources.encode(weights, fill.tokens)
    for layer, (k, v) in zip(cache[form.layers :], found, strict=True):
        kind = torch.float64 if layer.dtype == torch.float64 else torch.float32
        kernels.write_cache(k.to(kind), v.to(kind), layer, fill.slots)
    return (cache,)


def _find_kinds(rule: ImageRule | None, step: StepTensors) -> dict[str, Any]:
    """Returns the arguments of bodies that read images by a separate softmax, or images as a whole."""
    if rule is None or step.images is None or rule.rule == "causal":
        return {}
    return {"images": step.images.words, "rule": rule.rule}
