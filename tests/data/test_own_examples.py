"""Covers `OwnExamples`: each example of a stream goes to one rank and one worker, and a place can be loaded."""

from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from shardfn.data import OwnExamples


class _Placed(IterableDataset[int]):
    """A stream that can skip by itself."""

    def __init__(self) -> None:
        self.at, self.read = 0, list[int]()

    def __iter__(self) -> Any:
        for i in range(self.at, 10):
            self.at = i + 1
            self.read.append(i)
            yield i
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.day(4)
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_every_example_is_seen_once(world: int, workers: int) -> None:
    own = [OwnExamples(range(11), rank=r, world=world) for r in range(world)]
    seen = [[int(x) for x in DataLoader(data, batch_size=None, num_workers=workers)] for data in own]
    assert sorted(x for one in seen for x in one) == [*range(11)]
    assert [sorted(s) for s in seen] == [[*range(r, 11, world)] for r in range(world)]  # whatever the workers


def test_a_place_is_loaded_by_skipping_or_by_the_streams_own_state() -> None:
    for make in (lambda: range(10), _Placed):
        one = OwnExamples(make(), rank=1, world=2)
        items = iter(one)
        assert [next(items), next(items)] == [1, 3]
        other = OwnExamples(inner := make(), rank=1, world=2)
        other.load_state_dict(one.state_dict())
        assert list(other) == [5, 7, 9] and list(other) == [1, 3, 5, 7, 9]
        if isinstance(inner, _Placed):
            assert inner.read[:2] == [4, 5]  # nothing was read twice


def test_a_dataset_of_hugging_face_divides_itself() -> None:
    datasets: Any = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    data = datasets.Dataset.from_dict({"a": [1, 2]}).to_iterable_dataset()
    with pytest.raises(TypeError, match="split_dataset_by_node"):
        OwnExamples(data, rank=0, world=2)


def test_a_rank_outside_of_the_world() -> None:
    with pytest.raises(ValueError, match="rank=2 is not one of the 2 ranks"):
        OwnExamples([], rank=2, world=2)
