"""`shardfn speculate`: trains a speculator for a model on a text, and compares it with the n-gram drafter.

`--kind jacobi` trains the run's model itself for Jacobi decoding, and writes the model as another run.
"""

import argparse
import dataclasses
import functools
import importlib.util
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shardfn import speculators
from shardfn.checkpoint import save
from shardfn.collectives import unshard
from shardfn.core import make_mesh, num_launched, progress, raise_all, tree_map
from shardfn.data import JSONLines
from shardfn.inference import Decoder, Drafter, Engine, MultiBlockJacobi, Ngram, Sampling, limits_of
from shardfn.optim import adamw, chain, clip_by_global_norm
from shardfn.pretrained import LoadedModel, ModelSettings, Problem, detect_kind, load_model
from shardfn.speculators import (
    EagleConfig,
    ForcingConfig,
    HiddenRows,
    Kind,
    draw_trajectories,
    forcing_loss,
    make_forcing_batch,
    measure_acceptance,
)
from shardfn.transforms import sharded_step
from shardfn.waits import waiting

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
    noises = [make_forcing_batch(config, found, shift=shift) for shift in range(config.window)]
    optimizer = chain(clip_by_global_norm(1.0), adamw(job.learning_rate))
    step = sharded_step(functools.partial(forcing_loss, made.config, config), optimizer)
    state, drawn = step.init(tree_map(torch.clone, before)), torch.Generator().manual_seed(job.seed)
    for i in range(job.steps):
        own = torch.randint(len(found), (job.batch,), generator=drawn)
        state, metrics = step(state, {name: x[own] for name, x in noises[i % config.window].items()})
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


_JACOBI = "jacobi"  # no speculator: the model itself is trained
_HELD = 20  # one row of so many is held out
_SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "at temperature 0.8": {"temperature": 0.8, "seed": 1},
}
_PROMPTS = 16  # held-out rows that are completed


@dataclasses.dataclass(frozen=True)
class SpeculateJob:
    """Settings of a run. See `shardfn speculate --help`.

    Attributes:
        model: job of the model.
        text: path of the text.
        out: directory of the speculator.
        kind: kind of the speculator.
        width: width of the speculator, or None for the model's.
        drafts: number of guessed tokens.
        window: most positions that EAGLE-3 and MTP attend to, or None for the kind's default.
        draft_vocab: number of tokens that can be guessed, the most frequent of the text, or None for all.
        steps: number of steps.
        batch: rows of a step.
        length: tokens of a row.
        tokens: most tokens of the text.
        learning_rate: largest learning rate.
        draw: temperature at which the model draws the second half of each row, or None for the text as it is.
        seed: seed.
        png: file for a picture of the losses and the accepted drafts, or None.
    """

    model: ModelSettings
    text: str
    out: str
    kind: Kind | Literal["jacobi"]
    width: int | None = None
    drafts: int = 4
    window: int | None = None
    draft_vocab: int | None = None
    steps: int = 1000
    batch: int = 16
    length: int = 128
    tokens: int = 400_000
    learning_rate: float = 2e-3
    draw: float | None = None
    seed: int = 0
    png: str | None = None


_WINDOWED = ("eagle3", "mtp")  # kinds that attend to several states
_COUNTS = ("drafts", "window", "draft_vocab", "steps", "batch", "length", "tokens", "width")


