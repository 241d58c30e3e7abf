"""Covers the ledger: live and peak bytes by kind, views, autograd, torch.func, nesting, traffic, and its silence."""

import gc
import pathlib

import pytest
import torch

from shardfn import memory


def test_a_storage_counts_once_and_until_its_last_view_dies() -> None:
    older = torch.zeros(1000)
    with memory.ledger() as book:
        view = older.view(10, 100)[2:]  # nothing new
        older.add_(1)
        assert book.live("device") == 0
        x = torch.zeros(100)
        tail = x[50:]
        del x
        assert book.live("device") == 400
        y = tail + 1
        del tail
        assert (book.live("device"), book.peak("device")) == (200, 600)
        z = torch.tensor([1.0, 2.0])
        assert book.live("device") == 208
        book.count({"older": older, "view": view}, "host")
        assert book.live("host") == 4000
    del y, z, older
    assert (book.live("device"), book.live("host")) == (0, 4000)
    del view
    assert book.live("host") == 0


def test_regions_and_transfers_keep_device_and_host_apart() -> None:
    with memory.ledger() as book:
        x = torch.zeros(100_000)
        down = memory.to_host(x).result()
        assert (book.live("device"), book.live("host")) == (400_000, 400_000)
        with memory.on_host():
            y = down * 2
        up = memory.to_device(y).result()
        assert (book.live("device"), book.live("host")) == (800_000, 800_000)
        del x, down, y, up
        assert (book.live("device"), book.live("host")) == (0, 0)
        assert (book.peak("device"), book.peak("host")) == (800_000, 800_000)
    assert book.table().splitlines()[-1].split() == ["host", "->", "device", "1", "400,000"]


@pytest.mark.nightly
def test_backward_and_func_transforms_are_seen() -> None:
    w = torch.ones(50, 50, requires_grad=True)
    with memory.ledger() as book:
        loss = (w @ w).exp().sum()
        held = book.live("device")
        assert held == 10_000 + 4  # exp keeps its result; the product is gone
        loss.backward()
        assert book.peak("device") > held
        assert w.grad is not None
        del loss
        assert book.live("device") == w.grad.nbytes
        torch.func.vmap(torch.func.grad(lambda x: memory.put(x.sin(), "host").sum()))(w.detach())
        gc.collect()
        assert (book.live("device"), book.live("host")) == (w.grad.nbytes, 0)


def test_ledgers_nest() -> None:
    with memory.ledger() as outer:
        x = torch.zeros(10)
        with memory.ledger() as inner:
            y = torch.zeros(5)
            memory.to_host(x).result()
        z = torch.zeros(7)
    assert (outer.live("device"), inner.live("device")) == (88, 20)
    assert outer.moved("device", "host") == inner.moved("device", "host") == 40
    del y, z
    assert (outer.live("device"), inner.live("device")) == (40, 0)


def test_disk_values_and_staging_are_counted(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path, max_staging=1 << 17) as pool, memory.ledger() as book:
        x = torch.zeros(100_001)
        value = pool.write(x).result()
        assert book.live("disk") == 400_004 and book.moved("host", "disk") == 400_004
        assert book.peak("host") <= (1 << 17) + 4096  # the buffers, and the last page
        rows = value.read(7, 1007).result()
        assert book.moved("disk", "host") == rows.nbytes == 4000
        again = pool.write(x).result()
        assert book.peak("disk") == 800_008
        del value
        assert book.live("disk") == again.nbytes


def test_bytes_counted_by_hand_may_be_on_disk(tmp_path: pathlib.Path) -> None:
    with memory.Pool(tmp_path) as pool:
        value = pool.write(torch.zeros(10)).result()
        with memory.ledger() as book:
            book.count([value, value], "disk")
            assert book.live("disk") == 40


def test_an_unknown_kind_is_named() -> None:
    with memory.ledger() as book, pytest.raises(ValueError, match="Did you mean 'device'"):
        book.live("devise")
