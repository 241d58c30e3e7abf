"""Covers shardfn/data/_examples.py: batches of a map-style dataset, and a place in them."""

from itertools import chain

import pytest
import torch

from shardfn.data import Cursor, ExampleBatches, pad

EXAMPLES = [[i + 1] * (1 + i % 3) for i in range(10)]


def _ids(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["tokens"][:, 0].tolist()


def test_an_epoch_visits_every_example_once_in_an_order_of_its_own() -> None:
    batches = ExampleBatches(EXAMPLES, 5, pad(3), seed=1)
    epochs = [[*chain(*(_ids(batches(n)) for n in (2 * e, 2 * e + 1)))] for e in range(3)]
    assert [sorted(e) for e in epochs] == [list(range(1, 11))] * 3
    assert len({*map(tuple, epochs)}) == 3
    assert epochs[0] != [*chain(*(_ids(ExampleBatches(EXAMPLES, 5, pad(3), seed=2)(n)) for n in (0, 1)))]


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(1, marks=pytest.mark.nightly),
        2,
        pytest.param(3, marks=pytest.mark.nightly),
        pytest.param(4, marks=pytest.mark.nightly),
    ],
)
def test_ranks_concatenate_to_the_global_batch(world: int) -> None:
    batches = ExampleBatches(EXAMPLES, 3, pad(3), seed=1)  # four ranks share three rows
    for n in range(5):
        parts = [batches(n, rank=r, world=world) for r in range(world)]
        for name, whole in batches(n).items():
            assert torch.equal(torch.cat([p[name] for p in parts]), whole)
            assert {p[name].dtype for p in parts} == {whole.dtype}
    once = [_ids(b) for b in batches.once()]
    assert sorted(chain(*once)) == list(range(1, 11)) and len(once[-1]) == 1
    many = [list(batches.once(rank=r, world=world)) for r in range(world)]
    assert [[*chain(*(_ids(m[k]) for m in many))] for k in range(4)] == once


def test_a_cursor_goes_on_where_it_was() -> None:
    batches = ExampleBatches(EXAMPLES, 4, pad(3), seed=7)
    whole = [_ids(b) for b in Cursor(batches, stop=6)]
    cursor = Cursor(batches, stop=6)
    assert [_ids(next(cursor)) for _ in range(2)] == whole[:2]
    state = cursor.state()
    assert state == {"next": 2, "seed": 7, "batch_size": 4}
    assert [_ids(b) for b in Cursor(batches, stop=6).at(state)] == whole[2:]
    with pytest.raises(ValueError, match="seed is 8, and was 7"):
        Cursor(ExampleBatches(EXAMPLES, 4, pad(3), seed=8), stop=6).at(state)


def test_examples_that_make_no_batch_are_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        ExampleBatches([], 2, pad())
    with pytest.raises(ValueError, match="batch_size=0"):
        ExampleBatches(EXAMPLES, 0, pad())
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ExampleBatches(EXAMPLES, 2, pad())(0, rank=2, world=2)