def add_speculate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `shardfn speculate`."""
    add, of = parser.add_argument, SpeculateJob
    add("model", metavar="MODEL", help="a directory of Hugging Face, a GGUF file, or a run of examples/train_gpt.py")
    add(
        "text", metavar="TEXT", help="JSON lines with a text each, {'text': ...}, or a plain text; best the model's own"
    )
    text = "the kind of the speculator (default %(default)s), or jacobi, which trains a run itself for Jacobi decoding"
    add("--kind", choices=(*speculators.KINDS, _JACOBI), default="lstm", help=text)
    add("--out", required=True, metavar="DIR", help="the directory for the speculator, for --speculator DIR")
    add("--drafts", type=int, default=of.drafts, metavar="N", help="guessed tokens (default %(default)s)")
    add("--width", type=int, metavar="N", help="the width of the speculator (default: the model's)")
    window = f"the most positions that eagle3 and mtp attend to (default {EagleConfig.window})"
    add("--window", type=int, metavar="N", help=window)
    text = "guess only the N most frequent tokens of the text: a smaller head to train and to multiply (default: all)"
    add("--draft-vocab", type=int, metavar="N", help=text)
    add("--steps", type=int, default=of.steps, metavar="N", help="(default %(default)s)")
    add("--batch", type=int, default=of.batch, metavar="N", help="rows of a step (default %(default)s)")
    add("--length", type=int, default=of.length, metavar="N", help="tokens of a row (default %(default)s)")
    add("--tokens", type=int, default=of.tokens, metavar="N", help="the most tokens of the text (default %(default)s)")
    add("--lr", type=float, default=of.learning_rate, dest="learning_rate", help="(default %(default)s)")
    text = "the model draws the second half of each row at temperature T: a speculator meets the model's own text"
    add("--draw", type=float, metavar="T", help=text)
    add("--seed", type=int, default=0, help="(default %(default)s)")
    add("--png", metavar="FILE", help="write a picture of losses and accepted drafts to this file (needs matplotlib)")


def parse_speculate(args: argparse.Namespace) -> SpeculateJob:
    """Returns the settings that the arguments describe. No weights are loaded.

    Raises:
        ValueError: lists all mistakes, each with the remedy.
    """
    kind = detect_kind(pathlib.Path(args.model))
    problems = [str(kind)] if isinstance(kind, Problem) else []
    if not pathlib.Path(args.text).is_file():
        problems.append(f"TEXT {args.text} is not a file; give JSON lines such as {{'text': '...'}}, or a plain text")
    for name in _COUNTS:
        value = getattr(args, name)
        if value is not None and value < 1:
            problems.append(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.length < args.drafts + 2:
        problems.append(f"--length must be at least {args.drafts + 2}, --drafts and two more, got {args.length}")
    if args.window is not None and args.kind not in _WINDOWED:
        problems.append(f"--window is only for {' and '.join(_WINDOWED)}, got --kind {args.kind}; leave --window out")
    if args.draft_vocab is not None and args.kind in ("mtp", _JACOBI):
        problems.append(f"--draft-vocab is not for --kind {args.kind}; leave --draft-vocab out")
    if not args.learning_rate > 0:
        problems.append(f"--lr must be above 0, got {args.learning_rate}")
    if args.draw is not None and (args.draw < 0 or args.kind == _JACOBI):
        problems.append(f"--draw must be at least 0, and is for a speculator, got {args.draw} and --kind {args.kind}")
    if args.png is not None and (args.kind == _JACOBI or importlib.util.find_spec("matplotlib") is None):
        problems.append("--png needs a speculator and matplotlib: pip install 'shardfn[train]', or leave --png out")
    if num_launched() > 1:
        problems.append("shardfn speculate runs on one rank; start it without torchrun")
    raise_all(ValueError, "these arguments make no sense:", problems)
    names = {x.name for x in dataclasses.fields(SpeculateJob)} - {"model"}
    model = ModelSettings(model=args.model, kind=kind)
    return SpeculateJob(model, **{name: getattr(args, name) for name in names})


def speculate(job: SpeculateJob) -> int:
    """Trains a speculator, or a model for Jacobi decoding, writes its files, and prints its held-out acceptance.

    The acceptance of n-grams is printed next to a speculator's.

    Returns:
        The exit status.

    Raises:
        ValueError: the model or the text is refused.
    """
    with waiting("reading", job.model.model):
        served = load_model(job.model, make_mesh({}, alone=True))
    made = served.decoder
    rows = _read_rows(job, made, served.text.plain)
    rows = rows if job.draw is None else _draw_rows(made, served.params, rows, job)
    held = max(1, len(rows) // _HELD)
    if job.kind == _JACOBI:
        with progress(total=job.steps, desc="training", unit="step") as bar:
            print(force_model(job, served, rows[:-held], rows[-held:][:_PROMPTS], lambda *_: bar.update() and None))
        return 0
    sizes = {"d_inner": job.width, "num_drafts": job.drafts, "window": job.window or EagleConfig.window}
    sizes["draft_vocab"] = job.draft_vocab
    config = speculators.config_of(made, job.kind, **sizes)
    training, prompts = rows[:-held], rows[-held:][:_PROMPTS, : job.length // 2].tolist()
    hidden = None if job.kind == "owl" else _compute_hidden(made, served.params, training, config.layers)
    losses = list[float]()
    with progress(total=job.steps, desc="training", unit="step") as bar:

        def report(step: int, loss: float) -> None:
            losses.append(loss / sum(config.step_weights))
            bar.update()
            bar.set_postfix(loss=f"{loss / sum(config.step_weights):.3f}")
            if bar.disable and (step + 1) % max(1, job.steps // 5) == 0:
                print(
                    f"step {step + 1}: loss {loss / sum(config.step_weights):.3f} a draft", file=sys.stderr, flush=True
                )

        states = HiddenRows(hidden, training)
        how: dict[str, Any] = {"batch_size": job.batch, "learning_rate": job.learning_rate, "seed": job.seed}
        if job.kind in _WINDOWED:  # of the model's width, a layer learns the inputs of the model's head
            how["shared"] = speculators.find_shared(made, served.params)
        if job.draft_vocab is not None:
            how["shared"] = how.get("shared", {}) | {
                "draft_tokens": speculators.find_frequent_tokens(training, job.draft_vocab)
            }
        if job.kind == "owl" and made.config is not None:
            how["of_batch"] = functools.partial(speculators.owl_loss, made.config, config, unshard(served.params))
        params = speculators.train(config, states, steps=job.steps, report=report, **how)
    speculators.save(job.out, config, params, made, served.params)
    found = speculators.load(job.out, made, served.params)
    drafters = {f"{job.kind} speculator": found, "n-grams": Ngram()}
    given = found.prepare(made, served.params)
    accepted = {name: _measure(*given, drafter, prompts, job) for name, drafter in drafters.items()}
    for name, values in accepted.items():
        drawn = ", ".join(f"{value:.2f} {how}" for how, value in values.items())
        print(f"{name}: {drawn} accepted drafts a step")
    if job.png is not None:
        _draw_training(losses, accepted, job.png)
    print(f"{job.out}: for shardfn generate --speculator {job.out}")
    return 0


def _draw_training(losses: Sequence[float], accepted: Mapping[str, Mapping[str, float]], path: str) -> None:
    """Draws the losses of all steps, and the accepted drafts a step of each drafter."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(losses)
    left.set(xlabel="step", ylabel="cross entropy of a draft")
    for i, how in enumerate(_SAMPLINGS):
        places = [place + 0.4 * i for place in range(len(accepted))]
        right.bar(places, [values[how] for values in accepted.values()], width=0.4, label=how)
    right.set_xticks([place + 0.2 for place in range(len(accepted))], [*accepted])
    right.set(ylabel="accepted drafts a step, held-out text")
    right.legend()
    figure.savefig(path, dpi=120)


