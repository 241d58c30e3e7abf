"""Covers the parts of a leaf that each rank sends from mesh to mesh: against masks, element by element."""

import itertools
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from shardfn.collectives import Box, overlaps, pieces
from shardfn.core import Mesh, P, all_coords, block_slices

CPU = torch.device("cpu")


def _mesh(shape: dict[str, int], ranks: list[int]) -> Mesh:
    return Mesh(shape, CPU, ranks=ranks)


MESHES = [
    _mesh({"a": 2, "b": 2}, [0, 1, 2, 3]),
    _mesh({"a": 3}, [1, 3, 4]),
    _mesh({"b": 4}, [0, 1, 2, 3]),
    _mesh({"a": 1}, [2]),
    _mesh({"a": 3, "b": 2}, [0, 2, 3, 4, 5, 6]),
]


def _spec(draw: random.Random, ndim: int, mesh: Mesh) -> P:
    free = draw.sample(mesh.axis_names, len(mesh.axis_names))
    return P(*(tuple(free.pop() for _ in range(draw.randint(0, len(free)))) or None for _ in range(ndim)))


def _held(shape: tuple[int, ...], spec: P, mesh: Mesh, rank: int) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    if rank in mesh.ranks:
        coords = all_coords(mesh.shape)[mesh.ranks.index(rank)]
        mask[block_slices(shape, spec, mesh.shape, coords)] = True
    return mask


def _mask(shape: tuple[int, ...], box: Box) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[tuple(slice(*ends) for ends in box)] = True
    return mask


@pytest.mark.nightly
def test_each_rank_gets_each_element_of_its_block_once_from_one_that_holds_it() -> None:
    for seed in range(150):
        draw = random.Random(seed)
        old, new = draw.choice(MESHES), draw.choice(MESHES)
        shape = tuple(draw.choice((0, 1, 2, 5, 7, 12)) for _ in range(draw.randint(0, 3)))
        src, dst = (_spec(draw, len(shape), old), old), (_spec(draw, len(shape), new), new)
        seen = {rank: overlaps(shape, src, dst, rank) for rank in range(7)}
        for rank, rows in seen.items():
            got = torch.zeros(shape, dtype=torch.int64)
            mine = _held(shape, *src, rank)
            for sender, receiver, box in rows:
                assert rank in (sender, receiver) and (sender, receiver, box) in seen[sender], seed
                if receiver == rank:
                    got += _mask(shape, box)
                    assert bool(_held(shape, *src, sender)[_mask(shape, box)].all()), seed
                    assert sender == rank or not bool(mine[_mask(shape, box)].any()), seed
            assert torch.equal(got, _held(shape, *dst, rank).long()), (seed, rank)


def test_two_ranks_have_the_overlaps_between_them_in_one_order() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        old, new = draw.choice(MESHES), draw.choice(MESHES)
        src, dst = (_spec(draw, 2, old), old), (_spec(draw, 2, new), new)
        seen = [overlaps((7, 12), src, dst, rank) for rank in range(7)]
        for a, b in itertools.combinations(range(7), 2):
            both = [[x for x in seen[rank] if {x.sender, x.receiver} == {a, b}] for rank in (a, b)]
            assert both[0] == both[1], seed


def test_those_who_hold_the_same_take_turns() -> None:
    holders, many = _mesh({"a": 3}, [0, 1, 2]), _mesh({"a": 7}, [2, 3, 4, 5, 6, 7, 8])
    turns = Counter(x.sender for rank in range(3) for x in overlaps((4,), (P(), holders), (P(), many), rank))
    assert turns == {0: 2, 1: 2, 2: 2 + 1}  # six that hold nothing, in turn; and the part that rank 2 has itself


def test_pieces_are_the_box_and_none_is_too_large() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        shape = tuple(draw.choice((1, 2, 5, 7)) for _ in range(draw.randint(0, 3)))
        box = tuple((lo := draw.randint(0, 3), lo + n) for n in shape)
        most = draw.choice((1, 3, 10, 1000))
        whole = tuple(n + 4 for n in shape)
        parts = list(pieces(box, most))
        assert all(int(_mask(whole, part).sum()) <= most for part in parts), seed
        assert torch.equal(
            sum((_mask(whole, part).long() for part in parts), torch.zeros(whole)), _mask(whole, box).long()
        )
        assert most < 1000 or len(parts) == 1
