"""The settings of `shardfn serve`: from the command line, checked before anything is loaded."""

import argparse
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardfn.inference import Limits
from shardfn.kernels import num_processors
from shardfn.pretrained import DTYPES, KINDS, ModelSettings, Problem, detect_kind
from shardfn.serve import POOLINGS, REASONING_PARSERS, TOOL_PARSERS

from ._generate_job import (
    adapter_problems,
    add_config_argument,
    add_drafter_arguments,
    add_weights_arguments,
    base_problems,
    drafter_problems,
    recommended_of,
    weights_of,
)

_GIB, _MIB = 1 << 30, 1 << 20


@dataclasses.dataclass(frozen=True)
class ServeJob:
    """Settings of a server. See `shardfn serve --help`.

    Attributes:
        model: path and kind of the model, and settings of the loading.
        running: largest number of sequences at a time (continuous batching).
        budget: largest number of rows of a step (chunked prefill).
        chat_template: file, or None for the tokenizer's template.
        api_key_file: file of keys, or None.
        admin_key_file: file of keys of administrators, or None.
        adapters: directories of adapters, by name.
        server: fields of `shardfn.serve.Settings` but the keys.
        decisions: file of the log of decisions, or None.
        image_root: directory of images that clients may name, or None.
        image_limits: limits of an `ImageReader`.
        join: host and port of the front that this machine's ranks join, or None.
        join_key_file: file of the key of groups of ranks, or None.
    """

    model: ModelSettings
    running: int
    budget: int
    chat_template: str | None
    api_key_file: str | None
    admin_key_file: str | None
    adapters: dict[str, str]
    server: dict[str, Any]
    decisions: str | None = None
    image_root: str | None = None
    image_limits: dict[str, int] = dataclasses.field(default_factory=dict)
    join: tuple[str, int] | None = None
    join_key_file: str | None = None

    @property
    def buckets(self) -> tuple[int, ...]:
        """Returns the numbers of rows of a step."""
        return (*(size for size in Limits.buckets if size < self.budget), self.budget)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `shardfn serve`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory of Hugging Face, a GGUF file, or a run of examples/train_gpt.py")
    add("--host", default="127.0.0.1", help="the address to listen on (default %(default)s, for this machine alone)")
    add("--port", type=int, default=8000, help="0 takes a free one (default %(default)s)")
    add("--name", help="of the model, for clients (default: the last part of MODEL)")
    text = "the keys of clients, one in each line, with limits such as KEY requests=60 tokens=100000 concurrent=4"
    add("--api-key-file", metavar="FILE", help=text)
    add("--allowed-host", action="append", default=[], metavar="NAME", help="of a proxy before a server at loopback")
    add("--chat-template", metavar="FILE", help="a template of jinja, in place of the tokenizer's")
    text = "how the model writes calls of tools (default: as the chat template shows)"
    add("--tool-call-parser", choices=TOOL_PARSERS, default="auto", help=text)
    text = "how the model writes reasoning (default: as the chat template shows)"
    add("--reasoning-parser", choices=REASONING_PARSERS, default="auto", help=text)
    text = "of pages of other sites that may use the server, such as https://example.org; '*' is all; may be repeated"
    add("--allowed-origin", action="append", default=[], metavar="ORIGIN", help=text)
    add_config_argument(parser)
    text = "adapters of peft for requests whose model is NAME; may be repeated; float32 alone"
    add("--adapter", action="append", default=[], metavar="NAME=DIR", help=text)
    text = "adapters in this directory may be loaded and unloaded over HTTP; needs --admin-key-file"
    add("--adapter-root", metavar="DIR", help=text)
    text = "/start_profile and /stop_profile write profiles of torch into this directory; needs --admin-key-file"
    add("--profile-root", metavar="DIR", help=text)
    text = "images in this directory may be named by file: URLs, for a model of images and text"
    add("--image-root", metavar="DIR", help=text)
    text = "of an image, by its header, before it is decoded (default %(default)s)"
    add("--max-image-pixels", type=int, default=1 << 24, metavar="N", help=text)
    add("--max-image-mib", type=float, default=16.0, metavar="MIB", help="of an image's file (default %(default)s)")
    add("--admin-key-file", metavar="FILE", help="the keys of administrators, one in each line")
    text = "takes spans of requests by OpenTelemetry over HTTP, for example http://localhost:4318/v1/traces"
    add("--otlp-traces-endpoint", metavar="URL", help=text)
    text = "clients may give embeddings in place of a prompt's tokens (prompt_embeds of /v1/completions)"
    add("--enable-prompt-embeds", action="store_true", help=text)
    add("--pooling", choices=POOLINGS, default="last", help="of embeddings: the last token's state, or the mean")
    text = "the model's first logit is a reward, as examples/rlhf/chat_reward.py trains it: for /v1/score and /classify"
    add("--reward-head", action="store_true", help=text)
    add("--mesh", default="", metavar="tp=N", help="ranks, which the command starts (default tp=1)")
    text = "groups of ranks, each with the whole model, behind one address (default %(default)s)"
    add("--replicas", type=int, default=1, metavar="N", help=text)
    text = "of a replica in a row, with growing waits, before the server ends (default 3, or 0 without --replicas)"
    add("--restarts", type=int, metavar="N", help=text)
    text = "groups of ranks of other machines that may join, each another replica; needs --join-key-file"
    add("--joined", type=int, default=0, metavar="N", help=text)
    add(
        "--join-at",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where they join (default %(default)s, a free port)",
    )
    text = "be a replica of the front that has --join-at HOST:PORT, with the same model and options"
    add("--join", metavar="HOST:PORT", help=text)
    add("--join-key-file", metavar="FILE", help="the key of both, at least 32 bytes, such as of openssl rand -hex 32")
    text = "more ranks than this machine has cores or devices"
    add("--oversubscribe", action="store_true", help=f"let replicas have {text}")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="of weights and cache (default %(default)s)")
    add_weights_arguments(parser)
    add("--context", type=int, metavar="N", help="the most tokens of prompt and completion (default: the model's)")
    add("--cache-gib", type=float, default=1.0, metavar="GIB", help="the most memory of the cache (default 1)")
    add("--running", type=int, default=Limits.running, metavar="N", help="sequences at a time (default %(default)s)")
    add("--budget", type=int, default=Limits.buckets[-1], metavar="N", help="rows of a step (default %(default)s)")
    add_drafter_arguments(parser)
    text = "of prompts in line; then 429, and 413 for a request of more (default: 65536, or the context if longer)"
    add("--max-waiting-tokens", type=int, metavar="N", help=text)
    add("--max-body-mib", type=float, default=4.0, metavar="MIB", help="of a request (default %(default)s)")
    add("--max-connections", type=int, default=1024, metavar="N", help="at a time (default %(default)s)")
    add("--stall-seconds", type=float, default=30.0, metavar="S", help="for a slow reader (default %(default)s)")
    text = "of the schedule, for shardfn plan --serve and --replay; it has the prompts; --drafter none alone"
    add("--decisions", metavar="FILE", help=f"write a log {text}")
    add("--drain-seconds", type=float, default=30.0, metavar="S", help="after SIGTERM (default %(default)s)")


