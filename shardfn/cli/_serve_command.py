"""`shardfn plan --serve` and `--replay`: arguments, traces of requests, and reports as tables, JSON and SVG.

A trace is a file of JSON lines. A line is an object with `seconds`, `prompt` and `answer`, each of the last two a list
of token ids or a number of tokens. Or the line is of Mooncake's traces: `timestamp` in milliseconds, `input_length`,
`output_length`, and `hash_ids`, which name blocks of 512 tokens, so that equal beginnings of prompts are found in the
cache. Or the file is a log of decisions.

References:
    Qin et al., Mooncake, 2024, https://arxiv.org/abs/2407.00079
"""

import argparse
import html
import json
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardfn.core import raise_all
from shardfn.inference import LoggedStep, Request, Sampling, TimedRequest, check_trace, replay_log

from ._arguments import device_cluster, list_given, parse_mesh
from ._bench_rates import Slo, parse_slo
from ._models import parse_model
from ._plan_serve import ServePlan, ServeSetup, plan_server
from ._report import dump, table
from ._serve_times import fit_times
from ._units import gib, of_limit, seconds

_BLOCK = 512  # tokens of a block of Mooncake's traces
_MOST = 5  # problems of lines that a message lists


class ServeTrace(NamedTuple):
    """Requests of a trace.

    Attributes:
        requests: requests, in the order of their times.
        steps: steps of a log of decisions, empty for other files.
    """

    requests: list[TimedRequest]
    steps: Sequence[LoggedStep] = ()


def read_trace(path: str | os.PathLike[str], vocab: int, context: int) -> ServeTrace:
    """Returns the requests of a file.

    Args:
        path: file.
        vocab: number of tokens of the model.
        context: most tokens of a sequence.

    Raises:
        ValueError: lines are not requests, times run backwards, or a request does not fit. Lists the first lines.
    """
    lines = [(i, line) for i, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1) if line.strip()]
    if lines and '"limits"' in lines[0][1][:20]:
        found = replay_log(path)
        requests, steps = found.trace, found.steps
    else:
        requests, steps, problems = [], [], list[str]()
        for i, line in lines:
            try:
                requests.append(_read_line(line, i, vocab))
            except (ValueError, TypeError) as error:
                problems.append(f"line {i}: {error}")
        raise_all(ValueError, f"--trace {os.fspath(path)}:", problems[:_MOST])
    if not requests:
        raise ValueError(f"--trace {os.fspath(path)}: the file must have a request, got none.")
    long = [
        f"request {i} has {len(x.request.prompt)} + {len(x.answer)} tokens; the context is {context}"
        for i, x in enumerate(requests)
        if len(x.request.prompt) + len(x.answer) > context
    ]
    raise_all(ValueError, f"--trace {os.fspath(path)}: requests must fit; raise --context, or leave out:", long[:_MOST])
    check_trace(requests)
    return ServeTrace(requests, steps)


def _read_line(text: str, number: int, vocab: int) -> TimedRequest:
    told = json.loads(text)
    if not isinstance(told, Mapping):
        raise ValueError(f"a request is an object, got a {type(told).__name__}")
    if "timestamp" in told:
        seconds, prompt, answer = told["timestamp"] / 1e3, told.get("input_length"), told.get("output_length")
    else:
        seconds, prompt, answer = (told.get(name) for name in ("seconds", "prompt", "answer"))
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ValueError(f"seconds must be a number from 0 on, got {seconds!r}")
    draw = random.Random(number)
    tokens = _read_tokens("prompt", prompt, draw, vocab, told.get("hash_ids", ()))
    answered = _read_tokens("answer", answer, draw, vocab)
    return TimedRequest(float(seconds), Request(tokens, Sampling(max_tokens=len(answered))), answered)


