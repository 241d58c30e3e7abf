"""Covers the layouts of block-sparse attention: golden counts and rows, options, and refusals."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

import shardfn as sf
from shardfn import nn
from shardfn.nn import layouts
from shardfn.nn.layouts._windows import random_blocks

N = 16


def counts(layout: nn.BlockLayout) -> list[int]:
    blocks = layout.blocks if layout.blocks.ndim == 3 else layout.blocks[None]
    return [int(b.sum()) for b in blocks]


GOLDEN: list[tuple[Any, dict[str, Any], int, int]] = [
    (layouts.dense, {}, 1, 256),
    (layouts.fixed, {}, 1, 112),
    (layouts.fixed, {"attention": "unidirectional"}, 1, 64),
    (layouts.fixed, {"attention": "horizontal"}, 1, 148),
    (layouts.fixed, {"num_heads": 4, "num_patterns": 4}, 4, 112),
    (layouts.fixed, {"num_heads": 4, "num_patterns": 4, "attention": "unidirectional"}, 4, 64),
    (layouts.variable, {}, 1, 76),
    (
        layouts.variable,
        {"local_window_blocks": [2, 4, 3], "global_blocks": [0, 5], "attention": "unidirectional"},
        1,
        56,
    ),
    (layouts.variable, {"global_blocks": [(0, 2)], "attention": "horizontal"}, 1, 112),
    (layouts.bigbird, {}, 1, 74),
    (layouts.bigbird, {"attention": "unidirectional"}, 1, 45),
    (layouts.bslongformer, {}, 1, 74),
    (layouts.bslongformer, {"attention": "unidirectional"}, 1, 45),
    (layouts.local_window, {}, 1, 31),
    (layouts.local_window, {"attention": "bidirectional"}, 1, 46),
]


@pytest.mark.parametrize(
    ("make", "options", "heads", "count"),
    [pytest.param(*x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(GOLDEN)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_counts_are_golden(make: Any, options: dict[str, Any], heads: int, count: int) -> None:
    layout = make(16 * N, **options)
    assert counts(layout) == [count] * heads
    assert (make(64 * N, block=64, **options).blocks == layout.blocks).all()
    if options.get("attention") == "unidirectional" or (make is layouts.local_window and not options):
        assert not np.triu(layout.blocks, 1).any()
        assert (nn.Causal() & layout).looks_back and not layout.looks_back


def test_fixed_rows_are_golden() -> None:
    rows = layouts.fixed(8, block=1, attention="unidirectional").blocks.astype(int)
    told = ["".join(map(str, row)) for row in rows]
    assert told == ["10000000", "11000000", "11100000", "11110000", "00011000", "00011100", "00011110", "00011111"]
    assert counts(layouts.fixed(17 * 16)) == [133]


def test_fixed_ends_as_there_is_room() -> None:
    """In an incomplete last window the blocks that all see have the others' offset, or are at the end."""
    end = layouts.fixed(11, block=1).blocks  # windows at 0, 4 and 8, the last of 3 blocks
    assert end.all(0).tolist() == [False] * 3 + [True] + [False] * 3 + [True] + [False] * 2 + [True]
    early = layouts.fixed(11, block=1, num_heads=4, num_patterns=4).blocks
    assert [np.flatnonzero(b.all(0)).tolist() for b in early] == [[3, 7, 10], [2, 6, 10], [1, 5, 9], [0, 4, 8]]
    two = layouts.fixed(9, block=1, num_global_blocks=2, attention="unidirectional").blocks
    # A row of the group sees a later block of the group.
    assert two[2].astype(int).tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert two[8].astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert two[7].astype(int).tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]


def test_variable_windows_end_with_the_sequence() -> None:
    blocks = layouts.variable(7, block=1, local_window_blocks=[2, 3], global_blocks=[]).blocks.astype(int)
    assert [row.tolist() for row in blocks[[0, 2, 5]]] == [
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0] * 5 + [1] * 2,
    ]
    assert layouts.variable(3, block=1, local_window_blocks=[2, 9, 4]).blocks.shape == (3, 3)
    # Blocks that a short sequence lacks are left out, and a range is cut.
    assert counts(layouts.variable(4, block=1, global_blocks=[9, (3, 7)])) == [16]


@pytest.mark.parametrize("make", [layouts.variable, layouts.bigbird])
def test_random_blocks_are_functions_of_the_key_and_the_head(make: Any) -> None:
    plain = make(N, block=1).blocks
    a, b = (make(N, block=1, num_heads=3, random=(2, sf.key(seed))).blocks for seed in (0, 1))
    assert (a == make(N, block=1, num_heads=3, random=(2, sf.key(0))).blocks).all()
    assert (a[0] == make(N, block=1, random=(2, sf.key(0))).blocks).all()
    assert len({x.tobytes() for x in (*a, *b)}) == 6
    assert (a & plain == plain).all()
    more = (a & ~plain).sum(-1)
    assert more.max() == 2 and more.min() >= 0
    every = make(N, block=1, random=(N, sf.key(0))).blocks
    assert every.all()


