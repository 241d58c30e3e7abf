"""`shardfn bench`: accepted drafts by the length of prompts, or the delays that clients of a server see under load."""

import argparse
import asyncio
import functools
import importlib.util
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from shardfn.core import make_mesh, raise_all
from shardfn.inference import Engine, Ngram, Sampling, Suffix, limits_of
from shardfn.pretrained import LoadedModel, ModelSettings, Problem, detect_kind, load_model
from shardfn.serve import Arrival, Delays, measure, trace
from shardfn.speculators import Hybrid, load, measure_acceptance

from ._bench_rates import draw_rates, find_goodput, find_percentile, parse_slo, run_rates, write_rates

_DRAFTS = 15


def add_guess_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `shardfn bench guess`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="as of shardfn generate")
    add("text", metavar="TEXT", help="a plain text that the model was not trained on, for prompts")
    add("--speculator", nargs="*", default=[], metavar="DIR", help="speculators of shardfn speculate")
    add("--branches", type=int, default=1, metavar="N", help="also trees of N branches (default 1, none)")
    add("--lengths", type=int, nargs="+", default=[64], metavar="N", help="tokens of a prompt (default 64)")
    add("--prompts", type=int, default=8, metavar="N", help="prompts of each length (default %(default)s)")
    add("--tokens", type=int, default=48, metavar="N", help="drawn tokens of each prompt (default %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="(default %(default)s)")
    add("--json", action="store_true", help="JSON instead of a table")


def bench_guess(args: argparse.Namespace) -> int:
    """Measures drafters, and prints a table: a row for each drafter, and a column for each length.

    Returns:
        The exit status.

    Raises:
        ValueError: an argument is out of range, the text is too short, or a speculator is of another model.
        FileNotFoundError: a speculator's file is missing.
    """
    path = pathlib.Path(args.text)
    kind = detect_kind(pathlib.Path(args.model))
    problems = [str(kind)] if isinstance(kind, Problem) else []
    problems += [] if path.is_file() else [f"TEXT {path} is not a file; give a plain text"]
    for name in ("prompts", "tokens", "branches"):
        if getattr(args, name) < 1:
            problems.append(f"--{name} must be at least 1, got {getattr(args, name)}")
    problems += [f"--lengths must be at least 1, got {x}" for x in args.lengths if x < 1]
    raise_all(ValueError, "these arguments make no sense:", problems)
    served = load_model(ModelSettings(model=args.model, kind=kind), make_mesh({}, alone=True))
    if (most := max(args.lengths) + args.tokens) > served.decoder.context:
        raise ValueError(f"--lengths and --tokens must be at most the context {served.decoder.context}, got {most}.")
    ids = served.text.plain(path.read_text(encoding="utf-8", errors="replace"))
    found = measure_lengths(served, ids, args)
    print(json.dumps(found) if args.json else write_table(found))
    return 0


def measure_lengths(served: LoadedModel, ids: Sequence[int], args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Returns the accepted drafts a step by drafter and length.

    Prompts of all lengths end at the same places of the text, so that a length changes only the input of a drafter.

    Args:
        served: model.
        ids: token ids of the text.
        args: see `add_guess_arguments`.

    Raises:
        ValueError: the text has fewer tokens than the longest prompt.
    """
    if len(ids) < (longest := max(args.lengths)):
        raise ValueError(f"TEXT must have at least {longest} tokens, as the longest prompt, got {len(ids)}.")
    given: Any = (served.decoder, served.params)
    drafters: dict[str, tuple[Any, Any]] = {"n-grams": (Ngram(), given), "suffixes": (Suffix(), given)}
    for place in args.speculator:
        made, name = load(place, *given), pathlib.Path(place).name
        drafters[name] = made, made.prepare(*given)
        if args.branches > 1:
            tree = load(place, *given, branches=args.branches)
            drafters[f"{name} with trees"] = tree, tree.prepare(*given)
        drafters[f"{name} with suffixes"] = Hybrid(made), made.prepare(*given)
    ends = range(longest, len(ids) + 1, max(1, (len(ids) - longest) // args.prompts))[: args.prompts]
    how, found = Sampling(max_tokens=args.tokens, temperature=args.temperature), dict[str, dict[int, float]]()
    for name, (drafter, own) in drafters.items():
        sizes = {"context": longest + args.tokens, "running": 2, "buckets": (1, 2, 3, 5, 9, 16, 64)}
        engine = Engine(*own, limits=limits_of(own[0], drafts=_DRAFTS, **sizes), drafter=drafter)
        found[name] = {}
        for length in args.lengths:
            found[name][length] = measure_acceptance(engine, [ids[end - length : end] for end in ends], how)
    return found


def write_table(found: dict[str, dict[int, float]]) -> str:
    """Returns the accepted drafts a step as text.

    Example:
        >>> print(write_table({"n-grams": {64: 0.5, 256: 1.25}}))
        accepted drafts a step         64     256
        n-grams                      0.50    1.25
    """
    lengths = [*next(iter(found.values()))]
    lines = [f"{'accepted drafts a step':<25}" + "".join(f"{x:>8}" for x in lengths)]
    lines += [f"{name:<25}" + "".join(f"{x:>8.2f}" for x in row.values()) for name, row in found.items()]
    return "\n".join(lines)


_PARTS = (50, 90, 99, 100)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `shardfn bench`."""
    about = "Sends a seeded trace of completions to a running server. Exit status 1 if one fails."
    subjects = parser.add_subparsers(dest="subject", required=True)
    of_guesses = "Counts the accepted drafts of drafters and speculators, by the length of prompts."
    add_guess_arguments(subjects.add_parser("guess", help=of_guesses, description=of_guesses))
    add = subjects.add_parser("serve", help=about).add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="of the server (default %(default)s)")
    add("--model", required=True, help="the model's name there")
    add("--requests", type=int, default=100, metavar="N", help="(default %(default)s)")
    add("--rate", type=float, metavar="R", help="arrivals a second (default: all at once)")
    text = "several of them in turn: a row for each, latency against throughput"
    add("--rates", type=float, nargs="+", metavar="R", help=text)
    text = "objective of a percentile, for the goodput of --rates: p95_itl=50ms, p99_ttft=1s, p50_e2e=2s"
    add("--slo", nargs="+", default=[], metavar="SLO", help=text)
    add("--prompt", type=int, default=64, metavar="N", help="median tokens of a prompt (default %(default)s)")
    add("--drawn", type=int, default=32, metavar="N", help="median tokens of a completion (default %(default)s)")
    add("--vocab", type=int, default=256, metavar="N", help="prompts have ids below it (default %(default)s)")
    add("--seed", type=int, default=0, help="of the trace (default %(default)s)")
    add("--key", default="none", help="of the client")
    add("--json", action="store_true", help="JSON instead of a table")
    add("--png", metavar="FILE", help="write a picture to this file (needs matplotlib)")


def bench(args: argparse.Namespace) -> int:
    """Runs the benchmark, and prints the result.

    Returns:
        The exit status: 1 if a request fails.

    Raises:
        ValueError: a number is out of range.
        ImportError: a package is missing.
    """
    if args.subject == "guess":
        return bench_guess(args)
    for name in ("requests", "prompt", "drawn"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}.")
    if args.vocab < 2:
        raise ValueError(f"--vocab must be at least 2, got {args.vocab}.")
    for name, values in (("rate", [] if args.rate is None else [args.rate]), ("rates", args.rates or [])):
        if wrong := [x for x in values if not 0 < x < float("inf")]:
            raise ValueError(f"--{name} must be above 0, got {wrong[0]}.")
    if args.rate is not None and args.rates is not None:
        raise ValueError("--rate cannot be combined with --rates. Give one of them.")
    if args.slo and args.rates is None:
        raise ValueError("--slo has no effect without --rates. Give rates, or leave it out.")
    slos = [parse_slo(text) for text in args.slo]
    if importlib.util.find_spec("h11") is None:
        raise ImportError("it needs h11, which is missing: pip install 'shardfn[serve]'")
    lengths = {name: getattr(args, name) for name in ("prompt", "drawn", "vocab", "seed")}
    make_trace = functools.partial(trace, args.requests, **lengths)

    async def send(arrivals: Sequence[Arrival]) -> list[Delays]:
        return await measure(args.url, args.model, arrivals, args.key)

    if args.rates is not None:
        rows, found = run_rates(args.rates, make_trace, send, slos)
        made: dict[str, Any] = {"rates": rows, "failed": sum(row["failed"] for row in rows)}
        made |= {"slo": [str(slo) for slo in slos], "goodput": find_goodput(rows)} if slos else {}
        print(json.dumps(made) if args.json else write_rates(rows, slos))
        if args.png:
            draw_rates(rows, args.png)
    else:
        began = time.monotonic()
        found = asyncio.run(send(make_trace(args.rate)))
        made = summary(found, time.monotonic() - began)
        print(json.dumps(made) if args.json else table(made))
        if args.png:
            _draw_delays(found, args.png)
    for text in sorted({one.error for one in found if one.error})[:3]:
        print(f"shardfn bench: error: {text}", file=sys.stderr)
    return 1 if made["failed"] else 0


def summary(found: Sequence[Delays], seconds: float) -> dict[str, Any]:
    """Returns the percentiles of delays, and the rate of tokens.

    Args:
        found: delays of the answers.
        seconds: seconds of the whole run.
    """
    good = [one for one in found if not one.error]
    tokens = sum(one.tokens for one in good)
    rows = {
        "first token, ms": [1e3 * one.first for one in good],
        "between pieces, ms": [1e3 * gap for one in good for gap in one.gaps],
        "whole request, ms": [1e3 * one.whole for one in good],
    }
    return {
        "requests": len(found),
        "failed": len(found) - len(good),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "delays": {
            name: {f"p{part}": find_percentile(values, part) for part in _PARTS} for name, values in rows.items()
        },
    }


def table(made: dict[str, Any]) -> str:
    """Returns a summary as text.

    Example:
        >>> from shardfn.serve import Delays
        >>> print(table(summary([Delays(0.01, [0.002, 0.004], 0.02, 3)], 0.5)))
                                 p50      p90      p99     p100
        first token, ms         10.0     10.0     10.0     10.0
        between pieces, ms       2.0      4.0      4.0      4.0
        whole request, ms       20.0     20.0     20.0     20.0
        1 requests, 0 failed; 3 tokens in 0.5 s, 6.0 tokens a second
    """
    lines = [f"{'':<20}" + "".join(f"{f'p{part}':>9}" for part in _PARTS)]
    for name, row in made["delays"].items():
        lines.append(f"{name:<20}" + "".join(f"{value:>9.1f}" for value in row.values()))
    rate = f"{made['tokens']} tokens in {made['seconds']:.1f} s, {made['tokens_per_second']} tokens a second"
    return "\n".join([*lines, f"{made['requests']} requests, {made['failed']} failed; {rate}"])


def _draw_delays(found: Sequence[Delays], path: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    good = [one for one in found if not one.error]
    rows = {
        "first token": [one.first for one in good],
        "between pieces": [gap for one in good for gap in one.gaps],
        "whole request": [one.whole for one in good],
    }
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, values in rows.items():
        ordered = sorted(1e3 * value for value in values)
        axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=name)
    axes.set(xscale="log", xlabel="milliseconds", ylabel="part of them that took no longer")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
