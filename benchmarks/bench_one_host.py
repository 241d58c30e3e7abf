"""A step of two ranks of one host against DDP, FSDP2 and DeepSpeed: goals beside measured times.

By one command, in one run a table, in interleaved rounds as `bench_step_time.py` has them:

    python benchmarks/bench_one_host.py --out benchmarks/results/one_host.md

Peers of a table are there at the same time, so they come in several tables. Each has DDP, and the plain loop without
any communication: the cost of the same rows and a whole update alone. Seconds are those of the wall and of the
processor (a rank with all its threads, the mean of the ranks), of the same rounds. DeepSpeed takes part where it can be
imported; else a line says that it is left out. An environment with both is made by:

    python -m venv /tmp/peers && /tmp/peers/bin/pip install -e . deepspeed==0.19.8
    /tmp/peers/bin/python benchmarks/bench_one_host.py --out benchmarks/results/one_host.md
"""

import argparse
import importlib.util
import statistics
import sys

from _model import FULL, Size
from _report import publish, table
from bench_step_time import Times, measure_clocks, ratios

TINY = Size(num_layers=8, d_model=64, num_heads=4, tokens=32, vocab=512, batch=4)
# (size, peers beside DDP, the goals: a peer's step relative to that of another peer)
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
        peers = list(dict.fromkeys(["ddp", "loop", *(of for of, _ in wanted.values()), *map(str.strip, wanted)]))
        if importlib.util.find_spec("deepspeed") is None:
            missing = [peer for peer in peers if peer.startswith("deepspeed")]
            peers = [peer for peer in peers if peer not in missing]
            if missing:
                told = f"{', '.join(missing)} left out of {name!r}: {sys.executable} has no deepspeed"
                print(f"{told}; run this with the Python of an environment that has it.", file=sys.stderr, flush=True)
        names = {peer: f"{peer}:channel={args.channel}" if peer.startswith("shardfn") else peer for peer in peers}
        clocks, _ = measure_clocks(list(names.values()), args, size=size)
        wall, processor = ({peer: times[full] for peer, full in names.items()} for times in clocks.values())
        parts.append(f"## {name[0].upper()}{name[1:]}\n\n{size}\n\n{_table(wall, processor, wanted)}")
        raw[name] = {"wall": wall, "processor": processor}
    note = (
        f"World {args.world}, one thread a rank, {args.rounds} rounds of {args.steps} steps; seconds of the wall are"
        " the slowest rank's, of the processor the mean of the ranks, with all threads; ranks of shardfn talk by"
        f" {args.channel}. `loop` communicates nothing. Ratios are medians of those within a round, with quartiles."
    )
    publish("One host", "\n\n".join([note, *parts]), out=args.out, data=raw, as_json=args.json)


def _table(wall: Times, processor: Times, wanted: Wanted) -> str:
    medians = [
        [peer, f"{statistics.median(x):.4f}", f"{min(x):.4f}", f"{statistics.median(processor[peer]):.4f}"]
        for peer, x in wall.items()
    ]
    rows = []
    for name, (base, most) in {"loop": ("ddp", 0.0), **wanted}.items():
        peer = name.strip()
        if base not in wall:
            rows.append([f"{peer} / {base}", "-", "-", f"{most}", f"{base} was not there", "-"])
            continue
        low, mid, high = ratios(wall[peer], wall[base])
        asked, said = (f"{most}", "reached" if mid <= most else "not reached") if most else ("", "")
        of_processor = f"{ratios(processor[peer], processor[base])[1]:.3f}"
        rows.append([f"{peer} / {base}", f"{mid:.3f}", f"{low:.3f} .. {high:.3f}", asked, said, of_processor])
    first = table(["peer", "median s/step", "best", "processor"], medians)
    return first + "\n\n" + table(["ratio", "median", "quartiles", "asked, at most", "", "of the processor"], rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=lambda x: x.split(","), default=list(TABLES), help=", ".join(TABLES))
    parser.add_argument("--channel", choices=("memory", "gloo"), default="memory")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps a peer takes in one round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