def test_random_blocks_are_all_as_likely() -> None:
    n = 64
    drawn = np.stack([random_blocks("", 4, sf.key(s), 0, np.ones((n, n), bool)) for s in range(20)])
    assert (drawn.sum(-1) == 4).all()
    by_column = drawn.sum((0, 1))  # of 20 * 64 rows, with probability 1 / 16: 80 +- 8.7
    assert 45 < by_column.min() and by_column.max() < 120
    back = random_blocks("", 4, sf.key(0), 0, np.tril(np.ones((n, n), bool)))
    assert back.sum(-1).tolist() == [1, 2, 3] + [4] * (n - 3) and not np.triu(back, 1).any()


def test_causal_bigbird_draws_from_earlier_blocks() -> None:
    blocks = layouts.bigbird(N, block=1, random=(3, sf.key(0)), attention="unidirectional").blocks
    assert not np.triu(blocks, 1).any() and blocks.any(-1).all()
    assert counts(layouts.bigbird(N, block=1, random=(3, sf.key(0)), attention="unidirectional"))[0] > 45
    # With variable windows random blocks are drawn from all.
    assert np.triu(layouts.variable(N, block=1, random=(3, sf.key(0)), attention="unidirectional").blocks, 1).any()


def test_a_layout_is_made_for_its_length() -> None:
    make = functools.partial(layouts.fixed, block=4, num_local_blocks=4)
    corner = make(64).blocks[:11, :11]
    assert not (make(44).blocks == corner).all()
    padded = make(42, padded=True)
    assert padded.blocks.shape == (11, 11) and padded.padded
    assert layouts.bigbird(33, num_heads=2, padded=True, random=(1, sf.key(3))).lead == (1, 2)


def test_layouts_of_heads() -> None:
    layout = layouts.fixed(8, block=1, num_heads=3, num_patterns=2)
    assert layout.of_heads(1, 3) == nn.BlockLayout(layout.blocks[1:], 1)
    assert layout.of_heads(1, 2).lead == (1, 1) and layout.of_heads(2, 2).lead == (1, 0)
    one = nn.BlockLayout(layout.blocks[:1], 1)
    assert one == nn.BlockLayout(layout.blocks[0], 1) and one.of_heads(2, 3) == one


def refused(words: str, make: Any, length: int = 16, **options: Any) -> None:
    with pytest.raises(ValueError, match=words):
        make(length, **{"block": 1, **options})


def test_refusals_of_layouts() -> None:
    for make in (
        getattr(layouts, n) for n in ("dense", "fixed", "variable", "bigbird", "bslongformer", "local_window")
    ):
        refused(
            r"100 tokens in blocks of 16.*padded=True.*or pad the sequence to 112",
            make,
            100,
            block=16,
        )
        refused("must be at least 1, got 16 tokens in blocks of 0", make, 16, block=0)
        assert (
            make is layouts.dense
            or refused("'both' is not one of 'bidirectional', 'unid", make, attention="both") is None
        )
    refused("num_global_blocks=3 must divide num_local_blocks=4", layouts.fixed, num_global_blocks=3)
    refused(
        "windows of 4 blocks have 2 groups of 2, got 3", layouts.fixed, num_global_blocks=2, num_patterns=3, num_heads=3
    )
    refused("differ between heads. Pass num_heads", layouts.fixed, num_patterns=2)
    refused("must be one or more sizes", layouts.variable, local_window_blocks=[])
    refused("must be one or more sizes", layouts.variable, local_window_blocks=[2, 0])
    refused(r"must have 0 <= start < stop, got \[\(3, 3\)\]", layouts.variable, global_blocks=[1, (3, 3)])
    refused("random blocks must be at most 16, the number of blocks, got 17", layouts.variable, random=(17, sf.key(0)))
    refused(
        "cannot have num_window_blocks=17, random=20. Use smaller",
        layouts.bigbird,
        num_window_blocks=17,
        random=(20, sf.key(0)),
    )
    refused("cannot have num_window_blocks=3", layouts.bslongformer, 2)
    refused("cannot have num_window_blocks=3", layouts.local_window, 2)


def test_rows_without_blocks_are_asked_for() -> None:
    blocks = np.eye(4, dtype=bool)
    blocks[2] = False
    with pytest.raises(ValueError, match=r"1 rows are without one, the first at \(2,\).*allow_empty=True"):
        nn.BlockLayout(blocks, 2)
    layout = nn.BlockLayout(blocks, 2, allow_empty=True)
    assert layout.count((0, 8), (0, 8)) == 12
    q = torch.randn(1, 8, 2, 4)
    y = nn.attention(q, q, q, mask=layout)
    assert not y[:, 4:6].any() and y[:, :4].all() and y[:, 6:].all()


def test_layouts_are_made_while_a_program_is_captured() -> None:
    key = sf.key(0)

    def f(q: torch.Tensor) -> torch.Tensor:
        layout = layouts.bigbird(16, block=4, num_window_blocks=1, random=(1, key))
        return nn.attention(q, q, q, mask=nn.Causal() & layout, impl=nn.Blockwise(8))

    q = torch.randn(1, 16, 2, 4)
    torch.testing.assert_close(sf.jit(f, backend="graph")(q), f(q))
    torch.testing.assert_close(torch.func.vmap(f)(q[None])[0], f(q))
    with pytest.raises(ValueError, match="their key is computed by the program"):
        torch.func.vmap(lambda k: torch.tensor(layouts.bigbird(16, block=4, num_window_blocks=1, random=(1, k)).block))(
            key[None]
        )
