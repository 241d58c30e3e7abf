"""The loss curve of `examples/train_gpt.py` in 16 bits beside that in float32: same data, same seed, same steps.

    python benchmarks/bench_precision_curve.py
    python benchmarks/bench_precision_curve.py --precisions fp32 bf16 fp16 -- --layers 2 --dim 128 --heads 4

Arguments after `--` go to the example. Runs go on side by side. Curves are compared by means over windows of 25 steps.
The run `fp32-reordered` is the control: float32 with the gradient of each batch summed in two halves, which changes
nothing but the last bits. It shows how far two runs drift apart by rounding alone.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from _report import publish, table

ROOT = pathlib.Path(__file__).parents[1]
WINDOW = 25


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        started = {p: start(p, args, pathlib.Path(folder) / p) for p in args.precisions}
        runs = {p: finished(process, pathlib.Path(folder) / p) for p, process in started.items()}
    curves = {p: [round(row["loss"], 5) for row in rows] for p, rows in runs.items()}
    publish("Loss curves by precision", body(args, runs), out=args.out, data={"loss": curves}, as_json=args.json)


def start(name: str, args: argparse.Namespace, out: pathlib.Path) -> subprocess.Popen:
    precision, _, reordered = name.partition("-")
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--precision", precision, "--out", str(out)]
    command += ["--steps", str(args.steps), "--sample", "0", *args.rest, *(["--accumulate", "2"] if reordered else [])]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def finished(process: subprocess.Popen, out: pathlib.Path) -> list[dict]:
    if process.wait():
        raise SystemExit(f"{process.args} failed")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def smoothed(rows: list[dict]) -> list[float]:
    losses = [row["loss"] for row in rows]
    return [sum(losses[i : i + WINDOW]) / len(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]


def body(args: argparse.Namespace, runs: dict[str, list[dict]]) -> str:
    first, *others = args.precisions
    curves = {p: smoothed(runs[p]) for p in args.precisions}
    off = {p: [a / b - 1 for a, b in zip(curves[p], curves[first], strict=True)] for p in others}
    held = {p: [f"{r['validation_loss']:.4f}" for r in runs[p] if "validation_loss" in r] for p in args.precisions}
    rows = []
    for i, want in enumerate(curves[first]):
        cells = [x for p in others for x in (f"{curves[p][i]:.4f}", f"{100 * off[p][i]:+.3f} %")]
        rows.append([f"{i * WINDOW + 1} to {min((i + 1) * WINDOW, args.steps)}", f"{want:.4f}", *cells])
    lines = [f"Largest difference of {p} from {first}: {100 * max(map(abs, off[p])):.3f} %." for p in others]
    lines += [f"Validation of {p}: {', '.join(held[p])}." for p in args.precisions]
    head = ["steps", first, *(x for p in others for x in (p, f"{p} / {first} - 1"))]
    return "\n".join([*lines, "", f"Training loss, means over {WINDOW} steps:", "", table(head, rows)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "fp32-reordered", "bf16"])
    parser.add_argument("--out", default="", help="the report")
    parser.add_argument("--json", action="store_true", help="the curves, step by step, beside it")
    parser.add_argument("rest", nargs="*", help="after --: options of the example")
    return parser.parse_args()


if __name__ == "__main__":
    main()