def parse_serve(args: argparse.Namespace) -> ServeJob:
    """Returns the settings that the arguments describe. No weights are loaded.

    Raises:
        ValueError: lists all mistakes, each with the remedy.
    """
    path = pathlib.Path(args.model)
    kind, ranks = detect_kind(path), _parse_ranks(args.mesh)
    wrong = [] if kind in KINDS else [str(kind)]
    wrong += list(find_crowding(args, ranks, num_places())) if isinstance(ranks, int) else [ranks]
    weights = weights_of(args)
    recommended = recommended_of(args, kind)
    wrong += [value for value in (*weights.values(), recommended) if isinstance(value, Problem)]
    places = {name: _parse_place(getattr(args, name), name) for name in ("join", "join_at")}
    problems = [*wrong, *_find_problems(args), *(x for x in places.values() if isinstance(x, str))]
    if problems:
        raise ValueError("; ".join(problems))
    assert isinstance(ranks, int)
    names = (
        "context",
        "cache_gib",
        "dtype",
        "drafter",
        "draft_model",
        "speculator",
        "branches",
        "generation_config",
        "reward_head",
    )
    given = {name: getattr(args, name) for name in names} | {"recommended": recommended, "classifies": True}
    adapters = dict(pair.split("=", 1) for pair in args.adapter)
    given["adapter"] = next(iter(adapters.values()), args.adapter_root)
    model = ModelSettings(model=args.model, kind=kind, ranks=ranks, **given, **weights)
    server = {
        "name": args.name or path.absolute().name,
        "host": args.host,
        "port": args.port,
        "adapters": tuple(adapters),
        "adapter_root": None if args.adapter_root is None else pathlib.Path(args.adapter_root).absolute(),
        "profile_root": None if args.profile_root is None else pathlib.Path(args.profile_root).absolute(),
        "traces": args.otlp_traces_endpoint,
        "prompt_embeds": args.enable_prompt_embeds,
        "pooling": args.pooling,
        "hosts": tuple(args.allowed_host),
        "origins": tuple(args.allowed_origin),
        "replicas": args.replicas + args.joined,
        "joined": args.joined,
        "join_at": places["join_at"],
        "restarts": args.restarts if args.restarts is not None else 3 if args.replicas + args.joined > 1 else 0,
        "tool_call_parser": args.tool_call_parser,
        "reasoning_parser": args.reasoning_parser,
        "max_body": int(args.max_body_mib * _MIB),
        "max_connections": args.max_connections,
        "max_waiting": args.max_waiting_tokens,
        "stall_seconds": args.stall_seconds,
        "defaults": recommended,
        "drain_seconds": args.drain_seconds,
    }
    files = args.chat_template, args.api_key_file, args.admin_key_file
    images = {"max_pixels": args.max_image_pixels, "max_bytes": int(args.max_image_mib * _MIB)}
    further: Any = args.decisions, args.image_root, images, places["join"], args.join_key_file
    return ServeJob(model, args.running, args.budget, *files, adapters, server, *further)


