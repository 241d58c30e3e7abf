"""Optimizers that average gradients: compressed means, momentum under ZeRO, and the division of leaves.

A compressed mean is of whole leaves, and the same on all ranks. Where ZeRO cuts a leaf's state over the axis of the
mean, a rank keeps rows of the momentum, `A[I_axis]`, and the codes of the whole momentum. The next step decodes the
codes. For example, codes of one bit per element have 1/32 of the bytes.

`CompressedSplit` divides the leaves of a step into leaves that are averaged by a compressor and leaves that are
averaged exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import collectives, core
from shardfn._torch import FakeTensor
from shardfn.kernels import moving_average_

from . import _base as base
from ._decide import resolve_per_leaf
from ._leaves import leaves_like, spec_leaves, wide

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

    axis: core.Axes
    compressor: collectives.Compressor
    outer: core.Axes

    @property
    def over(self) -> tuple[str, ...]:
        """Returns the mesh axes of the average."""
        return (self.axis,) if isinstance(self.axis, str) else tuple(self.axis or ())

    def of(self, share: Share) -> "Averaging":
        """Returns the averaging of a leaf: over the axes along which ranks have the same block."""
        if not set(share.own) & set(self.over):
            return self
        over = tuple(a for a in self.over if a not in share.own)
        outer = (self.outer,) if isinstance(self.outer, str) else self.outer
        left = None if outer is None else tuple(a for a in outer if a in over)
        # Without a mean there is no message, and nothing to round.
        return replace(self, axis=over, outer=left, compressor=self.compressor if over else collectives.identity())

    def share(self, param: Tensor, whole: Any) -> Share:
        """Returns the part of a leaf that is averaged.

        Args:
            param: the parameter, as the optimizer sees it.
            whole: the leaf's whole block. Only the shape is used. A `GlobalTensor` also has a spec, and a
                `WholeLeaf` the axes without a mean.
        """
        if not isinstance(whole, collectives.GlobalTensor):
            return Share(whole.numel(), (), self.over if whole.shape != param.shape else ())
        mesh, n, rows = whole.mesh, 1, base.rows_over(whole, self.over)
        for dim, size in enumerate(whole.shape):
            for axis in mesh.axes(whole.spec.dim_axes(dim)):
                # Along the axes of the mean all ranks have the whole. Along other axes the first rank has the most.
                size = size if axis in rows else -(-size // mesh.axis_size(axis))
            n *= size
        return Share(n, tuple(a for a in mesh.axes(whole.spec.axes) if a not in rows), rows)

    def init(self, share: Share, device: torch.device) -> tuple[collectives.Residual, Codes]:
        """Returns the errors, and codes of zeros where rows are kept, as blocks that all ranks have."""
        like, mean = torch.empty(share.n, device=device), self.of(share)
        local = collectives.compressed_init([like], mean.axis, mean.compressor, outer=mean.outer)
        own = core.P(share.own) if share.own else core.P()
        residual = collectives.global_residuals(local, mean.axis, [own], outer=mean.outer)[0]
        return residual, tuple(_global_block(x, own) for x in mean._zero_codes(share.n, device)) if share.cut else ()

    def _zero_codes(self, n: int, device: torch.device) -> Codes:
        ranks, size = (
            collectives.axis_size(self.axis if self.outer is None else self.outer),
            collectives.axis_size(self.axis),
        )
        cut = collectives.cut_of(n, ranks, self.compressor.quantum, size // ranks)
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
        flat = [collectives.padded(x.reshape(-1), s.n) for x, s in zip(xs, shares, strict=True)]
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
            means, residuals = collectives.compressed_pmean(flat, self.axis, self.compressor, residuals, **options)
            return means, residuals, [()] * len(flat)
        codes, residuals = collectives.compressed_pmean_codes(flat, self.axis, self.compressor, residuals, **options)
        return collectives.decompress_codes(codes, flat, self.axis, self.compressor, **options), residuals, codes

    def decode(self, codes: Codes, share: Share, like: Tensor) -> Tensor:
        """Returns the decoded mean, in the shape of `like`."""
        flat, by = torch.empty(share.n, device=like.device), self.of(share)
        mean = collectives.decompress_codes(codes, flat, by.axis, self.compressor, outer=by.outer, donate=True)
        return mean[: like.numel()].view(like.shape)

    def rows(self, x: Tensor, spec: core.P, share: Share) -> Tensor:
        """Returns this rank's rows of a leaf."""
        for dim, axes in _row_cuts(x, spec, share):
            x = collectives.take_own_block(x, axes, dim=dim)
        return x

    def whole(self, x: Tensor, spec: core.P, share: Share, like: Tensor) -> Tensor:
        """Returns the whole leaf of the rows, in the shape of `like`."""
        for dim, axes in _row_cuts(x, spec, share):
            x = collectives.all_gather(x, axes, dim=dim, size=like.shape[dim])
        return x

    def exact(self, xs: list[Tensor], shares: list[Share]) -> list[Tensor]:
        """Returns the exact means, as any optimizer gets."""
        return [collectives.pmean(x, self.of(s).over) if x.numel() else x for x, s in zip(xs, shares, strict=True)]


