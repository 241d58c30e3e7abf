"""Codes with less error than from rounding: of the weights by least squares, or of a layer's outputs, by the inputs.

    quantize_blocks     each element is rounded on a grid from the smallest to the largest of the group
    fit_blocks      grids are searched: (s, m) that minimise  sum_i h_i (w_i - s q_i - m)^2  of a group
                    with all moments H of the inputs, later weights also make up for errors:
                    minimises  (w - w') H (w - w')  greedily, column by column

The stored form is the same. Grids stay between the bounds of a group, shrunk by some factors. For each grid, q is
rounded and (s, m) come from a weighted regression on q.

Each group has elements at both ends of the grid. So rounding keeps the values, and the values may be passed on as
floats:

    quantize_blocks(dequantize_blocks(blocks, k), codes) == blocks,  blocks = fit_blocks(w, codes)

Frantar et al., GPTQ, 2022, https://arxiv.org/abs/2210.17323. The search is the search of GGUF's quantisers.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ._row_codes import BLOCK_BYTES, GROUP, Quantization, check_codes, dequantize_blocks, quantize_blocks

_SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)
# Times the mean moment, added to each moment, so that rare inputs do not take up all errors.
_DAMPING = 0.01
# Scales below float16's normal numbers are rounded coarsely, and values may move several times.
_TURNS = 8


def fit_blocks(
    weight: Float[Tensor, "n k"], quantization: Quantization, moments: Float[Tensor, "..."] | None = None
) -> UInt8[Tensor, "n bytes"]:
    """Rounds a weight to codes with a small error: of the elements, or of the layer's outputs.

    The form and size are equal to `quantize_blocks`, and `quantize_blocks` of the decoded values gives the same blocks.
    The search takes some seconds for a weight of millions of elements.

    Args:
        weight: weight of floats, where k is a multiple of 32.
        quantization: "int8" or "int4".
        moments: moments of the layer's inputs x over some text. [k], the means of x_i^2, weigh errors. [k, k], the
            means of x_i x_j, also let each column make up for the errors of earlier columns (GPTQ). None weighs all
            errors equally.

    Raises:
        ValueError: for other codes, another k, or moments of another shape.

    Example:
        >>> w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        >>> from shardfn.kernels import dequantize_blocks
        >>> fitted, rounded = (dequantize_blocks(f(w, "int4"), 64) for f in (fit_blocks, quantize_blocks))
        >>> bool((fitted - w).square().mean() < (rounded - w).square().mean())
        True
        >>> torch.equal(dequantize_blocks(quantize_blocks(fitted, "int4"), 64), fitted)
        True
    """
    check_codes(quantization)
    n, k = weight.shape
    if k % GROUP:
        raise ValueError(f"rows of weight must be a multiple of {GROUP}, a block of codes, got {k}. Pad with zeros.")
    if moments is not None and tuple(moments.shape) not in ((k,), (k, k)):
        raise ValueError(
            f"moments must have the shape ({k},) or ({k}, {k}) for a weight {(n, k)}, got {tuple(moments.shape)}"
        )
    if not n or not k or not bool(weight.isfinite().all()):
        return quantize_blocks(weight, quantization)
    w = weight.float()
    if moments is not None and moments.ndim == 2:
        return _stabilise_blocks(_compensate_errors(w, quantization, moments.float()), w, quantization)
    h_K = torch.ones(k, device=w.device) if moments is None else moments.float()
    h_GE = (h_K + _DAMPING * h_K.mean() + 1e-30).view(-1, GROUP)
    x_NGE = w.view(n, -1, GROUP)
    grid = _search_grid(x_NGE, h_GE, quantization)
    return _stabilise_blocks(_pack_blocks(grid, grid.rounded(x_NGE)), w, quantization)


def _stabilise_blocks(blocks: Tensor, w: Tensor, quantization: Quantization) -> Tensor:
    """Returns the blocks. Blocks that rounding would change are made by `quantize_blocks` until nothing changes."""
    size, k = BLOCK_BYTES[quantization], w.shape[1]
    for turn in range(_TURNS):
        again = quantize_blocks(dequantize_blocks(blocks, k), quantization)
        same = (again == blocks).view(len(w), -1, size).all(-1, keepdim=True)
        if bool(same.all()):
            break
        other = quantize_blocks(w, quantization) if turn == 0 else again
        blocks = torch.where(same, blocks.view(len(w), -1, size), other.view(len(w), -1, size)).flatten(1)
    return blocks


class _CodeGrid(NamedTuple):
    """Values `scale q + least` of groups, with scales and least values rounded to float16. `quantization` bound q."""

    scale: Tensor
    least: Tensor
    quantization: Quantization

    def rounded(self, x: Tensor) -> Tensor:
        step = torch.where(self.scale > 0, self.scale, torch.inf)
        low, high = _BOUNDS[self.quantization]
        return ((x - self.least) / step).round().clamp(low, high)

    def values(self, q: Tensor) -> Tensor:
        return self.scale * q + self.least

    def spans(self, q: Tensor) -> Tensor:
        """Returns whether `quantize_blocks` finds the grid again: codes along the last dim are at its ends."""
        if self.quantization == "int8":
            return (q.abs() == 127).any(-1, keepdim=True)
        return (q == 0).any(-1, keepdim=True) & (q == 15).any(-1, keepdim=True)


_BOUNDS: dict[Quantization, tuple[int, int]] = {"int8": (-127, 127), "int4": (0, 15)}


def _search_grid(x: Tensor, h: Tensor, quantization: Quantization) -> _CodeGrid:
    """Returns the best grid of each group, with the group's elements along the last dim of x."""
    best, least_error = None, None
    for shrink in _SHRINKS:
        start = _span_grid(x, quantization, shrink)
        for grid in (start, _regress_grid(x, start.rounded(x), h, quantization)):
            q = grid.rounded(x)
            error = (h * (grid.values(q) - x).square()).sum(-1, keepdim=True)
            if best is None or least_error is None:
                best, least_error = grid, error
                continue
            better = (error < least_error) & grid.spans(q)
            best = _CodeGrid(
                torch.where(better, grid.scale, best.scale), torch.where(better, grid.least, best.least), quantization
            )
            least_error = torch.where(better, error, least_error)
    assert best is not None
    return best


