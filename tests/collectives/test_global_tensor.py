"""Covers `GlobalTensor` as a value: making it whole, and the placeholder on ranks outside of its mesh."""

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.collectives import all_gather, bind_mesh
from shardfn.core import P, chunk_bounds
from shardfn.testing import distributed


@distributed(world=4)
def test_the_whole_is_gathered_axis_by_axis() -> None:
    """Bits and bytes of gathers that are written out, with sizes that nothing divides; and fewer ranks may call."""
    mesh = sf.make_mesh({"a": 2, "b": 2}, device="cpu")
    x = torch.arange(7 * 5).view(7, 5)
    for spec in (P("a"), P(("b", "a")), P("b", "a"), P(None, ("a", "b")), P()):
        leaf = sf.shard(x, spec, mesh)
        with sf.count_traffic() as counted:
            assert torch.equal(leaf.full_tensor(), x), spec
        block = leaf.local
        with bind_mesh(mesh), sf.count_traffic() as wanted:
            for dim, size in enumerate(x.shape):
                extents = []
                for axis in spec.dim_axes(dim):
                    extents.append((axis, size))
                    lo, hi = chunk_bounds(size, 2, mesh.axis_index(axis))
                    size = hi - lo
                for axis, extent in reversed(extents):
                    block = all_gather(block, axis, dim=dim, size=extent)
        assert torch.equal(block, x) and counted.bytes == wanted.bytes and counted.calls == wanted.calls, spec
    if mesh.axis_index("b") == 0:
        assert torch.equal(sf.shard(x, P("a"), mesh).full_tensor(), x)


@distributed(world=2)
def test_a_leaf_of_a_mesh_of_others_has_no_block() -> None:
    mesh = sf.make_mesh({"dp": 1}, ranks=[1])
    leaf = sf.shard(torch.empty(3, 2, device="meta" if dist.get_rank() == 0 else "cpu"), P("dp"), mesh)
    assert (leaf.shape, leaf.dtype, leaf.spec, leaf.ndim) == ((3, 2), torch.float32, P("dp"), 2)
    here = "24 B here" if mesh.is_member else "nothing here"
    assert repr(leaf) == f"GlobalTensor((3, 2), torch.float32, P('dp'); {here} on device, mesh dp=1)"
    if mesh.is_member:
        assert leaf.local.shape == (3, 2)
        return
    words = r"a leaf of shape \(3, 2\) of Mesh\(dp=1; not this rank of the program's \[1\] on cpu\) has no block on"
    for ask in (lambda: leaf.local, leaf.full_tensor, lambda: sf.unshard([leaf]), lambda: sf.collectives.local(leaf)):
        with pytest.raises(ValueError, match=words):
            ask()
    scalar = sf.shard(torch.tensor(1.0), P(), mesh)
    assert not scalar.stacked and scalar.held.nbytes == 0
