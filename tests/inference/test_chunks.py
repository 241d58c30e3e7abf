"""Covers prompts in parts: any cut, any blocks and any order of these give the logits of one forward, bit for bit."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from shardfn.inference import CacheLayout, PagedAttention
from shardfn.inference._cache import make_single_bodies
from shardfn.models import gpt
from tests.inference.stories import Model, model
from tests.inference.test_stories import KINDS

LONGEST = 28
TOKENS = tuple(i * 7 % 13 for i in range(LONGEST))
WINDOWS = {f"window {n}": (KINDS["mistral"][0] | {"window": n}) for n in (1, 4, 17)}
CASES: dict[str, dict[str, Any]] = {kind: changes for kind, (changes, _) in KINDS.items()} | WINDOWS
DAY = ["llama", "bloom", "window 4"]


@functools.cache
def packed(kind: str) -> tuple[Model, Any]:
    one = model(**CASES[kind])
    return one, gpt.pack(one.config, one.params[0])


def in_parts(kind: str, ends: Sequence[int], block: int, order: Sequence[int]) -> Tensor:
    """The logits of all tokens; part i is `TOKENS[ends[i] : ends[i + 1]]`, and blocks lie in this order."""
    one, weights = packed(kind)
    layout = CacheLayout(one.config.num_layers, one.config.kv_heads, one.config.head_dim)
    width = -(-LONGEST // block)
    table = torch.tensor([i for i in order if i < width], dtype=torch.int32) + 1
    cache = [torch.full(layout.layer_shape(width + 1, block), torch.nan) for _ in range(layout.layers)]
    logits = []
    for a, b in itertools.pairwise(ends):
        at_T = torch.arange(a, b, dtype=torch.int32)
        slots_T = table[(at_T // block).long()] * block + at_T % block
        bodies = [PagedAttention(x, slots_T, at_T, torch.zeros_like(at_T), table[None]) for x in cache]
        rows = torch.arange(b - a, dtype=torch.int32)
        with torch.no_grad():
            tokens_T = torch.tensor(TOKENS[a:b])
            logits.append(gpt.decode(one.config, weights, tokens_T, at_T, rows, bodies).logits)
    return torch.cat(logits)


@pytest.mark.day("bloom")
@pytest.mark.parametrize("kind", [k if k in DAY else pytest.param(k, marks=pytest.mark.nightly) for k in CASES])
@settings(max_examples=25, derandomize=True, deadline=None, database=None)
@given(
    cuts=st.sets(st.integers(1, LONGEST - 1)),
    block=st.sampled_from([1, 3, 4, 16, 32]),
    order=st.permutations(range(LONGEST)),
)
def test_any_cut_has_the_logits_of_one_forward(kind: str, cuts: set[int], block: int, order: list[int]) -> None:
    got = in_parts(kind, [0, *sorted(cuts), LONGEST], block, order)
    assert torch.equal(got, packed(kind)[0].full(0, TOKENS))


@pytest.mark.day("llama")
@pytest.mark.parametrize("kind", [k if k in DAY else pytest.param(k, marks=pytest.mark.nightly) for k in CASES])
def test_wanted_rows_have_the_bits_of_all_rows(kind: str) -> None:
    """The last layer passes only wanted rows. States after each layer are those of all rows, too."""
    one, weights = packed(kind)
    layout = CacheLayout(one.config.num_layers, one.config.kv_heads, one.config.head_dim)
    at_T = torch.arange(LONGEST, dtype=torch.int32)

    def decoded(rows: Tensor) -> gpt.Decoded:
        bodies = make_single_bodies(layout, LONGEST)
        return gpt.decode(one.config, weights, torch.tensor(TOKENS), at_T, rows, bodies)

    with torch.no_grad():
        whole = decoded(at_T)
        for rows in ([LONGEST - 1], [3, 7], [0, 0, 5, 2]):
            some = decoded(torch.tensor(rows, dtype=torch.int32))
            assert torch.equal(some.logits, whole.logits[rows])
            for layers in range(one.config.num_layers + 1):
                assert torch.equal(some.state_after(layers), whole.state_after(layers)[rows])


@pytest.mark.day(3)
@pytest.mark.parametrize("block", [3, 4, 16])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_cuts_beside_the_end_of_a_block(block: int, off: int) -> None:
    ends = sorted({0, *range(block + off, LONGEST, block), LONGEST})
    got = in_parts("window 4", ends, block, range(LONGEST))
    assert torch.equal(got, packed("window 4")[0].full(0, TOKENS))
