"""Speculators against the n-gram drafter: accepted drafts a step, and processor time of one sequence over plain.

    shardfn speculate RUN text.jsonl --kind lstm --out lstm
    python benchmarks/bench_speculators.py RUN held_out.txt --speculator lstm mlp --out results/speculators.md

Prompts are parts of the held-out text. Each is completed by one sequence, greedy and sampled. Times are the
processor's, of one thread. Drafters take turns within a round; ratios are formed within it. All tokens and log
probabilities are compared with those without a drafter. Accepted drafts a step count all steps of a sequence, also
those without drafts.

The bound is the number of drafts that a drafter of n tokens would have accepted that guesses every token whose
probability under the model is above a half, and no other: what the model's own certainty allows.
"""

import argparse
import math
import os
import pathlib
import statistics
import time
from typing import Any

import torch
from _report import publish, table

from shardfn import make_mesh, speculators
from shardfn.inference import Drafter, Engine, Ngram, Runner, Sampling, Suffix, limits_of
from shardfn.pretrained import ModelSettings, detect_kind, load_model

SAMPLINGS = {"greedy": {"temperature": 0.0}, "temperature 0.8": {"temperature": 0.8, "seed": 1}}


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    path = pathlib.Path(args.model)
    served = load_model(ModelSettings(model=args.model, kind=detect_kind(path)), make_mesh({}, alone=True))
    made, params = served.decoder, served.params
    limits = limits_of(made, drafts=15, running=4, buckets=(1, 2, 4, 8, 16, 64))
    runner = Runner(made, limits)
    ids = served.text.plain(pathlib.Path(args.text).read_text(encoding="utf-8", errors="replace"))
    room = limits.context - args.tokens
    places = range(0, len(ids) - room, max(1, (len(ids) - room) // args.prompts))
    prompts = [ids[at : at + room] for at in places][: args.prompts]
    drafters: dict[str, Drafter | None] = {"none": None, "n-grams": Ngram(), "suffixes": Suffix()}
    drafters |= {pathlib.Path(x).name: speculators.load(x, made, params) for x in args.speculator}
    body = [
        f"{args.model}: {served.size:,} parameters; {len(prompts)} prompts of {room} tokens, {args.tokens} tokens each;"
        f" {args.rounds} rounds; one thread, processor time; load of the machine {os.getloadavg()[0]:.1f}"
    ]
    for name, fields in SAMPLINGS.items():
        how = Sampling(max_tokens=args.tokens, **fields)
        runs: dict[str, list[tuple[float, float, Any]]] = {each: [] for each in drafters}
        for _ in range(1 + args.rounds):  # the first round captures graphs
            for each, drafter in drafters.items():
                engine = Engine(made, params, limits=limits, runner=runner, drafter=drafter)
                start = time.process_time()
                found = [engine.generate([prompt], how)[0] for prompt in prompts]
                seconds, accepted = time.process_time() - start, engine.stats.speculation.accepted
                drawn = sum(len(one.tokens) for one in found)
                runs[each].append((seconds, accepted / (drawn - accepted), found))
                assert found == runs["none"][0][2], each
        rows = [_row(each, runs[each][1:], runs["none"][1:]) for each in drafters]
        head = ("drafter", "accepted drafts a step", "speed over none", "quartiles", "s, least")
        bound = _bound([one for one in runs["none"][0][2]], args.drafts)
        body.append(
            f"## {name}\n\n{table(head, rows)}\n\nbound of {args.drafts} drafts by the model's certainty: {bound:.2f}"
        )
    publish("Speculators", "\n\n".join(body), out=args.out)


def _row(name: str, mine: list[Any], plain: list[Any]) -> tuple[str, ...]:
    ratios = sorted(one[0] / other[0] for one, other in zip(plain, mine, strict=True))
    low, mid, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    least = f"{min(one[0] for one in mine):.2f}"
    return name, f"{mine[0][1]:.2f}", f"{mid:.2f}", f"{low:.2f} .. {high:.2f}", least


def _bound(found: list[Any], heads: int) -> float:
    """Accepted drafts a step if exactly the tokens of a probability above a half were guessed."""
    steps = tokens = 0
    for one in found:
        sure = [logprob > math.log(0.5) for logprob in one.logprobs]
        at = 0
        while at < len(sure):
            run = 0
            while run < heads and at + run < len(sure) - 1 and sure[at + run]:
                run += 1
            at, steps, tokens = at + run + 1, steps + 1, tokens + run
    return tokens / steps


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--speculator", nargs="+", default=[], metavar="DIR")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96, help="drawn tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="write the table there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
