"""Covers how ranks meet in a store that earlier rounds of the job have used."""

import concurrent.futures

import pytest
import torch.distributed as dist

from shardfn.core._make_mesh import round_name


def _round(store: dist.Store, world: int, late: int = -1) -> set[str]:
    """The names on which `world` ranks agree; a late one comes when the others wait already."""
    order = sorted(range(world), key=lambda rank: rank == late)
    with concurrent.futures.ThreadPoolExecutor(world) as ranks:
        return {x.result() for x in [ranks.submit(round_name, store, r, world, 60.0) for r in order]}


def test_ranks_of_a_round_have_a_name_that_no_other_round_has() -> None:
    store = dist.HashStore()
    names = [_round(store, world, late) for world in (3, 2, 3, 4, 1, 3) for late in (0, world - 1)]
    assert [len(found) for found in names] == [1] * 12
    assert len(set.union(*names)) == 12


def test_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    _round(store, 3)  # their entries do not belong to this round
    with pytest.raises(RuntimeError, match=r"ranks 1, 2 did not arrive within 0.2 s"):
        round_name(store, 0, 3, 0.2)
