"""Covers values on disk: rows, chunks in any order, dtypes, alignment, bounded staging, checksums, bad arguments."""

import itertools
import pathlib
import random
from collections.abc import Iterator

import pytest
import torch

from shardfn import memory
from shardfn.core import Stored

OPTIONS = [{}, {"direct": False}, {"checksum": True}, {"direct": False, "checksum": True}, {"max_staging": 1 << 16}]


@pytest.fixture(params=OPTIONS, ids=str)
def pool(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[memory.Pool]:
    with memory.Pool(tmp_path / "pool", **request.param) as pool:
        yield pool


@pytest.mark.day(10)
@pytest.mark.parametrize("rows", [1, 5, 1024, 70_001])
def test_rows_come_back(pool: memory.Pool, rows: int) -> None:
    draw = random.Random(rows)
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
        x = torch.randn(rows, 3).to(dtype)
        value = pool.write(x).result()
        assert isinstance(value, Stored) and (value.kind, value.nbytes) == ("disk", x.nbytes)
        assert torch.equal(value.load(), x)
        lo, hi = sorted(draw.choices(range(rows + 1), k=2))
        assert torch.equal(value.read(lo, hi).result(), x[lo:hi])
        for out in (torch.empty(hi - lo, 3, dtype=dtype), memory.host_empty((hi - lo, 3), dtype)):
            assert value.read(lo, hi, out=out).result() is out and torch.equal(out, x[lo:hi])


@pytest.mark.day(4)
def test_chunks_may_come_in_any_order_and_share_pages(pool: memory.Pool) -> None:
    draw, rows = random.Random(0), 60_000
    x = torch.randn(rows, 2)
    for cuts in (4, 200):
        ends = [0, *sorted(draw.sample(range(1, rows), cuts)), rows]
        chunks = list(itertools.pairwise(ends))
        draw.shuffle(chunks)
        writer = pool.writer(x.shape, x.dtype)
        for lo, hi in chunks:
            chunk = x[lo:hi].clone()
            writer.write(lo, chunk).result()
            chunk.zero_()  # a finished transfer has let go of its source, shared pages included
        assert torch.equal(writer.finish().load(), x)


def test_odd_shapes(pool: memory.Pool) -> None:
    for x in (
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.empty(4, 0),
        torch.randn(30, 40).t(),
        torch.randn(3, dtype=torch.complex64).conj(),
    ):
        value = pool.write(x).result()
        assert torch.equal(value.load(), x) and value.load().shape == x.shape
    assert torch.equal(pool.write(torch.arange(9)).result().read(4, 4).result(), torch.arange(0))


def test_many_transfers_under_way_share_the_buffers(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path, threads=3, max_staging=1 << 17) as pool, memory.ledger() as book:
        bound = (1 << 17) + 12 * 4096  # the buffers, and the last page of each value
        data = torch.randn(12, 50_000)
        writes = [pool.write(row) for row in data]
        values = [w.result() for w in writes]
        assert book.peak("host") <= bound
        outs = torch.empty(12, 49_999)
        reads = [v.read(1, out=out) for v, out in zip(values, outs, strict=True)]
        for read in reads:
            read.result()
        assert torch.equal(outs, data[:, 1:]) and book.peak("host") <= bound


def test_rows_are_written_once_and_all(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path) as pool:
        writer = pool.writer((10, 2), torch.float32)
        writer.write(2, torch.ones(3, 2))
        writer.write(7, torch.ones(3, 2))
        for lo, rows, overlap in ((4, 1, "4:5"), (1, 2, "2:3"), (0, 10, "2:5"), (9, 1, "9:10")):
            with pytest.raises(ValueError, match=f"rows {overlap} were written before"):
                writer.write(lo, torch.ones(rows, 2))
        with pytest.raises(ValueError, match=r"rows 0:2, 5:7 .* were not written"):
            writer.finish()
        writer.write(5, torch.ones(2, 2))
        writer.write(0, torch.ones(2, 2))
        assert torch.equal(writer.finish().load(), torch.ones(10, 2))


def test_bad_arguments_are_named(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path) as pool:
        value = pool.write(torch.zeros(10, 2)).result()
        with pytest.raises(ValueError, match=r"rows 3:11 .* there are rows 0:10"):
            value.read(3, 11)
        with pytest.raises(ValueError, match=r"out must have shape \(2, 2\) .* got shape \(3, 2\)"):
            value.read(0, 2, out=torch.zeros(3, 2))
        with pytest.raises(ValueError, match="strides"):
            value.read(0, 2, out=torch.zeros(2, 2).t())
        with pytest.raises(ValueError, match=r"rows must have .*dtype torch.float32, got .*dtype torch.float64"):
            pool.writer((10, 2), torch.float32).write(0, torch.zeros(10, 2, dtype=torch.float64))
        with pytest.raises(ValueError, match="to_host"):
            pool.write(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="closed"):
        value.load()
    with pytest.raises(ValueError, match="closed"):
        pool.write(torch.zeros(1))


def test_a_flipped_bit_is_found_and_located(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path, checksum=True, max_staging=1 << 17) as pool:
        x = torch.randn(200_000)
        value = pool.write(x).result()
        assert value.slot is not None
        with open(value.slot.path, "r+b") as file:
            file.seek(300_000)
            byte = file.read(1)[0]
            file.seek(300_000)
            file.write(bytes([byte ^ 4]))
        with pytest.raises(
            memory.DamagedError, match=r"slot-000000.bin has changed.*bytes 262144 to 327680.*checkpoint"
        ):
            value.load()
        assert torch.equal(value.read(0, 65_536).result(), x[:65_536])  # whole values can still be read


def test_a_truncated_or_missing_file_is_named_with_both_sizes(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path) as pool:
        value = pool.write(torch.randn(10_000)).result()
        assert value.slot is not None
        with open(value.slot.path, "r+b") as file:
            file.truncate(8192)
        with pytest.raises(memory.DamagedError, match="truncated: expected 40960 bytes, found 8192"):
            value.load()
        value.slot.path.unlink()
        with pytest.raises(memory.DamagedError, match="is gone"):
            value.load()
