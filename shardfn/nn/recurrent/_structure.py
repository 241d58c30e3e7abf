"""Linear maps of fewer numbers than a dense matrix: blocks on the diagonal, a low rank, or both.

    dense             y = W x                         K N M numbers
    block_diagonal    y_i = W_i x_i                   K N M / g
    shuffled          y = W' shuffle(W x)             (M M + K N M) / g
    grouped_low_rank  y = W' (W x), W of g blocks     r M / g + K N r
    low_rank          y = W' (W x)                    r M + K N r

x_i is part i of g equal parts of the features of x. `shuffle` transposes [g, M / g], so that each block of the second
map reads features of all blocks of the first map. Where g does not divide the features, the last part is padded, for
example 10 features in 4 parts of 3.

M inputs, N outputs of each of K gates, G groups, r rank.

Zhang et al., AntMan: Sparse Low-Rank Compression to Accelerate RNN inference, 2019, https://arxiv.org/abs/1910.01740
"""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from shardfn import collectives, core
from shardfn.nn import all_ranges
from shardfn.nn._parallel import affine

# Leaves of a map: a tensor, or {"first", "last"} for two maps in turn.
Leaves = Any


@dataclasses.dataclass(frozen=True)
class Structure:
    """Structure of a linear map. See `dense`, `block_diagonal`, `shuffled`, `grouped_low_rank` and `low_rank`.

    Attributes:
        groups: blocks of the only or the last map. 1: the map is dense.
        first_groups: blocks of the first of two maps, or None for a single map.
        rank: width between two maps. None: the width of the input.
        shuffle: whether the features between the maps are transposed.

    Raises:
        ValueError: a number below 1.
    """

    groups: int = 1
    first_groups: int | None = None
    rank: int | None = None
    shuffle: bool = False

    def __post_init__(self) -> None:
        numbers = {"groups": self.groups, "first_groups": self.first_groups, "rank": self.rank}
        low = [f"{name} must be at least 1, got {n}" for name, n in numbers.items() if n is not None and n < 1]
        core.raise_all(ValueError, "the structure of a linear map:", low)


def dense() -> Structure:
    """Returns the structure of a full matrix."""
    return Structure()


def block_diagonal(groups: int) -> Structure:
    """Returns the structure of `groups` blocks on the diagonal: output part i reads only input part i.

    Example:
        >>> map_shapes(block_diagonal(2), 1, 6, 4)
        (2, 1, 3, 2)
    """
    return Structure(groups)


def shuffled(groups: int) -> Structure:
    """Returns the structure of two block-diagonal maps with a transposition of the features between the maps.

    All outputs read all inputs if M is at least `groups` squared.
    """
    return Structure(groups, groups, shuffle=True)


def grouped_low_rank(groups: int, rank: int) -> Structure:
    """Returns the structure of a block-diagonal map to `rank` features, and a dense map of the features."""
    return Structure(1, groups, rank)


def low_rank(rank: int) -> Structure:
    """Returns the structure of a product of two dense maps, with `rank` features between."""
    return Structure(1, 1, rank)


def map_shapes(structure: Structure, gates: int, outputs: int, inputs: int) -> core.PyTree:
    """Returns the shapes of a map's leaves: [K, N, M] for dense maps and [G, K, N / G, M / G] for blocks.

    Args:
        structure: structure of the map.
        gates: number of gates K.
        outputs: outputs N of each gate.
        inputs: inputs M.

    Raises:
        ValueError: more groups than features, or a rank above the smaller side.

    Example:
        >>> map_shapes(grouped_low_rank(2, 4), 4, 10, 6)
        {'first': (2, 1, 2, 3), 'last': (4, 10, 4)}
    """
    _check_sizes(structure, gates, outputs, inputs)
    width = _middle_width(structure, inputs)
    last = _part_shape(structure.groups, gates, outputs, width)
    if structure.first_groups is None:
        return last
    return {"first": _part_shape(structure.first_groups, 1, width, inputs), "last": last}


def map_specs(structure: Structure, axis: core.Axes) -> core.PyTree:
    """Returns the layout of a map with outputs cut along `axis`: dense maps between outputs, and blocks between groups.

    Example:
        >>> map_specs(grouped_low_rank(2, 4), "tp")
        {'first': P('tp'), 'last': P(None, 'tp')}
    """
    if axis is None:
        return core.P() if structure.first_groups is None else {"first": core.P(), "last": core.P()}
    first, last = (core.P(axis) if n != 1 else core.P(None, axis) for n in (structure.first_groups, structure.groups))
    return last if structure.first_groups is None else {"first": first, "last": last}


def apply_map(
    structure: Structure,
    leaves: Leaves,
    x_M: Float[Tensor, "*batch m"],
    *,
    outputs: int,
    axis: core.Axes = None,
) -> Float[Tensor, "*batch k n"]:
    """Returns the outputs of each gate, [*batch, K, N], or the rank's outputs.

    Args:
        structure: structure of the map.
        leaves: leaves with shapes of `map_shapes`. On several ranks, the blocks by `map_specs`.
        x_M: all inputs. Over several ranks, as from `nn.enter_parallel`.
        outputs: outputs N of each gate of the whole map.
        axis: mesh axes that cut the outputs. None is a single device.

    Raises:
        ValueError: groups of outputs that the ranks do not share as they share outputs.

    Example:
        >>> x, w = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(2, 1, 1, 2)
        >>> apply_map(block_diagonal(2), w, x, outputs=2)
        tensor([[3., 7.]])
    """
    if structure.first_groups is not None:
        width = _middle_width(structure, x_M.shape[-1])
        x_M = _apply_part(structure.first_groups, leaves["first"], x_M, width, axis, gather=True).flatten(-2)
        if structure.shuffle:
            x_M = _shuffle(x_M, structure.groups)
        leaves = leaves["last"]
    return _apply_part(structure.groups, leaves, x_M, outputs, axis, gather=False)


