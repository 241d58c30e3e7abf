"""`kernels.draw`, `draw_uniforms` and `penalise` on one thread: the least processor time of a call and of a row.

Logits are normal with a deviation of 3, so that top p keeps some thousand tokens: more than a trained model's do.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
from _report import publish, table
from torch import Tensor

from shardfn import kernels

SIZES = ((1, 49152), (8, 49152), (32, 8192))
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "all tokens": {"temperature": 0.8},
    "top k 50": {"temperature": 0.8, "top_k": 50},
    "top p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top k 50, top p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top p 0.9, temperature 3": {"temperature": 3.0, "top_p": 0.9},
}
WIDTH = 1024


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = [line for size in SIZES for line in _lines(*size, args.rounds)]
    head = ("function", "rows", "vocabulary", "us a row", "ms a call")
    body = [
        f"the least processor time of {args.rounds} calls, one thread; history of {WIDTH} ids for `penalise`",
        table(head, lines),
        f"load of the machine at the end: {os.getloadavg()[0]:.1f}",
    ]
    publish("Tokens drawn", "\n\n".join(body), out=args.out)


def _lines(rows: int, vocab: int, rounds: int) -> list[tuple[object, ...]]:
    logits, keys = torch.randn(rows, vocab) * 3, torch.arange(rows)
    uniform = torch.rand(rows, dtype=torch.float64)
    history, prompts = torch.randint(vocab, (rows, WIDTH)).int(), torch.zeros(rows).int()
    one, penalties = torch.ones(rows, dtype=torch.float64), ("repetition", "presence", "frequency")
    cases: dict[str, Callable[[], object]] = {}
    for name, how in FILTERS.items():
        given = _same(rows, **how)
        cases[f"draw, {name}"] = lambda given=given: kernels.draw(logits, uniform, **given)
    cases["draw_uniforms"] = lambda: kernels.draw_uniforms(keys, keys)
    how = dict.fromkeys(penalties, one * 1.1)
    cases["penalise"] = lambda: kernels.penalise(logits, history, prompts, **how)
    times = {name: min(_time(run) for _ in range(rounds)) for name, run in cases.items()}
    return [(name, rows, vocab, f"{1e6 * t / rows:.1f}", f"{1e3 * t:.3f}") for name, t in times.items()]


def _same(rows: int, **how: float) -> dict[str, Tensor]:
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | how
    dtypes = {"top_k": torch.int64}
    return {name: torch.full((rows,), x, dtype=dtypes.get(name, torch.float64)) for name, x in given.items()}


def _time(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
