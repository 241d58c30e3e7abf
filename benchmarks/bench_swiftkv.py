"""SwiftKV of a small GPT: divergence from the model without before and after distillation, and time of a prompt.

    python benchmarks/bench_swiftkv.py --first 2 --temperature 1 --hidden-weight 0 --distill-steps 900 --rate 5e-3

The model is trained on the package's own source, and SwiftKV on the same rows. On held-out rows the divergence is the
mean over tokens of KL(model, model with SwiftKV), and agreement the part of tokens whose most probable successor is the
same. Prompts are timed by pairs, processor time of one thread: a forward of all tokens with one wanted row.
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

import shardfn as sf
from shardfn import distill
from shardfn.inference import decoder, make_single_bodies
from shardfn.models import gpt


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    small = train_small_gpt(args.steps)
    config, params = gpt.add_swift_kv(small.config, small.params, first=args.first, group=args.group)
    rows = small.held_out[:: max(1, len(small.held_out) // 32)][:32]
    before = _compare(config, params, rows)
    rate = sf.optim.warmup_cosine_decay_schedule(0.0, args.rate, 10, args.distill_steps, args.rate / 10)
    # Layers that are not batch-invariant compute the same function faster.
    weights = {"temperature": args.temperature, "hidden_weight": args.hidden_weight}
    loss = functools.partial(distill.swift_loss, dataclasses.replace(config, batch_invariant=False), **weights)
    step = sf.sharded_step(loss, sf.optim.adamw(rate), trainable=gpt.swift_trainable(config))
    state, drawn = step.init(params), torch.Generator().manual_seed(1)
    for i in range(args.distill_steps):
        own = torch.randint(len(small.training), (16,), generator=drawn)
        state, metrics = step(state, {"tokens": small.training[own]})
        if (i + 1) % max(1, args.distill_steps // 4) == 0:
            print(f"SwiftKV, step {i + 1}: loss {float(metrics['loss']):.4f}", flush=True)
    params = sf.unshard(state.params)
    after = _compare(config, params, rows)
    ratio = _time_prompts(small.config, small.params, config, params, args.prompt, args.rounds)
    L = config.num_layers
    found = [
        ("KL on held-out rows", f"{before[0]:.4f}", f"{after[0]:.4f}", f"{before[0] / after[0]:.1f}x"),
        ("greedy agreement", f"{before[1]:.3f}", f"{after[1]:.3f}", ""),
    ]
    body = (
        f"{L} layers, first {args.first}, group {args.group}; {args.distill_steps} steps of 16 rows, temperature"
        f" {args.temperature}, weight of states {args.hidden_weight}, rate {args.rate}; load"
        f" {os.getloadavg()[0]:.1f}\n\n{table(('', 'at the start', 'distilled', 'ratio'), found)}\n\n"
        f"processor time of a prompt of {args.prompt} tokens over the model without: {ratio:.2f},"
        f" by the formula {_predict_ratio(config, args.prompt):.2f}"
    )
    publish("SwiftKV", body, out=args.out)


@torch.no_grad()
def _compare(config: gpt.Config, params: Any, rows: torch.Tensor) -> tuple[float, float]:
    """Returns the divergence, and the part of equal greedy tokens."""
    student = gpt.apply(config, params, rows)
    teacher = gpt.apply(*gpt.drop_swift_kv(config, params), rows)
    kl = distill.logits(student, teacher).mean()
    return float(kl), float((student.argmax(-1) == teacher.argmax(-1)).float().mean())


def _predict_ratio(config: gpt.Config, length: int) -> float:
    """Returns multiply-adds of a prompt over those of the model without, its head left out.

    All layers have keys and values of all tokens, and the first layers all else of all tokens.
    """
    D, F, rows = config.d_model, config.ff_dim, config.kv_heads * config.head_dim
    own = 2 * D * config.num_heads * config.head_dim + 3 * D * F + config.num_heads * config.head_dim * length
    first, L = config.swift.first if config.swift else config.num_layers, config.num_layers
    groups = config.num_cache_layers - first
    return (first * own + (first + groups) * 2 * D * rows) / (L * (own + 2 * D * rows))


@torch.no_grad()
def _time_prompts(
    base: gpt.Config, base_params: Any, config: gpt.Config, params: Any, length: int, rounds: int
) -> float:
    """Returns the median over rounds of the ratio of times."""
    places = torch.arange(length, dtype=torch.int32)
    tokens, last = places % 251, places[-1:].long()
    models = []
    for c, p in ((base, base_params), (config, params)):
        made = decoder(dataclasses.replace(c, max_len=max(c.max_len, length)))
        models.append((made, made.pack(p)))
    ratios = []
    for _ in range(rounds):
        seconds = []
        for made, packed in models:
            bodies = make_single_bodies(made.cache, length)
            start = time.process_time()
            made.outputs(packed, tokens, places, last, bodies)
            seconds.append(time.process_time() - start)
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=2)
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600, help="of the model")
    parser.add_argument("--distill-steps", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=2.0, help="of the divergence")
    parser.add_argument("--hidden-weight", type=float, default=1.0, help="of the error of the last states")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a timed prompt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", help="write the table there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
