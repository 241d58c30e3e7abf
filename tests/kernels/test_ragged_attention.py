"""Covers kernels.ragged_attention: its plain formula, and the bits of a row, which are the same in any plan."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shardfn import kernels


class Story(NamedTuple):
    """Queries, keys and values of whole sequences, and the arguments of scores."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    how: dict[str, Any]


def _story(lengths: tuple[int, ...], heads: tuple[int, int, int], **how: Any) -> Story:
    (H, G, K), draw = heads, torch.Generator().manual_seed(sum(lengths) + heads[2])
    q, k, v = ([torch.randn(n, x, K, generator=draw) for n in lengths] for x in (H, G, G))
    for name, scale in (("slopes", 0.1), ("sinks", 1.0)):
        if how.get(name) is True:
            how[name] = torch.randn(H, generator=draw) * scale
    return Story(q, k, v, how)


class Pages:
    """A cache of shuffled blocks, with rubbish in it, and one table for each sequence of a story."""

    def __init__(self, story: Story, block: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.story, self.block = story, block
        num, G, K = len(story.q), *story.k[0].shape[1:]
        width = max(-(-len(q) // block) for q in story.q) + 1
        shuffled = torch.randperm(num * width + 1, generator=torch.Generator().manual_seed(seed))[: num * width]
        self.tables = shuffled.view(num, width).int()
        self.cache = torch.full((num * width + 1, block, 2, G, K), math.nan, dtype=dtype)

    def run(self, *chunks: tuple[int, range]) -> list[Tensor]:
        """One call for the tokens at some positions of some sequences; the rows of each chunk."""
        story, block = self.story, self.block
        positions = torch.tensor([p for _, r in chunks for p in r], dtype=torch.int32)
        sequences = torch.tensor([s for s, r in chunks for _ in r], dtype=torch.int32)
        slots = self.tables[sequences.long(), positions.long() // block] * block + positions % block
        q, k, v = (torch.cat([x[s][r.start : r.stop] for s, r in chunks]) for x in story[:3])
        y = kernels.ragged_attention(q, k, v, self.cache, slots, positions, sequences, self.tables, **story.how)
        return list(y.split([len(r) for _, r in chunks]))

    def whole(self) -> list[Tensor]:
        """One call with all tokens."""
        return self.run(*((s, range(len(q))) for s, q in enumerate(self.story.q)))


def _plain(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The formula in float64, of one whole sequence."""
    (T, H, K), G = q.shape, k.shape[1]
    k, v = (x.double().repeat_interleave(H // G, 1) for x in (k, v))
    scores = torch.einsum("thk,shk->hts", q.double(), k) * (how.get("scale") or K**-0.5)
    if "softcap" in how:
        scores = how["softcap"] * torch.tanh(scores / how["softcap"])
    distance = torch.arange(T)[:, None] - torch.arange(T)
    if "slopes" in how:
        scores = scores - how["slopes"].double()[:, None, None] * distance
    seen = (distance >= 0) & (distance < how.get("window", T))
    scores = scores.masked_fill(~seen, -math.inf)
    if "sinks" in how:
        scores = torch.cat([scores, how["sinks"].double()[:, None, None].expand(H, T, 1)], -1)
    return torch.einsum("hts,shk->thk", scores.softmax(-1)[..., :T], v).float()


HOW: list[dict[str, Any]] = [
    {},
    {"window": 5, "scale": 0.3},
    {"softcap": 2.0},
    {"slopes": True, "sinks": True},
    {"window": 33, "softcap": 5.0, "slopes": True, "sinks": True},
]


@pytest.mark.parametrize("how", HOW, ids=lambda x: "-".join(x) or "plain")
@pytest.mark.parametrize("heads", [(2, 2, 8), (6, 2, 77)], ids=str)
def test_the_plain_formula(heads: tuple[int, int, int], how: dict[str, Any]) -> None:
    story = _story((70, 1, 9), heads, **how)
    for s, y in enumerate(Pages(story, 4).whole()):
        want = _plain(story.q[s], story.k[s], story.v[s], **story.how)
        torch.testing.assert_close(y, want, rtol=2e-5, atol=2e-6)


def test_the_attention_of_torch() -> None:
    story = _story((50,), (4, 2, 16))
    q, k, v = (x[0].double().movedim(1, 0)[None] for x in story[:3])
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    (got,) = Pages(story, 16).whole()
    torch.testing.assert_close(got, want[0].movedim(0, 1).float(), rtol=2e-5, atol=2e-6)