def _read_tokens(name: str, told: Any, draw: random.Random, vocab: int, blocks: Sequence[Any] = ()) -> tuple[int, ...]:
    """Returns tokens, made up where a number of tokens is given."""
    if isinstance(told, list):
        if not told or any(type(x) is not int or not 0 <= x < vocab for x in told):
            raise ValueError(f"{name} must be token ids from 0 to {vocab - 1}, got {told!s:.60}")
        return tuple(told)
    if type(told) is not int or told < 1:
        raise ValueError(f"{name} must be a list of token ids, or a number of tokens, at least 1, got {told!r:.60}")
    made = list[int]()
    for block in blocks:
        same = random.Random(repr(block))
        made += [same.randrange(vocab) for _ in range(min(_BLOCK, told - len(made)))]
    return tuple(made + [draw.randrange(vocab) for _ in range(told - len(made))])


_NAMES, _PARTS = ("ttft", "itl", "e2e"), (50, 95, 99)
_TITLES = {"ttft": "time to the first token", "itl": "time between tokens"}
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
_WIDTH, _HEIGHT, _EDGE = 360, 220, 50  # of a panel, and around it


def serve_text(plans: Sequence[ServePlan], slos: Sequence[Slo], num: int) -> str:
    """Returns plans of a server as Markdown, the cheapest first.

    Args:
        plans: plans, the cheapest first.
        slos: objectives.
        num: number of requests of the trace.
    """
    best, wanted = plans[0], ", ".join(map(str, slos)) or "no objective"
    s = best.setup
    head = f"# {s.model} served on {s.cluster.device.name}: {num:,} requests, {wanted}"
    if best.found is None:
        need = of_limit(best.memory.total, best.room)
        verdict = (
            f"**Does not fit: {need}, with a cache of one sequence of {s.context} tokens.** Take more ranks of tp."
        )
        return f"{head}\n\n{verdict}\n\n{_memory_table(plans)}\n"
    count = f"{best.replicas} replica{'s' * (best.replicas > 1)} of {s.tp} x {s.cluster.device.name}"
    verdict = f"**{count} meet the objectives.**" if best.meets else f"**{count} do not meet the objectives.**"
    source = "as of the log" if s.times is not None else f"at {s.efficiency:.0%} of the device's rates: an estimate"
    parts = [head, verdict, _memory_table(plans), _latency_table(plans), _count_table(plans)]
    parts += [f"Steps without attention, {source}:\n\n{_bucket_table(best)}", f"    {command_text(best)}"]
    return "\n\n".join(parts) + "\n"


def serve_json(plans: Sequence[ServePlan], slos: Sequence[Slo]) -> dict[str, Any]:
    """Returns plans of a server as JSON's types, in bytes and milliseconds."""
    return {"slos": [str(x) for x in slos], "plans": [_plan_json(p) for p in plans]}


def command_text(p: ServePlan) -> str:
    """Returns the command of the planned server."""
    s = p.setup
    words = [f"shardfn serve {s.model}", *([f"--mesh tp={s.tp}"] if s.tp > 1 else [])]
    words += [f"--replicas {p.replicas}"] if p.replicas > 1 else []
    words += [f"--dtype {s.dtype} --context {s.context} --running {s.running} --budget {s.budget}"]
    return " ".join([*words, f"--cache-gib {p.memory.cache * s.tp / 2**30:.3f}"])


def _plan_json(p: ServePlan) -> dict[str, Any]:
    out: dict[str, Any] = {"tp": p.setup.tp, "memory": p.memory._asdict(), "room": p.room, "fits": p.found is not None}
    if p.found is None:
        return out
    found = p.found
    out |= {"replicas": p.replicas, "devices": p.devices, "meets": p.meets, "seconds": found.seconds}
    out |= {"tokens_per_second": found.tokens / found.seconds, "padding": found.padding}
    out |= {f"p{part}_{name}_ms": found.percentile(name, part) for name in _NAMES for part in _PARTS}
    out |= {"cache": found.cache._asdict(), "command": command_text(p)}
    return out | {"bucket_seconds": {str(bucket): x for bucket, x in p.bucket_seconds.items()}}


def _memory_table(plans: Sequence[ServePlan]) -> str:
    rows = []
    for p in plans:
        m, blocks = p.memory, "" if p.limits is None else f"{p.limits.usable * p.limits.block:,}"
        sizes = gib(m.weights), gib(m.cache), gib(m.step), of_limit(m.total, p.room)
        rows.append((str(p.setup.tp), *sizes, "no" if p.limits is None else "yes", blocks))
    names = ("tp", "weights, GiB", "cache, GiB", "step, GiB", "a rank", "fits", "tokens of the cache")
    return table(names, rows)


