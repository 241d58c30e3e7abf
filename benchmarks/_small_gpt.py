"""A byte-level GPT of half a million parameters, trained in a minute on the package's source. A part is held out."""

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shardfn as sf
from shardfn.models import gpt

CONFIG = gpt.Config.llama_like(
    vocab_size=256, num_layers=4, d_model=96, num_heads=3, d_ff=None, max_len=256, batch_invariant=True
)
LENGTH = 128


class SmallGPT(NamedTuple):
    """A trained model, and rows of its text.

    Attributes:
        config: shape, batch-invariant.
        params: parameters.
        training: rows of tokens [N, 128] that the model has seen.
        held_out: rows of files that it has not.
    """

    config: gpt.Config
    params: Any
    training: Tensor
    held_out: Tensor


def train_small_gpt(steps: int, report: Any = print) -> SmallGPT:
    """Trains the model. One thread gives the same bits on each run."""
    files = sorted(pathlib.Path(sf.__file__).parent.rglob("*.py"))
    parts = [[f for i, f in enumerate(files) if (i % 20 == 0) == held] for held in (False, True)]
    training, held_out = (_cut_rows("".join(f.read_text(encoding="utf-8") for f in part)) for part in parts)
    rate = sf.optim.warmup_cosine_decay_schedule(0.0, 3e-3, 20, steps, 3e-4)
    # Layers that are not batch-invariant compute the same function faster.
    loss = functools.partial(gpt.loss, dataclasses.replace(CONFIG, batch_invariant=False))
    step = sf.sharded_step(loss, sf.optim.adamw(rate, weight_decay=0.1))
    state = step.init(functools.partial(gpt.init, CONFIG), sf.key(0))
    drawn = torch.Generator().manual_seed(0)
    for i in range(steps):
        rows = torch.randint(len(training), (8,), generator=drawn)
        state, metrics = step(state, {"tokens": training[rows]})
        if (i + 1) % max(1, steps // 4) == 0:
            report(f"model, step {i + 1}: loss {float(metrics['loss']):.3f}", flush=True)
    return SmallGPT(CONFIG, sf.unshard(state.params), training, held_out)


def _cut_rows(text: str) -> Tensor:
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
