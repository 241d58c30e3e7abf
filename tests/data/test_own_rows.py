"""Covers shardfn/data/_own_rows.py: a DataLoader of global batches, where each rank reads its own rows."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shardfn.data import shard_rows


class _Squares(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size, self.read = size, list[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"x": torch.tensor(index**2), "y": torch.full((2,), float(index))}


class _Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


def _loader(data: Any, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(data, batch_size=4, shuffle=shuffle, generator=generator if shuffle else None, **options)


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(1, marks=pytest.mark.nightly),
        pytest.param(2, marks=pytest.mark.nightly),
        3,
        pytest.param(5, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_concatenate_to_the_loaders_batches(world: int, shuffle: bool) -> None:
    expected = list(_loader(_Squares(9), shuffle))
    data = [_Squares(9) for _ in range(world)]
    parts = [list(shard_rows(_loader(data[r], shuffle), rank=r, world=world)) for r in range(world)]
    assert {len(p) for p in parts} == {3}
    for n, whole in enumerate(expected):
        for name, x in whole.items():
            assert torch.equal(torch.cat([p[n][name] for p in parts]), x)
    if world == 2:
        assert sorted(data[0].read) != sorted(range(9)) and len(data[0].read) == 5  # its rows, and no others


def test_a_second_epoch_is_shuffled_anew_and_alike() -> None:
    plain, cut = _loader(_Squares(8)), [shard_rows(_loader(_Squares(8)), rank=r, world=2) for r in (0, 1)]
    epochs = []
    for _ in range(2):
        one, two = (list(c) for c in cut)
        epochs.append([torch.cat([a["x"], b["x"]]).tolist() for a, b in zip(one, two, strict=True)])
    assert epochs[0] != epochs[1]
    assert epochs[0] == [batch["x"].tolist() for batch in plain]


def test_datasets_that_read_several_at_once_do() -> None:
    class Many(_Squares):
        def __getitems__(self, at: list[int]) -> list[Any]:
            self.read.append(-len(at))
            return [{"x": torch.tensor(i)} for i in at]

    data = Many(8)
    assert [b["x"].tolist() for b in shard_rows(_loader(data, False), rank=1, world=2)] == [[2, 3], [6, 7]]
    assert data.read == [-2, -2]


def test_loaders_that_ranks_would_not_agree_on_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"generator=torch\.Generator"):
        shard_rows(DataLoader(_Squares(4), batch_size=2, shuffle=True), rank=0, world=2)
    with pytest.raises(TypeError, match="IterableDataset"):
        shard_rows(DataLoader(_Endless(), batch_size=2), rank=0, world=2)
    with pytest.raises(TypeError, match="batch_size=None"):
        shard_rows(DataLoader(_Squares(4), batch_size=None), rank=0, world=2)
    with pytest.raises(ValueError, match="rank=2"):
        shard_rows(DataLoader(_Squares(4), batch_size=2), rank=2, world=2)


def test_a_loader_that_is_cut_already_is_refused() -> None:
    def loader(replicas: int) -> DataLoader[Any]:
        data = _Squares(8)
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=replicas, rank=0))

    with pytest.raises(ValueError, match=r"among num_replicas=2 ranks.*1/2.*without sampler="):
        shard_rows(loader(2), rank=0, world=2)
    assert len(list(shard_rows(loader(1), rank=0, world=2))) == 4
    assert len(list(shard_rows(loader(2), rank=0, world=1))) == 2  # one rank keeps all rows


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_needs_a_generator_too() -> None:
    reason = "needs torchdata: pip install torchdata"
    torchdata: Any = pytest.importorskip("torchdata.stateful_dataloader", reason=reason)
    with pytest.raises(ValueError, match=r"generator=torch\.Generator"):
        shard_rows(torchdata.StatefulDataLoader([1, 2, 3], batch_size=2, shuffle=True), rank=0, world=2)
