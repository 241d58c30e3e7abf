"""Predictions of `step.lower` against measurements of the same step: peak memory and bytes sent, for stages 0 to 3.

Predicted: `step.lower(state, batch).memory_analysis().peak` and `.cost_analysis().transfers`. Measured: the peak of
live tensor bytes of a steady step, counted by `_heap.c` as in `bench_memory.py`, and `sf.count_traffic()` around one.
The steps are captured with the back end "graph". Bytes must be equal for each collective; the row shows the rank whose
peak is predicted worst.
"""

import argparse
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import _heap
from _model import Size, batches
from _pairs import Group
from _report import publish, table

MIDDLE = Size(num_layers=4, d_model=256, num_heads=4, tokens=128, vocab=2048, batch=8)
MIB = 2**20


class Case(NamedTuple):
    """One way to run the step."""

    stage: int
    remat: bool
    microbatches: int
    backend: str


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    size = Size(batch=8) if args.full else MIDDLE
    cases = [Case(*c, args.backend) for c in itertools.product(args.stages, (False, True), (1, 2))]
    preload, rows = _heap.build(), []
    for world in args.worlds:
        group = Group(serve, world, (size,), preload=preload).ready()
        rows += [_row(world, case, group.ask(case)) for case in cases]
        group.close()
    head = ["world", "stage", "remat", "microbatches", "predicted, MiB", "measured, MiB", "predicted / measured"]
    head += ["bytes predicted", "bytes sent", "equal by collective"]
    worst = max(abs(float(row[6]) - 1) for row in rows)
    equal = sum(row[-1] == "yes" for row in rows)
    note = f"{size}\n\nPeaks are off by at most {worst:.1%}; bytes are equal in {equal} of {len(rows)} cases."
    publish("Plan against run", f"{note}\n\n{table(head, rows)}", out=args.out, data={"rows": rows}, as_json=args.json)


def serve(rank: int, world: int, size: Size) -> Callable[[Case], dict[str, Any]]:
    """Makes a mesh; the answer to a case is the prediction and the measurement."""
    import shardfn as sf

    heap, mesh = _heap.Heap(), sf.make_mesh({"dp": world})

    def answer(case: Case) -> dict[str, Any]:
        gc.collect()
        before = heap.live()
        data = batches(size, rank, world)
        step, state = _build(case, size, mesh)
        lowered = step.lower(state, {"tokens": next(data)})
        found: dict[str, Any] = {"predicted": lowered.memory_analysis().peak}
        found["transfers"] = dict(lowered.cost_analysis().transfers)
        del lowered
        for _ in range(2):
            state, _ = step(state, {"tokens": next(data)})
        gc.collect()
        heap.reset()
        with sf.count_traffic() as traffic:
            state, _ = step(state, {"tokens": next(data)})
        found["measured"] = heap.peak() - before
        found["sent"] = {(op, ",".join(axes)): tuple(counts) for (op, axes), counts in traffic.by_op.items()}
        return found

    return answer


def _build(case: Case, size: Size, mesh: Any) -> tuple[Any, Any]:
    from _model import params
    from _peers import adamw

    import shardfn as sf
    from shardfn.models import gpt

    loss = functools.partial(gpt.loss, size.config, **({"wrap": sf.remat} if case.remat else {}))
    if case.microbatches > 1:
        loss = sf.accumulate(loss, case.microbatches)
    jitted, zero = sf.jit(loss, backend=case.backend), sf.Zero(stage=case.stage)
    step = sf.sharded_step(jitted, adamw(), mesh=mesh, batch=sf.P("dp"), zero=zero)
    return step, step.init(params(size))


def _row(world: int, case: Case, ranks: list[dict[str, Any]]) -> list[Any]:
    worst = max(ranks, key=lambda r: abs(r["predicted"] / r["measured"] - 1))
    predicted, measured = worst["predicted"], worst["measured"]
    totals = [sum(sent for _, sent in ranks[0][key].values()) for key in ("transfers", "sent")]
    equal = all(_traffic(r["transfers"]) == _traffic(r["sent"]) for r in ranks)
    sizes = [f"{predicted / MIB:.2f}", f"{measured / MIB:.2f}", f"{predicted / measured:.4f}"]
    how = [world, case.stage, "yes" if case.remat else "no", case.microbatches]
    row = [*how, *sizes, *totals, "yes" if equal else "NO"]
    print("|", *row, "|", flush=True)
    if not equal:
        print(f"  predicted {ranks[0]['transfers']}\n  sent      {ranks[0]['sent']}", flush=True)
    return row


def _traffic(counts: dict[Any, tuple[int, int]]) -> dict[Any, tuple[int, int]]:
    return {key: (value[0], value[1]) for key, value in counts.items() if value[1]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=_numbers, default=[2, 4])
    parser.add_argument("--stages", type=_numbers, default=[0, 1, 2, 3])
    parser.add_argument("--backend", default="graph")
    parser.add_argument("--full", action="store_true", help="the model of the other benchmarks, with 8 rows")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw numbers")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


if __name__ == "__main__":
    main()
