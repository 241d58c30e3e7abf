"""Bytes that a rank sends in one step, counted at the collective layer, against the formulas of the ZeRO paper.

With psi bytes of parameters and N ranks: stages 0, 1 and 2 send 2 psi (N - 1) / N (a reduce-scatter and an all-gather,
or an all-reduce), stage 3 sends 3 psi (N - 1) / N (two gathers and a reduce-scatter). Stage 3 may send less: leaves of
at most `Zero.persist_elements` elements stay gathered, leaves in the prefetch window where the forward turns into the
backward are not gathered again, nor is a leaf that the backward has no use for, as an embedding.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2019, section 7.
"""

import argparse
from collections.abc import Callable
from typing import Any

from _model import FULL, SMALL, Size, batches, num_params
from _pairs import Group
from _report import publish, table


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    fields = {k: int(v) for k, v in (pair.split("=") for pair in args.zero.split(":") if pair)}
    rows: list[list[Any]] = []
    for world in args.worlds:
        size = FULL if world <= 2 else SMALL
        for stage in range(4):
            group = Group(serve, world, (size, stage, fields)).ready()
            rows.append(_row(world, size, stage, group.ask(args.steps)))
            group.close()
    head = ["world", "stage", "psi, MB", "sent a rank, MB", "formula, MB", "sent / formula", "calls", "of these"]
    publish("Traffic", f"MB = 1e6 bytes\n\n{table(head, rows)}", out=args.out, data={"rows": rows}, as_json=args.json)


def serve(rank: int, world: int, size: Size, stage: int, fields: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    """Builds a step and takes a first one; the answer to k is the bytes that k further steps sent."""
    from _peers import shardfn

    from shardfn.collectives import count_traffic

    step, data = shardfn(rank, world, size, stage=stage, **fields), batches(size, rank, world)
    step(next(data))

    def answer(steps: int) -> dict[str, Any]:
        with count_traffic() as traffic:
            for _ in range(steps):
                step(next(data))
        by_op: dict[str, float] = {}
        for (op, _), (_, sent) in traffic.by_op.items():
            by_op[op] = by_op.get(op, 0.0) + sent / steps
        return {"bytes": traffic.bytes / steps, "calls": traffic.calls / steps, "by_op": by_op}

    return answer


def _row(world: int, size: Size, stage: int, ranks: list[dict[str, Any]]) -> list[Any]:
    psi = 4 * num_params(size)
    formula = (3 if stage == 3 else 2) * psi * (world - 1) / world
    sent = sum(r["bytes"] for r in ranks) / world
    ops = ", ".join(f"{op} {b / 1e6:.3f}" for op, b in sorted(ranks[0]["by_op"].items(), key=lambda i: -i[1]))
    values = [f"{psi / 1e6:.3f}", f"{sent / 1e6:.3f}", f"{formula / 1e6:.3f}", f"{sent / formula:.4f}"]
    return [world, stage, *values, f"{ranks[0]['calls']:.0f}", ops]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--zero", default="", help="fields of Zero: persist_elements=0:prefetch_bytes=0:bucket_bytes=0")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw numbers")
    args = parser.parse_args()
    args.worlds = [int(w) for w in args.worlds.split(",")]
    return args


if __name__ == "__main__":
    main()
