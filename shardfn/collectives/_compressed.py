"""Means and sums with compressed traffic: `compressed_pmean`, `compressed_psum`, and the codes of a mean.

Two phases. Rank i's part is, for rows j of its padded input x_i and errors e_i (worker), f_i (server):

    y = x_i + e_i;   (codes_j) = compress(y);   e_i' = y - decompress(codes)
    all_to_all:      codes_j to rank j
    z = mean over ranks k, in their order, of decompress(codes of rank k) + f_i
    codes = compress(z);   f_i' = z - decompress(codes)
    all_gather:      decompress(codes of every rank) is the result, the same bits everywhere

Each leaf of a tree is compressed separately, and leaves travel together: a bucket of leaves is one message a phase, and
the next bucket is compressed while a bucket is in flight.

References: Tang et al., 1-bit Adam, arXiv 2102.02888, 2021; Tang et al., APMSqueeze, arXiv 2008.11343, 2020.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardfn import core

from . import _native as native
from ._axis_group import AxisGroup, axis_group_along, count_ranks
from ._compressor import BUCKET, Codes, Compressor, buckets, check_leaves, combine, matched, misfit, padded, staggered
from ._message import exchange_rows, gather_rows
from ._residual import Cut, Residual, check_compressor, check_memory, cut_of, split_axes


def compressed_pmean(
    tree: core.PyTree,
    axis: core.Axes,
    compressor: Compressor,
    state: core.PyTree,
    *,
    outer: core.Axes = None,
    donate: bool = False,
    bucket: int = BUCKET,
) -> tuple[core.PyTree, core.PyTree]:
    """Returns the mean over the ranks along `axis`, approximately, at the compressor's bytes an element: `V -> I`.

        NCCL: all_to_all, all_gather.  Slow spec: see above.

    With `error_feedback` the error of a call is added in the next call, so that no part is lost over a run,

        mean_i (x_i + e_i) + f = out + mean_i e_i' + f'

    where f are the servers' errors in sequence. Through `identity()` the result is the sum in the order of ranks,
    divided by the number of ranks.

    Not differentiable: the mean is nonlinear, and meant for use after the backward.

    When: the link between ranks is slow and an optimizer can bear the noise. See `optim.onebit_adam`.

    Args:
        tree: floating point tensors of the same shape on all ranks, computed in float32. An empty tree is returned
            unchanged.
        axis: mesh axes. A single rank also compresses, and sends no message.
        compressor: a compressor, such as `error_feedback(sign())`.
        state: the result of `compressed_init` for a tree of these shapes, or the state that the last call returned.
        outer: the slow axes among several, for example "node" of ("node", "gpu"). Along the other axes the mean is
            exact: psum_scatter in float32 inside, compressed traffic between, and an all_gather of the codes inside.
        donate: whether the tensors of `tree` and `state` may be overwritten. Do not use these tensors afterwards.
        bucket: elements of a single message, the same on all ranks. The value changes no bits.

    Returns:
        The means, a tree like `tree`, and the new state.

    Raises:
        ValueError: an unknown axis, or a state that does not fit. Every leaf is listed.
        TypeError: `compressor` is not a `Compressor`, or a leaf is not a floating point tensor.
        NotImplementedError: a leaf is being differentiated or mapped over by torch.func.

    A NaN or an infinity on any rank spoils the result, and the errors for good: find such steps first, on all ranks,
    and leave such steps out (as `sharded_step` does, with `skip_nonfinite` or a loss scale).

    References:
        Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed,
        https://arxiv.org/abs/2102.02888, 2021.

    Example:
        >>> from shardfn.collectives import compressed_init, error_feedback, sign
        >>> grads, compressor = {"w": torch.tensor([1.0, -1.0, 1.0])}, error_feedback(sign())
        >>> state = compressed_init(grads, "dp", compressor)
        >>> mean, state = compressed_pmean(grads, "dp", compressor, state)
        >>> mean["w"]
        tensor([ 0.6124, -0.6124,  0.6124])
    """
    call = _CompressedCall("compressed_pmean", tree, axis, compressor, state, outer, mean=True, donate=donate)
    return call.run(bucket, decode=True)


def compressed_psum(
    tree: core.PyTree,
    axis: core.Axes,
    compressor: Compressor,
    state: core.PyTree,
    *,
    outer: core.Axes = None,
    donate: bool = False,
    bucket: int = BUCKET,
) -> tuple[core.PyTree, core.PyTree]:
    """Returns the sum over the ranks along `axis`, approximately: as `compressed_pmean`, without the division.

        NCCL: all_to_all, all_gather.

    The servers' errors are then of the sum: `sum_i (x_i + e_i) + f = out + sum_i e_i' + f'`.

    Args:
        tree: tree as in `compressed_pmean`.
        axis: mesh axes.
        compressor: see `compressed_pmean`.
        state: the errors of a sum, not of a mean.
        outer: the slow axes among several.
        donate: whether the tensors of `tree` and `state` may be overwritten.
        bucket: elements of a single message.

    Returns:
        The sums, a tree like `tree`, and the new state.

    Raises:
        ValueError: an unknown axis, or a state that does not fit. Every leaf is listed.
        TypeError: `compressor` is not a `Compressor`, or a leaf is not a floating point tensor.
        NotImplementedError: a leaf is being differentiated or mapped over by torch.func.

    Example:
        >>> from shardfn.collectives import compressed_init, identity
        >>> x = torch.ones(2)
        >>> compressed_psum(x, "dp", identity(), compressed_init(x, "dp", identity()))[0]
        tensor([1., 1.])
    """
    call = _CompressedCall("compressed_psum", tree, axis, compressor, state, outer, mean=False, donate=donate)
    return call.run(bucket, decode=True)


def compressed_pmean_codes(
    tree: core.PyTree,
    axis: core.Axes,
    compressor: Compressor,
    state: core.PyTree,
    *,
    outer: core.Axes = None,
    donate: bool = False,
    bucket: int = BUCKET,
) -> tuple[core.PyTree, core.PyTree]:
    """Returns the codes of the mean, which every rank holds whole: `compressed_pmean` before the last step.

    So a rank may keep the mean at one bit per element: `decompress_codes(codes, tree, axis, compressor)` is the mean.

    Args:
        tree: tree as in `compressed_pmean`.
        axis: mesh axes.
        compressor: see `compressed_pmean`.
        state: the errors.
        outer: the slow axes among several.
        donate: whether the tensors of `tree` and `state` may be overwritten.
        bucket: elements of a single message.

    Returns:
        The codes of each leaf, and the new state. Codes are a tuple of tensors with a leading dim of the number of
        ranks along `axis`, `()` for an empty leaf.

    Raises:
        ValueError: an unknown axis, or a state that does not fit. Every leaf is listed.
        TypeError: `compressor` is not a `Compressor`, or a leaf is not a floating point tensor.
        NotImplementedError: a leaf is being differentiated or mapped over by torch.func.

    Example:
        >>> from shardfn.collectives import compressed_init, error_feedback, sign
        >>> x, compressor = torch.tensor([2.0, -2.0]), error_feedback(sign())
        >>> codes, _ = compressed_pmean_codes(x, "dp", compressor, compressed_init(x, "dp", compressor))
        >>> codes
        (tensor([[191]], dtype=torch.uint8), tensor([1.]))
        >>> decompress_codes(codes, x, "dp", compressor)
        tensor([ 1., -1.])
    """
    call = _CompressedCall("compressed_pmean_codes", tree, axis, compressor, state, outer, mean=True, donate=donate)
    return call.run(bucket, decode=False)


def decompress_codes(
    codes: core.PyTree,
    like: core.PyTree,
    axis: core.Axes,
    compressor: Compressor,
    *,
    outer: core.Axes = None,
    donate: bool = False,
) -> core.PyTree:
    """Returns the tensors of the codes that `compressed_pmean_codes` returned. No communication.

    Args:
        codes: the result of `compressed_pmean_codes`.
        like: tensors of the shapes and dtypes of the result.
        axis: axis of the collective.
        compressor: compressor of the collective.
        outer: outer axes of the collective.
        donate: whether results may take the memory of `like`. Do not use `like` afterwards.

    Returns:
        A tree like `like`.

    Raises:
        ValueError: an unknown axis.
        TypeError: `compressor` is not a `Compressor`.

    Example:
        >>> from shardfn.collectives import identity
        >>> decompress_codes((torch.tensor([[2.0, 3.0]]),), torch.empty(2), "dp", identity())
        tensor([2., 3.])
    """
    check_compressor("decompress_codes", compressor)
    between, inside = _compressed_and_exact_lines("decompress_codes", axis, outer)
    leaves, treedef = core.tree_flatten(like)
    pairs = zip(leaves, treedef.flatten_up_to(codes), strict=True)
    cuts = [cut_of(x.numel(), count_ranks(between), compressor.quantum, count_ranks(inside)) for x in leaves]
    with torch.no_grad():
        out = [
            _copy_from_codes(_decode_leaf(part, x, cut, compressor, _memory_of(x) if donate else None), part)
            if cut.n
            else x
            for (x, part), cut in zip(pairs, cuts, strict=True)
        ]
    return core.tree_unflatten(treedef, out)


def _copy_from_codes(x: Tensor, codes: Codes) -> Tensor:
    """Returns `x` in separate memory, as `x` may be a view of codes that are kept (identity's are)."""
    shared = any(x.untyped_storage()._cdata == part.untyped_storage()._cdata for part in codes)
    return x.clone() if shared else x


def _memory_of(x: Tensor) -> Tensor | None:
    """Returns the memory of an input, if the result may be stored there."""
    return x.view(-1) if x.dtype == torch.float32 and x.is_contiguous() else None


def _decode_leaf(codes: Codes, like: Tensor, cut: Cut, compressor: Compressor, out: Tensor | None = None) -> Tensor:
    if compressor.decompress_into is None or cut.inner > 1:
        rows = compressor.decompress(codes, cut.c).view(cut.inner, -1)
        return rows[:, : cut.piece].reshape(-1)[: cut.n].view(like.shape).to(like.dtype)
    # Not by way of memory for all rows and their padding: fresh memory costs more than the arithmetic.
    flat = like.new_empty(cut.n, dtype=torch.float32) if out is None else out
    whole = cut.n // cut.c
    if whole:
        compressor.decompress_into(tuple(part[:whole] for part in codes), flat[: whole * cut.c].view(whole, -1))
    if whole * cut.c < cut.n:
        rest = compressor.decompress(tuple(part[whole : whole + 1] for part in codes), cut.c)
        flat[whole * cut.c :].copy_(rest[0, : cut.n - whole * cut.c])
    return flat.view(like.shape).to(like.dtype)


def _compressed_and_exact_lines(
    op: str, axis: core.Axes, outer: core.Axes
) -> tuple[AxisGroup | None, AxisGroup | None]:
    """Returns two groups of ranks: with compressed and with exact transfers."""
    axis_group_along(axis)  # raises if it is wrong
    between, inside = split_axes(op, axis, outer)
    return axis_group_along(between), axis_group_along(inside)


@dataclasses.dataclass
class _CompressedLeaf:
    """Leaf on its way."""

    x: Tensor
    residual: Residual
    cut: Cut
    out: Any = ()


class _CompressedCall:
    """Call of a compressed collective, checked by the constructor and run by `run`."""

    def __init__(
        self,
        op: str,
        tree: core.PyTree,
        axis: core.Axes,
        compressor: Compressor,
        state: core.PyTree,
        outer: core.Axes,
        *,
        mean: bool,
        donate: bool,
    ) -> None:
        check_compressor(op, compressor)
        self.compressor, self.donate = compressor, donate
        self.between, self.inside = _compressed_and_exact_lines(op, axis, outer)
        self.ranks, self.inner = count_ranks(self.between), count_ranks(self.inside)
        self.divisor, self.inner_divisor = (self.ranks, self.inner) if mean else (1, 1)
        leaves, self.treedef = core.tree_flatten(tree)
        paths = core.tree_paths(tree, "x")
        check_leaves(op, leaves, paths)
        residuals = matched(op, self.treedef, state)
        cuts = [cut_of(x.numel(), self.ranks, compressor.quantum, self.inner) for x in leaves]
        rows = list(zip(leaves, residuals, cuts, strict=True))
        problems = [p for path, (x, r, cut) in zip(paths, rows, strict=True)
                    for p in check_memory(path, x, r, *self._expected_shapes(cut))]  # fmt: skip
        core.raise_all(ValueError, misfit(op, self.ranks), problems)
        self.leaves = [_CompressedLeaf(*row) for row in rows]

    def _expected_shapes(self, cut: Cut) -> tuple[Any, Any]:
        return ((1, cut.ranks * cut.c), (cut.c,)) if self.compressor.remembers else (None, None)

    def run(self, bucket: int, *, decode: bool) -> tuple[core.PyTree, core.PyTree]:
        """Runs the call bucket by bucket, and returns the result, decompressed or not, and the new state."""
        with torch.no_grad():
            staggered([self._run_stages(leaves, decode) for leaves in buckets(self.leaves, bucket)])
            # Only here do all residuals belong to the state after the call. An earlier error leaves donated tensors
            # partly overwritten.
            out = [leaf.out if leaf.cut.n or not decode else leaf.x for leaf in self.leaves]
        return core.tree_unflatten(self.treedef, out), core.tree_unflatten(
            self.treedef, [leaf.residual for leaf in self.leaves]
        )

    def _run_stages(self, leaves: list[_CompressedLeaf], decode: bool) -> Iterator[None]:
        """Yields after each phase of a bucket, while a transfer is in flight."""
        # Collective at each stop: all ranks make the same buckets of the same leaves, and therefore send in the same
        # order.
        pieces = self._make_pieces(leaves)
        sent = [self._compress_piece(leaf, piece) for leaf, piece in zip(leaves, pieces, strict=True)]
        pieces.clear()
        arrived = exchange_rows(sent, self.between, name="all_to_all")
        yield
        combined = [self._combine_codes(leaf, codes) for leaf, codes in zip(leaves, arrived(), strict=True)]
        gathered = gather_rows(combined, self.between)
        yield
        whole = gather_rows(gathered(), self.inside)
        for leaf, codes in zip(leaves, whole(), strict=True):
            into = _memory_of(leaf.x) if self.donate else None
            leaf.out = _decode_leaf(codes, leaf.x, leaf.cut, self.compressor, into) if decode else codes

    def _make_pieces(self, leaves: list[_CompressedLeaf]) -> list[Tensor]:
        """Returns this rank's inputs, flat: the leaves, or with inner axes the pieces of the means there."""
        if self.inside is None:
            return [leaf.x.reshape(-1) for leaf in leaves]
        rows = [padded(leaf.x.reshape(-1).float(), self.inner * leaf.cut.piece).view(self.inner, -1) for leaf in leaves]
        own = native.reduce_scatter(torch.cat(rows, 1), self.inside, name="psum_scatter")
        return list((own / self.inner_divisor).split([leaf.cut.piece for leaf in leaves]))

    def _compress_piece(self, leaf: _CompressedLeaf, piece: Tensor) -> Codes:
        cut, memory = leaf.cut, leaf.residual.worker
        piece = piece.float() if piece.dtype == torch.float64 else piece
        fresh = piece if self.compressor.pads else padded(piece.float(), cut.ranks * cut.c).view(cut.ranks, cut.c)
        memory = memory.view(cut.ranks, cut.c) if isinstance(memory, Tensor) else memory
        codes, memory = self.compressor.compress(fresh, memory, whole=True, donate=self.donate)
        worker = memory.view(1, -1) if isinstance(memory, Tensor) else memory
        leaf.residual = leaf.residual._replace(worker=worker)
        return codes

    def _combine_codes(self, leaf: _CompressedLeaf, codes: Codes) -> Codes:
        memory = leaf.residual.server
        memory = memory.view(1, -1) if isinstance(memory, Tensor) else memory
        # `combine` may write the server's error in place.
        memory = memory if self.donate or not isinstance(memory, Tensor) else memory.clone()
        codes, memory = combine(self.compressor, codes, memory, leaf.cut.c, self.divisor)
        server = memory.view(-1) if isinstance(memory, Tensor) else memory
        leaf.residual = leaf.residual._replace(server=server)
        return codes
