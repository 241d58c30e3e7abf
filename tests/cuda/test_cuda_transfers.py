"""Covers transfers on a GPU: pinned memory, streams of their own, waits between them. Never run so far."""

import torch

from shardfn import memory

LARGE = 1 << 24  # bytes that take a while on the bus
CYCLES = 200_000_000  # about a tenth of a second of a busy stream


def test_host_memory_is_pinned() -> None:
    for shape in ((3,), (1 << 20,), (0, 4)):
        x = memory.host_empty(shape, torch.float32)
        assert x.device.type == "cpu" and (x.is_pinned() or not x.numel())
    assert memory.to_host(torch.ones(4, device="cuda")).result().is_pinned()


def test_a_round_trip_keeps_every_kind_of_tensor() -> None:
    for x in (torch.randn(3, 5), torch.randn(5, 3).t(), torch.tensor(7), torch.empty(0, 4), torch.rand(300, 300) > 0.5):
        there = memory.to_device(x)
        assert there.result().is_cuda
        assert torch.equal(memory.to_host(there.result()).result(), x)


def test_a_transfer_does_not_wait_for_the_caller_s_stream() -> None:
    x = torch.ones(LARGE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    down = memory.to_host(x)
    assert not down.done()  # behind the busy stream, without blocking the caller
    assert bool(down.result().all()) and down.done()


def test_the_source_is_computed_before_it_is_copied() -> None:
    x = torch.zeros(LARGE, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(CYCLES)
    x.fill_(7)
    assert bool((memory.to_host(x).result() == 7).all())


def test_the_caller_s_stream_waits_for_fetched_values() -> None:
    x = memory.host_empty((LARGE,), torch.uint8).fill_(3)
    up = memory.to_device(x)
    assert int(up.result().long().sum()) == 3 * LARGE


def test_memory_under_way_is_not_given_to_others() -> None:
    # Freed while its copy waits: the allocator must not hand its block to the tensors made next.
    x = torch.full((LARGE,), 5, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(CYCLES)
    down = memory.to_host(x)
    del x
    others = [torch.full((LARGE,), 9, dtype=torch.uint8, device="cuda") for _ in range(4)]
    assert bool((down.result() == 5).all())
    assert all(bool((y == 9).all()) for y in others)


def test_directions_have_streams_of_their_own() -> None:
    index = torch.cuda.current_device()
    up, down = (memory._transfer._copy_stream(index, way) for way in ("up", "down"))
    assert len({up.cuda_stream, down.cuda_stream, torch.cuda.current_stream().cuda_stream}) == 3
    assert memory._transfer._copy_stream(index, "up") is up


def test_the_ledger_reads_the_allocator() -> None:
    with memory.ledger() as book:
        x = torch.ones(LARGE, dtype=torch.uint8, device="cuda")
        kept = memory.to_host(x).result()
        assert book.live("device") >= LARGE and book.live("host") >= LARGE
        del x
    assert book.peak("device") >= LARGE
    assert (book.moved("device", "host"), book.transfers("device", "host")) == (LARGE, 1)
    assert kept.is_pinned()


def test_put_and_its_transpose() -> None:
    x = torch.randn(100, device="cuda", requires_grad=True)
    y = memory.put(memory.put(x.sin(), "host").exp(), "device")
    assert y.is_cuda
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * x.detach().sin().exp())
