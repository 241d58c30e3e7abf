"""`shardfn speculate --kind jacobi`: trains a run's model for Jacobi decoding, and writes it as another run."""

import functools
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn.checkpoint import save
from shardfn.collectives import unshard
from shardfn.core import tree_map
from shardfn.inference import Engine, MultiBlockJacobi, Sampling, limits_of
from shardfn.optim import adamw, chain, clip_by_global_norm
from shardfn.pretrained import LoadedModel
from shardfn.speculators import (
    ForcingConfig,
    draw_trajectories,
    forcing_loss,
    make_forcing_batch,
    measure_acceptance,
)
from shardfn.transforms import sharded_step

_TEXTS = 256  # rows whose beginnings are prompts of trajectories


def force_model(job: Any, served: LoadedModel, rows: Tensor, held: Tensor, report: Callable[[int, float], None]) -> str:
    """Trains a model for Jacobi decoding of blocks of `job.drafts` tokens, writes a run, and returns lines about it.

    The first half of a row is a prompt, and the model's own tokens fill the second half.

    Args:
        job: settings of `shardfn speculate`.
        served: model of a run.
        rows: rows of the text.
        held: held-out rows.
        report: function of the number of a step and its loss.

    Raises:
        ValueError: the model is of no run, or a row has no room for a block.
    """
    made, path, block = served.decoder, pathlib.Path(job.model.model), job.drafts
    prompt, num_blocks = job.length // 2, (job.length - job.length // 2 - 1) // block
    if made.config is None or not (path / "model.json").is_file():
        raise ValueError(f"--kind jacobi trains the model itself, and MODEL must be a run with model.json, got {path}.")
    if not num_blocks:
        raise ValueError(f"--length must have room for --drafts {block} in its second half, got {job.length}.")
    config, before = ForcingConfig(block=block), unshard(served.params)
    prompts = rows[:_TEXTS, :prompt].tolist()
    found = list(draw_trajectories(made, before, prompts, block=block, num_blocks=num_blocks))
    batch = make_forcing_batch(config, found)
    optimizer = chain(clip_by_global_norm(1.0), adamw(job.learning_rate))
    step = sharded_step(functools.partial(forcing_loss, made.config, config), optimizer)
    state, drawn = step.init(tree_map(torch.clone, before)), torch.Generator().manual_seed(job.seed)
    for i in range(job.steps):
        own = torch.randint(len(found), (job.batch,), generator=drawn)
        state, metrics = step(state, {name: x[own] for name, x in batch.items()})
        report(i, float(metrics["loss"]))
    params = tree_map(unshard, state.params)
    out = pathlib.Path(job.out)
    out.mkdir(parents=True, exist_ok=True)
    for file in path.iterdir():
        if file.is_file():
            shutil.copy2(file, out / file.name)
    save(out / "checkpoints", params, job.steps, at="params")
    how, lines = Sampling(max_tokens=job.length - prompt, temperature=0.0), list[str]()
    buckets = (*sorted({1, 2, 3, 5, 9, 2 * block + 1, 64 + 2 * block}),)
    limits = limits_of(made, context=job.length, drafts=2 * block, running=2, buckets=buckets)
    for name, weights in (("before", before), ("after", params)):
        engine = Engine(made, weights, limits=limits, drafter=MultiBlockJacobi(block))
        value = measure_acceptance(engine, held[:, :prompt].tolist(), how)
        lines.append(f"Jacobi decoding {name}: {value:.2f} accepted drafts a step")
    return "\n".join([*lines, f"{out}: for shardfn generate {out} --drafter jacobi"])
