"""Covers messages of a loss: elements of dtypes that no backend sends travel as their bytes."""

import pytest
import torch

import shardfn as sf
from shardfn.collectives.transport._sharing import VARIABLE
from shardfn.testing import distributed

ODD = [torch.complex64, torch.complex128, torch.int16, torch.float8_e4m3fn]


@distributed(world=3)
def test_other_dtypes_are_moved_unconverted() -> None:
    mesh = sf.make_mesh({"dp": 3}, device="cpu")
    bits = torch.arange(7 * 5 * 16).remainder(120).to(torch.uint8)
    with sf.collectives.bind_mesh(mesh):
        for dtype in ODD:
            x = bits.view(dtype).view(7, -1) if dtype.itemsize > 1 else bits.view(7, -1).view(dtype)
            own = sf.shard(x, sf.P("dp"), mesh).local
            with sf.count_traffic() as traffic:
                assert torch.equal(_bytes(sf.all_gather(own, "dp", size=7)), _bytes(x)), dtype
            assert traffic.by_dtype == {dtype: 2 * 3 * x[0].nbytes}
            columns = sf.all_to_all(own, "dp", split_dim=1, concat_dim=0, size=7)
            assert torch.equal(_bytes(columns), _bytes(sf.shard(x, sf.P(None, "dp"), mesh).local)), dtype


@distributed(world=2)
def test_the_dtype_of_a_sum_must_be_known_to_the_backend() -> None:
    x = torch.ones(2, dtype=torch.int16)
    with sf.collectives.bind_mesh(sf.make_mesh({"dp": 2}, device="cpu")), pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "gloo")
        with pytest.raises(TypeError, match=r"gloo sums no torch\.int16. Cast it to a dtype that it knows"):
            sf.psum(x, "dp")
    with sf.collectives.bind_mesh(sf.make_mesh({"dp": 2}, device="cpu")), pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "memory")
        assert sf.psum(x, "dp").tolist() == [2, 2]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
