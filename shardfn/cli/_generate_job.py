"""The settings of `shardfn generate`: from the command line, checked before anything is loaded."""

import argparse
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from shardfn.core import did_you_mean, find_directory_problem, num_launched
from shardfn.inference import Grammar, Limits, Request, Sampling, check_request
from shardfn.pretrained import (
    CACHE_DTYPES,
    DRAFTERS,
    DTYPES,
    SAMPLING_FIELDS,
    ModelSettings,
    Problem,
    detect_kind,
    read_sampling,
)

_CACHES = f"{', '.join(CACHE_DTYPES[:-1])} or {CACHE_DTYPES[-1]}"
_TEMPERATURE = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateJob(ModelSettings):
    """Settings of a run. See `shardfn generate --help`.

    Attributes:
        prompts: texts of the prompts. "-" reads a prompt from each line of stdin.
        sampling: way to draw tokens, without the stop tokens and `max_tokens`.
        stop_tokens: texts or ids of tokens.
        max_tokens: number of tokens to draw at most. None is 256, or fewer where the context ends.
        chat: whether each prompt is a user's message.
        system: message before the user's.
        json: whether the output is JSON lines.
    """

    prompts: tuple[str, ...]
    sampling: Sampling
    stop_tokens: tuple[str, ...] = ()
    max_tokens: int | None = None
    chat: bool = False
    system: str | None = None
    json: bool = False


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `shardfn generate`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory of Hugging Face, a GGUF file, or a run of examples/train_gpt.py")
    add("prompts", metavar="PROMPT", nargs="+", help="a text; - for one prompt in each line of stdin")
    add("--max-tokens", type=int, metavar="N", help="the most tokens (default 256, or fewer where the context ends)")
    add_config_argument(parser)
    add("--temperature", type=float, help="0 takes the most probable token (default: the model's own, or 0.8)")
    add("--top-k", type=int, help="draw among this number of tokens; 0 is all (default: the model's own, or 0)")
    add(
        "--top-p", type=float, help="draw among the fewest tokens of this probability together (default likewise, or 1)"
    )
    add(
        "--min-p", type=float, help="leave out tokens below this part of the most probable one (default likewise, or 0)"
    )
    text = "above 1 makes tokens of prompt and completion less probable (default likewise, or 1)"
    add("--repetition-penalty", type=float, help=text)
    add("--seed", type=int, default=0, help="equal seeds draw equal tokens (default %(default)s)")
    # torchrun takes --n for an abbreviation of several options, and refuses it.
    add("--n", "--choices", type=int, default=1, metavar="N", dest="n", help="completions of each prompt (default 1)")
    add("--stop-token", action="append", default=[], metavar="TOKEN", help="another token that ends: its text or id")
    add("--stop", action="append", default=[], metavar="TEXT", help="a text that ends, and is cut off")
    add("--json-schema", metavar="FILE", help="the completion is JSON of this schema")
    add("--regex", metavar="PATTERN", help="the completion matches this regular expression as a whole")
    add("--chat", action="store_true", help="prompts are messages of a user, by the tokenizer's chat template")
    add("--system", metavar="TEXT", help="the system's message before them")
    add("--context", type=int, metavar="N", help="the most tokens of prompt and completion (default: the model's)")
    add(
        "--cache-gib", type=float, default=1.0, metavar="GIB", help="the most memory of the cache (default %(default)s)"
    )
    add("--mesh", default="", metavar="tp=N", help="ranks, under torchrun (default: those of torchrun)")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="of weights and cache (default %(default)s)")
    add_weights_arguments(parser)
    add_drafter_arguments(parser)
    add("--adapter", metavar="DIR", help="adapters of peft, such as shardfn finetune --lora writes; float32 alone")
    add("--json", action="store_true", help="a line of JSON for each completion")


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the option that ignores `generation_config.json`."""
    text = f"auto: {', '.join(SAMPLING_FIELDS)} and tokens that end a text are those of MODEL's"
    text += " generation_config.json, unless they are given; none: the file is ignored (default %(default)s)"
    parser.add_argument("--generation-config", choices=("auto", "none"), default="auto", help=text)


def add_weights_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of weights and cache."""
    add = parser.add_argument
    add(
        "--weights",
        metavar="KINDS",
        help="int8 or int4: codes of linear layers' weights, GGUF's own unchanged; disk or host: the memory from"
        " which a step reads them layer by layer; or both, such as int4,disk",
    )
    add(
        "--activations",
        choices=("float32", "int8"),
        default="float32",
        help="int8 rounds the inputs of layers in codes: faster, less exact, the same in any batch",
    )
    add("--fit", metavar="FILE", help="a text like those of prompts: codes are fitted to it, and not only rounded")
    add("--disk", metavar="DIR", help="an empty directory for --weights disk (default: a temporary one)")
    add(
        "--cache",
        metavar="KINDS",
        help=f"the dtype of keys and values, {_CACHES}; int8 and fp8 are rounded (default: DTYPE); host: the memory"
        " from which a step brings those of its requests layer by layer; or both, such as int8,host",
    )


