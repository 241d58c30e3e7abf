"""How fast a pool streams values from and to disk, against a plain read and write of the same files in sequence.

The work of an optimizer step on disk, without its arithmetic: values of `--value` MiB are read in chunks, and each
chunk is written again as part of a new value; the files are recycled, so that both peers only ever overwrite. A pool
reads chunks ahead while it writes those behind, with `--buffers` chunks in memory. Plain is one thread that reads chunk
k and writes chunk k, with an aligned buffer, between two sets of files that it swaps; the same O_DIRECT or not. The
peers take turns, and the ratio is formed within a turn. With the page cache in the way (`--buffered`) dirty pages are
written back by fsync within the measured time, and files are dropped from the cache before they are read.
"""

import argparse
import collections
import itertools
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from _report import publish, table

from shardfn.memory import DiskTensor, DiskWriter, Pool, host_empty
from shardfn.memory._host import as_bytes

MIB = 1 << 20
Step = Callable[[], object]


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    torch.set_num_threads(1)
    rows, data = [], []
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        for chunk in map(float, args.chunks.split(",")):
            found = _case(pathlib.Path(place), args, int(chunk * MIB))
            data.append({"chunk": chunk, **found})
            rows.append(_row(chunk, args, found))
    moved = 2 * args.value * args.values
    flags = "page cache, fsync and dropped from the cache in each turn" if args.buffered else "O_DIRECT"
    checks = ", checksums on" if args.checksum else ""
    note = (
        f"{flags}{checks}; {args.values} values of {args.value} MiB, {moved} MiB moved a turn, {args.threads} threads,"
        f" {args.buffers} buffers;"
        f" {args.rounds} turns, median and quartiles. Load average of the machine: {os.getloadavg()[0]:.1f}."
    )
    head = ["chunk MiB", "plain MB/s", "pool MB/s", "pool / plain", "quartiles"]
    publish(
        "Streaming from and to disk",
        f"{note}\n\n{table(head, rows)}",
        out=args.out,
        data={"cases": data},
        as_json=args.json,
    )


def _case(place: pathlib.Path, args: argparse.Namespace, chunk: int) -> dict[str, list[float]]:
    plain = _Plain(place / f"plain{chunk}", args, chunk)
    pool = _Pooled(place / f"pool{chunk}", args, chunk)
    peers: dict[str, Step] = {"plain": plain.turn, "pool": pool.turn}
    taken: dict[str, list[float]] = {name: [] for name in peers}
    for round_ in range(args.rounds + 1):
        names = list(peers) if round_ % 2 else list(peers)[::-1]
        for name in names:
            os.sync()
            start = time.perf_counter()
            peers[name]()
            if round_:  # the first turn allocates the files
                taken[name].append(time.perf_counter() - start)
    plain.close()
    pool.close()
    return taken


class _Plain:
    """One thread, one buffer, file after file."""

    def __init__(self, place: pathlib.Path, args: argparse.Namespace, chunk: int) -> None:
        place.mkdir()
        self._flags = 0 if args.buffered else os.O_DIRECT
        self._size, self._fsync = args.value * MIB, args.buffered
        self._old = [place / f"a{i}" for i in range(args.values)]
        self._new = [place / f"b{i}" for i in range(args.values)]
        self._buffer = as_bytes(host_empty((chunk,), torch.uint8))
        for path in self._old + self._new:
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._size)
                _fill(file.fileno(), self._size)

    def turn(self, times: float = 1.0) -> tuple[float, float]:
        """Reads and writes all files, or a part of them, or some more than once; seconds of reading and of writing."""
        reading, writing, left = 0.0, 0.0, round(times * self._size * len(self._old))
        for source, target in itertools.cycle(zip(self._old, self._new, strict=True)):
            reads, writes = os.open(source, os.O_RDONLY | self._flags), os.open(target, os.O_WRONLY | self._flags)
            for at in range(0, self._size, len(self._buffer)):
                part = self._buffer[: self._size - at].data
                start = time.perf_counter()
                assert os.preadv(reads, [part], at) == len(part)
                middle = time.perf_counter()
                assert os.pwritev(writes, [part], at) == len(part)
                reading, writing = reading + middle - start, writing + time.perf_counter() - middle
                left -= len(part)
                if left <= 0:
                    break
            for fd in (reads, writes):
                if self._fsync:
                    _flush(fd)
                os.close(fd)
            if left <= 0:
                break
        self._old, self._new = self._new, self._old
        return reading, writing

    def close(self) -> None:
        for path in self._old + self._new:
            path.unlink()


