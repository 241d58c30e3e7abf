"""The loss curve of `examples/train_gpt.py` in 16 bits beside that in float32: same data, same seed, same steps.

    python benchmarks/bench_precision_curve.py --out benchmarks/results/precision_curve.md
    python benchmarks/bench_precision_curve.py --precisions fp32 bf16 fp16 -- --layers 2 --dim 128 --heads 4

What follows `--` goes to the example. Curves are compared by means over windows of 25 steps.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

import torch

ROOT = pathlib.Path(__file__).parents[1]
WINDOW = 25


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        runs = {p: train(p, args, pathlib.Path(folder) / p) for p in args.precisions}
    text = report(args, runs)
    print(text)
    if args.out is not None:
        args.out.write_text(text)


def train(precision: str, args: argparse.Namespace, out: pathlib.Path) -> list[dict]:
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--precision", precision, "--out", str(out)]
    command += ["--steps", str(args.steps), "--sample", "0", *args.rest]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def smoothed(rows: list[dict]) -> list[float]:
    losses = [row["loss"] for row in rows]
    return [sum(losses[i : i + WINDOW]) / len(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]


def report(args: argparse.Namespace, runs: dict[str, list[dict]]) -> str:
    first, *others = args.precisions
    base = smoothed(runs[first])
    curves = {p: smoothed(runs[p]) for p in args.precisions}
    worst = {p: max(abs(a / b - 1) for a, b in zip(curves[p], base, strict=True)) for p in others}
    held = {p: [r["validation_loss"] for r in runs[p] if "validation_loss" in r] for p in args.precisions}
    head = [f"{p} | {p} / {first} - 1" for p in others]
    lines = [
        "# Loss curves by precision",
        "",
        f"Command: `python benchmarks/bench_precision_curve.py --steps {args.steps} --precisions"
        f" {' '.join(args.precisions)} -- {' '.join(args.rest)}`",
        f"Commit {commit()}, torch {torch.__version__}, Python {platform.python_version()}, {processor()}, one process,"
        " one thread.",
        "",
        *(
            f"Largest difference of {p} from {first} over {args.steps} steps: {100 * w:.3f} %."
            for p, w in worst.items()
        ),
        *(f"Validation of {p}: {', '.join(f'{x:.4f}' for x in held[p])}." for p in args.precisions),
        "",
        f"Training loss, mean of {WINDOW} steps:",
        "",
        f"| steps | {first} | {' | '.join(head)} |",
        f"|{'---:|' * (2 + 2 * len(others))}",
    ]
    for i, want in enumerate(base):
        cells = [f"{curves[p][i]:.4f} | {100 * (curves[p][i] / want - 1):+.3f} %" for p in others]
        end = min((i + 1) * WINDOW, args.steps)
        lines.append(f"| {i * WINDOW + 1}-{end} | {want:.4f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("rest", nargs="*", help="after --: options of the example")
    return parser.parse_args()


if __name__ == "__main__":
    main()
