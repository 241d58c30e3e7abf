"""`GlobalTensor`: a leaf of a sharded tree. It shows its global shape and spec and holds this rank's block."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardfn.core import DonatedError, Mesh, P, PyTree, Sharding, block_slices, chunk_bounds, tree_map

from ._all_gather import all_gather
from ._env import bind_mesh


class GlobalTensor:
    """A tensor spread over a mesh: what `jax.Array` is to JAX.

    It is a plain value and no `torch.Tensor`: creating one costs a microsecond, where a `DTensor` costs about 25, and a
    step hands back hundreds. `to_dtensor()` gives the ecosystem's type.

    Attributes:
        shape: global shape.
        spec: layout over the mesh.
        mesh: the mesh.

    Example:
        >>> from shardfn.core import as_mesh
        >>> x = GlobalTensor(torch.ones(3), torch.Size([3]), P(), as_mesh(None))
        >>> x.full_tensor()
        tensor([1., 1., 1.])
    """

    __slots__ = ("_local", "mesh", "shape", "spec")

    def __init__(self, local: Tensor, shape: torch.Size, spec: P, mesh: Mesh) -> None:
        self._local: Tensor | None = local
        self.shape = shape
        self.spec = spec
        self.mesh = mesh

    @property
    def local(self) -> Tensor:
        """This rank's block.

        Raises:
            DonatedError: a step has consumed this leaf.
        """
        if self._local is None:
            raise DonatedError(
                f"this leaf of shape {tuple(self.shape)} was donated: a step took its buffers for the state that it"
                " returned. Use that state, or build the step with donate=False."
            )
        return self._local

    @property
    def donated(self) -> bool:
        """Whether a step has consumed this leaf."""
        return self._local is None

    def donate(self) -> Tensor:
        """The block, after which this leaf cannot be touched."""
        local = self.local
        self._local = None
        return local

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """Where the block is."""
        return self.local.device

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def sharding(self) -> Sharding:
        """Layout and memory kind."""
        return Sharding(self.spec)

    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return self.shape.numel()

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every rank. Collective over the axes of `spec`."""
        x = self.local
        with bind_mesh(self.mesh), torch.no_grad():
            for dim, size in enumerate(self.shape):
                for axis, extent in reversed(_extents(size, self.spec.dim_axes(dim), self.mesh)):
                    x = all_gather(x, axis, dim=dim, size=extent)
        return x if x is not self.local else x.clone()

    def to_dtensor(self) -> DTensor:
        """The same tensor as a `DTensor`, sharing the block.

        Raises:
            ValueError: there is no process group, or one dim is cut by several axes in an order DTensor cannot express.
        """
        if self.mesh.device_mesh is None:
            raise ValueError("a DTensor needs a process group; with one rank use full_tensor().")
        placements: list[Any] = [Replicate()] * len(self.mesh.shape)
        for dim in range(len(self.shape)):
            axes = self.mesh.axes(self.spec.dim_axes(dim))
            if list(axes) != [a for a in self.mesh.axis_names if a in axes]:
                raise ValueError(
                    f"{self.spec!r} cuts dim {dim} by {axes}, against the mesh's order {self.mesh.axis_names}."
                )
            for axis in axes:
                placements[self.mesh.axis_names.index(axis)] = Shard(dim)
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            self.local, self.mesh.device_mesh, placements, run_check=False, shape=self.shape, stride=stride
        )

    def __repr__(self) -> str:
        state = "donated" if self.donated else f"{self.dtype}"
        return f"GlobalTensor({tuple(self.shape)}, {state}, {self.spec!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a GlobalTensor cannot be pickled: its mesh is this process's. Use full_tensor(), or save a checkpoint."
        )


def shard(x: Tensor, spec: P, mesh: Mesh) -> GlobalTensor:
    """The `GlobalTensor` of a tensor that every rank holds whole; keeps a copy of the own block only."""
    block = x.detach()[block_slices(tuple(x.shape), spec, mesh.shape, mesh.coords)]
    return GlobalTensor(block.to(mesh.device, copy=True).contiguous(), x.shape, spec, mesh)


def unshard(tree: PyTree) -> PyTree:
    """Every `GlobalTensor` of `tree` as a whole plain tensor. Collective; other leaves pass through."""
    return tree_map(lambda x: x.full_tensor() if isinstance(x, GlobalTensor) else x, tree)


def local(tree: PyTree) -> PyTree:
    """Every `GlobalTensor` of `tree` as this rank's block; other leaves pass through."""
    return tree_map(lambda x: x.local if isinstance(x, GlobalTensor) else x, tree)


def _extents(size: int, axes: tuple[str, ...], mesh: Mesh) -> list[tuple[str, int]]:
    out = []
    for axis in axes:
        out.append((axis, size))
        lo, hi = chunk_bounds(size, mesh.axis_size(axis), mesh.axis_index(axis))
        size = hi - lo
    return out
