"""Covers shardfn/data/_mixture.py: batches of a map-style dataset, and a place in them."""

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
    digest = state.pop("digest")
    assert state == {"next": 2, "seed": 7, "batch_size": 4, "examples": 10}
    state["digest"] = digest
    assert [_ids(b) for b in Cursor(batches, stop=6).at(state)] == whole[2:]
    with pytest.raises(ValueError, match="seed must be 7, as in the saved position, got 8"):
        Cursor(ExampleBatches(EXAMPLES, 4, pad(3), seed=8), stop=6).at(state)


@pytest.mark.parametrize("ids", [[*range(1, 15)], [*range(1, 10), 99], [*range(2, 12)]], ids=["longer", "one", "all"])
def test_a_position_is_of_its_data_set_only(ids: list[int]) -> None:
    state = Cursor(ExampleBatches(EXAMPLES, 4, pad(3)), stop=6).state()
    other = Cursor(ExampleBatches([[i] * (1 + (i - 1) % 3) for i in ids], 4, pad(3)), stop=6)
    with pytest.raises(ValueError, match=r"Pass the same data with the same seed.*leave out at\(\)") as caught:
        other.at(state)
    examples = "examples must be 10, as in the saved position, got 14"
    assert (examples in str(caught.value)) == (len(ids) == 14)
    assert f"digest must be {state['digest']!r}, as in the saved position, got" in str(caught.value)
    assert other.next == 0  # it was not moved


def test_a_position_without_a_data_set_is_taken_up_with_a_warning() -> None:
    cursor = Cursor(ExampleBatches(EXAMPLES, 4, pad(3)), stop=6)
    with pytest.warns(UserWarning, match=r"does not name the data set \(examples, digest\).*seen twice or never"):
        cursor.at({"next": 2, "seed": 0, "batch_size": 4})
    assert cursor.next == 2


class Drawing:
    """A data set whose rows differ from read to read, as random crops of images do."""

    reads = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> list[int]:
        self.reads += 1
        return [self.reads]


def test_a_data_set_that_may_draw_is_recognised_by_its_length() -> None:
    data = Drawing()
    state = Cursor(ExampleBatches(data, 4, pad(3)), stop=6).state()
    assert state["examples"] == 10 and "digest" not in state and data.reads == 0
    assert Cursor(ExampleBatches(Drawing(), 4, pad(3)), stop=6).at(state).next == 0


def test_examples_that_make_no_batch_are_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        ExampleBatches([], 2, pad())
    with pytest.raises(ValueError, match="batch_size=0"):
        ExampleBatches(EXAMPLES, 0, pad())
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ExampleBatches(EXAMPLES, 2, pad())(0, rank=2, world=2)
