"""Covers the mask values: their answers for a rectangle agree with the whole mask, alone and composed."""

import itertools
import random

import numpy as np
import pytest
import torch

import shardfn as sf
from shardfn import nn
from shardfn.nn._masks import COVERS

T = 37
IDS = torch.tensor([[0] * 20 + [1] * 13 + [2] * 4, [5] * T])
HEADS = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.4
MASKS = [
    nn.Full(),
    nn.Causal(),
    nn.Window(3, 2),
    nn.Window(None, 1),
    nn.Window(4),
    nn.Prefix(7),
    nn.Segments(IDS),
    nn.BlockLayout(torch.eye(5), 8, padded=True),
    nn.BlockLayout(HEADS | torch.eye(5).bool(), 8, padded=True),
    nn.Keys(IDS % 2 == 0),
    nn.Added(torch.where(torch.rand(3, T, T, generator=torch.Generator().manual_seed(1)) < 0.8, 0.5, -torch.inf)),
    nn.Relative(torch.arange(7.0)[None]),
    nn.JacobiBlocks(5, 4, 2),
]
PAIRS = [a & b for a, b in itertools.product(MASKS, MASKS)]


@pytest.mark.day(31)
@pytest.mark.parametrize(
    "mask",
    [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate([*MASKS, *PAIRS])],
    ids=str,
)
def test_rectangles_are_those_of_the_whole(mask: nn.Mask) -> None:
    draw = random.Random(str(mask.lead))
    whole = mask.pairs((0, T), (0, T)).expand(*mask.lead, T, T)
    assert mask.count((0, T), (0, T)) == int(whole.sum())
    for _ in range(30):
        (a, b), (c, d) = (sorted(draw.choices(range(T + 1), k=2)) for _ in range(2))
        want, cover = whole[..., a:b, c:d], mask.cover((a, b), (c, d))
        got = mask.pairs((a, b), (c, d))
        assert torch.equal(got.expand(want.shape), want)
        assert mask.count((a, b), (c, d)) == int(want.sum())
        assert cover != "all" or (want.all() and want.numel())
        assert cover != "none" or not want.any()
        bias, part = mask.bias((0, T), (0, T)), mask.bias((a, b), (c, d))
        assert (bias is None) == (part is None)
        assert bias is None or part is None or torch.equal(part, bias[..., a:b, c:d])
    if mask.looks_back:
        assert not whole.triu(1).any()


@pytest.mark.parametrize(
    "mask",
    [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate([*MASKS, *PAIRS])],
    ids=str,
)
def test_grids_are_the_covers_of_their_tiles(mask: nn.Mask) -> None:
    draw = random.Random(0)
    for _ in range(3):
        rows, columns = (np.array([0, *sorted(draw.sample(range(1, T), draw.randint(0, 9))), T]) for _ in range(2))
        for head, layout in enumerate(mask.grid(rows, columns)):
            own = mask.of_heads(head, head + 1)
            got = [[COVERS[x] for x in row] for row in layout.tolist()]
            spans = (list(itertools.pairwise(edges.tolist())) for edges in (rows, columns))
            tiles = itertools.product(*spans)
            assert [x for row in got for x in row] == [own.cover(*tile) for tile in tiles]


def test_intersections_are_those_of_the_dense_masks() -> None:
    for (a, b), both in zip(itertools.product(MASKS, MASKS), PAIRS, strict=True):
        span = ((0, T), (0, T))
        want = a.pairs(*span) & b.pairs(*span)
        assert torch.equal(both.pairs(*span).expand(want.shape), want)


@pytest.mark.nightly
def test_tiles_are_classified_exactly_by_positions() -> None:
    """The cover of a mask of positions is "some" only for a mixed rectangle."""
    for mask in (nn.Causal(), nn.Window(3, 2), nn.Window(None, 1), nn.Window(4), nn.Prefix(7)):
        whole = mask.pairs((0, 12), (0, 12))
        for a, c in itertools.product(range(12), range(12)):
            for b, d in itertools.product(range(a + 1, 13), range(c + 1, 13)):
                part = whole[a:b, c:d]
                want = "all" if part.all() else "some" if part.any() else "none"
                assert mask.cover((a, b), (c, d)) == want


def test_large_counts_are_formulas() -> None:
    n = 30_000
    assert nn.Causal().count((0, n), (0, n)) == n * (n + 1) // 2
    assert nn.Full().count((0, n), (0, n)) == n * n
    w = 1024
    assert nn.Window(w - 1).count((0, n), (0, n)) == n * w - w * (w - 1) // 2


def test_values() -> None:
    eye = nn.BlockLayout(torch.eye(2), 4)
    assert eye == nn.BlockLayout([[1, 0], [0, 1]], 4)
    assert eye != nn.BlockLayout([[1, 1], [0, 1]], 4)
    assert len({eye, nn.BlockLayout(torch.eye(2), 4), nn.Causal(), nn.Causal(), nn.Window(1)}) == 3
    assert nn.Full() & nn.Full() == nn.Full()
    assert (nn.Causal() & nn.Window(1)) & eye == nn.Causal() & (nn.Window(1) & eye)
    one = nn.BlockLayout(HEADS | torch.eye(5).bool(), 8).of_heads(1, 3)
    assert one.lead == (1, 2)
    assert torch.equal(nn.segments(torch.tensor([[3, 4, 0, 1, 0]])).ids_BT, torch.tensor([[0, 0, 1, 1, 2]]))


def test_refusals() -> None:
    q = torch.ones(2, T, 3, 2)
    with pytest.raises(ValueError, match=r"1 rows are without one, the first at \(1,\)"):
        nn.BlockLayout([[1, 0], [0, 0]], 4)
    with pytest.raises(ValueError, match="distances are 0 or more"):
        nn.Window(-1)
    with pytest.raises(ValueError, match=r"BlockLayout of 5 blocks of 8 for 37 tokens.*padded=True"):
        nn.attention(q, q, q, mask=nn.BlockLayout(torch.eye(5), 8))
    with pytest.raises(ValueError, match="make a layout for 10 blocks"):
        nn.attention(q, q, q, mask=nn.BlockLayout(torch.eye(5), 4, padded=True))
    with pytest.raises(ValueError, match="for 3 heads, but there are 2"):
        nn.attention(q[:, :, :2], q[:, :, :2], q[:, :, :2], mask=MASKS[8])
    with pytest.raises(ValueError, match="give the ids of the whole sequence"):
        nn.attention(q, q, q, mask=nn.Segments(IDS[:, :9]))
    with pytest.raises(ValueError, match="the counts must agree"):
        nn.attention(q, q[:, :9], q[:, :9], mask=nn.Window(3))
    with pytest.raises(ValueError, match="Write both in the mask"):
        nn.attention(q, q, q, mask=nn.Full(), causal=True)
    with pytest.raises(ValueError, match="must look back only"):
        nn.attention(q, q, q, mask=nn.Prefix(3), slopes_H=torch.ones(3))
    assert sf.nn.Mask is nn.Mask