def dense_matrix(structure: Structure, leaves: Leaves, *, outputs: int, inputs: int) -> Float[Tensor, "k n m"]:
    """Returns the matrix [K, N, M] of a map.

    Example:
        >>> dense_matrix(block_diagonal(2), torch.ones(2, 1, 1, 2), outputs=2, inputs=4)
        tensor([[[1., 1., 0., 0.],
                 [0., 0., 1., 1.]]])
    """
    some = leaves if isinstance(leaves, Tensor) else leaves["last"]
    eye = torch.eye(inputs, dtype=some.dtype, device=some.device)
    return apply_map(structure, leaves, eye, outputs=outputs).movedim(0, -1)


def count_flops(structure: Structure, gates: int, outputs: int, inputs: int) -> int:
    """Returns the floating-point operations of a map for one row, two for each number of the leaves.

    Example:
        >>> count_flops(block_diagonal(4), 4, 64, 64) / count_flops(dense(), 4, 64, 64)
        0.25
    """
    shapes = map_shapes(structure, gates, outputs, inputs)
    each = [shapes] if structure.first_groups is None else list(shapes.values())
    return 2 * sum(math.prod(shape) for shape in each)


def _middle_width(structure: Structure, inputs: int) -> int:
    """Returns the width between two maps, a multiple of the first map's groups."""
    if structure.first_groups is None:
        return inputs
    width = inputs if structure.rank is None else structure.rank
    return structure.first_groups * -(-width // structure.first_groups)


def _part_shape(groups: int, gates: int, outputs: int, inputs: int) -> tuple[int, ...]:
    if groups == 1:
        return (gates, outputs, inputs)
    return (groups, gates, -(-outputs // groups), -(-inputs // groups))


def _apply_part(groups: int, w: Tensor, x_M: Tensor, outputs: int, axis: core.Axes, *, gather: bool) -> Tensor:
    """Returns [*batch, K, N] of a single map. With `gather`, all outputs, otherwise the rank's outputs."""
    if groups == 1:
        y_KN = affine(x_M, w, None)
        return collectives.all_gather(y_KN, axis, dim=-1, size=outputs) if gather else y_KN
    ranges = all_ranges(groups, axis)
    (start, stop), size = ranges[int(collectives.axis_index(axis))], -(-outputs // groups)
    x_SGm = F.pad(x_M, (0, groups * w.shape[-1] - x_M.shape[-1])).reshape(-1, groups, w.shape[-1])[:, start:stop]
    y_GSn = torch.bmm(x_SGm.transpose(0, 1), w.flatten(1, 2).mT)
    y_SKGn = y_GSn.unflatten(-1, w.shape[1:3]).permute(1, 2, 0, 3)
    if gather:
        y_SKGn = collectives.all_gather(y_SKGn.contiguous(), axis, dim=-2, size=groups)
    else:
        _check_ranges(groups, ranges, outputs, axis)
    own = outputs if gather else min(stop * size, outputs) - min(start * size, outputs)
    return y_SKGn.flatten(-2)[..., :own].reshape(*x_M.shape[:-1], w.shape[1], own)


def _shuffle(x_M: Tensor, groups: int) -> Tensor:
    """Transposes the features as [groups, M / groups]."""
    return x_M.unflatten(-1, (groups, -1)).mT.flatten(-2)


def _check_ranges(groups: int, ranges: list[tuple[int, int]], outputs: int, axis: core.Axes) -> None:
    size = -(-outputs // groups)
    have = [(min(a * size, outputs), min(b * size, outputs)) for a, b in ranges]
    want = all_ranges(outputs, axis)
    if have != want:
        num = collectives.axis_size(axis)
        raise ValueError(
            f"a map of {groups} groups of {outputs} outputs over the {num} ranks of {axis!r} must have whole groups on"
            f" each rank, got outputs {have} of the groups on ranks with outputs {want}. Choose groups that the ranks"
            " divide, or a structure with a dense last map."
        )


def _check_sizes(structure: Structure, gates: int, outputs: int, inputs: int) -> None:
    problems = []
    if structure.groups > min(outputs, _middle_width(structure, inputs)):
        problems.append(f"groups={structure.groups} of a map from {inputs} to {outputs} features; choose fewer")
    if structure.first_groups is not None and structure.first_groups > inputs:
        problems.append(f"groups={structure.first_groups} of {inputs} inputs; choose fewer")
    if structure.rank is not None and structure.rank > min(gates * outputs, inputs):
        problems.append(
            f"rank={structure.rank} of a map from {inputs} to {gates * outputs} features; a rank is at most"
            f" {min(gates * outputs, inputs)}, the rank of a dense map"
        )
    core.raise_all(ValueError, f"{structure} does not fit:", problems)