class _Pooled:
    """Reads ahead, writes behind; a few buffers in a ring."""

    def __init__(self, place: pathlib.Path, args: argparse.Namespace, chunk: int) -> None:
        self._pool = Pool(place, threads=args.threads, direct=not args.buffered, checksum=args.checksum)
        self._size, self._fsync, self._chunk = args.value * MIB, args.buffered, chunk
        self._ahead = (args.buffers + 1) // 2
        self._ring = collections.deque(host_empty((chunk,), torch.uint8) for _ in range(args.buffers))
        first = torch.ones(self._size, dtype=torch.uint8)
        self._values = [self._pool.write(first).result() for _ in range(args.values)]

    def turn(self) -> None:
        jobs = [(i, at) for i in range(len(self._values)) for at in range(0, self._size, self._chunk)]
        writers: list[DiskWriter] = []
        fresh: list[DiskTensor] = []
        reads = collections.deque(self._read(*job) for job in jobs[: self._ahead])
        writes: collections.deque = collections.deque()
        for n, (i, at) in enumerate(jobs):
            if i == len(writers):
                writers.append(self._pool.writer((self._size,), torch.uint8))
            rows = reads.popleft().result()
            writes.append((writers[i].write(at, rows), rows))
            if n + self._ahead < len(jobs):
                if not self._ring:
                    self._done(writes.popleft())
                reads.append(self._read(*jobs[n + self._ahead]))
        while writes:
            self._done(writes.popleft())
        fresh = [writer.finish() for writer in writers]
        for value in (*self._values, *fresh) if self._fsync else ():
            assert value.slot is not None
            fd = os.open(value.slot.path, os.O_RDONLY)
            _flush(fd)
            os.close(fd)
        self._values = fresh

    def close(self) -> None:
        self._values.clear()
        self._pool.close()

    def _read(self, i: int, at: int):
        stop = min(at + self._chunk, self._size)
        return self._values[i].read(at, stop, out=self._ring.popleft()[: stop - at])

    def _done(self, pair) -> None:
        pair[0].result()
        self._ring.append(pair[1] if len(pair[1]) == self._chunk else host_empty((self._chunk,), torch.uint8))


def _fill(fd: int, size: int) -> None:
    ones = b"\1" * MIB
    for at in range(0, size, MIB):
        os.pwrite(fd, ones, at)
    os.fsync(fd)


def _flush(fd: int) -> None:
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _row(chunk: float, args: argparse.Namespace, taken: dict[str, list[float]]) -> list[str]:
    moved = 2 * args.value * args.values * MIB / 1e6
    rate = {name: moved / statistics.median(times) for name, times in taken.items()}
    ratios = sorted(a / b for a, b in zip(taken["plain"], taken["pool"], strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return [f"{chunk:g}", f"{rate['plain']:.0f}", f"{rate['pool']:.0f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default=None, help="where the files go; the system's temporary directory")
    parser.add_argument("--value", type=int, default=64, help="MiB of a value")
    parser.add_argument("--values", type=int, default=6)
    parser.add_argument("--chunks", default="1,4,16", help="MiB of a chunk")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--buffers", type=int, default=3, help="chunks in memory")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--buffered", action="store_true", help="through the page cache")
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("--out", default="", help="Markdown file")
    parser.add_argument("--json", action="store_true", help="also the raw times")
    return parser.parse_args()


if __name__ == "__main__":
    main()
