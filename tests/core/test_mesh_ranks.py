"""Covers meshes of some of the program's ranks: steps and collectives on them, and the errors of the other ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.core import Mesh
from shardfn.testing import distributed


def _loss(params: dict, x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


def _trained(mesh: Mesh) -> Tensor:
    step = sf.sharded_step(_loss, sf.optim.adam(0.1), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
    state = step.init({"w": torch.arange(12.0).view(4, 3)})
    for _ in range(2):
        state, _ = step(state, torch.ones(2, 4))
    return state.params["w"].full_tensor()


@pytest.mark.nightly
@distributed(world=4)
def test_each_half_of_the_ranks_trains_by_itself_as_often_as_it_likes() -> None:
    rank = dist.get_rank()
    halves = [sf.make_mesh({"dp": 2}, ranks=[0, 1]), sf.make_mesh({"dp": -1}, ranks=[2, 3])]
    assert [m.is_member for m in halves] == [rank < 2, rank >= 2]
    mine = halves[rank // 2]
    assert (mine.rank, mine.coords, mine.ranks) == (rank % 2, {"dp": rank % 2}, ((0, 1), (2, 3))[rank // 2])
    want = _trained(sf.make_mesh(alone=True))
    for _ in range(1 + rank // 2):  # the second half makes more groups than the first
        assert torch.equal(_trained(mine), want)
        mine.close()
        mine = sf.make_mesh({"dp": 2}, ranks=mine.ranks)
    whole = sf.make_mesh({"dp": 4})
    assert torch.equal(_trained(whole), want)


@distributed(world=4)
def test_groups_have_the_ranks_in_the_order_of_the_axes() -> None:
    mesh = sf.make_mesh({"dp": 1, "tp": 3}, ranks=[0, 1, 3])
    if mesh.is_member:
        group = mesh.group("tp")
        assert isinstance(group, dist.ProcessGroup)
        x = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(x, torch.tensor([float(dist.get_rank())]), group=group)
        assert [int(v) for v in x] == [0, 1, 3] and group.rank() == mesh.axis_index("tp")
        double = sf.shard_map(lambda x: sf.psum(x, "tp"), mesh=mesh, in_specs=sf.P(), out_specs=sf.P())
        assert double(torch.ones(1)) == 3
    mesh.close()


@distributed(world=3)
def test_ranks_outside_a_mesh_raise() -> None:
    mesh = sf.make_mesh({"dp": 2}, ranks=[0, 2])
    if dist.get_rank() == 1:
        words = r"rank 1 of the program is not of Mesh\(dp=2; not this rank of the program's \[0, 2\] on cpu\)"
        for use in (
            lambda: mesh.coords,
            lambda: mesh.group("dp"),
            lambda: sf.sharded_step(_loss, sf.optim.sgd(0.1), mesh=mesh),
            lambda: sf.shard_map(lambda x: x, mesh=mesh, in_specs=sf.P(), out_specs=sf.P()),
        ):
            with pytest.raises(ValueError, match=words):
                use()
    else:
        assert repr(mesh) == f"Mesh(dp=2; rank {mesh.rank} of the program's [0, 2] on cpu)"


@distributed(world=2)
def test_ranks_that_are_not_the_program_s_are_refused() -> None:
    for ranks in ([], [1, 0], [0, 0], [0, 2]):
        with pytest.raises(ValueError, match=r"some of the program's ranks, 0 to 1, each once and in ascending"):
            sf.make_mesh({"dp": -1}, ranks=ranks)
    with pytest.raises(ValueError, match="does not fit 1 rank"):
        sf.make_mesh({"dp": 2}, ranks=[1])
    for alone in (True, False):
        with pytest.raises(ValueError, match=r"ranks=\[0\]\) has no effect with abstract= or alone="):
            sf.make_mesh({"dp": 1}, ranks=[0], alone=alone, abstract=not alone)
    alone = sf.make_mesh(alone=True)
    assert alone.ranks == (dist.get_rank(),) and alone.rank == 0
