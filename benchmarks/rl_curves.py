"""Pictures and a table of runs that learn from rewards: reward, divergence, length and entropy, from metrics.jsonl.

    for s in 0 1 2 3 4; do python examples/rlhf/ppo_arithmetic.py --seed $s --out runs/ppo$s; done
    python benchmarks/rl_curves.py runs/ppo? --out benchmarks/results/rl_ppo_CPU_YYYYMM.md

A run counts by the first update of each rollout, which has the weights that have drawn. Its rise is the mean reward of
the last ten rollouts less that of the first ten, in standard errors of rewards of 0 or 1: the answers to one problem
count as one. A run of chat_ppo.py has errors of its own: `--reward form` is the share of a rule that answers obey, and
"form_error" its standard error.
"""

import argparse
import json
import pathlib
import statistics
from typing import Any

from _report import publish, table

PANELS = {"reward": "reward", "divergence": "divergence, nats a token", "length": "tokens of an answer"}
PANELS |= {"entropy": "entropy, nats a token"}


def main() -> None:
    """Draws, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=pathlib.Path, nargs="+", help="directories with metrics.jsonl")
    parser.add_argument("--epochs", type=int, default=2, help="updates by each rollout (%(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="of a rollout (%(default)s)")
    parser.add_argument("--window", type=int, default=10, help="rollouts at each end (%(default)s)")
    parser.add_argument("--reward", default="reward", help="metric that rises (%(default)s)")
    parser.add_argument("--title", default="Learning from rewards", help="%(default)s")
    parser.add_argument("--note", default="", help="a sentence above the table, such as the command of the runs")
    parser.add_argument("--out", required=True, help="the table; the picture has the same name and .png")
    args = parser.parse_args()
    runs = {run.name: _rollouts(run, args.epochs, args.reward) for run in args.runs}
    picture = pathlib.Path(args.out).with_suffix(".png")
    picture.parent.mkdir(parents=True, exist_ok=True)
    _draw(runs, picture)
    head = ["run", "reward, first", "reward, last", "rise, standard errors", "largest divergence", "divergence, last"]
    head += ["tokens, last", "entropy, last"]
    rows = [[name, *_row(x, args.window, args.prompts)] for name, x in runs.items()]
    shown = f"![{', '.join(PANELS)}]({picture.name})"
    publish(args.title, "\n\n".join([*filter(None, [args.note]), table(head, rows), shown]), out=args.out)


def _rollouts(run: pathlib.Path, epochs: int, reward: str) -> dict[str, list[float]]:
    """Metric -> its values, one for each rollout."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines][::epochs]
    named = [{name.removeprefix("actor/"): x for name, x in row.items()} for row in rows]
    for row in named:
        row.setdefault("divergence", row.get("kl"))  # of runs that have the estimate alone
        row["reward"] = row[reward]
    errors = {"error": [row[f"{reward}_error"] for row in named]} if f"{reward}_error" in named[0] else {}
    return {name: [row[name] for row in named] for name in PANELS} | errors


def _row(run: dict[str, list[float]], window: int, prompts: int) -> list[str]:
    first, last = (statistics.mean(part) for part in (run["reward"][:window], run["reward"][-window:]))
    if "error" in run:
        error = sum(x**2 for x in (*run["error"][:window], *run["error"][-window:])) ** 0.5 / window
    else:
        error = sum(x * (1 - x) / (window * prompts) for x in (first, last)) ** 0.5
    ends = [statistics.mean(run[name][-window:]) for name in ("divergence", "length", "entropy")]
    found = [first, last, (last - first) / max(error, 1e-9), max(run["divergence"]), *ends]
    digits = (3, 3, 1, 3, 3, 2, 2)
    return [f"{x:.{n}f}" for x, n in zip(found, digits, strict=True)]


def _draw(runs: dict[str, dict[str, list[float]]], path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    axes = Figure(figsize=(10, 6), layout="constrained").subplots(2, 2)
    for place, (name, label) in zip(axes.flat, PANELS.items(), strict=True):
        for run, found in runs.items():
            place.plot(range(len(found[name])), found[name], lw=1, label=run)
        place.set(xlabel="rollout", ylabel=label)
        place.grid(alpha=0.3)
    axes.flat[0].legend()
    axes.flat[0].figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