def make_averaging(
    who: str, axis: core.Axes, compressor: collectives.Compressor, outer: core.Axes, feedback: bool
) -> Averaging:
    """Returns an `Averaging` from a user's arguments.

    Raises:
        TypeError: `compressor` is not a `Compressor`.
    """
    collectives.check_compressor(who, compressor)
    return Averaging(
        axis, collectives.error_feedback(compressor) if feedback and not compressor.remembers else compressor, outer
    )


def _row_cuts(x: Tensor, spec: core.P, share: Share) -> list[tuple[int, tuple[str, ...]]]:
    cuts = [(d, tuple(a for a in spec.dim_axes(d) if a in share.cut)) for d in range(x.ndim)]
    return [(d, axes) for d, axes in cuts if axes]


def write_over(old: Tensor, new: Tensor) -> Tensor:
    """Returns `old` with the values of `new`. Both may share memory."""
    if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
        old.copy_(new)
    return old


def _global_block(block: Tensor, own: core.P) -> collectives.GlobalTensor:
    """Returns a block that is equal along the axis of the mean, and different along `own`, as a global tensor."""
    mesh = collectives.current_mesh()
    shape = torch.Size((block.shape[0] * mesh.axis_size(own.dim_axes(0)), *block.shape[1:]))
    return collectives.GlobalTensor(block, shape, own, mesh)


_PIECE = 1 << 16  # elements: a few tensors of this size stay in a core's cache