def weights_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a job for `add_weights_arguments`, or a message in place of each wrong value."""
    codes, memory, fits = _parse_pair(args.weights, ("int8", "int4"), ("host", "disk"))
    dtype, cache_memory, cache_fits = _parse_pair(args.cache, CACHE_DTYPES, ("host",))
    found: dict[str, Any] = {"weights": codes, "memory": memory or "device", "fit": args.fit, "disk": args.disk}
    found |= {"cache": dtype, "cache_memory": cache_memory or "device"}
    found["activations"] = None if args.activations == "float32" else args.activations
    if not cache_fits:
        found["cache"] = Problem(f"--cache {args.cache}: write {_CACHES}, and host, or one: int8,host")
    if not fits:
        found["weights"] = Problem(f"--weights {args.weights}: write int8 or int4, and disk or host, or one: int4,disk")
    elif codes and args.dtype != "float32":
        hint = "needs --dtype float32, in which exact layers compute; leave out --dtype"
        found["weights"] = Problem(f"--weights {codes} {hint}")
    if found["activations"] and args.dtype != "float32":
        hint = "needs --dtype float32, in which exact layers compute; leave out --dtype"
        found["activations"] = Problem(f"--activations {args.activations} {hint}")
    if args.fit is not None and not codes:
        found["fit"] = Problem(f"--fit {args.fit} has no effect without codes; add --weights int4, or int8")
    elif args.fit is not None and not pathlib.Path(args.fit).is_file():
        found["fit"] = Problem(f"--fit {args.fit} is not a file; give a text like those of prompts")
    if find_directory_problem([found["memory"]], args.disk) == "idle":
        found["disk"] = Problem(f"--disk {args.disk} has no effect without --weights disk")
    return found


def _parse_pair(given: str | None, *known: Sequence[str]) -> tuple[str | None, str | None, bool]:
    """Splits an option such as "int4,disk" into a word of each of two kinds.

    Returns:
        The first word, the second word (None where it is missing), and whether the option is valid.
    """
    words = [] if given is None else given.split(",")
    one, other = ([w for w in words if w in of] for of in known)
    fits = len(one) <= 1 and len(other) <= 1 and len(one) + len(other) == len(words)
    return next(iter(one), None), next(iter(other), None), fits


def add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of speculative decoding."""
    add = parser.add_argument
    add("--drafter", choices=tuple(DRAFTERS), default="none", help="guess tokens; changes no exact completion")
    add(
        "--draft-model",
        metavar="DIR",
        help="a smaller model of the same tokenizer that guesses tokens, kept by each rank",
    )
    add(
        "--speculator",
        metavar="DIR",
        help="a speculator that shardfn speculate has trained for MODEL; with --drafter suffix, both in a tree",
    )
    branches = "guesses of a place that a --speculator continues, in a tree (default %(default)s: a chain)"
    add("--branches", type=int, default=1, metavar="N", help=branches)


def drafter_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yields the problems of the options of speculative decoding."""
    named = {"--draft-model": args.draft_model, "--speculator": args.speculator}
    given = [option for option, value in named.items() if value is not None]
    given += [f"--drafter {args.drafter}"] if args.drafter != "none" else []
    if len(given) > 1 and given != ["--speculator", "--drafter suffix"]:
        yield f"{' and '.join(given)} are {len(given)} drafters; leave all but one of them out"
    if args.draft_model is not None and isinstance(kind := detect_kind(pathlib.Path(args.draft_model)), Problem):
        yield str(kind).replace("MODEL", "--draft-model", 1)
    if args.speculator is not None and not (pathlib.Path(args.speculator) / "config.json").is_file():
        yield f"--speculator {args.speculator} has no config.json; give a directory of shardfn speculate"
    if args.branches < 1 or (args.branches > 1 and args.speculator is None):
        yield f"--branches must be at least 1, and is for a --speculator, got {args.branches}"


def parse_generate(args: argparse.Namespace) -> GenerateJob:
    """Returns the settings that the arguments describe. No weights are loaded.

    Raises:
        ValueError: lists all mistakes, each with the remedy.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "n")
    grammar, kind = _parse_grammar(args), detect_kind(pathlib.Path(args.model))
    recommended = recommended_of(args, kind)
    defaults: dict[str, Any] = {"temperature": _TEMPERATURE} | ({} if isinstance(recommended, Problem) else recommended)
    sampling = Sampling(
        **defaults | {name: getattr(args, name) for name in names if getattr(args, name) is not None},
        stop=tuple(args.stop),
        grammar=None if isinstance(grammar, Problem) else grammar,
    )
    found = {"ranks": _parse_ranks(args.mesh), "kind": kind, "grammar": grammar, "recommended": recommended}
    found |= weights_of(args)
    problems = [*(value for value in found.values() if isinstance(value, Problem)), *_find_problems(args, sampling)]
    if problems:
        raise ValueError("; ".join(problems))
    fields = {field.name for field in dataclasses.fields(GenerateJob)}
    given = {name: value for name, value in (vars(args) | found).items() if name in fields}
    given |= {"prompts": tuple(args.prompts), "stop_tokens": tuple(args.stop_token), "sampling": sampling}
    return GenerateJob(**given)


