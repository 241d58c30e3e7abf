"""The cost of `step.lower` on an idle machine: seconds and peak memory of the process, and its hot functions.

Each case is captured in a fresh process, on an abstract mesh: the step of the benchmark model, and of a GPT of a
trillion parameters, 128 layers, on 1024 ranks; `stacked` is the latter with its blocks stacked and scanned. `capture`
is `step.lower` up to the first pass, `schedule` the passes; `CPU` are the same two in seconds of the process, which are
steadier where others use the machine. `peak RSS` is that of the whole process, Python and torch included. One more run
of each case under cProfile shows where the time goes; its own seconds are larger.
"""

import argparse
import cProfile
import functools
import json
import pathlib
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from _report import publish, table


class Case(NamedTuple):
    """A captured step: a configuration of `gpt`, and the settings of its run."""

    config: dict[str, Any]
    ranks: int
    rows: int
    stage: int = 3


SMALL = {"vocab_size": 512, "num_layers": 2, "d_model": 128, "num_heads": 4, "max_len": 64}
BENCHMARK = {"vocab_size": 8192, "num_layers": 8, "d_model": 512, "num_heads": 8, "max_len": 256}
TRILLION = {"vocab_size": 51200, "num_layers": 128, "d_model": 25600, "num_heads": 160, "max_len": 2048}
CASES = {"small": Case(SMALL, 2, 2), "benchmark": Case(BENCHMARK, 2, 2), "trillion": Case(TRILLION, 1024, 1)}
CASES["stacked"] = Case({**TRILLION, "stacked": True}, 1024, 1)


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    if args.one:
        print(json.dumps(_capture(CASES[args.one], args.profiled)))
        return
    rows, profiles = [], []
    for name in args.cases:
        found = [_run(name) for _ in range(args.repeat)]
        best = min(found, key=lambda f: f["capture"])
        rows.append(_row(name, best))
        print("|", *rows[-1], "|", flush=True)
        if args.top:
            rows_of = table(["function", "calls", "own, s", "with callees, s"], _run(name, args.top)["top"])
            profiles.append(f"{name}: functions by their own time\n\n{rows_of}")
    head = [
        "case",
        "parameters",
        "ranks",
        "imports, s",
        "shapes of the state, s",
        "capture, s",
        "CPU, s",
        "schedule, s",
        "CPU, s",
        "analysis, s",
    ]
    head += ["peak RSS, GiB", "before, GiB", "nodes", "predicted peak, GiB", "sent a rank, GB"]
    body = "\n\n".join([f"The best of {args.repeat}, each in a fresh process", table(head, rows), *profiles])
    publish("Capture", body, out=args.out, data={"rows": rows}, as_json=args.json)


def _run(name: str, top: int = 0) -> dict[str, Any]:
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--one", name, "--profiled", str(top)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _capture(case: Case, top: int) -> dict[str, Any]:
    marks = [time.perf_counter()]
    import torch

    import shardfn as sf
    from shardfn.models import gpt

    torch.set_num_threads(1)
    marks.append(time.perf_counter())
    before = _peak_rss()
    config = gpt.Config(**case.config)
    cpu: list[float] = []

    def captured(gm: Any) -> Any:
        marks.append(time.perf_counter())
        cpu.append(time.process_time())
        return gm

    step, state, batch = _abstract(config, case, captured)
    marks.append(time.perf_counter())
    cpu.append(time.process_time())
    profile = cProfile.Profile() if top else None
    lowered = _profiled(profile, lambda: step.lower(state, batch))
    marks.append(time.perf_counter())
    cpu.append(time.process_time())
    memory, cost = lowered.memory_analysis(), lowered.cost_analysis()
    marks.append(time.perf_counter())
    names = ("imports", "shapes", "capture", "schedule", "analysis")
    found: dict[str, Any] = {n: b - a for n, a, b in zip(names, marks, marks[1:], strict=False)}
    found |= {
        "cpu": cpu[1] - cpu[0],
        "schedule_cpu": cpu[2] - cpu[1],
        "rss": _peak_rss(),
        "before": before,
        "nodes": len(lowered.gm.graph.nodes),
    }
    found |= {"parameters": gpt.num_params(config), "ranks": case.ranks, "peak": memory.peak, "sent": cost.sent}
    found["top"] = _top(profile, top) if profile else []
    del sf
    return found


def _abstract(config: Any, case: Case, captured: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    import torch
    from _peers import adamw

    import shardfn as sf
    from shardfn.models import gpt

    mesh = sf.make_mesh({"dp": case.ranks}, device="cpu", abstract=True)
    loss = sf.jit(functools.partial(gpt.loss, config), backend="graph", passes=(captured,))
    specs, zero = gpt.specs(config), sf.Zero(stage=case.stage)
    step = sf.sharded_step(loss, adamw(), mesh=mesh, specs=specs, batch=sf.P("dp"), zero=zero)
    state = sf.eval_shape(lambda: step.init(gpt.init, config, sf.key(0)))
    tokens = torch.empty(case.rows, config.max_len + 1, dtype=torch.int64, device="meta")
    return step, state, {"tokens": tokens}


def _profiled(profile: cProfile.Profile | None, f: Callable[[], Any]) -> Any:
    return profile.runcall(f) if profile else f()


def _top(profile: cProfile.Profile, count: int) -> list[list[Any]]:
    stats: Any = pstats.Stats(profile)
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:count]
    return [[f"`{_short(where)}`", calls, f"{own:.2f}", f"{total:.2f}"] for where, (_, calls, own, total, _) in rows]


def _short(where: tuple[str, int, str]) -> str:
    file, line, name = where
    parts = pathlib.Path(file).parts
    return name if file == "~" else f"{'/'.join(parts[-2:])}:{line} {name}"


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _row(name: str, found: dict[str, Any]) -> list[Any]:
    seconds = [
        f"{found[k]:.2f}" for k in ("imports", "shapes", "capture", "cpu", "schedule", "schedule_cpu", "analysis")
    ]
    sizes = [f"{found[k] / 2**30:.2f}" for k in ("rss", "before")]
    plan = [f"{found['peak'] / 2**30:.3f}", f"{found['sent'] / 1e9:.3f}"]
    return [name, f"{found['parameters']:,}", found["ranks"], *seconds, *sizes, found["nodes"], *plan]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases", type=lambda x: x.split(","), default=["benchmark", "trillion"], help=", ".join(CASES)
    )
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--top", type=int, default=12, help="rows of the profile; 0 takes none")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw numbers")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--profiled", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