def _parse_place(text: str | None, name: str) -> tuple[str, int] | str | None:
    """Returns a host and a port, or a message, or None for None."""
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        return f"--{name.replace('_', '-')} {text}: write HOST:PORT, such as 10.0.0.1:9000"
    return host.strip("[]"), int(port)


def _parse_ranks(mesh: str) -> int | str:
    """Returns the number of ranks, or a message."""
    found = re.fullmatch(r"tp=(\d+)", mesh or "tp=1")
    if found is None or int(found[1]) < 1:
        return f"--mesh {mesh}: write tp=N, with at least one rank"
    return int(found[1])


def num_places() -> int:
    """Returns the number of this machine's devices, or of its cores on a machine without devices."""
    return torch.cuda.device_count() or num_processors()


def find_crowding(args: argparse.Namespace, ranks: int, places: int) -> Iterator[str]:
    """Yields what is wrong with the number of replicas.

    Args:
        args: arguments of the command.
        ranks: ranks of each replica.
        places: cores or devices of this machine.
    """
    if args.replicas < 1:
        yield f"--replicas must be at least 1, got {args.replicas}"
    if args.restarts is not None and args.restarts < 0:
        yield f"--restarts must be at least 0, got {args.restarts}"
    if 1 < args.replicas and args.replicas * ranks > places and not args.oversubscribe:
        yield (
            f"--replicas {args.replicas} of {ranks} ranks must have at most {places} ranks, the cores or devices of"
            f" this machine, got {args.replicas * ranks}; take fewer, or add --oversubscribe"
        )
    if args.oversubscribe and args.replicas == 1:
        yield "--oversubscribe has no effect without --replicas; leave it out"


def choose_devices(replica: int, ranks: int, devices: Sequence[str]) -> dict[str, str]:
    """Returns the variables of the environment by which the ranks of a replica see their own devices.

    Example:
        >>> choose_devices(1, 2, ["0", "1", "2", "3"]), choose_devices(1, 1, [])
        ({'CUDA_VISIBLE_DEVICES': '2,3'}, {})
    """
    own = [devices[(replica * ranks + rank) % len(devices)] for rank in range(ranks)] if devices else []
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))} if own else {}


