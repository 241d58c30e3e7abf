"""A save beside a raw write of the same bytes, and beside torch's DCP; the stall of a save in the background.

    python benchmarks/bench_checkpoint.py --megabytes 1024

One process, one run: the ways take turns, each `--rounds` times, and the best of each counts. `caller` is what the
calling thread alone computed, which other programs on the machine disturb less than they do the time; with
`--threads 1` the step waits for nothing else.
"""

import argparse
import os
import pathlib
import shutil
import tempfile
import time
import warnings
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from _report import publish, table

from shardfn import checkpoint

# Copies, and saves in the background, in one turn: the first ones find pages for their memory.
REPEATS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--leaves", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=pathlib.Path, default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--ways", default="raw,save,dcp,copy,stall,restore", help="which of them, with commas")
    parser.add_argument("--out", default="", help="a file for the report")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    place = pathlib.Path(tempfile.mkdtemp(dir=args.directory))
    tree = {f"w{i}": torch.randn((args.megabytes << 18) // args.leaves) for i in range(args.leaves)}
    size = sum(x.nbytes for x in tree.values())
    every = {"raw": raw, "save": save, "dcp": by_dcp, "copy": copy, "stall": stall, "restore": restore}
    ways = {name: every[name] for name in args.ways.split(",")}
    best = dict.fromkeys(ways, Spent(float("inf"), float("inf")))
    restored = place / "restored"
    checkpoint.save(restored, tree, 0)
    try:
        for n in range(args.rounds):
            for name, way in ways.items():
                where = restored if name == "restore" else place / f"{name}{n}"
                for x in tree.values():
                    x.add_(1)
                os.sync()
                best[name] = Spent(*map(min, best[name], way(where, tree)))
                if where is not restored:
                    shutil.rmtree(where, ignore_errors=True)
    finally:
        shutil.rmtree(place)
    rows = [[n, f"{x.wall:.3f}", f"{size / x.wall / 2**30:.2f}", f"{x.caller:.3f}"] for n, x in best.items()]
    ratios = [
        f"- {over} / {under}: {best[over].wall / best[under].wall:.2f}"
        for over, under in (("raw", "save"), ("dcp", "save"), ("stall", "copy"))
        if {over, under} <= ways.keys()
    ]
    body = f"{size / 2**20:.0f} MiB in {args.leaves} leaves, load {os.getloadavg()[0]:.1f}; the best of each.\n\n"
    body += table(["", "s", "GiB/s", "s of the calling thread"], rows) + "\n\n" + "\n".join(ratios)
    publish("A save beside a raw write, and its stall beside a copy", body, out=args.out)


class Spent(NamedTuple):
    """Seconds, and those that the calling thread computed."""

    wall: float
    caller: float


class Clock:
    """Both, since it was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), time.thread_time()

    def spent(self) -> Spent:
        return Spent(time.perf_counter() - self._begin[0], time.thread_time() - self._begin[1])


def raw(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> Spent:
    clock = Clock()
    where.mkdir()
    fd = os.open(where / "raw", os.O_WRONLY | os.O_CREAT)
    for x in tree.values():
        data = x.numpy().data.cast("B")
        for lo in range(0, len(data), 8 << 20):
            os.write(fd, data[lo : lo + (8 << 20)])
    os.fsync(fd)
    os.close(fd)
    return clock.spent()


def save(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> Spent:
    clock = Clock()
    checkpoint.save(where, tree, 0)
    return clock.spent()


def by_dcp(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> Spent:
    clock = Clock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(tree, checkpoint_id=where)
    return clock.spent()


def copy(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> Spent:
    out = [torch.empty_like(x) for x in tree.values()]
    spent = []
    for _ in range(REPEATS):
        clock = Clock()
        for x, y in zip(tree.values(), out, strict=True):
            y.copy_(x)
        spent.append(clock.spent())
    return Spent(*map(min, *spent))


def stall(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> Spent:
    spent = []
    with checkpoint.Manager(where) as manager:
        for n in range(REPEATS):
            clock = Clock()
            manager.save(tree, n)
            spent.append(clock.spent())
            manager.wait()
    return Spent(*map(min, *spent))


def restore(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> Spent:
    clock = Clock()
    checkpoint.restore(where, tree)
    return clock.spent()


if __name__ == "__main__":
    main()