def _latency_table(plans: Sequence[ServePlan]) -> str:
    rows = []
    for p in plans:
        if p.found is not None:
            each = [seconds(p.found.percentile(name, part) / 1e3) for name in _NAMES for part in (50, 95)]
            rows.append((str(p.setup.tp), str(p.replicas), str(p.devices), *each, "yes" if p.meets else "no"))
    return table(("tp", "replicas", "devices", *(f"{n} p{x}" for n in _NAMES for x in (50, 95)), "meets"), rows)


def _count_table(plans: Sequence[ServePlan]) -> str:
    rows = []
    for p in plans:
        if (found := p.found) is not None:
            hits = found.cache.hits / max(1, found.cache.queries)
            figures = f"{found.tokens / found.seconds:,.0f}", f"{hits:.1%}", f"{found.cache.preemptions:,}"
            rows.append((str(p.setup.tp), *figures, f"{found.most_running}", f"{found.padding:.1%}"))
    return table(("tp", "tokens/s", "prefix hits", "preemptions", "most running", "padding"), rows)


def _bucket_table(p: ServePlan) -> str:
    return table(("rows", "seconds"), [(str(n), seconds(x)) for n, x in p.bucket_seconds.items()])


def serve_svg(plans: Sequence[ServePlan], slos: Sequence[Slo]) -> str:
    """Returns a picture as SVG: the part of tokens by latency, a line for each plan, dashed lines for objectives."""
    panels = [_draw_panel(plans, slos, name, i * (_WIDTH + 2 * _EDGE)) for i, name in enumerate(_TITLES)]
    size = f'width="{2 * (_WIDTH + 2 * _EDGE)}" height="{_HEIGHT + 2 * _EDGE}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n' + (
        "\n".join([*panels, "</svg>\n"])
    )


def _draw_panel(plans: Sequence[ServePlan], slos: Sequence[Slo], name: str, left: float) -> str:
    found = [(p, p.found) for p in plans if p.found is not None]
    bounds = [slo.ms for slo in slos if slo.name == name]
    most = max([1e-3, *(f.percentile(name, 99) for _, f in found), *(1.1 * x for x in bounds)])

    def place(ms: float, part: float) -> str:
        x, y = left + _EDGE + _WIDTH * min(1.0, ms / most), _EDGE + _HEIGHT * (1 - part / 100)
        return f"{x:.1f},{y:.1f}"

    def write(x: float, y: float, text: str, colour: str = "black") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{html.escape(text)}</text>'

    lines = [f'<rect x="{left + _EDGE}" y="{_EDGE}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="black"/>']
    lines.append(write(left + _EDGE, _EDGE - 8, f"{_TITLES[name]}: percent of tokens by milliseconds"))
    for tick in _list_ticks(most):
        x, y = place(tick, 0).split(",")
        lines.append(write(float(x) - 8, float(y) + 16, f"{tick:g}"))
    lines += [write(left + 16, _EDGE + _HEIGHT * (1 - part / 100) + 4, str(part)) for part in (0, 50, 100)]
    for i, (p, f) in enumerate(found):
        colour = _COLOURS[i % len(_COLOURS)]
        points = " ".join(place(f.percentile(name, part), part) for part in range(1, 101))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f"tp={p.setup.tp} x {p.replicas}"
        lines.append(write(left + _EDGE + _WIDTH - 80, _EDGE + _HEIGHT - 12 - 16 * i, label, colour))
    for x in bounds:
        points = f"{place(x, 0)} {place(x, 100)}"
        lines.append(f'<polyline points="{points}" stroke="black" stroke-dasharray="4"/>')
    return "\n".join(lines)


def _list_ticks(most: float) -> Iterator[float]:
    """Yields four to nine round numbers up to a number."""
    step = 10 ** math.floor(math.log10(most))
    step = next(s for s in (step / 5, step / 2, step) if most / s < 10)
    for i in range(int(most / step) + 1):
        yield round(i * step, 9)


