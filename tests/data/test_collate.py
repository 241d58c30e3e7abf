"""Covers shardfn/data/_collate.py: padding and packing, which give a model the same examples."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardfn.data import IGNORED, first_fit, pack, pad

EXAMPLES = [[3, 1, 4], {"tokens": [1, 5, 9, 2, 6], "labels": [IGNORED, IGNORED, 9, 2, 6]}, [5, 3], [8], [9, 7, 9, 3]]


def _of_positions(batch: dict[str, Tensor], positions: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """Total and weight of a model with positions, and attention within segments."""
    table = torch.randn(16, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    place = torch.randn(16, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    h = table[batch["tokens"]] + place[positions]
    length = h.shape[1]
    same = (segments[:, :, None] == segments[:, None]) & torch.ones(length, length, dtype=torch.bool).tril()
    h = F.scaled_dot_product_attention(h, h, h, attn_mask=same)
    logits = (h @ table.T)[:, :-1]
    labels = batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


@pytest.mark.parametrize(
    "length", [5, pytest.param(6, marks=pytest.mark.nightly), pytest.param(9, marks=pytest.mark.nightly), 16]
)
def test_packed_examples_equal_padded_ones_to_a_model(length: int) -> None:
    packed, padded = pack(length)(EXAMPLES), pad(length)(EXAMPLES)
    one = _of_positions(packed, packed["position_ids"], packed["segment_ids"])
    mask = padded["attention_mask"]
    two = _of_positions(padded, torch.arange(length).expand_as(mask), mask)
    torch.testing.assert_close(one, two)
    assert packed["weight"].sum() == padded["weight"].sum() == one[1]
    assert len(packed["tokens"]) < len(padded["tokens"])


def test_first_fit_overlaps_nothing() -> None:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 18, (200,), generator=generator).tolist()
    places, rows = first_fit(lengths, 17)
    cells = {(row, start + k) for (row, start), n in zip(places, lengths, strict=True) for k in range(n)}
    assert len(cells) == sum(lengths) and {r for r, _ in cells} == set(range(rows)) and max(c for _, c in cells) < 17
    assert rows <= 11 / 9 * -(-sum(lengths) // 17) + 1


def test_rows_of_padding_have_no_weight() -> None:
    batch = pack(6, token=7, rows=5)(EXAMPLES)
    assert batch["tokens"].shape == (5, 6) and batch["tokens"][-1].tolist() == [7] * 6
    assert batch["weight"][-1] == 0 and (batch["labels"][-1] == IGNORED).all()


def test_every_example_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="example 1 of the batch has 5 tokens; cut it") as error:
        pad(4)([*EXAMPLES, {"tokens": [1, 2], "labels": [1]}])
    assert "example 5 of the batch has 2 tokens and 1 labels" in str(error.value)
    with pytest.raises(ValueError, match="take 3 rows of 6 tokens"):
        pack(6, rows=2)(EXAMPLES)
