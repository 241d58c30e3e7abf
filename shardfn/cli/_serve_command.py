"""`shardfn plan --serve` and `--replay`: arguments, checks, output."""

import argparse
from pathlib import Path

from shardfn.core import raise_all
from shardfn.inference import replay_log

from ._arguments import device_cluster, list_given, parse_mesh
from ._bench_rates import parse_slo
from ._models import parse_model
from ._plan_serve import ServeSetup, plan_server
from ._report import dump
from ._serve_report import serve_json, serve_svg, serve_text
from ._serve_times import fit_times
from ._serve_trace import read_trace

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
        ValueError: a decision differs, or the file is no log.
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
