"""Penalties on logits, in Triton: a program for each tile of a row reads the row's history."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._penalise import check_values
from ._triton import ceil, launch

WIDTH = 1024


def penalise(
    logits: Tensor, history: Tensor, prompts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Maps logits [r, v] and history [r, w] to logits [r, v]."""
    arguments = history, prompts, repetition, presence, frequency
    (r, v), out = logits.shape, torch.empty_like(logits)
    check_values(v, *arguments)
    changes, tiles = ((repetition != 1) | (presence != 0) | (frequency != 0)).int(), ceil(v, WIDTH)
    launch(
        *(_penalise_kernel, r * tiles, logits.device, logits, *arguments, changes, out, v, history.shape[1], tiles),
        WIDTH=WIDTH,
    )
    return out


@triton.jit
@no_type_check
def _penalise_kernel(
    logits, history, prompts, repetition, presence, frequency, changes, out, v, width, tiles, WIDTH: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row, at = program // tiles, program % tiles * WIDTH + tl.arange(0, WIDTH)
    raw = tl.load(logits + row * v + at, mask=at < v, other=0.0)
    often, once, times = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
    prompt = tl.load(prompts + row)
    seen, drawn = tl.full((WIDTH,), 0, tl.int32), tl.full((WIDTH,), 0, tl.int32)
    for i in range(width):
        here = (at == tl.load(history + row * width + i)).to(tl.int32)
        seen += here
        drawn += tl.where(i >= prompt, here, 0)
    x = raw.to(tl.float64)
    y = tl.where(x > 0.0, x / often, x * often)
    y = tl.where(drawn > 0, (y - times * drawn.to(tl.float64)) - once, y)
    tl.store(out + row * v + at, tl.where(seen * tl.load(changes + row) > 0, y.to(tl.float32), raw), mask=at < v)
