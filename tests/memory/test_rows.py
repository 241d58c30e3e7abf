"""Covers transfers of rows between device and host: values, bytes in the ledger, errors, and their ops in a graph."""

import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn import memory
from shardfn.graph import moves


def test_rows_come_to_the_device_and_only_their_bytes_move() -> None:
    x = torch.randn(7, 3, 2)
    for rows in ([4], [6, 0, 1, 6], [], [[2, 3], [3, 5]], range(7)):
        at = torch.tensor(list(rows), dtype=torch.int32)
        wanted = sorted({int(i) for i in at.reshape(-1)})
        with memory.ledger() as book:
            here = memory.rows_to_device(x, at).result()
        assert here.shape == x.shape and torch.equal(here[wanted], x[wanted])
        assert book.moved("host", "device") == len(wanted) * 3 * 2 * 4 and book.transfers("host", "device") == 1
        assert here.data_ptr() != x.data_ptr()


def test_rows_go_to_places_on_the_host_and_others_stay() -> None:
    x, out = torch.randn(3, 2, 5), torch.zeros(4, 2, 6, 5)
    view = out.permute(0, 2, 1, 3)
    places = torch.tensor([3, 0, 3]), torch.tensor([5, 2, 0], dtype=torch.int32)
    with memory.ledger() as book:
        assert memory.rows_to_host(x, view, places).result() is view
    assert book.moved("device", "host") == x.nbytes
    want = torch.zeros(4, 2, 6, 5)
    for row, i, j in zip(x, *(p.tolist() for p in places), strict=True):
        want[i, :, j] = row
    assert torch.equal(out, want)


def test_they_do_not_wait_for_their_turn() -> None:
    gate = threading.Event()
    for way, started in (
        ("up", lambda: memory.rows_to_device(torch.ones(2, 2), torch.tensor([1]))),
        ("down", lambda: memory.rows_to_host(torch.ones(1, 2), torch.zeros(2, 2), [torch.tensor([1])])),
    ):
        gate.clear()
        held = memory._transfer._thread(way).submit(gate.wait, 10)
        transfer = started()
        assert not transfer.done()
        gate.set()
        assert held.result() and torch.equal(transfer.result()[1], torch.ones(2))


def test_mistakes() -> None:
    x = torch.ones(3, 2)
    for rows in ([3], [0, -1]):
        with pytest.raises(ValueError, match=r"rows must be in 0 to 2, got "):
            memory.rows_to_device(x, torch.tensor(rows))
    with pytest.raises(ValueError, match=r"rows must be on the CPU, got meta. Pass rows\.cpu\(\)"):
        memory.rows_to_device(x, torch.empty(1, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match=r"places must be on the CPU"):
        memory.rows_to_host(x, x, [torch.empty(3, dtype=torch.int64, device="meta")])


def test_in_a_graph_they_are_moves_with_a_wait_each() -> None:
    def f(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        here = memory.rows_to_device(x, rows).result()
        memory.rows_to_host(here[rows] * 2, x, [rows]).result()
        return here.sum(1)[rows]

    x, rows = torch.arange(6.0).view(3, 2), torch.tensor([2])
    gm = make_fx(f, tracing_mode="fake")(x, rows)
    assert [(m.src, m.dst, m.nbytes, m.wait is not None) for m in moves(gm)] == [
        ("host", "device", 24, True),  # at most
        ("device", "host", 8, True),
    ]
    with memory.ledger() as book, memory.bind_pool():
        assert torch.equal(gm(x, rows), torch.tensor([9.0]))
    assert torch.equal(x, torch.tensor([[0.0, 1.0], [2.0, 3.0], [8.0, 10.0]]))
    assert book.moved("host", "device") == book.moved("device", "host") == 8
    assert book.peak("device") <= 24 + 4 * 8  # `x` was there before
