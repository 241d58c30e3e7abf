"""The loss of a language model: -log softmax(logits)[target], with logits in memory or a tile of tokens at a time.

The gradients of a tiled loss are computed together with the loss, in the forward, while a tile's logits are in memory.
The backward multiplies the gradients by the cotangent. Gradients are kept in float32 or better. So the memory in
addition to x is two tensors like a tile of logits and, if a gradient is needed, a tensor like x and two tensors like w
(a single such tensor while two tiles of logits are alive).

B batch, T tokens, N tokens of all rows, D model, V vocabulary.
Snowflake, Arctic Long Sequence Training, 2025, https://arxiv.org/abs/2506.13996
Hsu et al., Liger Kernel, 2024, https://arxiv.org/abs/2410.10989
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import collectives
from shardfn.collectives import psum
from shardfn.core import Axes

from ._layers import rank_classes, rank_index
from ._online import wide
from ._parallel import enter_parallel


def cross_entropy(
    logits_BTV: Float[Tensor, "b t v"],
    targets_BT: Int64[Tensor, "b t"],
    *,
    ignore_index: int = -100,
    axis: Axes = None,
    vocab_size: int | None = None,
) -> Float[Tensor, ""]:
    """Returns the mean over the counted targets, or 0 without counted targets.

    Args:
        logits_BTV: unnormalised logits. 16-bit logits are summed in float32. With `axis`, the rank's classes.
        targets_BT: classes in [0, V), or `ignore_index`.
        ignore_index: target without a loss, such as padding.
        axis: mesh axes along which V is cut. None means a single device.
        vocab_size: V, needed where the axis has several ranks.

    Example:
        >>> round(cross_entropy(torch.zeros(1, 2, 8), torch.tensor([[3, -100]])).item(), 4)
        2.0794
    """
    total, count = cross_entropy_sum(
        logits_BTV, targets_BT, ignore_index=ignore_index, axis=axis, vocab_size=vocab_size
    )
    return total / count.clamp(min=1)


def cross_entropy_sum(
    logits_BTV: Float[Tensor, "b t v"],
    targets_BT: Int64[Tensor, "b t"],
    *,
    ignore_index: int = -100,
    axis: Axes = None,
    vocab_size: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Returns the sum over the counted targets, and the number of counted targets.

    For means over ranks with unequal numbers of tokens.

    With `axis` no rank has all logits: three numbers a token cross the mesh, a maximum, a sum and the target's logit.

    Args:
        logits_BTV: unnormalised logits. 16-bit logits are summed in float32. With `axis`, the rank's classes.
        targets_BT: classes in [0, V), or `ignore_index`.
        ignore_index: target without a loss, such as padding.
        axis: mesh axes along which V is cut. None means a single device.
        vocab_size: V, needed where the axis has several ranks.

    Returns:
        (total, count), 0-d, both of the dtype of the sum.

    Example:
        >>> total, count = cross_entropy_sum(torch.zeros(1, 2, 8), torch.tensor([[3, -100]]))
        >>> count.item()
        1.0
    """
    wide = logits_BTV.float() if logits_BTV.dtype in (torch.float16, torch.bfloat16) else logits_BTV
    if collectives.axis_size(axis) > 1:
        loss_BT = _vocab_parallel(wide, targets_BT, ignore_index, axis, vocab_size)
        counts = targets_BT != ignore_index
        return loss_BT.masked_fill(~counts, 0.0).sum(), counts.sum().to(loss_BT.dtype)
    total = F.cross_entropy(wide.flatten(0, 1), targets_BT.flatten(), ignore_index=ignore_index, reduction="sum")
    return total, (targets_BT != ignore_index).sum().to(total.dtype)


def _vocab_parallel(
    logits_BTV: Tensor, targets_BT: Tensor, ignore_index: int, axis: Axes, vocab_size: int | None
) -> Tensor:
    """Returns the loss log sum exp(logits) - logits[target], of blocks of the classes, invariant along `axis`."""
    start, stop, size = rank_classes("cross_entropy: logits_BTV", logits_BTV.shape[-1], vocab_size, axis)
    own_BT = logits_BTV.logsumexp(-1)
    top_BT = collectives.pmax(own_BT.detach(), axis)  # a shift without an effect on the result
    if start == stop:
        hit_BT = logits_BTV.sum(-1)
    else:
        index, missing = rank_index(targets_BT.masked_fill(targets_BT == ignore_index, 0), start, stop, size)
        hit_BT = logits_BTV.gather(-1, index[..., None])[..., 0].masked_fill(missing, 0.0)
    total_BT, hit_BT = psum(torch.stack([(own_BT - top_BT).exp(), hit_BT]), axis).unbind()
    return total_BT.log() + top_BT - hit_BT


