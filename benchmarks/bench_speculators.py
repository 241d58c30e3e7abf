"""Speculators against the n-gram drafter: accepted drafts a step, and processor time over plain.

    shardfn speculate RUN text.jsonl --kind lstm --out lstm
    python benchmarks/bench_speculators.py RUN held_out.txt --speculator lstm mlp --out results/speculators.md

Or without a model: a small GPT and a speculator of each kind are trained here, in about four minutes. Speculators
propose chains, and with --branches trees, too.

    python benchmarks/bench_speculators.py --branches 3

Prompts are parts of the held-out text. Each is completed by one sequence, greedy and sampled, and then 16 sequences
together. Times are the processor's, of one thread. Drafters take turns within a round; ratios are formed within it.
All tokens and log probabilities are compared with those without a drafter. Accepted drafts a step count all steps of a
sequence, also those without drafts. For EAGLE-3 and MTP the part of right drafts after each place of held-out rows is
reported, with the text before each draft.

The costs of a step say how many drafts must be accepted for 1.5 times the speed: 1.5 times the time of a step over the
time without a drafter, less 1. They have the prompts' steps in them.

The bound is the number of drafts that a drafter of n tokens would have accepted that guesses every token whose
probability under the model is above a half, and no other: what the model's own certainty allows.
"""

import argparse
import functools
import math
import os
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import torch
from _report import publish, table
from _small_gpt import LENGTH, SmallGPT, train_small_gpt

from shardfn import make_mesh, speculators
from shardfn.inference import Decoder, Drafter, Engine, Jacobi, Ngram, Runner, Sampling, Suffix, decoder, limits_of
from shardfn.models import gpt
from shardfn.pretrained import ModelSettings, detect_kind, load_model
from shardfn.speculators import Hybrid, Speculator

SAMPLINGS = {"greedy": {"temperature": 0.0}, "temperature 0.8": {"temperature": 0.8, "seed": 1}}


class Measured(NamedTuple):
    """A model, its drafters, and prompts.

    Attributes:
        title: line about the model.
        decoder: decoder of the model.
        params: parameters.
        prompts: token ids.
        drafters: drafters by name, "none" first.
    """

    title: str
    decoder: Decoder
    params: Any
    prompts: list[list[int]]
    drafters: dict[str, Drafter | None]


class Run(NamedTuple):
    """A round of a drafter.

    Attributes:
        seconds: processor time of prompts one after another.
        proposals: part of the time in proposals of a speculator.
        together: processor time of 16 prompts together.
        accepted: accepted drafts a step.
        steps: steps in which tokens of single prompts were drawn.
        found: completions.
    """

    seconds: float
    proposals: float
    together: float
    accepted: float
    steps: int
    found: list[Any]