@dataclass(frozen=True)
class CompressedSplit:
    """Leaves of a step, in flattening order.

    Attributes:
        averaging: method of averaging the compressed leaves.
        treedef: the structure of the params.
        ps: the parameters: this rank's rows.
        gs: the gradients: whole.
        specs: specs of the rows.
        shares: averaged part of each leaf.
        exact: for each leaf, whether it is not compressed.
    """

    averaging: Averaging
    treedef: Any
    ps: list[Tensor]
    gs: list[Tensor]
    specs: list[core.P]
    shares: list[Share]
    exact: Sequence[bool]

    def pick(self, column: Sequence[Any]) -> list[Any]:
        """Returns the entries of the compressed leaves."""
        return [x for x, exact in zip(column, self.exact, strict=True) if not exact]

    def merged(self, exact: Sequence[Any], compressed: Sequence[Any]) -> core.PyTree:
        """Returns the tree of entries for both kinds."""
        these, those = iter(exact), iter(compressed)
        return core.tree_unflatten(self.treedef, [next(these if on else those) for on in self.exact])

    def alone(self, column: Sequence[Any]) -> core.PyTree:
        """Returns the tree of the exact leaves, or None in place of compressed leaves."""
        return core.tree_unflatten(self.treedef, [x if on else None for x, on in zip(column, self.exact, strict=True)])

    def exactly(
        self,
        step: Callable[..., tuple[Any, base.OptState]],
        state: base.OptState,
        mus: list[Tensor],
        nus: list[Tensor],
        *,
        averaged: bool = False,
    ) -> tuple[list[Tensor], base.OptState]:
        """Returns the step of the exact leaves by a chain that begins with moments. All leaves share the counters."""
        gs = [g for g, on in zip(self.gs, self.exact, strict=True) if on]
        if not averaged:
            cuts = [x for x, on in zip(zip(self.specs, self.shares, strict=True), self.exact, strict=True) if on]
            means = self.averaging.exact(gs, [share for _, share in cuts])
            gs = [self.averaging.rows(g, spec, share) for g, (spec, share) in zip(means, cuts, strict=True)]
        grads = self.merged(gs, [None] * (len(self.gs) - len(gs)))
        own = (state[0]._replace(mu=self.alone(mus), nu=self.alone(nus)), *state[1:])
        out, own = step(grads, own, self.alone(self.ps), specs=self.alone(self.specs))
        return core.tree_leaves(out), own

    def join_states(self, own: base.OptState, mus: Sequence[Tensor], nus: Sequence[Tensor]) -> base.OptState:
        """Returns the state of a chain for exact leaves, with the moments of the compressed leaves put in."""
        mu, nu = self.merged(core.tree_leaves(own[0].mu), mus), self.merged(core.tree_leaves(own[0].nu), nus)
        return (own[0]._replace(mu=mu, nu=nu), *own[1:])

    def init(self) -> tuple[core.PyTree, core.PyTree]:
        """Returns the first errors and codes, each a tree like params."""
        pairs = [
            self.averaging.init(share, p.device)
            for share, p in zip(*map(self.pick, (self.shares, self.ps)), strict=True)
        ]
        none = [None] * (len(self.ps) - len(pairs))
        return self.merged(none, [r for r, _ in pairs]), self.merged(none, [c for _, c in pairs])

    def wholes(self, rows: list[Tensor], codes: core.PyTree, *, gather: bool) -> list[Tensor]:
        """Returns the whole compressed leaves that are kept as rows.

        The leaves are gathered, or decoded from the last codes.
        """
        table = zip(*map(self.pick, (rows, self.treedef.flatten_up_to(codes), *self._leaf_columns())), strict=True)
        return [
            x
            if not share.cut
            else self.averaging.whole(x, spec, share, g)
            if gather
            else self.averaging.decode(code, share, g).to(x.dtype)
            for x, code, g, spec, share in table
        ]

    def mean(
        self, xs: list[Tensor], residual: core.PyTree, *, donate: bool
    ) -> tuple[list[Tensor], core.PyTree, core.PyTree]:
        """Returns the means of whole compressed leaves, and the new errors and codes as trees."""
        residuals = self.pick(self.treedef.flatten_up_to(residual))
        means, new, codes = self.averaging.mean(xs, residuals, self.pick(self.shares), donate=donate)
        none = [None] * (len(self.ps) - len(xs))
        return means, self.merged(none, new), self.merged(none, codes)

    def rows(self, xs: list[Tensor]) -> list[Tensor]:
        """Returns this rank's rows of whole compressed leaves."""
        table = zip(xs, *map(self.pick, (self.specs, self.shares)), strict=True)
        return [self.averaging.rows(x, spec, share) for x, spec, share in table]

    def _leaf_columns(self) -> tuple[list[Any], ...]:
        return self.gs, self.specs, self.shares