def next_tokens(tokens_BT: Int64[Tensor, "b t"], *, ignore_index: int = -100) -> Int64[Tensor, "b t"]:
    """Returns the targets of a language model: each token's successor. The target of the last token does not count.

    Args:
        tokens_BT: whole sequences. Cut sequences along T only after the shift.
        ignore_index: target without a loss, such as padding.

    Example:
        >>> next_tokens(torch.tensor([[5, 6, 7]])).tolist()
        [[6, 7, -100]]
    """
    return torch.cat((tokens_BT[:, 1:], torch.full_like(tokens_BT[:, :1], ignore_index)), dim=1)


class _How(NamedTuple):
    """Tokens of a tile, the target without a loss, the rank's classes, the axis, and whether gradients follow."""

    tile: int
    ignore_index: int
    classes: tuple[int, int, int]
    axis: Axes
    differentiated: bool


def tiled_cross_entropy(
    x_BTD: Float[Tensor, "b t d"],
    w_VD: Float[Tensor, "v d"],
    targets_BT: Int64[Tensor, "b t2"],
    *,
    tile: int = 1024,
    ignore_index: int = -100,
    axis: Axes = None,
    vocab_size: int | None = None,
    sequence: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Returns `cross_entropy_sum(x w^T, targets)` with at most `tile` rows of logits in memory at a time.

    Args:
        x_BTD: input of the output layer, whole, or with `sequence` the rank's rows of the tokens.
        w_VD: weight of the output layer, with `axis` the rank's classes.
        targets_BT: classes in [0, V), or `ignore_index`.
        tile: tokens.
        ignore_index: target without a loss, such as padding.
        axis: mesh axes along which V is cut. None means a single device.
        vocab_size: V, needed where the axis has several ranks.
        sequence: T where `x_BTD` is cut along the tokens.

    Returns:
        (total, count), 0-d, both of the dtype of the sum. The total is differentiable once.

    Raises:
        ValueError: `tile` is less than 1, the numbers of targets and tokens differ, or the layer is not the rank's
            block.

    Example:
        >>> x, w, targets = torch.zeros(1, 2, 4), torch.zeros(8, 4), torch.tensor([[3, -100]])
        >>> total, count = tiled_cross_entropy(x, w, targets, tile=1)
        >>> round(total.item(), 4), count.item()
        (2.0794, 1.0)
    """
    classes = rank_classes("tiled_cross_entropy: w_VD", w_VD.shape[0], vocab_size, axis)
    x_BTD = enter_parallel(x_BTD, axis, sequence)
    if tile < 1 or x_BTD.shape[:-1] != targets_BT.shape:
        raise ValueError(
            f"tiled_cross_entropy: tile={tile}, tokens {tuple(x_BTD.shape[:-1])}, targets {tuple(targets_BT.shape)}."
            " Each token must have a target, and tile must be 1 or more."
        )
    how = _How(tile, ignore_index, classes, axis, torch.is_grad_enabled())
    total: Any = _TiledCrossEntropy.apply(x_BTD.flatten(0, -2), w_VD, targets_BT.flatten(), how)
    total = collectives.summed_inside(total[0], axis)
    return total, (targets_BT != ignore_index).sum().to(total.dtype)


class _TiledCrossEntropy(torch.autograd.Function):
    """(x, w, targets) -> (total, dx, dw, empty). The backward uses the last as a function of x and w."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_ND: Tensor, w_VD: Tensor, targets_N: Tensor, how: _How) -> tuple[Tensor, ...]:
        work = wide(x_ND.dtype)
        total, dxs, dw_VD = torch.zeros((), dtype=work, device=x_ND.device), [], torch.zeros_like(w_VD, dtype=work)
        own = _locate_targets(targets_N, how)
        tiles = (x.split(how.tile) for x in (x_ND, *own))
        for x, *found in zip(*tiles, strict=True):
            targets = _Targets(*found)
            loss, p = _compute_tile(x, w_VD, targets, how)
            total = total + loss
            if how.differentiated:
                dxs.append(_input_gradient(p, w_VD.to(work), targets))
                dw_VD = torch.addmm(dw_VD, p.mT, x.to(work) * targets.counts[:, None])
            del p  # before the next tile's tensors are made
        dx_ND = torch.cat(dxs) if dxs else torch.zeros_like(x_ND, dtype=work)
        if how.differentiated and len(w_VD):
            dw_VD = dw_VD.index_add(0, own.classes, x_ND.to(work) * own.hits[:, None], alpha=-1)
        return total, dx_ND, dw_VD, total.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtypes = inputs[0].dtype, inputs[1].dtype
        ctx.mark_non_differentiable(*output[1:3])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        of_x, of_w = ctx.dtypes
        dx_ND, dw_VD, nothing = ctx.saved_tensors
        dx, dw = (_Once.apply(d * grad_outputs[0], nothing) for d in (dx_ND, dw_VD))
        return dx.to(of_x), dw.to(of_w), None, None


class _Once(torch.autograd.Function):
    """Identity without a derivative, for gradients of a loss without support for second derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, of: Tensor) -> Tensor:
        del of
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        raise NotImplementedError(
            "tiled_cross_entropy has only a first derivative, because the forward computes the gradients. For a second"
            " derivative, use cross_entropy_sum(linear(x, w), targets)."
        )


class _Targets(NamedTuple):
    """Classes of tokens among the rank's classes, counted tokens, and counted tokens with a local class."""

    classes: Tensor
    counts: Tensor
    hits: Tensor


def _locate_targets(targets_N: Tensor, how: _How) -> _Targets:
    counts_N = targets_N != how.ignore_index
    index_N, missing_N = rank_index(targets_N.masked_fill(~counts_N, 0), *how.classes)
    return _Targets(index_N, counts_N, counts_N & ~missing_N)


def _input_gradient(p_NV: Tensor, w_VD: Tensor, targets: _Targets) -> Tensor:
    """Returns (p - one-hot targets) w.

    The targets' part is subtracted from the product, as narrower than the logits.
    """
    dx_ND = (p_NV @ w_VD).masked_fill(~targets.counts[:, None], 0.0)
    return dx_ND - w_VD[targets.classes].masked_fill(~targets.hits[:, None], 0.0) if len(w_VD) else dx_ND


def _compute_tile(x_ND: Tensor, w_VD: Tensor, targets: _Targets, how: _How) -> tuple[Tensor, Tensor]:
    """Returns the sum over the tokens of a tile, and the probabilities of all classes.

    No more than two tensors of the size of the logits are alive at once: each tensor is freed once the next is made.
    """
    logits_NV = F.linear(x_ND, w_VD)
    logits_NV = logits_NV.to(wide(logits_NV.dtype))
    if collectives.axis_size(how.axis) == 1:
        log_p_NV = logits_NV.log_softmax(-1)
        del logits_NV
        loss_N = -log_p_NV.gather(-1, targets.classes[:, None])[:, 0]
    else:
        lse_N, loss_N = _reduce_over_ranks(logits_NV, targets, how)
        log_p_NV = logits_NV - lse_N[:, None]
        del logits_NV
    loss = loss_N.masked_fill(~targets.counts, 0.0).sum()
    return loss, log_p_NV.exp() if how.differentiated else loss


def _reduce_over_ranks(logits_NV: Tensor, targets: _Targets, how: _How) -> tuple[Tensor, Tensor]:
    """Returns the log sum exp and the loss of tokens, with classes cut over ranks."""
    start, stop, _ = how.classes
    if start == stop:
        hit_N = logits_NV.sum(-1)
    else:
        hit_N = logits_NV.gather(-1, targets.classes[:, None])[:, 0].masked_fill(~targets.hits, 0.0)
    lse_N = logits_NV.logsumexp(-1)
    top_N = collectives.pmax(lse_N, how.axis)
    sum_N, hit_N = collectives.psum(torch.stack([(lse_N - top_N).exp(), hit_N]), how.axis).unbind()
    lse_N = sum_N.log() + top_N
    return lse_N, lse_N - hit_N
