"""Covers the way through memory: the bits of gloo, for all operations, dtypes and sizes; its failures."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.collectives import Channel, Channels, TransportError
from shardfn.collectives.transport._memory import _KINDS, RINGS, Address, addresses, engine
from shardfn.collectives.transport._sharing import VARIABLE
from shardfn.memory import ledger
from shardfn.testing import assert_same, distributed, odd_batch, odd_loss, odd_params, on_mesh, one_device

DTYPES = [x for x in _KINDS if x != torch.bool]
# gloo sums no others.
_SUMMED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int32]
_SUMMED += [torch.int64]


def _channels(mesh: sf.Mesh, way: str) -> Channels:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, way)
        channels = Channels(mesh)
        for channel in (channels.gather(("dp",)), channels.reduce(("dp",)), channels.between(("dp",))):
            assert (channel._lanes is not None) == (way == "memory"), "ranks of a test share memory"
        return channels


def _drawn(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    at = torch.Generator().manual_seed(rank)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 100, (n,), generator=at).to(dtype)
    x = torch.randn(n, generator=at, dtype=torch.float64) * torch.logspace(-8, 4, max(n, 1), dtype=torch.float64)[:n]
    return x.to(dtype)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


Run = Callable[[Channels, int, list[int], torch.dtype], Tensor]


def _gathers(channels: Channels, me: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    channel, own = channels.gather(("dp",)), _drawn(me, sizes[me], dtype)
    hows = ((False, False), (True, False), (False, True))
    got = [channel.all_gather(own, sizes, idle=idle, settled=settled).result() for idle, settled in hows]
    assert all(torch.equal(_bits(x), _bits(got[0])) for x in got)
    return got[0]


def _scatters(channels: Channels, me: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    return channels.reduce(("dp",)).reduce_scatter(_drawn(me, sum(sizes), dtype), sizes).result()


def _exchanges(channels: Channels, me: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    return channels.reduce(("dp",)).all_to_all(_drawn(me, sum(sizes), dtype), sizes).result()


def _sums(channels: Channels, me: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    # gloo does not add more than two numbers in the order of ranks: small whole ones have the same sum in any order.
    x = _drawn(me, sum(sizes), dtype)
    x = x if len(sizes) == 2 else torch.arange(len(x)).remainder(20).to(dtype)
    return channels.reduce(("dp",)).all_reduce(x).result()


def _passes_on(channels: Channels, me: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    n, channel = len(sizes), channels.between(("dp",))
    going = [channel.send(_drawn(me + tag, max(sizes), dtype), (me + 1) % n, tag) for tag in (1, 2)]
    coming = [channel.receive(torch.empty(max(sizes), dtype=dtype), (me - 1) % n, tag) for tag in (2, 1)]
    got = torch.cat([x.result() for x in coming])
    assert all(x.result() is not None for x in going)
    return got


def _compare(world: int, run: Run, each: list[list[int]], dtypes: list[torch.dtype]) -> None:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    ways = {way: _channels(mesh, way) for way in ("memory", "gloo")}
    for dtype in dtypes:
        for sizes in each:
            sent, got = {}, {}
            for way, channels in ways.items():
                with sf.count_traffic() as traffic:
                    got[way] = run(channels, mesh.rank, sizes, dtype)
                channels.flush()
                sent[way] = (traffic.by_op, traffic.by_dtype)
            assert got["memory"].shape == got["gloo"].shape and got["memory"].dtype == got["gloo"].dtype
            assert torch.equal(_bits(got["memory"]), _bits(got["gloo"])), (run, dtype, sizes)
            assert sent["memory"] == sent["gloo"], (run, dtype, sizes)
    for channels in ways.values():
        channels.close()
    mesh.close()


def _sizes(world: int) -> list[list[int]]:
    return [[1] * world, [0] * (world - 1) + [7], [5, 0, 130, 1][:world], [1025] * world]


_RUNS = (_gathers, _scatters, _exchanges, _sums, _passes_on)


@distributed(world=[pytest.param(2, marks=pytest.mark.nightly), 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_operations_have_the_bits_of_gloo(world: int) -> None:
    for run in _RUNS:
        _compare(world, run, _sizes(world), [torch.float32])
        _compare(world, run, _sizes(world)[2:3], [torch.bfloat16, torch.int64][: 4 - world])


@pytest.mark.nightly
@distributed(world=[2, 3, 4])
def test_operations_have_the_bits_of_gloo_in_all_dtypes(world: int) -> None:
    for run in _RUNS:
        _compare(world, run, _sizes(world), _SUMMED)


def _longer(world: int, runs: Sequence[Run]) -> None:
    n = RINGS // 4 + 12345
    for run in runs:
        _compare(world, run, [[n, n // 3, n - 1, 0][:world]], [torch.float32])


@pytest.mark.nightly
@distributed(world=2)
def test_messages_longer_than_a_ring_have_the_bits_of_gloo(world: int) -> None:
    _longer(world, (_gathers, _scatters))


@pytest.mark.nightly
@distributed(world=[2, 3, 4])
def test_all_messages_longer_than_a_ring_have_the_bits_of_gloo(world: int) -> None:
    _longer(world, _RUNS)


@distributed(world=2)
def test_operations_that_gloo_lacks_equal_those_of_torch() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    channel = _channels(mesh, "memory").reduce(("dp",))
    for dtype in (torch.int16, torch.bool, torch.complex64, torch.complex128):
        flats = [_drawn(rank, 2000, torch.int16).remainder(2).to(dtype) for rank in range(2)]
        got = channel.reduce_scatter(flats[mesh.rank], [1000, 1000]).result()
        mine = slice(1000 * mesh.rank, 1000 * mesh.rank + 1000)
        assert torch.equal(got, flats[0][mine] + flats[1][mine]), dtype
    with pytest.raises(TypeError, match="float8_e5m2 are not known"):
        channel.reduce_scatter(torch.zeros(2, dtype=torch.float8_e5m2), [1, 1])
    mesh.close()


@distributed(world=2)
def test_half_precision_is_rounded_as_torch_does_it() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    channel = _channels(mesh, "memory").reduce(("dp",))
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        a = every.view(dtype)
        for shift in (0, 1, 4097, 30000):
            b = a.roll(shift)
            got = channel.all_reduce((a if mesh.rank == 0 else b).clone()).result()
            want = (a.float() + b.float()).to(dtype)
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(_bits(got[~want.isnan()]), _bits(want[~want.isnan()])), (dtype, shift)
    mesh.close()


@pytest.mark.parametrize(
    "dtype", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(_KINDS)], ids=str
)
def test_sums_of_any_number_of_rows_are_taken_in_their_order(dtype: torch.dtype) -> None:
    for k in range(2, 8):
        rows = [_drawn(rank, 3000 + 7, dtype) for rank in range(k)]
        want = rows[0].float() if dtype in (torch.float16, torch.bfloat16) else rows[0].clone()
        for row in rows[1:]:
            want += row
        for place in (None, 0, k - 1):  # where the sum goes: elsewhere, or over a row
            given = [_bits(row.clone()) for row in rows]
            out = torch.empty_like(given[0]) if place is None else given[place]
            at = addresses([x.data_ptr() for x in given])
            engine().plain("sum_rows", _KINDS[dtype], at, k, len(out), Address(out.data_ptr()))
            assert torch.equal(out, _bits(want.to(dtype))), (k, place)


@pytest.mark.nightly
@distributed(world=3)
def test_results_are_taken_in_any_order_and_wholly_apart_by_channel() -> None:
    mesh = sf.make_mesh({"dp": 3}, device="cpu")
    channels, me, n = _channels(mesh, "memory"), mesh.rank, RINGS // 8
    gather, reduce = channels.gather(("dp",)), channels.reduce(("dp",))
    ones = torch.ones(3 * n)
    # Each is longer than a ring; every rank waits for another one first, and starts the two channels in its own order.
    for _ in range(3):
        first = [reduce.reduce_scatter(ones * k, [n] * 3) for k in (1, 2)] if me else []
        whole = [gather.all_gather(torch.full((n,), 1.0 * me + k), [n] * 3) for k in (1, 2)]
        first = first or [reduce.reduce_scatter(ones * k, [n] * 3) for k in (1, 2)]
        pending = [*first, *whole]
        got = {i % 4: pending[i % 4].result() for i in range(me, me + 4)}
        assert torch.equal(got[0], torch.full((n,), 3.0)) and torch.equal(got[1], torch.full((n,), 6.0))
        assert [float(x) for x in got[3].view(3, n)[:, -1]] == [2.0, 3.0, 4.0]
        gather.flush()
    mesh.close()


@distributed(world=2)
def test_ranks_that_call_different_things_raise() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    channel: Channel = _channels(mesh, "memory").gather(("dp",))
    with pytest.raises(TransportError, match=r"where this one, rank [01], takes|closed it"):
        channel.all_gather(torch.ones(3 + mesh.rank), [3 + mesh.rank] * 2).result()
    channel.close()
    with pytest.raises(TransportError, match="has ended"):
        channel.all_gather(torch.ones(3), [3, 3])
    mesh.close()


@pytest.mark.nightly
@distributed(world=3)
def test_steps_have_the_bits_of_gloo() -> None:
    mesh, runs = sf.make_mesh({"dp": 3}, device="cpu"), {}
    batches = [odd_batch(n) for n in range(2)]
    want = one_device(odd_loss, sf.optim.sgd(1e-3), odd_params(), batches)
    for way in ("memory", "gloo"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, way)
            for stage in (1, 3):
                zero = sf.Zero.flat(stage=stage, persist_elements=2, bucket_bytes=64)
                loss = sf.accumulate(odd_loss, 2)
                runs[way, stage] = on_mesh(loss, sf.optim.sgd(1e-3), odd_params(), batches, mesh=mesh, zero=zero)
                assert_same(runs[way, stage], want)
    for stage in (1, 3):
        assert_same(runs["memory", stage], runs["gloo", stage], exact=True)
    mesh.close()


@pytest.mark.nightly
@distributed(world=2)
def test_the_ledger_counts_memory_that_a_step_has_set_aside_to_share() -> None:
    loss, peaks = (lambda p, x: (x @ p).square().mean()), {}
    for way in ("gloo", "memory"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, way)
            mesh = sf.make_mesh({"dp": 2}, device="cpu")
            step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=2, persist_elements=0))
            state, x = step.init(torch.ones(5, 3)), torch.ones(2, 5)
            with ledger() as book:
                for _ in range(2):  # some channels are made in the first step
                    state, _ = step(state, x)
            peaks[way] = book.peak("host")
            mesh.close()
    assert peaks["gloo"] == 0 and peaks["memory"] >= 2 * RINGS, peaks
