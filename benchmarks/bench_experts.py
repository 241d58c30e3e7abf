"""A tiny Mixtral with its experts on two ranks: shardfn beside transformers' AllToAllEP and DeepSpeed's native layer.

Time of a step in turns, and peak memory. All peers have the same weights, rows and optimizer, and route every token to
its two experts; the losses of the first steps are in the table. Each peer has two processes of one thread, with gloo
between them. A peer that does not begin within --patience seconds is left out: DeepSpeed compiles an extension once,
and waits for ever where a killed run has left a file `lock` in its folder under TORCH_EXTENSIONS_DIR.

It needs a Python that has transformers 5.24, accelerate, DeepSpeed 0.19.8, psutil and ninja besides shardfn:

    DS_ACCELERATOR=cpu $PEERS_PYTHON benchmarks/bench_experts.py --turns 20 --out benchmarks/results/experts.md
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import _heap
from _experts import PEERS, SIZES, save_model, tokens_of
from _pairs import Group
from _report import publish, table

MIB, WARM = 2**20, 3


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as directory:
        num = save_model(directory)
        groups = {name: _started(name, directory, args) for name in args.peers}
        groups = {name: group for name, group in groups.items() if group is not None}
        first = {name: [a["losses"] for a in g.ask(("losses", WARM))] for name, g in groups.items()}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        load = os.getloadavg()[0]
        for turn in range(args.turns):
            order = list(groups)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                ranks = groups[name].ask(("time", args.steps))
                taken[name].append((max(a["seconds"] for a in ranks), sum(a["cpu"] for a in ranks)))
        memory = {name: group.ask(("memory", 2)) for name, group in groups.items()}
        for group in groups.values():
            group.close()
    _report(args, num, load, first, taken, memory)


def _started(name: str, directory: str, args: argparse.Namespace) -> Group | None:
    group = Group(serve, 2, (name, directory, args.rows, args.length), preload=_heap.build())
    try:
        return group.ready(args.patience)
    except (RuntimeError, TimeoutError) as error:
        group.close()
        print(f"{name} is left out: {error}", flush=True)
        return None


def serve(rank: int, world: int, name: str, directory: str, rows: int, length: int) -> Callable[[Any], dict[str, Any]]:
    """Builds a peer; it answers with the losses, the seconds or the memory of some steps."""
    import gc

    del world
    heap = _heap.Heap()
    before, turn = heap.live(), -1
    step = PEERS[name](directory)

    def run(num: int) -> list[float]:
        nonlocal turn
        losses = []
        for _ in range(num):
            turn += 1
            losses.append(step(tokens_of(turn, rank, rows, length)).item())
        return losses

    def answer(request: tuple[str, int]) -> dict[str, Any]:
        what, num = request
        gc.collect()
        rest, start, used = heap.live() - before, time.perf_counter(), time.process_time()
        heap.reset()
        losses = run(num)
        seconds, used = (time.perf_counter() - start) / num, (time.process_time() - used) / num
        return {
            "losses": losses,
            "seconds": seconds,
            "cpu": used,
            "peak": heap.peak() - before,
            "rest": rest,
            "what": what,
        }

    return answer


def _report(
    args: argparse.Namespace,
    num: int,
    load: float,
    first: dict[str, list[list[float]]],
    taken: dict[str, list[tuple[float, float]]],
    memory: dict[str, list[dict[str, Any]]],
) -> None:
    rivals = [name for name in taken if not name.startswith("shardfn")]
    rows = []
    for name, pairs in taken.items():
        worst, medians = (
            max(memory[name], key=lambda a: a["peak"]),
            [statistics.median(x) for x in zip(*pairs, strict=True)],
        )
        row = [name, *(f"{x * 1e3:.1f}" for x in medians), f"{worst['peak'] / MIB:.1f}", f"{worst['rest'] / MIB:.1f}"]
        for rival in rivals:
            row += ["" if rival == name else _ratio(pairs, taken[rival], i) for i in range(2)]
        rows.append([*row, " ".join(f"{sum(x) / 2:.4f}" for x in zip(*first[name], strict=True))])
    over = [f"{kind} over {r}" for r in rivals for kind in ("time", "CPU")]
    head = ["peer", "ms a step", "CPU ms of both ranks", "peak MiB", "rest MiB", *over, "first losses"]
    note = (
        f"Mixtral of {num:,} parameters, {SIZES}; two ranks of one thread with gloo between them, {args.rows} rows of"
        f" {args.length} tokens each, AdamW, float32. Medians of {args.turns} turns of {args.steps} steps, in which the"
        f" peers follow one another; ratios are those within a turn, with their quartiles. `peak` is of the tensors"
        f" of the larger rank, `rest` between steps. Load of the machine at the start {load:.1f}. The number behind"
        " shardfn is its stage; transformers cuts all leaves (its stage 3), DeepSpeed the optimizer state (stage 1)."
    )
    publish("Experts on two ranks, beside transformers and DeepSpeed", f"{note}\n\n{table(head, rows)}", out=args.out)


def _ratio(own: list[tuple[float, float]], theirs: list[tuple[float, float]], i: int) -> str:
    ratios = sorted(a[i] / b[i] for a, b in zip(own, theirs, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return f"{statistics.median(ratios):.2f} ({low:.2f} ... {high:.2f})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--rows", type=int, default=4, help="of a rank")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--patience", type=float, default=300, help="seconds for a peer to begin")
    parser.add_argument("--out", default="", help="Markdown file")
    args = parser.parse_args()
    args.peers = args.peers.split(",")
    return args


if __name__ == "__main__":
    main()
