"""OWL by context length: accepted drafts a step of OWL, of a draft model trained on short texts, and of suffixes.

    python benchmarks/bench_owl.py --out benchmarks/results/owl.md

A copy task: a row repeats a series of 3 to 5 words of a dictionary over and over, token by token. Each word has 3 to 7
tokens of its own, so that a token gives the rest of its word, and only the text gives the next word. A small GPT is
trained on rows of 128 tokens, then on long rows, so that it copies at all lengths. Then both drafters are trained on
rows of 256: OWL's LSTM with its [SPEC] token, and a GPT of two layers that attends to the whole text (`DraftModel`).
Prompts of all lengths are ends of the same rows, so that all have the same completions. All completions are compared
with plain greedy decoding. With --keep, models stay in a directory, and a later run begins with them.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import time
from typing import Any

import torch
from _report import publish, table

import shardfn as sf
from shardfn.inference import (
    Decoder,
    Drafter,
    DraftModel,
    Engine,
    Ngram,
    Runner,
    Sampling,
    Suffix,
    decoder,
    limits_of,
)
from shardfn.models import gpt
from shardfn.speculators import (
    HiddenRows,
    Hybrid,
    Speculator,
    config_of,
    measure_acceptance,
    owl_loss,
    train,
)

SHORT, VOCAB = 256, 48
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "d_ff": None, "max_len": 2304, "batch_invariant": True}
TARGET = gpt.Config.llama_like(num_layers=2, d_model=64, num_heads=2, **SIZES)
DRAFT = gpt.Config.llama_like(num_layers=2, d_model=48, num_heads=2, **SIZES)


def make_words() -> list[list[int]]:
    """Returns the dictionary: all tokens, cut in words of 3 to 7."""
    words, at, drawn = list[list[int]](), 0, torch.Generator().manual_seed(0)
    while at < VOCAB:
        num = int(torch.randint(3, 8, (1,), generator=drawn))
        words.append([*range(at, min(at + num, VOCAB))])
        at += num
    return words


def make_rows(num: int, length: int, drawn: torch.Generator) -> torch.Tensor:
    """Returns rows of tokens."""
    words, rows = make_words(), []
    for _ in range(num):
        chosen = torch.randperm(len(words), generator=drawn)[: int(torch.randint(3, 6, (1,), generator=drawn))]
        series = [token for i in chosen.tolist() for token in words[i]]
        start = int(torch.randint(len(series), (1,), generator=drawn))
        rows.append((series * (length // len(series) + 2))[start : start + length])
    return torch.tensor(rows)


def keep(args: argparse.Namespace, name: str, make: Any) -> Any:
    """Returns the value of a function, or the value that an earlier run with the same settings has kept."""
    if args.keep is None:
        return make()
    path = pathlib.Path(args.keep) / f"{name}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(make(), path)
    return torch.load(path)


def train_gpt(config: gpt.Config, params: Any, steps: int, batch: int, length: int, rate: float) -> Any:
    """Returns parameters after some steps on new rows of the copy task."""
    falling = sf.optim.warmup_cosine_decay_schedule(0.0, rate, min(50, steps // 2), steps, rate / 10)
    loss = functools.partial(gpt.loss, dataclasses.replace(config, batch_invariant=False))
    step = sf.sharded_step(loss, sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(falling, b2=0.95)))
    state, drawn = step.init(params), torch.Generator().manual_seed(steps + length)
    start = time.monotonic()
    for i in range(steps):
        state, metrics = step(state, {"tokens": make_rows(batch, length + 1, drawn)})
        if (i + 1) % max(1, steps // 8) == 0:
            spent = time.monotonic() - start
            print(f"{config.num_layers} layers, step {i + 1}: {float(metrics['loss']):.3f}, {spent:.0f} s", flush=True)
    return sf.core.tree_map(sf.unshard, state.params)


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    first, long = functools.partial(gpt.init, TARGET, sf.key(0)), max(args.lengths) + args.tokens
    target = keep(args, "short", lambda: train_gpt(TARGET, first(), args.steps, 16, SHORT // 2, 4e-3))
    start = sf.core.tree_map(torch.clone, target)
    target = keep(args, "long", lambda: train_gpt(TARGET, start, args.long_steps, 2, long, 1e-3))
    new = functools.partial(gpt.init, DRAFT, sf.key(1))
    draft = keep(args, "draft", lambda: train_gpt(DRAFT, new(), args.draft_steps, 16, SHORT, 4e-3))
    made, rows = decoder(TARGET), make_rows(1024, SHORT, torch.Generator().manual_seed(5))
    config = config_of(made, "owl", num_drafts=args.drafts)
    of_batch = functools.partial(owl_loss, TARGET, config, target)

    def report(step: int, loss: float) -> None:
        if (step + 1) % max(1, args.owl_steps // 8) == 0:
            print(f"OWL, step {step + 1}: {loss / args.drafts:.3f} a draft", flush=True)

    how: dict[str, Any] = {"batch_size": 8, "learning_rate": 4e-3, "of_batch": of_batch, "report": report}
    params = keep(args, "owl", lambda: train(config, HiddenRows(None, rows), steps=args.owl_steps, **how))
    owl, held = Speculator(config, params), make_rows(args.prompts, long, torch.Generator().manual_seed(6))
    small = limits_of(decoder(DRAFT), running=1, buckets=(1, 8, 256))
    drafters: dict[str, Drafter | None] = {
        "none": None,
        "n-grams": Ngram(),
        "suffixes": Suffix(),
        f"draft model, trained at {SHORT}": DraftModel(decoder(DRAFT), draft, limits=small),
        f"OWL, trained at {SHORT}": owl,
        "OWL with suffixes": Hybrid(owl),
    }
    found = {name: _measure(made, target, x, held, args) for name, x in drafters.items()}
    right = [f"{_count_copied(held, found['none'][length][1], args.tokens):.3f}" for length in args.lengths]
    lines = []
    for name, by_length in found.items():
        assert all(by_length[x][1] == found["none"][x][1] for x in args.lengths), name
        each = [by_length[x][0] for x in args.lengths]
        ratio = f"{each[-1] / each[args.lengths.index(SHORT)]:.3f}" if each[0] else ""
        lines.append((name, *(f"{x:.3f}" for x in each), ratio))
    lines[0] = ("copied tokens of the model", *right, "")
    body = (
        f"Target: {gpt.num_params(TARGET):,} parameters, {args.steps} steps at {SHORT // 2} tokens and"
        f" {args.long_steps} at {long}. Draft model: {gpt.num_params(DRAFT):,} parameters, {args.draft_steps}"
        f" steps at {SHORT}. OWL: {args.drafts} drafts, {args.owl_steps} steps at {SHORT}. {args.prompts} prompts of"
        f" each length, {args.tokens} tokens each, greedy; load of the machine {os.getloadavg()[0]:.1f}\n\n"
        "## Accepted drafts a step by the tokens of a prompt\n\n"
    )
    head = ("drafter", *args.lengths, f"{args.lengths[-1]} over {SHORT}")
    publish("OWL by context length", body + table(head, lines), out=args.out)


def _measure(
    made: Decoder, params: Any, drafter: Drafter | None, held: torch.Tensor, args: argparse.Namespace
) -> dict[int, tuple[float, list[list[int]]]]:
    """Returns the accepted drafts a step, and all completions, by length."""
    prepared = drafter.prepare(made, params) if isinstance(drafter, Speculator | Hybrid) else (made, params)
    limits = limits_of(prepared[0], running=1, buckets=(1, 8, 16, 256), drafts=2 * args.drafts + 1)
    runner, how, found = Runner(prepared[0], limits), Sampling(args.tokens, temperature=0.0), {}
    for length in args.lengths:
        prompts = held[:, max(args.lengths) - length : max(args.lengths)].tolist()
        engine = Engine(*prepared, limits=limits, runner=runner, drafter=drafter)
        accepted = measure_acceptance(engine, prompts, how)
        plain = Engine(*prepared, limits=limits, runner=runner, drafter=drafter)
        found[length] = accepted, [plain.generate([x], how)[0].tokens for x in prompts]
    print(type(drafter).__name__, {length: x[0] for length, x in found.items()}, flush=True)
    return found


def _count_copied(held: torch.Tensor, drawn: list[list[int]], tokens: int) -> float:
    """Returns the part of drawn tokens that continue the series."""
    return float((torch.tensor(drawn) == held[:, -tokens:]).float().mean())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="of the target, on short rows")
    parser.add_argument("--long-steps", type=int, default=150, help="of the target, on long rows")
    parser.add_argument("--draft-steps", type=int, default=400, help="of the draft model")
    parser.add_argument("--owl-steps", type=int, default=300)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="drawn tokens of each prompt")
    parser.add_argument("--keep", metavar="DIR", help="directory of the trained models")
    parser.add_argument("--out", help="write the table there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
