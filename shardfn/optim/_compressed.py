"""Parts shared by optimizers that average gradients: compressed means, and momentum under ZeRO.

A compressed mean is of whole leaves, and the same on all ranks. Where ZeRO cuts a leaf's state over the axis of the
mean, a rank keeps rows of the momentum, `A[I_axis]`, and the codes of the whole momentum. The next step decodes the
codes. For example, codes of one bit per element have 1/32 of the bytes.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import (
    Compressor,
    GlobalTensor,
    Residual,
    all_gather,
    axis_size,
    check_compressor,
    compressed_init,
    compressed_pmean,
    compressed_pmean_codes,
    current_mesh,
    cut_of,
    decompress_codes,
    error_feedback,
    global_residuals,
    identity,
    padded,
    pmean,
    take_own_block,
)
from shardfn.core import Axes, P

from ._base import rows_over

Codes = tuple[Any, ...]


class Share(NamedTuple):
    """The part of a leaf that is averaged.

    Attributes:
        n: number of elements of the largest rank's block. Smaller blocks are padded.
        own: axes along which ranks have different blocks. Each block is averaged over the other axes.
        cut: axes along which ranks keep rows of the leaf, or ().
    """

    n: int
    own: tuple[str, ...]
    cut: tuple[str, ...]


@dataclass(frozen=True)
class Averaging:
    """Averages leaves by `compressed_pmean`, over the axes among `axis` along which ranks have the same elements."""

    axis: Axes
    compressor: Compressor
    outer: Axes

    @property
    def over(self) -> tuple[str, ...]:
        """Returns the axes."""
        return (self.axis,) if isinstance(self.axis, str) else tuple(self.axis or ())

    def of(self, share: Share) -> "Averaging":
        """Returns the averaging of a leaf: over the axes along which ranks have the same block."""
        if not set(share.own) & set(self.over):
            return self
        over = tuple(a for a in self.over if a not in share.own)
        outer = (self.outer,) if isinstance(self.outer, str) else self.outer
        left = None if outer is None else tuple(a for a in outer if a in over)
        # Without a mean there is no message, and nothing to round.
        return replace(self, axis=over, outer=left, compressor=self.compressor if over else identity())

    def share(self, param: Tensor, whole: Any) -> Share:
        """Returns the part of a leaf that is averaged.

        Args:
            param: the parameter, as the optimizer sees it.
            whole: the leaf's whole block. Only the shape is used. A `GlobalTensor` also has a spec, and a
                `WholeLeaf` the axes without a mean.
        """
        if not isinstance(whole, GlobalTensor):
            return Share(whole.numel(), (), self.over if whole.shape != param.shape else ())
        mesh, n, rows = whole.mesh, 1, rows_over(whole, self.over)
        for dim, size in enumerate(whole.shape):
            for axis in mesh.axes(whole.spec.dim_axes(dim)):
                # Along the axes of the mean all ranks have the whole. Along other axes the first rank has the most.
                size = size if axis in rows else -(-size // mesh.axis_size(axis))
            n *= size
        return Share(n, tuple(a for a in mesh.axes(whole.spec.axes) if a not in rows), rows)

    def init(self, share: Share, device: torch.device) -> tuple[Residual, Codes]:
        """Returns the errors, and codes of zeros where rows are kept, as blocks that all ranks have."""
        like, mean = torch.empty(share.n, device=device), self.of(share)
        local = compressed_init([like], mean.axis, mean.compressor, outer=mean.outer)
        own = P(share.own) if share.own else P()
        residual = global_residuals(local, mean.axis, [own], outer=mean.outer)[0]
        return residual, tuple(_global_block(x, own) for x in mean._zero_codes(share.n, device)) if share.cut else ()

    def _zero_codes(self, n: int, device: torch.device) -> Codes:
        ranks, size = axis_size(self.axis if self.outer is None else self.outer), axis_size(self.axis)
        cut = cut_of(n, ranks, self.compressor.quantum, size // ranks)
        zero = torch.zeros((size, cut.c), device=device)
        return self.compressor.compress(zero, self.compressor.init(zero), whole=True, donate=False)[0]

    def mean(
        self, xs: list[Tensor], residuals: list[Any], shares: list[Share], *, donate: bool
    ) -> tuple[list[Tensor], list[Any], list[Codes]]:
        """Returns the means of local tensors, the new errors, and the codes of the means that are kept as rows.

        Args:
            xs: local tensors, float32.
            residuals: error-feedback residual of each tensor.
            shares: share of each tensor.
            donate: whether tensors and residuals may be overwritten.
        """
        # Ranks have blocks of different sizes, but messages of equal size. The padding of smaller blocks is cut off
        # again.
        flat = [padded(x.reshape(-1), s.n) for x, s in zip(xs, shares, strict=True)]
        groups: dict[Averaging, list[int]] = {}
        for i, share in enumerate(shares):
            groups.setdefault(self.of(share), []).append(i)
        means, new, codes = list(flat), list(residuals), [Codes()] * len(xs)
        for by, at in groups.items():
            coded, parts = any(shares[i].cut for i in at), ([x[i] for i in at] for x in (flat, residuals))
            for i, m, e, code in zip(at, *by._average_leaves(*parts, coded=coded, donate=donate), strict=True):
                means[i], new[i], codes[i] = m, e, code
        out = [m[: x.numel()].view(x.shape) for m, x in zip(means, xs, strict=True)]
        return out, new, [c if s.cut else () for c, s in zip(codes, shares, strict=True)]

    def _average_leaves(
        self, flat: list[Tensor], residuals: list[Any], *, coded: bool, donate: bool
    ) -> tuple[list[Tensor], list[Any], list[Codes]]:
        """Returns the means of leaves over the same axes, the new errors, and the codes of the means."""
        options: dict[str, Any] = {"outer": self.outer, "donate": donate}
        if not coded:
            means, residuals = compressed_pmean(flat, self.axis, self.compressor, residuals, **options)
            return means, residuals, [()] * len(flat)
        codes, residuals = compressed_pmean_codes(flat, self.axis, self.compressor, residuals, **options)
        return decompress_codes(codes, flat, self.axis, self.compressor, **options), residuals, codes

    def decode(self, codes: Codes, share: Share, like: Tensor) -> Tensor:
        """Returns the decoded mean, in the shape of `like`."""
        flat, by = torch.empty(share.n, device=like.device), self.of(share)
        mean = decompress_codes(codes, flat, by.axis, self.compressor, outer=by.outer, donate=True)
        return mean[: like.numel()].view(like.shape)

    def rows(self, x: Tensor, spec: P, share: Share) -> Tensor:
        """Returns this rank's rows of a leaf."""
        for dim, axes in _row_cuts(x, spec, share):
            x = take_own_block(x, axes, dim=dim)
        return x

    def whole(self, x: Tensor, spec: P, share: Share, like: Tensor) -> Tensor:
        """Returns the whole leaf of the rows, in the shape of `like`."""
        for dim, axes in _row_cuts(x, spec, share):
            x = all_gather(x, axes, dim=dim, size=like.shape[dim])
        return x

    def exact(self, xs: list[Tensor], shares: list[Share]) -> list[Tensor]:
        """Returns the exact means, as any optimizer gets."""
        return [pmean(x, self.of(s).over) if x.numel() else x for x, s in zip(xs, shares, strict=True)]


def make_averaging(who: str, axis: Axes, compressor: Compressor, outer: Axes, feedback: bool) -> Averaging:
    """Returns an `Averaging` from a user's arguments.

    Raises:
        TypeError: `compressor` is not a `Compressor`.
    """
    check_compressor(who, compressor)
    return Averaging(axis, error_feedback(compressor) if feedback and not compressor.remembers else compressor, outer)


def _row_cuts(x: Tensor, spec: P, share: Share) -> list[tuple[int, tuple[str, ...]]]:
    cuts = [(d, tuple(a for a in spec.dim_axes(d) if a in share.cut)) for d in range(x.ndim)]
    return [(d, axes) for d, axes in cuts if axes]


def write_over(old: Tensor, new: Tensor) -> Tensor:
    """Returns `old` with the values of `new`. Both may share memory."""
    if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
        old.copy_(new)
    return old


def _global_block(block: Tensor, own: P) -> GlobalTensor:
    """Returns a block that is equal along the axis of the mean, and different along `own`, as a global tensor."""
    mesh = current_mesh()
    shape = torch.Size((block.shape[0] * mesh.axis_size(own.dim_axes(0)), *block.shape[1:]))
    return GlobalTensor(block, shape, own, mesh)
