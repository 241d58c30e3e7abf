"""The bytes that a restore on another number of ranks reads, beside those that its ranks are to hold.

    python benchmarks/bench_restore.py --gigabytes 10 --saved 3 --restored 2

Leaves of 1 GiB are saved by rows on `--saved` ranks, and restored by rows and by columns on `--restored`.
The bytes that a process reads are counted by the kernel (`rchar` of /proc/self/io) and by `restore`. Leaves are
views of one memory, in turn, so that the file may be larger than the memory; so values are compared for one leaf.
"""

import argparse
import os
import pathlib
import shutil
import tempfile
import time
from typing import Any

import torch

import shardfn as sf
from shardfn import checkpoint
from shardfn.collectives import GlobalTensor, blocks_of
from shardfn.testing import distributed

WIDTH = 4096
RANKS = [1, 2, 3, 4, 5, 6, 7, 8]


def tree_of(count: int, rows: int, spec: Any, mesh: Any, *, filled: bool) -> dict[str, GlobalTensor]:
    """Leaves [rows, WIDTH] whose blocks share their memory."""
    shape = (rows, WIDTH)
    (lo, hi), (left, right) = blocks_of(shape, spec, mesh)[mesh.rank]
    block = torch.zeros(hi - lo, right - left)
    if filled:
        block += torch.arange(lo, hi)[:, None] + torch.arange(left, right) / WIDTH
    return {f"w{i}": GlobalTensor(block.view(block.shape), torch.Size(shape), spec, mesh) for i in range(count)}


@distributed(world=RANKS, timeout=3000)
def save(directory: pathlib.Path, count: int, rows: int, world: int) -> int:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    tree = tree_of(count, rows, sf.P("dp"), mesh, filled=True)
    return checkpoint.save(directory, tree, 0, durable=False).bytes


@distributed(world=RANKS, timeout=3000)
def restore(directory: pathlib.Path, count: int, rows: int, cut: str, world: int) -> tuple[int, int, int, float]:
    """Bytes of this rank's blocks, bytes read by its own word and by the kernel's, and seconds of processor."""
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    spec = sf.P("dp") if cut == "rows" else sf.P(None, "dp")
    like = tree_of(count, rows, spec, mesh, filled=False)
    own = sum(x.local.nbytes for x in like.values())
    before, begin = _rchar(), time.process_time()
    out = checkpoint.restore(directory, like)
    spent, read = time.process_time() - begin, _rchar() - before
    want = tree_of(1, rows, spec, mesh, filled=True)["w0"]
    assert torch.equal(out.tree[f"w{count - 1}"].local, want.local)
    return own, out.read, read, spent


def _rchar() -> int:
    return int(pathlib.Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=int, default=10)
    parser.add_argument("--saved", type=int, default=3)
    parser.add_argument("--restored", type=int, default=2)
    parser.add_argument("--directory", type=pathlib.Path, default=None)
    args = parser.parse_args()
    place = pathlib.Path(tempfile.mkdtemp(dir=args.directory))
    rows = (1 << 30) // 4 // WIDTH
    try:
        total = sum(save(place, args.gigabytes, rows, world=args.saved))
        print(f"{total / 2**30:.2f} GiB saved by {args.saved} ranks, torch {torch.__version__}, {os.cpu_count()} cores")
        for cut in ("rows", "columns"):
            found = restore(place, args.gigabytes, rows, cut, world=args.restored)
            own, told, read, spent = (sum(x) for x in zip(*found, strict=True))
            said = f"{told / 2**30:.2f} read by restore's word ({told / own:.4f})"
            kernels = f"{read / 2**30:.2f} by the kernel's ({read / own:.4f})"
            print(
                f"{cut:8} on {args.restored} ranks: {own / 2**30:.2f} GiB to hold, {said}, {kernels}; {spent:.1f} CPU s"
            )
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