def _span_grid(x: Tensor, quantization: Quantization, shrink: float) -> _CodeGrid:
    """Returns the grid from bound to bound of each group, shrunk towards the middle.

    Unshrunk: the grid of `quantize_blocks`.
    """
    if quantization == "int8":
        return _make_grid(x.abs().amax(-1, keepdim=True) * shrink / 127, torch.zeros_like(x[..., :1]), quantization)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    least = (low + (high - low) * (1 - shrink) / 2).half().float()
    return _make_grid((high - (high - low) * (1 - shrink) / 2 - least) / 15, least, quantization)


def _regress_grid(x: Tensor, q: Tensor, h: Tensor, quantization: Quantization) -> _CodeGrid:
    """Returns the weighted regression of the elements on the codes.

    Through the origin where there is no least value.
    """
    if quantization == "int8":
        sums = (h * q.square()).sum(-1, keepdim=True)
        return _make_grid(
            (h * q * x).sum(-1, keepdim=True) / sums.clamp_min(1e-30), torch.zeros_like(sums), quantization
        )
    total = h.sum(-1, keepdim=True)
    q_mean, x_mean = ((h * y).sum(-1, keepdim=True) / total for y in (q, x))
    spread = (h * (q - q_mean).square()).sum(-1, keepdim=True)
    scale = (h * (q - q_mean) * (x - x_mean)).sum(-1, keepdim=True) / spread.clamp_min(1e-30)
    scale = scale.clamp_min(0).half().float()
    return _make_grid(scale, x_mean - scale * q_mean, quantization)


def _make_grid(scale: Tensor, least: Tensor, quantization: Quantization) -> _CodeGrid:
    return _CodeGrid(scale.clamp(0, 65504).half().float(), least.clamp(-65504, 65504).half().float(), quantization)


def _compensate_errors(w: Tensor, quantization: Quantization, moments_KK: Tensor) -> Tensor:
    """Rounds columns in order. Later columns take up the error of each column (GPTQ, algorithm 1).

    A group's grid is searched when the first column of the group is reached, for the weights at this point. Where the
    codes then miss an end of the grid, the columns of the group do not make up for each other, but later groups do.
    """
    w, k = w.clone(), w.shape[1]
    h_K = moments_KK.diagonal()
    damped = moments_KK + (_DAMPING * h_K.mean() + 1e-30) * torch.eye(k, device=w.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped.double()))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    grids, found = list[_CodeGrid](), list[Tensor]()
    for start in range(0, k, GROUP):
        stop = start + GROUP
        own, errors = w[:, start:stop], torch.empty(w.shape[0], GROUP, device=w.device)
        grid, q, first = (
            _search_grid(own, damped.diagonal()[start:stop], quantization),
            torch.empty_like(own),
            own.clone(),
        )
        for i in range(GROUP):
            row = upper[start + i, start + i : stop]
            q[:, i : i + 1] = grid.rounded(own[:, i : i + 1])
            errors[:, i : i + 1] = (own[:, i : i + 1] - grid.values(q[:, i : i + 1])) / row[0]
            own[:, i:] -= errors[:, i : i + 1] * row
        alone, spans = grid.rounded(first), grid.spans(q)
        q = torch.where(spans, q, alone)
        # Errors of any codes q: by the errors, row after row of `upper`, the columns have become the values of q.
        apart = torch.linalg.solve_triangular(
            upper[start:stop, start:stop], first - grid.values(alone), upper=True, left=False
        )
        errors = torch.where(spans, errors, apart)
        w[:, stop:] -= errors @ upper[start:stop, stop:]
        grids.append(grid)
        found.append(q)
    scale, least = torch.stack([x.scale for x in grids], 1), torch.stack([x.least for x in grids], 1)
    return _pack_blocks(_CodeGrid(scale, least, quantization), torch.stack(found, 1))


def _pack_blocks(grid: _CodeGrid, q: Tensor) -> Tensor:
    """Returns the bytes of GGUF's blocks."""
    scale, n = grid.scale.half().view(torch.uint8), q.shape[0]
    if grid.quantization == "int8":
        return torch.cat([scale, q.to(torch.int8).view(torch.uint8)], -1).view(n, -1)
    nibbles = q.to(torch.uint8)
    nibbles = nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << 4
    return torch.cat([scale, grid.least.half().view(torch.uint8), nibbles], -1).view(n, -1)