def _find_problems(args: argparse.Namespace) -> Iterator[str]:
    if args.context is not None and args.context < 2:
        yield f"--context must be at least 2, a token of the prompt and a drawn token, got {args.context}"
    if not args.cache_gib > 0:
        yield f"--cache-gib must be above 0, got {args.cache_gib}"
    if not 1 <= args.running < args.budget:
        yield f"--running must be from 1 to {args.budget - 1}, fewer than --budget, got {args.running}"
    if args.decisions is not None and args.replicas + args.joined > 1:
        yield f"--decisions {args.decisions} is the log of one replica; leave out --replicas"
    if args.decisions is not None and (args.drafter != "none" or args.draft_model or args.speculator):
        yield f"--decisions {args.decisions} has no drafts; leave out the drafter"
    if args.decisions is not None and args.enable_prompt_embeds:
        yield f"--decisions {args.decisions} has only prompts of token ids; leave out --enable-prompt-embeds"
    if args.joined < 0:
        yield f"--joined must be at least 0, got {args.joined}"
    if (args.joined > 0 or args.join is not None) != (args.join_key_file is not None):
        yield "--join-key-file and --joined or --join need each other: pass both, or none"
    if args.joined > 0 and args.join is not None:
        yield "--joined is of a front, and --join of a machine that joins one; pass one of them"
    names = [pair.partition("=")[0] for pair in args.adapter]
    for name, pair in zip(names, args.adapter, strict=True):
        if not name or not pair.partition("=")[2]:
            yield f"--adapter {pair}: write NAME=DIR, a name for clients and a directory of peft"
        elif names.count(name) > 1:
            yield f"--adapter {pair}: the name {name!r} is given twice; give each adapter a name of its own"
        else:
            yield from adapter_problems(pathlib.Path(pair.partition("=")[2]), args)
    yield from drafter_problems(args)
    if args.adapter_root is not None:
        yield from base_problems("--adapter-root", args)
        if not pathlib.Path(args.adapter_root).is_dir():
            yield f"--adapter-root {args.adapter_root}: there is no such directory"
    if args.image_root is not None and not pathlib.Path(args.image_root).is_dir():
        yield f"--image-root {args.image_root}: there is no such directory"
    if args.max_image_pixels < 1 or not args.max_image_mib > 0:
        given = f"{args.max_image_pixels} and {args.max_image_mib}"
        yield f"--max-image-pixels and --max-image-mib must be above 0, got {given}"
    if (args.adapter_root is None and args.profile_root is None) != (args.admin_key_file is None):
        yield "--admin-key-file and --adapter-root or --profile-root need each other: pass both, or none"
    for name in ("api_key_file", "admin_key_file", "chat_template", "join_key_file"):
        given = getattr(args, name)
        if given is not None and not pathlib.Path(given).is_file():
            yield f"--{name.replace('_', '-')} {given}: there is no such file"


def command_of(job: ServeJob, end: int, python: str) -> Sequence[str]:
    """Returns the program of a rank, as another process starts it."""
    model = job.model
    options = {
        "--mesh": f"tp={model.ranks}",
        "--dtype": model.dtype,
        "--cache-gib": model.cache_gib,
        "--running": job.running,
        "--budget": job.budget,
        "--drafter": model.drafter,
        "--generation-config": model.generation_config,
        **({} if model.context is None else {"--context": model.context}),
        **({} if job.admin_key_file is None else {"--admin-key-file": job.admin_key_file}),
        **({} if (root := job.server["adapter_root"]) is None else {"--adapter-root": root}),
        **({} if (root := job.server["profile_root"]) is None else {"--profile-root": root}),
        **({} if model.activations is None else {"--activations": model.activations}),
        **({} if model.fit is None else {"--fit": model.fit}),
        **({} if job.decisions is None else {"--decisions": job.decisions}),
        **({} if model.disk is None else {"--disk": model.disk}),
        **({} if model.draft_model is None else {"--draft-model": model.draft_model}),
        **({} if model.speculator is None else {"--speculator": model.speculator}),
        **({} if model.branches == 1 else {"--branches": model.branches}),
    }
    for option, pair in (("--weights", (model.weights, model.memory)), ("--cache", (model.cache, model.cache_memory))):
        kinds = [kind for kind in pair if kind not in (None, "device")]
        options |= {option: ",".join(map(str, kinds))} if kinds else {}
    flat = [str(x) for pair in options.items() for x in pair]
    flat += ["--reward-head"] if model.reward_head else []
    flat += [f"--adapter={name}={place}" for name, place in job.adapters.items()]
    return [python, "-m", "shardfn.cli._serve_rank", str(end), model.model, *flat]
