"""A step of two ranks of one host against DDP, FSDP2 and DeepSpeed: what was asked of it beside what it takes.

By one command, in one run a table, in interleaved rounds as `bench_step_time.py` has them:

    python benchmarks/bench_one_host.py --out benchmarks/results/one_host.md

Peers of a table are there at the same time, so they come in tables of which each has DDP. DeepSpeed takes part where it
can be imported; else a line says that it is left out. An environment that has it needs what shardfn needs besides:

    python -m venv /tmp/peers && /tmp/peers/bin/pip install -e . deepspeed==0.19.8
    /tmp/peers/bin/python benchmarks/bench_one_host.py --out benchmarks/results/one_host.md
"""

import argparse
import importlib.util
import statistics
import sys

from _model import FULL, Size
from _report import publish, table
from bench_step_time import Times, measure, ratios

TINY = Size(num_layers=8, d_model=64, num_heads=4, tokens=32, vocab=512, batch=4)
# (size, peers beside DDP, what their step may take of that of another peer)
Wanted = dict[str, tuple[str, float]]
TABLES: dict[str, tuple[Size, Wanted]] = {
    "stages 0 to 2": (FULL, {"shardfn0": ("ddp", 0.94), "shardfn1": ("ddp", 0.94), "shardfn2": ("ddp", 0.95)}),
    "stage 3": (
        FULL,
        {
            "shardfn3": ("ddp", 0.97),
            "shardfn3:jit=graph": ("ddp", 0.95),
            "shardfn3:jit=inductor": ("ddp", 0.95),
            "shardfn3 ": ("fsdp2", 0.72),
            "shardfn3  ": ("deepspeed3", 0.78),
        },
    ),
    "a small step": (
        TINY,
        {
            "shardfn0": ("ddp", 1.3),
            "shardfn1": ("ddp", 1.5),
            "shardfn3": ("ddp", 1.9),
            "shardfn3:jit=graph": ("ddp", 1.2),
        },
    ),
}


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    parts, raw = [], {}
    for name in args.tables:
        size, wanted = TABLES[name]
        peers = list(dict.fromkeys(["ddp", *(of for of, _ in wanted.values()), *map(str.strip, wanted)]))
        if importlib.util.find_spec("deepspeed") is None:
            missing = [peer for peer in peers if peer.startswith("deepspeed")]
            peers = [peer for peer in peers if peer not in missing]
            if missing:
                told = f"{', '.join(missing)} left out of {name!r}: {sys.executable} has no deepspeed"
                print(f"{told}; run this with the Python of an environment that has it.", file=sys.stderr, flush=True)
        names = {peer: f"{peer}:channel={args.channel}" if peer.startswith("shardfn") else peer for peer in peers}
        times, _ = measure(list(names.values()), args, size=size)
        seconds = {peer: times[full] for peer, full in names.items()}
        parts.append(f"## {name[0].upper()}{name[1:]}\n\n{size}\n\n{_table(seconds, wanted)}")
        raw[name] = seconds
    note = (
        f"World {args.world}, one thread a rank, {args.rounds} rounds of {args.steps} steps, seconds of the"
        f" {args.clock} clock, the slower rank; ranks of shardfn talk by {args.channel}. Ratios are medians of those"
        " within a round, with quartiles."
    )
    publish("One host", "\n\n".join([note, *parts]), out=args.out, data=raw, as_json=args.json)


def _table(seconds: Times, wanted: Wanted) -> str:
    medians = [[peer, f"{statistics.median(x):.4f}", f"{min(x):.4f}"] for peer, x in seconds.items()]
    rows = []
    for name, (base, most) in wanted.items():
        peer = name.strip()
        if base not in seconds:
            rows.append([f"{peer} / {base}", "-", "-", f"{most}", f"{base} was not there"])
            continue
        low, mid, high = ratios(seconds[peer], seconds[base])
        said = "reached" if mid <= most else "not reached"
        rows.append([f"{peer} / {base}", f"{mid:.3f}", f"{low:.3f} .. {high:.3f}", f"{most}", said])
    first = table(["peer", "median s/step", "best"], medians)
    return first + "\n\n" + table(["ratio", "median", "quartiles", "asked, at most", ""], rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=lambda x: x.split(","), default=list(TABLES), help=", ".join(TABLES))
    parser.add_argument("--channel", choices=("memory", "gloo"), default="memory")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps a peer takes in one round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
