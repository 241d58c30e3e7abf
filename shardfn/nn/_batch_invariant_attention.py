"""Batch-invariant attention: rows have the same bits next to any other rows, by `kernels.ragged_attention`.

B samples, T tokens, H query heads, G key heads, K head dim.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from shardfn import kernels
from shardfn.core import raise_all, save_tensors

from ._attention_backends import Local
from ._masks import Mask, Window
from ._multimodal import Modality
from ._online import OnlineScores, refuse_gradients
from ._rectangles import QKV, TORCH_TILE, kernel_tile
from ._ring import OnlineBackward, tangent
from ._ring_rounds import RingRounds, make_rounds

# Places of a block of the cache for the keys and values of a call.
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class BatchInvariant(Local):
    """Batch-invariant attention: the bits of a token depend only on the visible tokens, as in batch-invariant layers.

    The mask is `Causal()` or `Window(left)`, also inside `MultimodalCausal`. Queries, keys and values are float32, or
    all float64. Derivatives are the derivatives of `Blockwise()`, without batch-invariant rows.
    """

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Returns the attention of the rank's queries over all keys."""
        refuse_gradients(how)
        raise_all(ValueError, "attention by BatchInvariant():", find_mask_problems(how.mask))
        where = (((0, length),),)
        plain = how._replace(slopes_H=None, sinks_H=None)
        along = make_rounds(None, where, length, plain, TORCH_TILE, kernel_tile(how, q_BTHK.device, TORCH_TILE))
        return _ExactAttention.apply(q_BTHK, k_BSGK, v_BSGK, how.sinks_H, how.slopes_H, along)[0]  # pyright: ignore[reportReturnType]


def find_mask_problems(mask: Mask) -> list[str]:
    """Returns the parts of a mask unknown to `BatchInvariant`."""
    told = "the mask must be Causal() or Window(left). Use another mask, or another body, such as Dense()"
    return [
        f"{m}: {told}" for m in mask.parts if not (isinstance(m, Modality) or (isinstance(m, Window) and m.looks_back))
    ]


class _ExactAttention(torch.autograd.Function):
    """Maps (q, k, v, sinks, slopes, course) to y and lse. y has the derivatives of attention in tiles."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, sinks_H: Any, slopes_H: Any, along: RingRounds) -> Any:
        lefts = [m.left for m in along.how.mask.parts if isinstance(m, Window) and m.left is not None]
        window = min(lefts) + 1 if lefts else None
        return _attend_sequences((q, k, v), along.how, window, slopes_H, sinks_H)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.along = inputs
        tensors += output
        ctx.mark_non_differentiable(output[1])
        ctx.there = [x is not None for x in tensors]
        kept = [x for x in tensors if x is not None]
        save_tensors(ctx, *kept)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        saved, _, sinks_H, slopes_H = _saved_tensors(ctx)
        grads: Any = OnlineBackward.apply(
            grad_outputs[0], *saved, sinks_H, slopes_H, ctx.along, *ctx.along.how.mask.tensors
        )
        return (*grads, *([None] if sinks_H is None else []), None, None)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        saved, how, sinks_H, _ = _saved_tensors(ctx)
        return tangent(ctx.along, how, saved, sinks_H, grad_inputs), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Joins a mapped dim to the samples. Mapped slopes or sinks get a call each."""
        if any(dim is not None for dim in in_dims[3:]):
            pairs = list(zip(args, in_dims, strict=True))
            each: Any = ((x if d is None else x.select(d, i) for x, d in pairs) for i in range(info.batch_size))
            return tuple(map(torch.stack, zip(*(_ExactAttention.apply(*one) for one in each), strict=True))), (0, 0)

        def fold_samples(x: Tensor, dim: int | None) -> Tensor:
            return (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

        qkv = (fold_samples(x, dim) for x, dim in zip(args[:3], in_dims[:3], strict=True))
        found: Any = _ExactAttention.apply(*qkv, *args[3:])
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in found), (0, 0)


def _saved_tensors(ctx: Any) -> Any:
    """Returns (q, k, v, y, lse), the scores, sinks and slopes. y and lse are not functions of q, k and v here."""
    found = iter(ctx.saved_tensors)
    given: list[Any] = [next(found) if there else None for there in ctx.there]
    q, k, v, sinks_H, slopes_H, y, lse = given
    return (q, k, v, y.detach(), lse.detach()), ctx.along.how._replace(slopes_H=slopes_H), sinks_H, slopes_H


def _attend_sequences(
    qkv: QKV, how: OnlineScores, window: int | None, slopes_H: Tensor | None, sinks_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns attention of whole sequences, each a sequence of a KV cache for only the call, and lse [B, H, T]."""
    q, k, v = qkv
    (B, T, H, K), G = q.shape, k.shape[2]
    if not q.numel():
        return torch.zeros_like(q), q.new_full((B, H, T), -torch.inf)
    blocks = -(-T // BLOCK)
    kinds = [m for m in how.mask.parts if isinstance(m, Modality)]
    images: Any = {"images": kernels.pack_bits(kinds[0].images_BT), "branch": kinds[0].branch} if kinds else {}
    count = {"dtype": torch.int32, "device": q.device}
    at = torch.arange(B * T, **count)
    sequences, positions = at // T, at % T
    cache = q.new_zeros(B * blocks, 2, G, BLOCK, K)
    y, lse = kernels.ragged_attention(
        q.flatten(0, 1).contiguous(),
        k.flatten(0, 1).contiguous(),
        v.flatten(0, 1).contiguous(),
        cache,
        sequences * (blocks * BLOCK) + positions,
        positions,
        sequences,
        torch.arange(B * blocks, **count).view(B, blocks),
        scale=K**-0.5 if how.scale is None else how.scale,
        window=window,
        softcap=how.softcap,
        slopes=slopes_H,
        sinks=sinks_H,
        **images,
    )
    return y.view(B, T, H, K), lse.view(B, T, H).transpose(1, 2).contiguous()
