"""Batches: pure in (seed, n), every window once an epoch, the same under any world size, split without overlap."""

import pathlib
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from shardfn.data import Batches, ByteTokenizer, TokenFile, encode_files


@pytest.fixture
def source(tmp_path: pathlib.Path) -> TokenFile:
    text = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    return encode_files([tmp_path / "a.txt"], tmp_path / "a.bin", ByteTokenizer())


def test_rows_are_the_windows_they_name(source: TokenFile) -> None:
    batches = Batches(source, 5, 13, seed=1)
    for n in (0, 3, 40):
        batch = batches(n)
        assert batch["tokens"].dtype == batch["index"].dtype == torch.int64
        assert batch["tokens"].shape == (5, 14)
        assert batch["index"].tolist() == list(range(5 * n, 5 * n + 5))
        for row, window in zip(batch["tokens"], batches.windows(batch["index"].numpy()), strict=True):
            assert row.tolist() == source.tokens[window * 13 : window * 13 + 14].tolist()


@pytest.mark.parametrize(
    "length",
    [
        1,
        pytest.param(7, marks=pytest.mark.nightly),
        pytest.param(13, marks=pytest.mark.nightly),
        998,
        pytest.param(999, marks=pytest.mark.nightly),
    ],
)
def test_each_epoch_visits_each_window_once(source: TokenFile, length: int) -> None:
    batches = Batches(source, 1, length, seed=3)
    total = (1000 - 1) // length
    assert batches.num_windows == total
    epochs = [batches.windows(np.arange(e * total, (e + 1) * total)).tolist() for e in range(3)]
    assert all(sorted(e) == list(range(total)) for e in epochs)
    assert total < 5 or len({tuple(e) for e in epochs}) == 3


def test_a_batch_may_span_epochs(source: TokenFile) -> None:
    batches = Batches(source, 7, 100)  # 9 windows: batch 1 holds two rows of epoch 0 and five of epoch 1
    seen = np.concatenate([batches.windows(batches(n)["index"].numpy()) for n in range(9)])
    assert np.bincount(seen, minlength=9).tolist() == [7] * 9


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(1, marks=pytest.mark.nightly),
        pytest.param(2, marks=pytest.mark.nightly),
        3,
        pytest.param(4, marks=pytest.mark.nightly),
        pytest.param(9, marks=pytest.mark.nightly),
    ],
)
def test_ranks_concatenate_to_the_global_batch(source: TokenFile, world: int) -> None:
    batches = Batches(source, 7, 10, seed=2)
    for n in (0, 5, 31):
        parts = [batches(n, rank=rank, world=world) for rank in range(world)]
        for name, whole in batches(n).items():
            assert torch.equal(torch.cat([part[name] for part in parts]), whole)


def test_rows_of_a_batch(source: TokenFile) -> None:
    batches = Batches(source, 8, 10)
    assert torch.equal(batches.rows(4, 3, 6)["tokens"], batches(4)["tokens"][3:6])
    assert batches.rows(4, 3, 3)["tokens"].shape == (0, 11)


def test_resuming_needs_only_n(source: TokenFile) -> None:
    first, again = Batches(source, 4, 20, seed=7), Batches(TokenFile.open(source.path), 4, 20, seed=7)
    whole = [batch["tokens"] for batch in first.iterate(0, 30)]
    rest = [batch["tokens"] for batch in pickle.loads(pickle.dumps(again)).iterate(17, 30)]
    assert len(rest) == 13
    assert all(torch.equal(a, b) for a, b in zip(whole[17:], rest, strict=True))


def test_seed_names_the_order(source: TokenFile) -> None:
    assert not torch.equal(Batches(source, 8, 10, seed=1)(0)["tokens"], Batches(source, 8, 10, seed=2)(0)["tokens"])


def test_split_is_disjoint_and_whole(source: TokenFile) -> None:
    whole = Batches(source, 4, 10, seed=5)
    train, validation = whole.split(0.1)
    parts = [part.windows(np.arange(part.num_windows)).tolist() for part in (train, validation)]
    assert [len(part) for part in parts] == [89, 10]
    assert sorted(parts[0] + parts[1]) == list(range(99))


def test_split_holds_out_the_same_windows_for_every_seed_and_batch_size(source: TokenFile) -> None:
    held = [Batches(source, b, 10, seed=b).split(0.2)[1] for b in (1, 4)]
    first, second = (set(part.windows(np.arange(part.num_windows)).tolist()) for part in held)
    assert first == second


def test_split_again(source: TokenFile) -> None:
    rest, test = Batches(source, 4, 10).split(0.2)
    train, validation = rest.split(0.25)
    windows = [part.windows(np.arange(part.num_windows)).tolist() for part in (train, validation, test)]
    assert sorted(window for part in windows for window in part) == list(range(99))


@pytest.mark.parametrize(
    "fraction",
    [0.0, pytest.param(0.001, marks=pytest.mark.nightly), pytest.param(1.0, marks=pytest.mark.nightly), -0.5],
)
def test_split_refuses_an_empty_part(source: TokenFile, fraction: float) -> None:
    with pytest.raises(ValueError, match="Both parts need"):
        Batches(source, 4, 10).split(fraction)


def test_corpus_shorter_than_a_window(source: TokenFile) -> None:
    assert Batches(source, 1, 999)(0)["tokens"].shape == (1, 1000)
    with pytest.raises(ValueError, match="has 1000 ids, but one window of length=1000 needs 1001"):
        Batches(source, 1, 1000)


def test_empty_corpus(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    source = encode_files([tmp_path / "empty.txt"], tmp_path / "e.bin", ByteTokenizer())
    with pytest.raises(ValueError, match="has 0 ids"):
        Batches(source, 1, 1)


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch_size": 0},
        pytest.param({"length": 0}, marks=pytest.mark.nightly),
        pytest.param({"part": (3, 3)}, marks=pytest.mark.nightly),
        {"part": (0, 1000)},
    ],
)
def test_bad_sizes(source: TokenFile, sizes: dict[str, Any]) -> None:
    every: dict[str, Any] = {"batch_size": 4, "length": 10} | sizes
    with pytest.raises(ValueError, match=next(iter(sizes))):
        Batches(source, **every)


def test_bad_calls(source: TokenFile) -> None:
    batches = Batches(source, 4, 10)
    with pytest.raises(ValueError, match="rank=2"):
        batches(0, rank=2, world=2)
    with pytest.raises(ValueError, match="batch -1"):
        batches(-1)
    with pytest.raises(ValueError, match="got 3:5 of batch 0"):
        batches.rows(0, 3, 5)