def _draw_rows(made: Decoder, params: Any, rows: Tensor, job: SpeculateJob) -> Tensor:
    """Returns the rows with a second half that the model draws."""
    kept, found = job.length // 2, list[list[int]]()
    engine = Engine(made, params, limits=limits_of(made, context=job.length, running=16))
    how = Sampling(max_tokens=job.length - kept, temperature=job.draw or 0.0, seed=job.seed)
    with progress(total=len(rows), desc="drawing", unit="row") as bar:
        for some in rows[:, :kept].split(16):
            found += [one.tokens for one in engine.generate(some.tolist(), how)]
            bar.update(len(some))
    return torch.cat([rows[:, :kept], torch.tensor(found)], 1)


def _compute_hidden(made: Decoder, params: Any, training: Tensor, layers: Sequence[int]) -> Tensor:
    """Returns the states of all rows [N, S, D]."""
    found = []
    with progress(total=len(training), desc="hidden states", unit="row") as bar:
        for states in speculators.hidden_states(made, params, training, layers):
            found.append(states)
            bar.update()
    return torch.stack(found)


def _read_rows(job: SpeculateJob, made: Decoder, encode: Any) -> Tensor:
    """Returns the text as rows of equal length."""
    path = pathlib.Path(job.text)
    ids = list[int]()
    for text in _read_texts(path):
        ids += encode(text)
        if len(ids) >= job.tokens:
            break
    if job.length > made.context:
        raise ValueError(f"--length {job.length}: the longest sequence of {job.model.model} has {made.context} tokens.")
    num = min(len(ids), job.tokens) // job.length
    if num < job.batch + 1:
        raise ValueError(
            f"{path} has {len(ids)} tokens, and {(job.batch + 1) * job.length} are needed: --batch rows and a"
            " held-out row, of --length each. Give a longer text, or lower --batch or --length."
        )
    return torch.tensor(ids[: num * job.length]).view(num, job.length)


def _read_texts(path: pathlib.Path) -> Any:
    """Yields the texts of a file."""
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8", errors="replace")
        return
    lines = JSONLines(path)
    for i in range(len(lines)):
        row = lines[i]
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ValueError(f"{lines.place(i)} must be an object with a text, as {{'text': '...'}}, got {row!r:.60}.")
        yield row["text"]


def _measure(
    made: Decoder, params: Any, drafter: Drafter, prompts: list[list[int]], job: SpeculateJob
) -> dict[str, float]:
    """Returns the accepted drafts a step by kind of sampling."""
    limits = limits_of(made, context=job.length, drafts=15, running=4, buckets=(1, 2, 3, 5, 9, 16, 64))
    engine, most = Engine(made, params, limits=limits, drafter=drafter), job.length - max(map(len, prompts))
    return {
        how: measure_acceptance(engine, prompts, Sampling(max_tokens=most, **fields))
        for how, fields in _SAMPLINGS.items()
    }
