"""Norms of trees whose leaves may be cut in blocks over the mesh.

The sum of squares of a leaf is the sum over its blocks, so a `psum` over exactly the axes that cut the leaf is needed:
an axis that replicates a leaf must not count elements twice. Leaves that are cut over the same axes are sent as one
vector.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from shardfn._torch import foreach_norm
from shardfn.collectives import current_mesh, pmax, psum, transforming, values_are_known
from shardfn.core import Ambient, P, PyTree, tree_leaves

from ._base import Specs
from ._leaves import spec_leaves, wide

# torch's CPU norm adds in float32 lanes one element after another: over 17M elements the error is 1.3e-3. Rows of this
# length, then a sum of rows in float64, are as fast, with an error of 1e-8 (at most 1e-6 for bfloat16).
_ROW = 1024
_LARGE = 4 * _ROW
_TILE = 256 * _ROW  # elements: a megabyte in float32, as the tiles of `fused`


def sum_squares(tree: PyTree, specs: Specs = None) -> Float[Tensor, " num_leaves"]:
    """Returns the global sum of squares of each leaf: `sum_i x_i^2` over all blocks, 0 for a leaf without elements.

    Args:
        tree: tree of tensors, each the local block of a leaf.
        specs: tree (or prefix) of `P`: specs of the blocks. None: leaves are whole.

    Returns:
        One entry a leaf in flattening order, equal on every rank that shares the blocks. float32, or float64 if a leaf
        is float64.

    Raises:
        ValueError: `specs` does not match `tree`, or names an axis that is not in the mesh.

    Example:
        >>> sum_squares({"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(0)})
        tensor([25.,  0.])
    """
    return leaf_squares(tree_leaves(tree), None if specs is None else spec_leaves(specs, tree))


def leaf_squares(
    leaves: list[Tensor],
    specs: list[P] | None,
    dtype: torch.dtype | None = None,
    large: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, " num_leaves"]:
    """Returns `sum_squares` of a flattened tree, in a dtype.

    Args:
        leaves: leaves of the tree.
        specs: specs of the leaves.
        dtype: dtype of the result. None: the dtype of `sum_squares`.
        large: sum of squares of one large tensor. None: `large_square`.
    """
    dtype = dtype or dtype_of_squares(leaves)
    if not leaves:
        return torch.zeros(0, dtype=dtype)
    if is_exact():
        return _exact_squares(leaves, specs).to(dtype)
    local = _local_norm(leaves, dtype, large)
    return local if specs is None else over_blocks(local, specs)


def block_squares(block: Float[Tensor, "..."]) -> Float[Tensor, ""]:
    """Returns the sum of squares of one leaf's local block: its share of `sum_squares`.

    Example:
        >>> block_squares(torch.tensor([3.0, 4.0]))
        tensor(25.)
    """
    return _local_norm([block], dtype_of_squares([block]))[0]


@contextlib.contextmanager
def sum_exactly() -> Iterator[None]:
    """Sums squares as integers while the context is open, so that the specs of leaves change no bit."""
    with _EXACT.bound(True):
        yield


def is_exact() -> bool:
    """Returns whether `sum_exactly` is active."""
    return bool(_EXACT.innermost())


_EXACT = Ambient[bool]("whether sums of squares are exact")


def _exact_squares(leaves: list[Tensor], specs: list[P] | None) -> Float[Tensor, " num_leaves"]:
    top = torch.stack([max_abs(x) for x in leaves])
    top = top if specs is None else over_blocks(top, specs, pmax)
    limbs = [exact_limbs(x, m) for x, m in zip(leaves, top.unbind(), strict=True)]
    if specs is not None:
        limbs = list(over_blocks(torch.stack(limbs), specs).unbind())
    return torch.stack([join_limbs(x, m) for x, m in zip(limbs, top.unbind(), strict=True)])


def max_abs(x: Tensor) -> Float[Tensor, ""]:
    """Returns the largest absolute value, in float64: NaN if an element is NaN, 0 without elements."""
    return x.detach().abs().max().double() if x.numel() else torch.zeros((), dtype=torch.float64, device=x.device)


def exact_limbs(x: Tensor, top: Tensor) -> Int64[Tensor, "2"]:
    """Returns the sum of squares of at most 2^32 elements as two integers, in units of top^2 2^-30 and top^2 2^-60.

    `top` is rounded up to a power of two, so that only the squares of float64 elements are rounded, and parts below
    2^-60 of the largest square are dropped, for each element separately. A sum of integers does not depend on the
    order.

    Args:
        x: tensor of any shape.
        top: float64, 0-d: at least the largest absolute value.
    """
    scale = exact_scale(top)
    total = torch.zeros(2, dtype=torch.int64, device=x.device)
    for piece in x.detach().reshape(-1).split(1 << 20):
        square = (piece.double() * scale).square() * float(1 << 30)
        high = square.floor()
        total += torch.stack([high.long().sum(), ((square - high) * float(1 << 30)).long().sum()])
    return total


def exact_scale(top: Tensor) -> Tensor:
    """Returns the power of two that brings the largest absolute value `top` to at most 1."""
    return torch.ldexp(torch.ones_like(top), -_scale_exponent(top))


def join_limbs(limbs: Int64[Tensor, "2 *units"], top: Float[Tensor, "*units"]) -> Float[Tensor, "*units"]:
    """Returns the sum of the limbs of `exact_limbs` in float64. Not finite where `top` is not."""
    high, low = limbs.double().unbind()
    exact = (high + low / float(1 << 30)) / float(1 << 30)
    return torch.where(top.isfinite(), torch.ldexp(exact, 2 * _scale_exponent(top)), top)


def _scale_exponent(top: Tensor) -> Tensor:
    return torch.frexp(top.nan_to_num(1.0, 1.0, 1.0)).exponent


def dtype_of_squares(leaves: Iterable[Tensor]) -> torch.dtype:
    """Returns the dtype in which sums of squares are added up: float32, or float64 if a leaf is float64."""
    return torch.float64 if any(x.dtype == torch.float64 for x in leaves) else torch.float32


def global_norm(tree: PyTree, specs: Specs = None, *, ord: float | str | None = None) -> Float[Tensor, ""]:
    """Returns the norm of all elements of a tree, as if the tree were a single vector.

    Euclidean, the sum of absolute values, or the largest absolute value.

    Args:
        tree: tree of tensors, each the local block of a leaf.
        specs: tree (or prefix) of `P`: specs of the blocks. None: leaves are whole.
        ord: 2 or None: `sqrt(sum over leaves and blocks of x^2)`; 1: `sum |x|`; `math.inf` or "inf": `max |x|`, not
            differentiable over several ranks.

    Returns:
        0-d: float32, or float64 if a leaf is float64. NaN if an element is NaN.

    Raises:
        ValueError: `ord` is another order, or `specs` do not match `tree`.

    Example:
        >>> tree = [torch.tensor(3.0), torch.tensor(-4.0)]
        >>> global_norm(tree), global_norm(tree, ord=1), global_norm(tree, ord="inf")
        (tensor(5.), tensor(7.), tensor(4.))
    """
    if ord is None or ord == 2:
        return sum_squares(tree, specs).sum().sqrt()
    if ord not in (1, math.inf, "inf", "infinity"):
        raise ValueError(f'global_norm: ord={ord!r} must be None, 1, 2, math.inf or "inf".')
    leaves = tree_leaves(tree)
    dtype = dtype_of_squares(leaves)
    if not leaves:
        return torch.zeros((), dtype=dtype)
    cuts = None if specs is None else spec_leaves(specs, tree)
    if ord == 1:
        local = torch.stack([wide(x).abs().sum(dtype=torch.float64).to(leaves[0].device) for x in leaves])
        return (local if cuts is None else over_blocks(local, cuts)).sum().to(dtype)
    top = torch.stack([max_abs(x).to(leaves[0].device) for x in leaves])
    return (top if cuts is None else over_blocks(top, cuts, pmax)).max().to(dtype)


def _local_norm(
    leaves: list[Tensor], dtype: torch.dtype, large: Callable[[Tensor], Tensor] | None = None
) -> Float[Tensor, " num_leaves"]:
    device = leaves[0].device
    if transforming():  # no rule for the kernel below, and no derivative of a norm at 0
        # By functions that torch can differentiate and map over.
        return torch.stack([wide(x).double().square().sum().to(device=device, dtype=dtype) for x in leaves])
    small = [x if is_small(x) else None for x in leaves]
    norms = iter(_leaf_norms([wide(x) for x in small if x is not None]))
    square = large or large_square
    squares = [square(x) if s is None else next(norms).square() for x, s in zip(leaves, small, strict=True)]
    return torch.stack([s.to(device=device, dtype=dtype) for s in squares])


def is_small(x: Tensor) -> bool:
    """Returns whether the norm of `x` is computed together with other norms."""
    return x.device.type == "cuda" or x.numel() < _LARGE


def _leaf_norms(leaves: list[Tensor]) -> tuple[Tensor, ...] | list[Tensor]:
    return foreach_norm(leaves) if leaves else []


def large_square(x: Tensor) -> Float[Tensor, ""]:
    """Returns the sum of squares of one tensor, row by row. A narrow tensor is cast tile by tile."""
    flat = x.reshape(-1)
    narrow = x.dtype != wide(flat[:1]).dtype and values_are_known(x)
    parts = [_row_norms(tile) for tile in (flat.split(_TILE) if narrow else (flat,))]
    norms = parts[0][0] if len(parts) == 1 else torch.cat([of_rows for of_rows, _ in parts])
    total, rest = norms.double().square().sum(), parts[-1][1]
    return total if rest is None else total + rest


def _row_norms(tile: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the norms of whole rows, and the square of the rest, if any."""
    tile = wide(tile)
    cut = tile.numel() // _ROW * _ROW
    whole = tile if cut == tile.numel() else tile[:cut]
    norms = torch.linalg.vector_norm(whole.view(-1, _ROW), dim=1)
    return norms, None if whole is tile else torch.linalg.vector_norm(tile[cut:]).double().square()


def over_blocks(
    local: Shaped[Tensor, "num_leaves *rest"], specs: list[P], reduce: Callable[..., Tensor] | None = None
) -> Shaped[Tensor, "num_leaves *rest"]:
    """Returns the sum (or another `reduce`) over blocks, of a few numbers a leaf.

    One call for each set of axes.
    """
    mesh = current_mesh()
    # By axes in the mesh's order, so that specs with another order of axes share a call.
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, spec in enumerate(specs):
        axes = mesh.axes(spec.axes)
        groups.setdefault(tuple(n for n in mesh.axis_names if n in axes), []).append(i)
    entries = list(local.unbind())
    for axes, index in groups.items():
        if axes:
            summed = (reduce or psum)(torch.stack([entries[i] for i in index]), axes).unbind()
            for i, s in zip(index, summed, strict=True):
                entries[i] = s
    return torch.stack(entries)
