"""Sums of squares of units: of slices of leaves that may be cut over the mesh along any dim."""

from collections.abc import Callable, Sequence, Set

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn.collectives import current_mesh, pmax, psum, pvary, transforming
from shardfn.core import P

from ._leaves import wide
from ._norm import exact_scale, is_exact, of_limbs

Axes = tuple[str, ...]


def unit_squares(
    leaves: Sequence[Tensor], dims: Sequence[Set[int]], specs: Sequence[P] | None
) -> list[Float[Tensor, "..."]]:
    """Returns the sum of squares of each leaf along its `dims`, over all blocks. In the result, these dims have size 1.

    Along other dims the result is a block, like the leaf. Sums over the same mesh axes are one psum.

    Args:
        leaves: local blocks.
        dims: for each leaf, dims to sum over.
        specs: spec of each leaf. None: leaves are whole.

    Example:
        >>> unit_squares([torch.tensor([[3.0, 1.0], [4.0, 1.0]])], [{0}], None)
        [tensor([[25.,  2.]])]
    """
    rows = list(zip(leaves, dims, strict=True))
    axes = [()] * len(rows) if specs is None else [_cutting_axes(spec, d) for spec, d in zip(specs, dims, strict=True)]
    if not is_exact():
        return _reduce_over(psum, [_reduce_along(wide(x).square(), d, torch.sum) for x, d in rows], axes)
    tops = _reduce_over(pmax, [_reduce_along(x.detach().abs().double(), d, torch.amax) for x, d in rows], axes)
    limbs = _reduce_over(psum, [_unit_limbs(x, top, d) for (x, d), top in zip(rows, tops, strict=True)], axes)
    exact = [of_limbs(x, top) for x, top in zip(limbs, tops, strict=True)]
    return [y.to(wide(x).dtype) for x, y in zip(leaves, exact, strict=True)]


def _cutting_axes(spec: P, dims: Set[int]) -> Axes:
    """Returns the mesh axes that cut a leaf along some dims, in the mesh's order."""
    mesh = current_mesh()
    axes = mesh.axes(tuple(name for dim in sorted(dims) for name in spec.dim_axes(dim)))
    return tuple(name for name in mesh.axis_names if name in axes)


def _reduce_along(x: Tensor, dims: Set[int], f: Callable[..., Tensor]) -> Tensor:
    if not dims:
        return x
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    return f(x, dim=sorted(dims), keepdim=True) if x.numel() else x.new_zeros(shape)


def _unit_limbs(x: Tensor, top: Float[Tensor, "..."], dims: Set[int]) -> Int64[Tensor, "2 ..."]:
    """Returns the `exact_limbs` of each unit."""
    square = (x.detach().double() * exact_scale(top)).square() * float(1 << 30)
    high = square.floor()
    low = (square - high) * float(1 << 30)
    return torch.stack([_reduce_along(limb.long(), dims, torch.sum) for limb in (high, low)])


def _reduce_over(reduce: Callable[..., Tensor], values: Sequence[Tensor], axes: Sequence[Axes]) -> list[Tensor]:
    """Reduces each value over the value's axes, with one call for values of equal dtype and axes."""
    groups: dict[tuple[Axes, torch.dtype], list[int]] = {}
    for i, (x, names) in enumerate(zip(values, axes, strict=True)):
        groups.setdefault((names, x.dtype), []).append(i)
    out = list(values)
    for (names, _), index in groups.items():
        if not names:
            continue
        whole = reduce(torch.cat([values[i].reshape(-1) for i in index]), names)
        # Used with blocks, which vary: the transpose of the cast is the sum over blocks.
        whole = pvary(whole, names) if transforming() or whole.requires_grad else whole
        for i, part in zip(index, whole.split([values[i].numel() for i in index]), strict=True):
            out[i] = part.view(values[i].shape)
    return out
