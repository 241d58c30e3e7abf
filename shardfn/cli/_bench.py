"""`shardfn bench`: accepted drafts by the length of prompts, or the delays that clients of a server see under load."""

import argparse
import asyncio
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from shardfn.serve import Arrival, Delays, measure, trace

from ._bench_guess import add_guess_arguments, bench_guess
from ._bench_rates import draw_rates, find_goodput, find_percentile, parse_slo, run_rates, write_rates

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
        raise ValueError("--rate is given beside --rates. Give one of them.")
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
