"""SwiftKV of a small GPT: divergence from the model without before and after distillation, and time of a prompt.

    python benchmarks/bench_swiftkv.py --out benchmarks/results/swiftkv.md
    python benchmarks/bench_swiftkv.py --wall --out benchmarks/results/swiftkv_wall.md  # only times, two minutes

The model is trained on the package's own source, and SwiftKV on the same rows. On held-out rows the divergence is the
mean over tokens of KL(model, model with SwiftKV), and agreement the part of tokens whose most probable successor is the
same. With --wall, prompts of a GPT of 8 layers and width 512 are timed by pairs, processor time of one thread: a
forward of all tokens with one wanted row, over the forward of the model without, which passes all tokens through all
layers ("whole"), or only the wanted row through the last layer's queries and MLP, as an engine does ("served").
"""

import argparse
import dataclasses
import functools
import os
import statistics
import time
from typing import Any

import torch
from _report import publish, table
from _small_gpt import train_small_gpt
from torch import Tensor

import shardfn as sf
from shardfn import distill
from shardfn.inference import Decoder, decoder, make_single_bodies
from shardfn.models import gpt


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    publish("SwiftKV", _time_prompts(args) if args.wall else _distill(args), out=args.out)


def _distill(args: argparse.Namespace) -> str:
    """Trains a model and its SwiftKV, and returns the divergence by steps."""
    small = train_small_gpt(args.steps)
    config, params = gpt.add_swift_kv(small.config, small.params, first=args.first, group=args.group)
    rows = small.held_out[:: max(1, len(small.held_out) // 64)][:64]
    rate = sf.optim.warmup_cosine_decay_schedule(0.0, args.rate, 10, args.distill_steps, args.rate / 10)
    # Layers that are not batch-invariant compute the same function faster.
    weights = {"temperature": args.temperature, "hidden_weight": args.hidden_weight}
    loss = functools.partial(distill.swift_loss, dataclasses.replace(config, batch_invariant=False), **weights)
    step = sf.sharded_step(loss, sf.optim.adamw(rate), trainable=gpt.swift_trainable(config))
    state, drawn = step.init(params), torch.Generator().manual_seed(1)
    start, lines = _compare(config, params, rows), list[tuple[str, ...]]()
    for i in range(args.distill_steps + 1):
        if i % max(1, args.distill_steps // 6) == 0:
            kl, agreement = _compare(config, sf.unshard(state.params), rows)
            lines.append((str(i), f"{kl:.4f}", f"{start[0] / kl:.1f}x", f"{agreement:.3f}"))
            print(*lines[-1], flush=True)
        own = torch.randint(len(small.training), (args.batch,), generator=drawn)
        state, _ = step(state, {"tokens": small.training[own]}) if i < args.distill_steps else (state, {})
    head = ("steps", "KL on held-out rows", "fall", "greedy agreement")
    return (
        f"{config.num_layers} layers, first {args.first}, group {args.group}; steps of {args.batch} rows of"
        f" {rows.shape[1]}, temperature {args.temperature}, weight of states {args.hidden_weight}, rate {args.rate};"
        f" {len(rows)} held-out rows; load {os.getloadavg()[0]:.1f}\n\n{table(head, lines)}"
    )


@torch.no_grad()
def _compare(config: gpt.Config, params: Any, rows: torch.Tensor) -> tuple[float, float]:
    """Returns the divergence, and the part of equal greedy tokens."""
    student = gpt.apply(config, params, rows)
    teacher = gpt.apply(*gpt.drop_swift_kv(config, params), rows)
    kl = distill.logits(student, teacher).mean()
    return float(kl), float((student.argmax(-1) == teacher.argmax(-1)).float().mean())


def _predict_ratios(config: gpt.Config, length: int) -> tuple[float, float]:
    """Returns multiply-adds of a prompt over those of the model without, whole and served, the head left out.

    All layers have keys and values of all tokens, and the first layers all else of all tokens.
    """
    D, F, rows = config.d_model, config.ff_dim, config.kv_heads * config.head_dim
    own = 2 * D * config.num_heads * config.head_dim + 3 * D * F + config.num_heads * config.head_dim * length
    first, L = config.swift.first if config.swift else config.num_layers, config.num_layers
    swift = first * own + config.num_cache_layers * 2 * D * rows
    return swift / (L * (own + 2 * D * rows)), swift / ((L - 1) * own + L * 2 * D * rows)


@torch.no_grad()
def _time_prompts(args: argparse.Namespace) -> str:
    """Returns medians over rounds of the ratios of times, and the ratios of the formula."""
    base = gpt.Config.llama_like(
        vocab_size=256, num_layers=8, d_model=512, num_heads=8, d_ff=1408, max_len=args.prompt, batch_invariant=True
    )
    params = gpt.init(base, sf.key(0))
    places = torch.arange(args.prompt, dtype=torch.int32)
    tokens, last, whole = places % 251, places[-1:].long(), places.long()
    lines = []
    for first, group in ((6, 1), (4, 1), (4, 2)):
        config, with_swift = gpt.add_swift_kv(base, params, first=first, group=group)
        models = [(decoder(c), decoder(c).pack(p)) for c, p in ((base, params), (config, with_swift))]
        ratios = list[tuple[float, float]]()
        for _ in range(1 + args.rounds):
            plain, served, swift = (
                _time_prompt(*models[i], tokens, places, rows) for i, rows in ((0, whole), (0, last), (1, last))
            )
            ratios.append((swift / plain, swift / served))
        found = [statistics.median(x) for x in zip(*ratios[1:], strict=True)]
        want = _predict_ratios(config, args.prompt)
        pairs = [f"{x:.3f}" for pair in zip(found, want, strict=True) for x in pair]
        lines.append((f"first {first}, group {group}", *pairs))
        print(*lines[-1], flush=True)
    head = ("of 8 layers", "over whole", "formula", "over served", "formula")
    return (
        f"{gpt.num_params(base):,} parameters, a prompt of {args.prompt} tokens, {args.rounds} rounds, processor time"
        f" of one thread; load of the machine {os.getloadavg()[0]:.1f}\n\n{table(head, lines)}"
    )


def _time_prompt(made: Decoder, packed: Any, tokens: Tensor, places: Tensor, rows: Tensor) -> float:
    """Returns the processor time of a forward."""
    bodies = make_single_bodies(made.cache, len(tokens))
    start = time.process_time()
    made.outputs(packed, tokens, places, rows, bodies)
    return time.process_time() - start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=2)
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600, help="of the model")
    parser.add_argument("--distill-steps", type=int, default=1200)
    parser.add_argument("--temperature", type=float, default=1.0, help="of the divergence")
    parser.add_argument("--hidden-weight", type=float, default=0.0, help="of the error of the last states")
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--batch", type=int, default=16, help="rows of a step of distillation")
    parser.add_argument("--wall", action="store_true", help="only the times of prompts, of a larger model")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a timed prompt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", help="write the table there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
