"""Peak tensor bytes per rank of shardfn and its peers, over two steady steps, each peer in fresh processes.

`_heap.c` wraps glibc's allocator, so every tensor counts, whichever thread made it and however long ago.
`rest` counts the bytes between steps (parameters and optimizer state), `peak - rest` those that a step adds: gradients,
gathered parameters, activations, communication buffers.
"""

import argparse
from collections.abc import Callable
from typing import Any

import _heap
from _model import FULL, batches, num_params
from _pairs import Group
from _report import publish, table

MIB = 2**20


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    preload = _heap.build()
    check = Group(serve_check, 1, preload=preload).ready()
    check.ask(None)
    check.close()
    found = {}
    for name in args.peers:
        group = Group(serve, args.world, (name,), preload=preload).ready()
        found[name] = group.ask(args.steps)
        group.close()
    _report(args, found)


def serve(rank: int, world: int, name: str) -> Callable[[int], dict[str, Any]]:
    """Builds one peer and takes a first step; the answer to k is the memory of k further steps."""
    import gc

    from _peers import build

    heap = _heap.Heap()
    before = heap.live()
    step, data = build(name)(rank, world, FULL), batches(FULL, rank, world)
    step(next(data))

    def answer(steps: int) -> dict[str, Any]:
        gc.collect()
        rest = heap.live() - before
        heap.reset()
        for _ in range(steps):
            step(next(data))
        sizes = heap.sizes_at_peak()
        return {"peak": heap.peak() - before, "rest": rest, "other": heap.other_at_peak(), "sizes": sizes}

    return answer


def serve_check(rank: int, world: int) -> Callable[[None], None]:
    """The counter on a known case: 4 MiB kept, 8 MiB of another thread freed here, 16 MiB resized away."""
    import threading

    import torch

    heap, mib = _heap.Heap(), 2**20
    del rank, world

    def answer(request: None) -> None:
        del request
        start = heap.live()
        heap.reset()
        kept, made = torch.empty(mib), []
        worker = threading.Thread(target=lambda: made.append(torch.empty(2 * mib)))
        worker.start()
        worker.join()
        made.clear()
        big = torch.empty(4 * mib)
        big.untyped_storage().resize_(0)
        live, peak = heap.live() - start, heap.peak() - start
        if abs(live - 4 * mib) > 4096 or abs(peak - 20 * mib) > 4096:
            raise RuntimeError(f"the counter is wrong: {live} and {peak} bytes, expected 4 and 20 MiB")
        del kept

    return answer


def _report(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    rows = []
    for name, ranks in found.items():
        worst = max(ranks, key=lambda r: r["peak"])
        columns = [worst["peak"], worst["rest"], worst["peak"] - worst["rest"], worst["other"]]
        blocks = ", ".join(f"{n} x {size / MIB:.2f}" for size, n in list(worst["sizes"].items())[: args.blocks])
        rows.append([name, *(f"{c / MIB:.1f}" for c in columns), f"{worst['peak'] / num_params(FULL):.2f}", blocks])
    head = ["peer", "peak", "rest", "peak - rest", "malloc", "bytes/parameter", "largest blocks alive at the peak"]
    note = f"MiB, the larger rank; world {args.world}, {args.steps} steps after the first; {FULL}"
    publish("Peak memory", f"{note}\n\n{table(head, rows)}", out=args.out, data={"ranks": found}, as_json=args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default="ddp,fsdp2,shardfn0,shardfn1,shardfn2,shardfn3", help="see _peers.py")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=6, help="how many sizes of the breakdown to print")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw numbers")
    args = parser.parse_args()
    args.peers = args.peers.split(",")
    return args


if __name__ == "__main__":
    main()
