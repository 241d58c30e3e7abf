"""Messages and time of `sf.reshard` on one mesh for many small leaves, each in a message of its own and in shared ones.

    python benchmarks/bench_reshard_small.py --leaves 200 --bytes 1024 --out FILE.md

Both kinds run in turns on the same two ranks, in all three ways that send: rows to columns (all_to_all), rows to whole
(all_gather), and rows to whole over memory of the target (`into=`). Bits are compared before the first turn.
"""

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _pairs import Group
from _report import publish, table
from _turns import in_turns

KINDS = {"alone": 0, "shared": None}  # the least bytes of a leaf that does not share; None: the default


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=1024, help="of a whole leaf, in float32")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    group = Group(serve, 2, (args.leaves, args.bytes)).ready()
    found: dict[str, Any] = group.ask(args.turns)[0]
    group.close()
    rows = []
    for way, (counts, times) in found.items():
        alone, shared = ([wall * 1e3 for wall, _ in times[kind]] for kind in KINDS)
        used = (_shown([used * 1e3 for _, used in times[kind]]) for kind in KINDS)
        ratio = [b / a for a, b in zip(alone, shared, strict=True)]
        sent = (f"{calls}, {nbytes}" for calls, nbytes in counts)
        rows.append([way, *sent, _shown(alone), _shown(shared), _shown(ratio), *used])
    head = [
        "",
        "alone: messages, bytes",
        "shared",
        "alone, ms",
        "shared, ms",
        "shared / alone",
        "alone, CPU ms",
        "shared",
    ]
    about = (
        f"{args.leaves} leaves of {args.bytes} bytes, 2 ranks of one thread; median (quartiles) of {args.turns} turns."
    )
    publish("reshard of small leaves on one mesh", f"{about}\n\n{table(head, rows)}", out=args.out)


def _shown(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def serve(rank: int, world: int, leaves: int, nbytes: int) -> Callable[[int], dict[str, Any]]:
    """The answer to a number of turns: by way, messages and bytes of each kind, and the times of the turns."""
    import shardfn as sf
    from shardfn import P

    del rank
    torch.set_num_threads(1)
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    whole = [torch.randn(8, nbytes // 32, generator=torch.Generator().manual_seed(i)) for i in range(leaves)]
    tree = [sf.shard(x, P("dp"), mesh) for x in whole]
    into = [sf.shard(torch.zeros_like(x), P(), mesh) for x in whole]
    ways = {
        "rows to columns": lambda: sf.reshard(tree, P(None, "dp")),
        "rows to whole": lambda: sf.reshard(tree, P()),
        "rows to whole, into=": lambda: sf.reshard(tree, into=into),
    }

    def answer(turns: int) -> dict[str, Any]:
        return {name: _measured(run, turns) for name, run in ways.items()}

    return answer


def _measured(run: Callable[[], Any], turns: int) -> tuple[list[tuple[int, int]], dict[str, list[tuple[float, float]]]]:
    from shardfn.collectives import count_traffic

    counts, blocks = [], []
    for least in KINDS.values():
        with _sharing(least), count_traffic() as traffic:
            blocks.append([x.local.clone() for x in run()])
        counts.append((traffic.calls, traffic.bytes))
    assert all(torch.equal(x, y) for x, y in zip(*blocks, strict=True))
    runs = {kind: (functools.partial(_with, least, run), None) for kind, least in KINDS.items()}
    return counts, in_turns(runs, turns)


def _with(least: int | None, run: Callable[[], Any]) -> None:
    with _sharing(least):
        run()


@contextlib.contextmanager
def _sharing(least: int | None) -> Iterator[None]:
    """Lets leaves of fewer bytes than `least` share messages."""
    from shardfn.collectives import _carry

    before = _carry.SMALL
    _carry.SMALL = before if least is None else least
    try:
        yield
    finally:
        _carry.SMALL = before


if __name__ == "__main__":
    main()