def split_leaves(
    averaging: Averaging,
    grads: base.Updates,
    params: base.Params,
    specs: base.Specs,
    whole: core.PyTree,
    exact: base.Mask,
) -> CompressedSplit:
    """Returns a step's leaves.

    Args:
        averaging: method of averaging the compressed leaves.
        grads: whole gradients.
        params: this rank's rows.
        specs: specs of the parameters. None: parameters are whole.
        whole: the whole blocks, by shapes. None: the shapes of `grads`.
        exact: leaves that are not compressed. Leaves without elements are never compressed.
    """
    ps, treedef = core.tree_flatten(params)
    gs = leaves_like(grads, treedef, "grads", "params")
    blocks = gs if whole is None else leaves_like(whole, treedef, "whole", "params")
    shares = [averaging.share(p, block) for p, block in zip(ps, blocks, strict=True)]
    flags = resolve_per_leaf(False if exact is None else exact, bool, "exact")(params, ps, treedef, specs)
    cuts = [core.P()] * len(ps) if specs is None else spec_leaves(specs, params)
    return CompressedSplit(
        averaging, treedef, ps, gs, cuts, shares, [on or not s.n for on, s in zip(flags, shares, strict=True)]
    )


def blend_momentum(mu: Tensor, g: Tensor, b1: float, *, donate: bool) -> Tensor:
    """Returns `b1 mu + (1 - b1) g` in float32. With `donate`, in the memory of `mu` if possible."""
    if not donate or mu.dtype != torch.float32:
        return b1 * mu.float() + (1 - b1) * g.float()
    if g.dtype == torch.float32 and mu.is_contiguous():
        moving_average_(mu, g, b1)
    else:
        for m, part in split_rows([mu], [g]):
            m.mul_(b1).add_((1 - b1) * part.float())
    return mu


def is_differentiated(tree: core.PyTree) -> bool:
    """Returns whether results computed from the tensors may be differentiated, or transformed by torch.func."""
    on = torch.is_grad_enabled()
    return collectives.transforming() or any(
        on and isinstance(x, Tensor) and x.requires_grad for x in core.tree_leaves(tree)
    )


def update_by_apply(
    who: str,
    rate: base.LearningRate,
    apply: Callable[..., tuple[base.Params, base.OptState]],
    grads: base.Updates,
    state: base.OptState,
    params: base.Params,
    specs: base.Specs,
) -> tuple[base.Updates, base.OptState]:
    """Computes `update` by `apply`, on copies. The updates are `p' - p`, exact in float64.

    Raises:
        NotImplementedError: under a derivative, or another transform of torch.func.
    """
    # Parameters are not tested: a module's parameters always require a gradient.
    if is_differentiated((grads, state, rate)):
        raise NotImplementedError(
            f"{who}: the update has no derivative once it is compressed, and torch.func does not map over it. Detach"
            " its arguments, or differentiate the rule that it is made from."
        )
    copies = core.tree_map(torch.clone, (grads, state, params))
    new, state = apply(*copies, specs=specs)
    return core.tree_map(lambda x, p: x.double() - p.double(), new, params), state


def add_rounded_(p: Tensor, u: Tensor) -> None:
    """Computes `p = p + u` in place, rounded once."""
    if p.dtype == u.dtype:
        p.add_(u)
    else:
        p.copy_(wide(p) + u)


def split_rows(*columns: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yields rows of tensors of equal shape, cut in flat pieces that fit a core's cache.

    Columns of other values come last, and each piece has the row's value. Rows are not cut without need.
    """
    for row in zip(*columns, strict=True):
        tensors = [x for x in row if isinstance(x, Tensor)]
        if tensors[0].numel() <= _PIECE or not all(map(_is_plain, tensors)):
            yield row
            continue
        for cut in zip(*(x.view(-1).split(_PIECE) for x in tensors), strict=True):
            yield (*cut, *row[len(tensors) :])


def _is_plain(x: Tensor) -> bool:
    # A tracer would record every piece.
    return x.is_contiguous() and x.device.type == "cpu" and not isinstance(x, FakeTensor)
