"""Draws of a step's rows, from logits to tokens: penalties, biases, forbidden tokens, then temperature and filters."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn import kernels

from ._logprobs import widen_floats
from ._plan import StepPlan
from ._requests import MOST_TOP
from ._tensors import StepTensors

Processor = Callable[[list[int], list[int], Tensor], Tensor]
Top = tuple[tuple[int, float], ...]  # tokens and their log probabilities, the most probable first


class LogitsEdit(NamedTuple):
    """Change of the logits of a single row.

    Attributes:
        row: number of the row.
        name: name of the request, for messages.
        processors: processors with their names, in order.
        prompt: tokens of the prompt.
        output: drawn tokens before the row's place.
    """

    row: int
    name: str
    processors: Sequence[tuple[str, Processor]]
    prompt: list[int]
    output: list[int]


def draw_tokens(logits_RV: Tensor, step: StepTensors, edited_RV: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns tokens of the rows, and their log probabilities under the raw logits.

    Args:
        logits_RV: raw logits.
        step: tensors of the step.
        edited_RV: logits that tokens are drawn from, in place of the raw logits, for example after a processor.
    """
    given = widen_floats(logits_RV)
    changed = given if edited_RV is None else edited_RV
    if step.penalties is not None:
        changed = kernels.penalise(changed, **step.penalties)
    if step.biases is not None:
        changed = changed.scatter_add(1, step.biases.tokens, step.biases.values.to(changed.dtype))
    if step.allowed is not None:
        changed = torch.where(step.allowed, changed, -torch.inf)
    uniforms = kernels.draw_uniforms(step.keys, step.places)
    tokens, logprobs = kernels.draw(changed, uniforms, **step.draw, targets=step.targets)
    if changed is not given:  # log probabilities are those of the raw logits
        _, logprobs = kernels.draw(given, uniforms, **step.draw, targets=tokens)
    return tokens, logprobs


def edit_logits(logits: Float[Tensor, "rows vocab"], edits: Sequence[LogitsEdit]) -> Float[Tensor, "rows vocab"]:
    """Returns logits in the dtype of draws, with the edits of some rows.

    Raises:
        ValueError: a processor returns another shape or dtype. The message names the processor and the request.

    Example:
        >>> f = lambda prompt, output, logits: logits + len(output)
        >>> edit_logits(torch.zeros(1, 3), [LogitsEdit(0, "a", [("f", f)], [5], [6, 7])])
        tensor([[2., 2., 2.]])
    """
    logits = widen_floats(logits).clone()
    for edit in edits:
        row = logits[edit.row].clone()
        for name, processor in edit.processors:
            found = processor(edit.prompt[:], edit.output[:], row)
            if not isinstance(found, Tensor) or (found.shape, found.dtype) != (row.shape, row.dtype):
                what = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
                raise ValueError(
                    f"logits processor {name!r} must return a tensor {tuple(row.shape)} of {row.dtype}, as it gets, got"
                    f" {what} for request {edit.name!r}."
                )
            row = found
        logits[edit.row] = row
    return logits


def find_top(logits_RV: Tensor, step: StepTensors) -> tuple[Tensor, ...]:
    """Returns the most probable tokens of the rows of an extended step, under the raw logits."""
    if step.biases is None:
        return ()
    return kernels.top_logprobs(widen_floats(logits_RV), min(MOST_TOP, logits_RV.shape[1]))


def read_tops(plan: StepPlan, top: tuple[Tensor, ...]) -> list[Top]:
    """Returns the most probable tokens that each row wants, without tokens that the model excludes."""
    if plan.histories is None or not any(one.top_logprobs for one in plan.sampling):
        return []
    rows = zip(plan.sampling, *(x[: plan.num_rows].tolist() for x in top), strict=True)
    return [
        tuple([pair for pair in zip(*found, strict=True) if pair[1] > -math.inf][: how.top_logprobs])
        for how, *found in rows
    ]
