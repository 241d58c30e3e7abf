"""`shardfn bench guess`: accepted drafts a step of each drafter, by the length of the prompts."""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from shardfn.core import make_mesh, raise_all
from shardfn.inference import Engine, Ngram, Sampling, Suffix, limits_of
from shardfn.pretrained import LoadedModel, ModelSettings, Problem, detect_kind, load_model
from shardfn.speculators import Hybrid, load, measure_acceptance

_DRAFTS = 15


def add_guess_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `shardfn bench guess`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="as of shardfn generate")
    add("text", metavar="TEXT", help="a plain text that the model was not trained on, for prompts")
    add("--speculator", nargs="*", default=[], metavar="DIR", help="speculators of shardfn speculate")
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
    problems += [] if path.is_file() else [f"TEXT {path} is no file; give a plain text"]
    for name in ("prompts", "tokens"):
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

    Args:
        served: model.
        ids: token ids of the text.
        args: see `add_guess_arguments`.

    Raises:
        ValueError: the text has fewer tokens than the longest prompt.
    """
    if len(ids) < max(args.lengths):
        raise ValueError(f"TEXT must have at least {max(args.lengths)} tokens, as the longest prompt, got {len(ids)}.")
    given: Any = (served.decoder, served.params)
    drafters: dict[str, tuple[Any, Any]] = {"n-grams": (Ngram(), given), "suffixes": (Suffix(), given)}
    for place in args.speculator:
        made, name = load(place, *given), pathlib.Path(place).name
        drafters[name] = made, made.prepare(*given)
        drafters[f"{name} with suffixes"] = Hybrid(made), made.prepare(*given)
    how, found = Sampling(max_tokens=args.tokens, temperature=args.temperature), dict[str, dict[int, float]]()
    for name, (drafter, own) in drafters.items():
        sizes = {"context": max(args.lengths) + args.tokens, "running": 2, "buckets": (1, 2, 3, 5, 9, 16, 64)}
        engine = Engine(*own, limits=limits_of(own[0], drafts=_DRAFTS, **sizes), drafter=drafter)
        found[name] = {}
        for length in args.lengths:
            step = max(1, (len(ids) - length) // args.prompts)
            prompts = [ids[at : at + length] for at in range(0, len(ids) - length + 1, step)][: args.prompts]
            found[name][length] = measure_acceptance(engine, prompts, how)
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