_SHARED = ("command", "serve", "model", "mesh", "device", "efficiency", "json", "out", "search")
_OWN = ("trace", "slo", "dtype", "context", "running", "budget", "cache_gib", "calibrate", "most_replicas", "svg")


def server_command(args: argparse.Namespace) -> int:
    """Plans a server.

    Returns:
        The exit status: 0 if the objectives are met.

    Raises:
        ValueError: names the wrong arguments.
    """
    wrong = [f"{text}: it sets up a run" for text in list_given(args, outside=(*_SHARED, *_OWN))]
    wrong += [] if args.trace else ["add --trace FILE, the requests that are served"]
    wrong += _find_problems(args)
    raise_all(ValueError, "plan --serve:", wrong)
    config, shape = parse_model(args.model), parse_mesh(args.mesh)
    slos = [parse_slo(text) for text in args.slo]
    context = config.max_len if args.context is None else args.context
    trace = read_trace(args.trace, config.vocab_size, context)
    times = fit_times(read_trace(args.calibrate, config.vocab_size, context).steps) if args.calibrate else None
    if "pp" in shape:
        raise ValueError(f"plan --serve: --mesh {args.mesh}: a server has dp, its replicas, and tp; leave out pp.")
    cluster = device_cluster(args.device, {"tp": shape.get("tp", 1)})
    dtype = args.dtype or ("bfloat16" if cluster.device.name != "cpu" else "float32")
    heads = config.kv_heads
    layouts = [n for n in range(1, min(heads, cluster.per_node) + 1) if heads % n == 0] if args.search else []
    plans = []
    for tp in layouts or [shape.get("tp", 1)]:
        cache = None if args.cache_gib is None else int(args.cache_gib * 2**30)
        sizes = {"context": context, "running": args.running, "budget": args.budget, "cache_bytes": cache}
        setup = ServeSetup(args.model, config, cluster, tp, dtype, **sizes, efficiency=args.efficiency, times=times)
        fixed = shape["dp"] if "dp" in args.mesh and args.mesh != "dp=1" else None
        plans.append(plan_server(setup, trace.requests, slos, replicas=fixed, most=args.most_replicas))
    plans.sort(key=lambda p: p.sort_key)
    text = serve_text(plans, slos, len(trace.requests))
    if args.svg:
        Path(args.svg).write_text(serve_svg(plans, slos), encoding="utf-8")
    text = dump(serve_json(plans, slos)) if args.json else text
    print(text, end="")
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")
    return 0 if plans[0].meets else 1


def replay_command(args: argparse.Namespace) -> int:
    """Makes the decisions of a log again, and returns the exit status.

    Raises:
        ValueError: a decision differs, or the file is not a log.
    """
    given = list_given(args, outside=("command", "replay"))
    raise_all(ValueError, "plan --replay is an answer without other options; leave out:", given)
    found = replay_log(args.replay)
    print(f"{len(found.steps)} steps, {len(found.trace)} requests: all decisions are those of the log.")
    return 0


def check_no_server(args: argparse.Namespace) -> None:
    """Refuses options of a server in the plan of a run.

    Raises:
        ValueError: lists the options.
    """
    given = list_given(args, only=_OWN)
    raise_all(ValueError, "plan: these options are of a server; add --serve, or leave out:", given)


def _find_problems(args: argparse.Namespace) -> list[str]:
    wrong = (
        []
        if 1 <= args.running < args.budget
        else [f"--running must be from 1 to {args.budget - 1}, got {args.running}"]
    )
    wrong += [] if args.most_replicas >= 1 else [f"--most-replicas must be at least 1, got {args.most_replicas}"]
    wrong += (
        [] if args.cache_gib is None or args.cache_gib > 0 else [f"--cache-gib must be above 0, got {args.cache_gib}"]
    )
    wrong += [] if args.context is None or args.context > 1 else [f"--context must be at least 2, got {args.context}"]
    wrong += [] if 0 < args.efficiency <= 1 else [f"--efficiency must be in (0, 1], got {args.efficiency}"]
    return wrong
