"""Covers several tensors as one message: packed, sent, and unpacked unchanged."""

import torch
from torch import Tensor

import shardfn as sf
from shardfn.collectives._axis_group import axis_group_along
from shardfn.collectives._message import _pack_rows, _unpack_rows, exchange_rows, gather_rows
from shardfn.testing import distributed


def _parts(rows: int, seed: int = 0) -> list[tuple[Tensor, ...]]:
    """Two groups of tensors of all widths, one of them strided, one without elements."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(-128, 127, (rows, 3), generator=draw, dtype=torch.int8), torch.randn(rows, generator=draw)),
        (
            torch.randn(5, rows, generator=draw, dtype=torch.float64).t(),
            torch.randn(rows, 2, 3, generator=draw).bfloat16(),
            torch.empty(rows, 0),
        ),
    ]


def _equal(got: list[tuple[Tensor, ...]], want: list[tuple[Tensor, ...]]) -> bool:
    pairs = [(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_a_message_is_the_bytes_of_each_row_widest_first() -> None:
    parts = _parts(4)
    message, places = _pack_rows(parts)
    assert message.shape == (4, 3 + 4 + 40 + 12)
    assert [place.start % place.dtype.itemsize for place in places] == [0] * 5
    assert _equal(_unpack_rows(message, places, parts), parts)
    assert torch.equal(message[1:2], _pack_rows([tuple(x[1:2] for x in group) for group in parts])[0])


def test_a_single_rank_sends_nothing() -> None:
    parts = _parts(1)
    assert exchange_rows(parts, None, name="x")() == parts
    assert gather_rows(parts, None)() == parts


@distributed(world=3)
def test_rows_go_to_the_ranks_they_are_for() -> None:
    mesh = sf.make_mesh({"dp": 3}, device="cpu")
    every = [_parts(3, seed) for seed in range(3)]
    with sf.collectives.bind_mesh(mesh), sf.count_traffic() as traffic:
        line = axis_group_along("dp")
        sent = exchange_rows(every[mesh.rank], line, name="there")
        got = gather_rows([tuple(x[:1] for x in group) for group in every[mesh.rank]], line)
        mine = [
            tuple(torch.stack([p[g][k][mesh.rank] for p in every]) for k in range(len(every[0][g]))) for g in (0, 1)
        ]
        assert _equal(sent(), mine)
        firsts = [tuple(torch.stack([p[g][k][0] for p in every]) for k in range(len(every[0][g]))) for g in (0, 1)]
        assert _equal(got(), firsts)
    assert traffic.by_op == {("there", ("dp",)): [1, 2 * 59], ("all_gather", ("dp",)): [1, 2 * 59]}