class Clock:
    """Sum of the processor time of the proposals of a speculator. It replaces `propose_all` of the speculator."""

    def __init__(self, drafter: Any) -> None:
        self.seconds, self._propose = 0.0, getattr(drafter, "propose_all", None)
        if self._propose is not None:
            drafter.propose_all = self._propose_all

    def _propose_all(self, asks: Any) -> Any:
        assert self._propose is not None
        start = time.process_time()
        found = self._propose(asks)
        self.seconds += time.process_time() - start
        return found


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    given = _train_all(args) if args.model is None else _load(args)
    made, params, prompts, drafters = given.decoder, given.params, given.prompts, given.drafters
    context = len(prompts[0]) + args.tokens
    limits = limits_of(made, context=context, drafts=15, running=16, buckets=(1, 2, 5, 8, 16, 64))
    given_of = {name: _prepare(x, made, params) for name, x in drafters.items()}
    plain = Runner(made, limits)
    runners = {name: plain if own[0] is made else Runner(own[0], limits) for name, own in given_of.items()}
    clocks = {name: Clock(x) for name, x in drafters.items()}
    body = [
        f"{given.title}; {len(prompts)} prompts of {len(prompts[0])} tokens, {args.tokens} tokens each;"
        f" {args.rounds} rounds; one thread, processor time; load of the machine {os.getloadavg()[0]:.1f}"
    ]
    for name, fields in SAMPLINGS.items():
        how = Sampling(max_tokens=args.tokens, **fields)
        runs: dict[str, list[Run]] = {each: [] for each in drafters}
        many = (prompts * 16)[:16]
        for _ in range(1 + args.rounds):  # the first round captures graphs
            for each, drafter in drafters.items():
                engine = Engine(*given_of[each], limits=limits, runner=runners[each], drafter=drafter)
                start, proposed = time.process_time(), clocks[each].seconds
                found = [engine.generate([prompt], how)[0] for prompt in prompts]
                seconds, proposals = time.process_time() - start, clocks[each].seconds - proposed
                accepted = engine.stats.speculation.accepted
                steps = sum(len(one.tokens) for one in found) - accepted
                start = time.process_time()
                together = engine.generate(many, how)
                taken = time.process_time() - start
                runs[each].append(Run(seconds, proposals, taken, accepted / steps, steps, found))
                assert found == runs["none"][0].found and together == (found * 16)[:16], each
        rows = [_row(each, runs[each][1:] or runs[each], runs["none"][1:] or runs["none"]) for each in drafters]
        head = (
            "drafter",
            "accepted drafts a step",
            "speed over none",
            "quartiles",
            "speed of 16 over none",
            "ms a step, least",
            "of them proposals",
            "accepted for 1.5",
        )
        bound = _bound(runs["none"][0].found, args.drafts)
        body.append(
            f"## {name}\n\n{table(head, rows)}\n\nbound of {args.drafts} drafts by the model's certainty: {bound:.2f}"
        )
    publish("Speculators", "\n\n".join(body), out=args.out)


def _prepare(drafter: Drafter | None, made: Decoder, params: Any) -> tuple[Decoder, Any]:
    """Returns decoder and parameters, with a [SPEC] token for OWL."""
    return drafter.prepare(made, params) if isinstance(drafter, Speculator | Hybrid) else (made, params)


