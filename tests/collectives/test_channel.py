"""Covers channels against a reference over the blocks of all ranks, and the ownership of memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.collectives import Channels, TransportError
from shardfn.testing import distributed

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def _flat(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(n) * 3 + 7 * rank + 1).remainder(50).to(dtype)


@distributed(world=3)
def test_operations_equal_their_definitions_for_all_sizes() -> None:
    mesh = sf.make_mesh({"dp": 3}, device="cpu")
    channels, me = Channels(mesh), mesh.rank
    gather, reduce = channels.gather(("dp",)), channels.reduce(("dp",))
    for dtype in DTYPES:
        for sizes in ([4, 4, 4], [5, 0, 2], [0, 0, 7]):
            starts = [sum(sizes[:r]) for r in range(4)]
            own = _flat(me, sizes[me], dtype)
            whole = torch.cat([_flat(r, n, dtype) for r, n in enumerate(sizes)])
            ways: list[dict[str, Any]] = [{}, {"idle": True}, {"settled": True}]
            for how in [*ways, {"into": torch.empty(sum(sizes), dtype=dtype)}]:
                with sf.count_traffic() as traffic:
                    got = gather.all_gather(own, sizes, **how).result()
                assert torch.equal(got, whole) and traffic.bytes == 2 * own.nbytes, (dtype, sizes, how)
                assert "into" not in how or got is how["into"]
            flats = [_flat(r, sum(sizes), dtype) for r in range(3)]
            total = flats[0] + flats[1] + flats[2]  # small whole numbers, so exact in any order
            mine = slice(starts[me], starts[me] + sizes[me])
            for reuse in (False, True):
                got = reduce.reduce_scatter(flats[me].clone(), sizes, reuse=reuse).result()
                assert torch.equal(got, total[mine]), (dtype, sizes, reuse)
            got = reduce.all_to_all(flats[me].clone(), sizes).result()
            assert torch.equal(got, torch.cat([flat[mine] for flat in flats])), (dtype, sizes)
        if dtype != torch.uint8:
            total = torch.stack([_flat(r, 6, dtype) for r in range(3)]).sum(0)
            assert torch.equal(reduce.all_reduce(_flat(me, 6, dtype)).result(), total)
    gather.flush()
    channels.close()


@distributed(world=3)
def test_from_rank_to_rank_messages_are_matched_by_their_tags() -> None:
    mesh = sf.make_mesh({"dp": 3}, device="cpu")
    channels = Channels(mesh)
    channel, me = channels.between(("dp",)), mesh.rank
    assert channels.between(("dp",)) is channel is not channels.gather(("dp",))
    if me == 0:
        x = torch.arange(6.0).view(2, 3)
        with sf.count_traffic() as traffic:
            going = [channel.send(x * tag, 1, tag) for tag in (2, 1)]
            assert torch.equal(going[1].result(), x) and torch.equal(going[0].result(), 2 * x)
        assert traffic.by_op == {("send", ("dp",)): [2, 48]} and traffic.by_dtype == {torch.float32: 48}
    elif me == 1:
        into = [torch.empty(2, 3) for _ in range(2)]
        coming = [channel.receive(into[tag - 1], 0, tag) for tag in (1, 2)]
        assert [torch.equal(c.result(), torch.arange(6.0).view(2, 3) * t) for t, c in zip((1, 2), coming, strict=True)]
        assert torch.equal(into[1], 2 * into[0]) and all(c.done() for c in coming)
    channel.close()
    with pytest.raises(TransportError, match="this communicator has ended"):
        channel.send(torch.ones(1), 1, 0)


@distributed(world=2)
def test_a_result_may_be_worked_on_and_channels_made_anew() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    channels = Channels(mesh)
    channel = channels.reduce(("dp",))
    pending = channel.all_to_all(torch.tensor([1.0, 2.0]) + mesh.rank, [1, 1]).then(lambda x: x.sum())
    assert float(pending.result()) == [3.0, 5.0][mesh.rank]
    assert channel.sums_in_one and not Channels(sf.make_mesh({"dp": 1, "tp": 2})).reduce(("dp",)).sums_in_one
    channels.close()
    assert channels.num_made == 1 and channels.anew(0).num_made == 0
    fresh = channels.anew(1)
    again = fresh.reduce(("dp",))
    assert again is not channel
    assert float(again.all_reduce(torch.ones(1)).result()) == 2


@distributed(world=2)
def test_a_channel_of_one_rank_needs_no_others() -> None:
    """One that came later would find them gone, if they fail meanwhile."""
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    channels = Channels(mesh, lambda: pytest.fail("met"))
    assert channels.gather(()).size == 1 and channels.num_made == 1
    with pytest.raises(pytest.fail.Exception, match="met"):
        channels.gather(("dp",))
    assert channels.num_made == 1


def test_a_single_rank_sends_nothing() -> None:
    channels = Channels(sf.make_mesh({"dp": 1}, device="cpu"))
    channel, x = channels.gather(("dp",)), torch.arange(3)
    assert (channel.size, channel.index, channel.group) == (1, 0, None)
    assert channel.all_gather(x, [3]).result().tolist() == [0, 1, 2]
    assert channel.reduce_scatter(x, [3]).result() is x and channel.all_to_all(x, [3]).result() is x
    channel.close()


@distributed(world=3)
def test_sums_are_taken_in_the_order_of_ranks_in_32_bits_at_least() -> None:
    mesh = sf.make_mesh({"dp": 3}, device="cpu")
    channel, me = Channels(mesh).reduce(("dp",)), mesh.rank
    flats = [torch.randn(3 * 500, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    mine = slice(500 * me, 500 * me + 500)
    for dtype in (torch.float32, torch.bfloat16):
        a, b, c = (flat.to(dtype)[mine].float() for flat in flats)
        got = channel.reduce_scatter(flats[me].to(dtype), [500] * 3).result()
        assert torch.equal(got, ((a + b) + c).to(dtype)), dtype
    mesh.close()
