"""Jacobi Forcing: tokens a step before and after a training on structured text, and quality on held-out text.

    python benchmarks/bench_forcing.py --out benchmarks/results/forcing.md

The text is records of key and value, for example `id=0427 name=row0427 next=0428;`, byte by byte, of random numbers. A
small GPT is trained on records, then for Jacobi decoding on trajectories, in rounds: each round draws trajectories with
the weights so far. Beside it the same model is trained as long on the clean text of its own trajectories. Quality is
the loss on held-out records, and the part of right bytes among those that the record's number determines. All
completions are compared with plain greedy decoding.
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
FAST = gpt.Config(**{**CONFIG.__dict__, "batch_invariant": False})
DRAFTERS: dict[str, Drafter] = {"n-grams": Ngram(), "jacobi 8": Jacobi(8), "jacobi blocks of 8": MultiBlockJacobi(8)}
PROMPT, RECORD = 40, 31


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
    """Returns parameters after some steps, at a rate that falls to a tenth."""
    falling = sf.optim.warmup_cosine_decay_schedule(0.0, rate, 10, steps, rate / 10)
    step = sf.sharded_step(loss, sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(falling)))
    state = step.init(sf.core.tree_map(torch.clone, params))
    for i in range(steps):
        state, _ = step(state, batches(i))
    return sf.core.tree_map(sf.unshard, state.params)


def force(base: Any, rows: torch.Tensor, args: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    """Returns the model after Jacobi Forcing, and the clean text of the first trajectories."""
    settings = ForcingConfig(block=8, window=4, text_weight=args.text_weight)
    made, pairs = decoder(CONFIG), functools.partial(forcing_loss, CONFIG, settings)

    def loss(params: Any, batch: dict[str, torch.Tensor]) -> Any:
        total, weight = pairs(params, batch)
        if not args.real_weight:
            return sf.WeightedMean(total, weight)
        text = gpt.loss(FAST, params, {"tokens": batch["tokens"]})
        return sf.WeightedMean(total + args.real_weight * weight * text, weight)

    params, clean, prompts = base, torch.empty(0), rows[: args.texts, :PROMPT].tolist()
    for number in range(args.rounds):
        found = list(draw_trajectories(made, params, prompts, block=8, num_blocks=8))
        passes = [make_forcing_batch(settings, found, shift=shift) for shift in range(settings.window)]
        if not number:
            clean = torch.cat([passes[0]["prompt"], passes[0]["clean"].flatten(1)], 1)
        steps_a_pass = -(-args.texts // args.batch)

        def pick(i: int, passes: Any = passes, steps: int = steps_a_pass) -> dict[str, torch.Tensor]:
            own = slice(i % steps * args.batch, (i % steps + 1) * args.batch)
            start = i * args.batch % (len(rows) - args.batch)
            picked = {name: x[own] for name, x in passes[i // steps % settings.window].items()}
            return picked | {"tokens": rows[start : start + args.batch]}

        params = train(params, loss, pick, args.forcing_steps // args.rounds, args.rate)
        print(f"round {number + 1} of Jacobi Forcing", flush=True)
    return params, clean


@torch.no_grad()
def measure_quality(params: Any, held: torch.Tensor) -> tuple[float, float]:
    """Returns the loss, and the part of right bytes among those that a record's number determines."""
    logits = gpt.apply(FAST, params, held[:, :-1])
    free = torch.arange(1, held.shape[1]) % RECORD
    determined = (free < 3) | (free > 6)
    right = (logits.argmax(-1) == held[:, 1:])[:, determined]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten())), float(
        right.float().mean()
    )


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    rows, held = make_rows(2048, 129, 0), make_rows(64, 129, 1)
    text = functools.partial(gpt.loss, FAST)
    base = train(gpt.init(CONFIG, sf.key(0)), text, lambda i: {"tokens": rows[i * 16 % 2032 :][:16]}, args.steps, 3e-3)
    print("model trained", measure_quality(base, held), flush=True)
    forced, clean = force(base, rows, args)
    own = lambda i: {"tokens": clean[i * args.batch % (args.texts - args.batch + 1) :][: args.batch]}  # noqa: E731
    further = train(base, text, own, args.forcing_steps, args.rate)
    made, how, lines = decoder(CONFIG), Sampling(max_tokens=64, temperature=0.0), []
    limits = limits_of(made, drafts=16, running=1, buckets=(1, 8, 17, 64))
    runner = Runner(made, limits)
    for name, params in {"before": base, "text of the trajectories": further, "Jacobi Forcing": forced}.items():
        asked = held[:16, :PROMPT].tolist()
        plain = [Engine(made, params, limits=limits, runner=runner).generate([x], how) for x in asked[:2]]
        found = []
        for drafter in DRAFTERS.values():
            engine = Engine(made, params, limits=limits, runner=runner, drafter=drafter)
            assert [engine.generate([x], how) for x in asked[:2]] == plain
            found.append(f"{1 + measure_acceptance(engine, asked, how):.2f}")
        loss, right = measure_quality(params, held)
        print(name, found, loss, right, flush=True)
        lines.append((name, "1.00", *found, f"{loss:.3f}", f"{right:.3f}"))
    body = (
        f"{gpt.num_params(CONFIG):,} parameters; {args.steps} steps on text, then {args.forcing_steps} steps of"
        f" {args.batch} rows in {args.rounds} rounds on {args.texts} texts of 8 blocks of 8, at the rate {args.rate},"
        f" text weight {args.text_weight}, weight of real text {args.real_weight}; 16 held-out prompts of {PROMPT}"
        f" bytes, 64 bytes each, greedy; quality on 64 held-out rows; load of the machine"
        f" {os.getloadavg()[0]:.1f}\n\n## Tokens a step\n\n"
    )
    head = ("model", "plain", *DRAFTERS, "loss on held-out text", "right bytes")
    publish("Jacobi Forcing", body + table(head, lines), out=args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=900, help="of the model")
    parser.add_argument("--forcing-steps", type=int, default=600)
    parser.add_argument("--texts", type=int, default=96, help="trajectories")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step of Jacobi Forcing")
    parser.add_argument("--rounds", type=int, default=3, help="parts of the training, each on new trajectories")
    parser.add_argument("--rate", type=float, default=1e-3, help="of Jacobi Forcing, and of further text")
    parser.add_argument("--text-weight", type=float, default=10.0, help="of the clean text in Jacobi Forcing")
    parser.add_argument("--real-weight", type=float, default=5.0, help="of rows of the training text in Jacobi Forcing")
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
