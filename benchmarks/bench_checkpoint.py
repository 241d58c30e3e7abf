"""A save beside a raw write of the same bytes, and beside torch's DCP; the stall of a save in the background.

    python benchmarks/bench_checkpoint.py --megabytes 1024

One process, one run: the ways take turns, each `--rounds` times, and the best of each counts.
"""

import argparse
import os
import pathlib
import shutil
import tempfile
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp

from shardfn import checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--leaves", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=pathlib.Path, default=None)
    args = parser.parse_args()
    place = pathlib.Path(tempfile.mkdtemp(dir=args.directory))
    tree = {f"w{i}": torch.randn((args.megabytes << 18) // args.leaves) for i in range(args.leaves)}
    size = sum(x.nbytes for x in tree.values())
    ways = {"raw": raw, "save": save, "dcp": by_dcp, "copy": copy, "stall": stall, "restore": restore}
    best = dict.fromkeys(ways, float("inf"))
    restored = checkpoint.save(place / "restored", tree, 0).path.parent
    try:
        for n in range(args.rounds):
            for name, way in ways.items():
                where = restored if name == "restore" else place / f"{name}{n}"
                for x in tree.values():
                    x.add_(1)
                os.sync()
                best[name] = min(best[name], way(where, tree))
                if where is not restored:
                    shutil.rmtree(where, ignore_errors=True)
    finally:
        shutil.rmtree(place)
    print(f"{size / 2**20:.0f} MiB in {args.leaves} leaves, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, seconds in best.items():
        print(f"{name:8} {seconds:7.3f} s  {size / seconds / 2**30:6.2f} GiB/s")
    print(f"raw / save {best['raw'] / best['save']:.2f}, dcp / save {best['dcp'] / best['save']:.2f}: more is better")
    print(f"stall / one host copy {best['stall'] / best['copy']:.2f}")


def raw(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> float:
    begin = time.perf_counter()
    where.mkdir()
    fd = os.open(where / "raw", os.O_WRONLY | os.O_CREAT)
    for x in tree.values():
        data = x.numpy().data.cast("B")
        for lo in range(0, len(data), 8 << 20):
            os.write(fd, data[lo : lo + (8 << 20)])
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - begin


def save(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> float:
    begin = time.perf_counter()
    checkpoint.save(where, tree, 0)
    return time.perf_counter() - begin


def by_dcp(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> float:
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(tree, checkpoint_id=where)
    return time.perf_counter() - begin


def copy(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> float:
    out = [torch.empty_like(x).zero_() for x in tree.values()]
    begin = time.perf_counter()
    for x, y in zip(tree.values(), out, strict=True):
        y.copy_(x)
    return time.perf_counter() - begin


def stall(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> float:
    with checkpoint.Manager(where) as manager:
        manager.save(tree, 0)
        manager.wait()
        begin = time.perf_counter()
        manager.save(tree, 1)
        return time.perf_counter() - begin


def restore(where: pathlib.Path, tree: dict[str, torch.Tensor]) -> float:
    begin = time.perf_counter()
    checkpoint.restore(where, tree)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
