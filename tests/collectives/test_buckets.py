"""Covers buckets of leaves, and several runs under way at once."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from shardfn.collectives._compressor import buckets, check_leaves, matched, padded, staggered
from shardfn.core import tree_structure


def _leaves(*sizes: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(cut=SimpleNamespace(n=n)) for n in sizes]


def test_neighbours_travel_together_while_they_fit() -> None:
    def sizes(leaves: list[SimpleNamespace], most: int) -> list[list[int]]:
        return [[leaf.cut.n for leaf in bucket] for bucket in buckets(leaves, most)]

    assert sizes(_leaves(3, 4, 0, 2, 9, 12, 1), 9) == [[3, 4, 2], [9], [12], [1]]
    assert sizes(_leaves(5, 5), 10) == [[5, 5]]
    assert sizes(_leaves(0, 0), 10) == [] and sizes([], 1) == []


def test_runs_overlap_and_each_goes_to_its_end() -> None:
    told: list[str] = []

    def run(name: str, stages: int) -> Iterator[None]:
        for stage in range(stages):
            told.append(f"{name}{stage}")
            yield
        told.append(f"{name} ends")

    staggered([run("a", 1), run("b", 1), run("c", 1)])
    assert told == ["a0", "b0", "a ends", "c0", "b ends", "c ends"]  # sends all ready messages before it waits
    told.clear()
    staggered([run("a", 2), run("b", 0), run("c", 1)])
    assert told == ["a0", "b ends", "a1", "c0", "a ends", "c ends"]
    staggered([])


def test_zeros_follow_the_elements() -> None:
    x = torch.tensor([1, 2])
    assert padded(x, 2) is x
    assert padded(x, 4).tolist() == [1, 2, 0, 0]


def test_leaves_that_are_followed_or_no_floats_are_listed() -> None:
    good, followed = torch.ones(2), torch.ones(3, requires_grad=True)
    check_leaves("op", [good], ["x"])
    with pytest.raises(TypeError, match=r"(?s)op takes floating point tensors.*b is a tensor of torch.int64.*c is 3"):
        check_leaves("op", [good, torch.arange(2), 3], ["a", "b", "c"])
    with pytest.raises(NotImplementedError, match=r"no derivative(?s:.*)b of shape \(3,\)"):
        check_leaves("op", [good, followed], ["a", "b"])
    with torch.no_grad():
        check_leaves("op", [followed], ["a"])
    with pytest.raises(NotImplementedError, match="x of shape"):
        torch.func.vmap(lambda x: check_leaves("op", [x], ["x"]))(torch.ones(2, 2))


def test_a_state_of_another_tree_is_refused() -> None:
    treedef = tree_structure({"a": 1, "b": 2})
    assert matched("op", treedef, {"a": (1, 2), "b": 3}) == [(1, 2), 3]
    with pytest.raises(
        ValueError, match=r"op: the state must be of this tree's structure\. Make it by compressed_init"
    ):
        matched("op", treedef, {"a": 1})
