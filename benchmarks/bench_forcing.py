"""Jacobi Forcing: tokens a step before and after a training on structured text, and the loss on held-out text.

    python benchmarks/bench_forcing.py --out benchmarks/results/forcing.md

The text is records of key and value, for example `id=0427 name=row0427 next=0428;`, byte by byte, of random numbers. A
small GPT is trained on records, then for Jacobi decoding on its own trajectories. Beside it the same model is trained
as long on the clean text of these trajectories. All completions are compared with plain greedy decoding.
"""

import argparse
import functools
import os
from typing import Any

import torch
from _report import publish, table

import shardfn as sf
from shardfn.inference import Drafter, Engine, Jacobi, MultiBlockJacobi, Ngram, Runner, Sampling, decoder, limits_of
from shardfn.models import gpt
from shardfn.speculators import ForcingConfig, draw_trajectories, forcing_loss, make_forcing_batch, measure_acceptance

CONFIG = gpt.Config.llama_like(
    vocab_size=128, num_layers=3, d_model=96, num_heads=3, d_ff=None, max_len=160, batch_invariant=True
)
FAST = functools.partial(gpt.loss, gpt.Config(**{**CONFIG.__dict__, "batch_invariant": False}))
DRAFTERS: dict[str, Drafter] = {"n-grams": Ngram(), "jacobi 8": Jacobi(8), "jacobi blocks of 8": MultiBlockJacobi(8)}


def make_rows(num: int, length: int, seed: int) -> torch.Tensor:
    """Returns rows of bytes of records."""
    drawn, rows = torch.Generator().manual_seed(seed), []
    for _ in range(num):
        text = ""
        while len(text) < length:
            n = int(torch.randint(0, 9999, (1,), generator=drawn))
            text += f"id={n:04} name=row{n:04} next={n + 1:04};"
        rows.append(list(text[:length].encode()))
    return torch.tensor(rows)


def train(params: Any, loss: Any, batches: Any, steps: int, rate: float) -> Any:
    """Returns parameters after some steps."""
    step = sf.sharded_step(loss, sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(rate)))
    state = step.init(params)
    for i in range(steps):
        state, _ = step(state, batches(i))
    return sf.core.tree_map(sf.unshard, state.params)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--forcing-steps", type=int, default=150)
    parser.add_argument("--texts", type=int, default=48, help="trajectories")
    parser.add_argument("--rounds", type=int, default=1, help="parts of the training, each on new trajectories")
    parser.add_argument("--rate", type=float, default=1e-3, help="of Jacobi Forcing, and of further text")
    parser.add_argument("--text-weight", type=float, default=10.0, help="of the clean text in Jacobi Forcing")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, held = make_rows(512, 129, 0), make_rows(16, 129, 1)
    made, settings = decoder(CONFIG), ForcingConfig(block=8, window=4, text_weight=args.text_weight)
    base = train(gpt.init(CONFIG, sf.key(0)), FAST, lambda i: {"tokens": rows[i * 8 % 504 :][:8]}, args.steps, 3e-3)
    print("model trained", flush=True)
    prompts = rows[: args.texts, :40].tolist()
    forced, clean = base, torch.empty(0)
    for number in range(args.rounds):
        whole = make_forcing_batch(settings, list(draw_trajectories(made, forced, prompts, block=8, num_blocks=8)))
        if not number:
            clean = torch.cat([whole["prompt"], whole["clean"].flatten(1)], 1)
        pick = lambda i, of=whole: {name: x[i * 4 % args.texts :][:4] for name, x in of.items()}  # noqa: E731
        of_pairs = functools.partial(forcing_loss, CONFIG, settings)
        forced = train(forced, of_pairs, pick, args.forcing_steps // args.rounds, args.rate)
        print(f"round {number + 1} of Jacobi Forcing", flush=True)
    texts = lambda i: {"tokens": clean[i * 4 % args.texts :][:4]}  # noqa: E731
    further = train(base, FAST, texts, args.forcing_steps, args.rate)
    how, lines = Sampling(max_tokens=64, temperature=0.0), []
    limits = limits_of(made, drafts=16, running=1, buckets=(1, 8, 17, 64))
    runner = Runner(made, limits)
    for name, params in {"before": base, "further text": further, "Jacobi Forcing": forced}.items():
        asked = held[:8, :40].tolist()
        plain = [Engine(made, params, limits=limits, runner=runner).generate([x], how) for x in asked[:2]]
        found = []
        for drafter in DRAFTERS.values():
            engine = Engine(made, params, limits=limits, runner=runner, drafter=drafter)
            assert [engine.generate([x], how) for x in asked[:2]] == plain
            found.append(f"{1 + measure_acceptance(engine, asked, how):.2f}")
        with torch.no_grad():
            loss = float(FAST(params, {"tokens": held}))
        print(name, found, loss, flush=True)
        lines.append((name, "1.00", *found, f"{loss:.3f}"))
    body = (
        f"{gpt.num_params(CONFIG):,} parameters; {args.steps} steps on text, then {args.forcing_steps} steps in"
        f" {args.rounds} rounds on {args.texts} texts of 8 blocks of 8; 8 held-out prompts of 40 bytes,"
        f" 64 bytes each, greedy; load"
        f" of the machine {os.getloadavg()[0]:.1f}\n\n## Tokens a step\n\n"
    )
    head = ("model", "plain", *DRAFTERS, "loss on held-out text")
    publish("Jacobi Forcing", body + table(head, lines), out=args.out)


if __name__ == "__main__":
    main()
