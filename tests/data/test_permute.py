"""The shuffle that is never stored: a bijection of every size, another one for every key, near to random."""

import numpy as np
import pytest

from shardfn.data import permute


@pytest.mark.day("key3")
@pytest.mark.parametrize(
    "key",
    [(), pytest.param((0,), marks=pytest.mark.nightly), pytest.param((-1, 3), marks=pytest.mark.nightly), (2**70, 1)],
)
def test_bijection_for_small_sizes(key: tuple[int, ...]) -> None:
    for size in range(1, 201):
        assert sorted(permute(np.arange(size), size, *key).tolist()) == list(range(size))


@pytest.mark.parametrize(
    "size",
    [
        2**16 - 1,
        pytest.param(2**16, marks=pytest.mark.nightly),
        pytest.param(2**16 + 1, marks=pytest.mark.nightly),
        300_007,
    ],
)
def test_bijection_for_large_sizes(size: int) -> None:
    image = permute(np.arange(size), size, 5, 1)
    assert image.dtype == np.int64
    assert (np.bincount(image, minlength=size) == 1).all()


def test_huge_size_stays_inside_and_distinct() -> None:
    size = 10**15 + 37
    image = permute(np.arange(10_000) + size - 10_000, size, 1)
    assert len(set(image.tolist())) == 10_000
    assert 0 <= image.min() <= image.max() < size


def test_pointwise_equals_whole() -> None:
    whole = permute(np.arange(1000), 1000, 9)
    assert [int(permute(np.array([i]), 1000, 9)[0]) for i in range(0, 1000, 97)] == whole[::97].tolist()


def test_nothing_in_nothing_out() -> None:
    assert permute(np.empty(0, np.int64), 10, 1).tolist() == []


def test_keys_name_different_orders() -> None:
    orders = {tuple(permute(np.arange(50), 50, seed, epoch).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.nightly
def test_first_image_is_near_uniform() -> None:
    # 10 cells, 1000 draws: chi-square with 9 degrees of freedom exceeds 33.7 once in 10,000 keys; the draws are fixed
    firsts = [int(permute(np.zeros(1, np.int64), 10, seed)[0]) for seed in range(1000)]
    counts = np.bincount(firsts, minlength=10)
    assert ((counts - 100) ** 2 / 100).sum() < 33.7


def test_neighbours_are_torn_apart() -> None:
    image = permute(np.arange(10_000), 10_000, 3)
    # the correlation of a random permutation of n numbers has a deviation of 1/sqrt(n)
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(image)) == 1).sum() < 15


def test_index_outside_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 to 4"):
        permute(np.array([5]), 5, 0)
    with pytest.raises(ValueError, match="-1"):
        permute(np.array([-1]), 5, 0)