def _load(args: argparse.Namespace) -> Measured:
    """Returns the model and the speculators of the arguments."""
    path = pathlib.Path(args.model)
    served = load_model(ModelSettings(model=args.model, kind=detect_kind(path)), make_mesh({}, alone=True))
    made = served.decoder
    ids = served.text.plain(pathlib.Path(args.text).read_text(encoding="utf-8", errors="replace"))
    room = made.context - args.tokens if args.length is None else args.length
    places = range(0, len(ids) - room, max(1, (len(ids) - room) // args.prompts))
    prompts = [ids[at : at + room] for at in places][: args.prompts]
    drafters: dict[str, Drafter | None] = {"none": None, "n-grams": Ngram(), "suffixes": Suffix()}
    for x in args.speculator:
        drafters[pathlib.Path(x).name] = speculators.load(x, made, served.params)
        if args.branches > 1:
            tree = speculators.load(x, made, served.params, branches=args.branches)
            drafters[f"{pathlib.Path(x).name}, {args.branches} branches"] = tree
    return Measured(f"{args.model}: {served.size:,} parameters", made, served.params, prompts, drafters)


def _train_all(args: argparse.Namespace) -> Measured:
    """Returns a small model, and a speculator of each kind, trained here."""
    small = train_small_gpt(args.model_steps)
    made, rows = decoder(small.config), small.training[:: max(1, len(small.training) // args.rows)][: args.rows]
    drafters: dict[str, Drafter | None] = {"none": None, "n-grams": Ngram(), "suffixes": Suffix(), "jacobi": Jacobi()}
    seen, notes = dict[tuple[int, ...], torch.Tensor](), list[str]()
    windowed = ("eagle3", "mtp")
    for kind, window in [(k, w) for k in args.kinds for w in (args.window if k in windowed else args.window[:1])]:
        config = speculators.config_of(made, kind, num_drafts=args.drafts, window=window)
        name = f"{kind}, window {window}" if kind in windowed and len(args.window) > 1 else kind
        if config.layers not in seen and kind != "owl":
            states = speculators.hidden_states(made, small.params, rows, config.layers)
            seen[config.layers] = torch.stack(list(states))
        hidden = None if kind == "owl" else seen[config.layers]
        losses = list[float]()
        how: dict[str, Any] = {"learning_rate": 2e-3, "report": lambda _, x, losses=losses: losses.append(x)}
        if kind == "owl":
            how["of_batch"] = functools.partial(speculators.owl_loss, small.config, config, small.params)
        params = speculators.train(config, speculators.HiddenRows(hidden, rows), steps=args.steps, **how)
        mean = sum(losses[-10:]) / len(losses[-10:]) / sum(config.step_weights)
        print(f"{name}: loss {losses[0] / sum(config.step_weights):.3f} -> {mean:.3f} a draft", flush=True)
        drafters[name] = Speculator(config, params)
        if kind in windowed:
            notes.append(f"right drafts of {name} on held-out rows: {_measure_rows(made, small, config, params)}")
        if args.branches > 1:
            drafters[f"{name}, {args.branches} branches"] = Speculator(config, params, branches=args.branches)
        if kind == "owl":
            drafters["owl with suffixes"] = Hybrid(Speculator(config, params))
    step = max(1, len(small.held_out) // args.prompts)
    prompts = [row[: LENGTH // 2].tolist() for row in small.held_out[::step][: args.prompts]]
    size = gpt.num_params(small.config)
    title = f"a byte-level GPT of {size:,} parameters, on held-out source; {args.steps} steps of each speculator"
    return Measured(". ".join([title, *notes]), made, small.params, prompts, drafters)


@torch.no_grad()
def _measure_rows(made: Decoder, small: SmallGPT, config: Any, params: Any) -> str:
    """Returns the part of right drafts after each position of held-out rows, for each draft of a chain."""
    rows = small.held_out[:: max(1, len(small.held_out) // 32)][:32]
    hidden = torch.stack(list(speculators.hidden_states(made, small.params, rows, config.layers)))
    windows = rows[:, 1:].unfold(1, config.num_drafts + 1, 1)
    found = speculators.apply(config, params, hidden[:, : windows.shape[1]], windows[..., : config.num_drafts])
    return " ".join(f"{float((x.argmax(-1) == windows[..., i + 1]).float().mean()):.3f}" for i, x in enumerate(found))


def _row(name: str, mine: list[Run], plain: list[Run]) -> tuple[str, ...]:
    ratios = sorted(one.seconds / other.seconds for one, other in zip(plain, mine, strict=True))
    low, mid, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    together = statistics.median(one.together / other.together for one, other in zip(plain, mine, strict=True))
    least = min(mine, key=lambda one: one.seconds)
    step, base = least.seconds / least.steps, min(one.seconds / one.steps for one in plain)
    speeds = f"{mine[0].accepted:.2f}", f"{mid:.2f}", f"{low:.2f} .. {high:.2f}", f"{together:.2f}"
    costs = f"{1e3 * step:.2f}", f"{1e3 * least.proposals / least.steps:.2f}", f"{max(0.0, 1.5 * step / base - 1):.2f}"
    return name, *speeds, *costs


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
    parser.add_argument("model", nargs="?", help="default: a small model, trained here with a speculator of each kind")
    parser.add_argument("text", nargs="?")
    parser.add_argument("--speculator", nargs="+", default=[], metavar="DIR")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="drawn tokens of each prompt")
    parser.add_argument("--length", type=int, help="tokens of a prompt, default: the rest of the model's context")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model-steps", type=int, default=600, help="of the small model's training")
    parser.add_argument("--steps", type=int, default=600, help="of each speculator's training, without a model")
    parser.add_argument("--rows", type=int, default=1200, help="rows of 128 tokens for speculators, without a model")
    parser.add_argument("--branches", type=int, default=1, help="of trees, next to chains")
    parser.add_argument("--kinds", nargs="+", default=speculators.KINDS, choices=speculators.KINDS)
    parser.add_argument("--window", type=int, nargs="+", default=[8], help="of EAGLE-3 and MTP, without a model")
    parser.add_argument("--out", help="write the table there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