def recommended_of(args: argparse.Namespace, kind: Any) -> Any:
    """Returns the values of sampling that a model's files recommend, or a message."""
    if args.generation_config == "none" or kind != "files":
        return {}
    try:
        return read_sampling(pathlib.Path(args.model))
    except (OSError, ValueError) as error:
        return Problem(error)


def _find_problems(args: argparse.Namespace, sampling: Sampling) -> Iterator[str]:
    high = 1 << 40
    anything = Limits(vocab=high, context=high, blocks=high)
    if args.max_tokens == 0:
        yield "--max-tokens must be an integer of at least 1, got 0"
    if args.max_tokens is not None:
        sampling = dataclasses.replace(sampling, max_tokens=args.max_tokens)
    try:
        check_request(Request((0,), sampling), anything)
    except ValueError as error:
        name, _, rest = str(error).removesuffix(".").partition(" ")
        yield f"--{name.replace('_', '-')} {rest}"
    yield from drafter_problems(args)
    if args.adapter is not None:
        yield from adapter_problems(pathlib.Path(args.adapter), args)
    if args.system is not None and not args.chat:
        yield "--system has no effect without --chat"
    if args.context is not None and args.context < 2:
        yield f"--context must be at least 2, a token of the prompt and a drawn token, got {args.context}"
    if not args.cache_gib > 0:
        yield f"--cache-gib must be above 0, got {args.cache_gib}"


def _parse_grammar(args: argparse.Namespace) -> Any:
    """Returns the grammar of the completions, None, or a message."""
    if args.json_schema is not None and args.regex is not None:
        return Problem("--json-schema and --regex are two grammars of one text; leave one of them out")
    try:
        if args.json_schema is not None:
            return Grammar.json_schema(pathlib.Path(args.json_schema).read_text(encoding="utf-8"))
        return None if args.regex is None else Grammar.regex(args.regex)
    except (OSError, ValueError) as error:
        return Problem(f"--json-schema {args.json_schema}: {error}" if args.regex is None else f"--regex: {error}")


def adapter_problems(path: pathlib.Path, args: argparse.Namespace) -> Iterator[str]:
    """Yields the reasons why a directory has no adapter for the model of the arguments."""
    missing = [n for n in ("adapter_config.json", "adapter_model.safetensors") if not (path / n).is_file()]
    if missing:
        yield f"--adapter {path} has no {' and no '.join(missing)}; give a directory of peft"
    yield from base_problems("--adapter", args)


def base_problems(option: str, args: argparse.Namespace) -> Iterator[str]:
    """Yields the reasons why the model of the arguments takes no adapters.

    Args:
        option: option that gives adapters.
        args: arguments of the command.
    """
    if detect_kind(pathlib.Path(args.model)) != "files":
        yield f"{option} is for a directory of Hugging Face, and MODEL is {args.model}"
    if args.dtype != "float32":
        yield f"{option} needs exact layers, which compute float32, and --dtype is {args.dtype}"


def _parse_ranks(mesh: str) -> Any:
    """Returns the number of ranks, or a message."""
    world = num_launched()
    if not mesh:
        return world
    found = re.fullmatch(r"(\w+)=(\d+)", mesh)
    if found is None or found[1] != "tp" or int(found[2]) < 1:
        axis = mesh.partition("=")[0]
        return Problem(f"--mesh {mesh}: write tp=N, with at least one rank.{did_you_mean(axis, ('tp',))}")
    if (ranks := int(found[2])) != world:
        start = f"torchrun --nproc-per-node {ranks} -m shardfn generate ..."
        return Problem(f"--mesh {mesh} takes {ranks} ranks, and there are {world}; start it by {start}")
    return ranks
