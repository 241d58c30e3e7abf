"""Attention over the tiles that a mask leaves, by `kernels.block_sparse_attention`.

B samples, T queries, S keys, H query heads, G key heads, K head dim.
Child et al., Generating Long Sequences with Sparse Transformers, 2019, https://arxiv.org/abs/1904.10509
"""

import dataclasses
import functools
import operator
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardfn.kernels import Given, Tiles, block_sparse_attention, block_sparse_attention_backward

from ._given import together
from ._local import Local
from ._masks import Full, Mask
from ._online import OnlineScores, factor, wide
from ._tiles import tiles_of


@dataclasses.dataclass(frozen=True)
class BlockSparse(Local):
    """The tiles in which the mask counts a pair, each head's for itself, by one kernel: time and memory of those alone.

    It takes any mask of positions, and of data `Segments`, `Keys`, `Added` and `Relative`.

    Attributes:
        block: queries, and keys, of a tile; None is that of the mask's layout, and 64 where it has none.
    """

    block: int | None = None

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ValueError(f"BlockSparse(block={self.block}): a tile has 1 or more tokens.")

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: OnlineScores, length: int) -> Tensor:
        """Attention of this rank's queries over all keys."""
        del length
        q, k, v = narrowed(q_BTHK, k_BSGK, v_BSGK)
        refuse_gradients(how)
        (B, T), S = q.shape[:2], k.shape[1]
        known = functools.reduce(operator.and_, [m for m in how.mask.parts if not m.tensors], Full())
        block = self.block or known.tile or 64
        tiles = tiles_of(known, T, S, block).on(q.device)
        given = _given(how, [m for m in how.mask.parts if m.tensors], (B, T, S), q)
        return _BlockSparse.apply(q, k, v, *tiles, *given, block, factor(how, q))[0]


def narrowed(*qkv: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the dtype of autocast, once, as forward and backward are apart."""
    kind = qkv[0].device.type
    if not torch.is_autocast_enabled(kind) or qkv[0].dtype == torch.float64:
        return qkv
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in qkv)


def refuse_gradients(how: OnlineScores) -> None:
    """Raises where data beside queries, keys and values would need a gradient.

    Raises:
        ValueError: it does.
    """
    if how.slopes_H is not None and how.slopes_H.requires_grad:
        raise ValueError("attention: slopes_H requires a gradient, which only Dense() takes; pass slopes_H.detach().")
    wrong = [type(m).__name__ for m in how.mask.parts if any(t.requires_grad for t in m.tensors)]
    if wrong:
        raise ValueError(
            f"attention: data of the masks {', '.join(wrong)} require a gradient, which only Dense() gives; detach"
            " them, or take it."
        )


def _given(how: OnlineScores, masks: list[Mask], sizes: tuple[int, int, int], q: Tensor) -> Given:
    B, T, S = sizes
    found = together(m.given(T, S) for m in masks)
    if how.slopes_H is not None:
        distance = torch.arange(1 - T, S, device=q.device).abs()
        table = -how.slopes_H[:, None] * distance
        found = found._replace(table=table if found.table is None else found.table + table)
    numbers = (None if x is None else x.to(q.device, torch.int64).expand(B, -1) for x in found[:2])
    floats = (None if x is None else x.to(q.device, wide(q.dtype)) for x in found[2:])
    return Given(*numbers, *floats)


class _BlockSparse(torch.autograd.Function):
    """(q, k, v, tiles, given, block, scale) -> (y, lse)."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
        tiles, given, options = _told(args)
        return block_sparse_attention(q, k, v, tiles, given, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3:-2])
        ctx.options = inputs[-2:]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: remat makes them again at each look
        grads = _Backward.apply(grad_outputs[0], *saved, *ctx.options)
        return (*grads, *(None for _ in range(len(saved) - 3)))

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> NoReturn:
        _refuse("forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _by_sample(_BlockSparse, 3, info, in_dims, args)


class _Backward(torch.autograd.Function):
    """(dy, q, k, v, y, lse, tiles, given, block, scale) -> (dq, dk, dv)."""

    @staticmethod
    def forward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *args: Any) -> Any:
        tiles, given, options = _told(args)
        return block_sparse_attention_backward(dy, (q, k, v), y, lse, tiles, given, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        _refuse("second derivative")

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> NoReturn:
        _refuse("forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _by_sample(_Backward, 6, info, in_dims, args)


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"BlockSparse() has no {what}; Blockwise() computes the same and has.")


def _told(args: tuple[Any, ...]) -> tuple[Tiles, Given, dict[str, Any]]:
    return Tiles(*args[:4]), Given(*args[4:8]), {"block": args[8], "scale": args[9]}


def _by_sample(function: Any, num: int, info: Any, in_dims: Any, args: Any) -> Any:
    """What is mapped is samples: of the first `num` tensors, and of what is given for each sample."""
    V, B = info.batch_size, args[1].shape[0 if in_dims[1] is None else int(in_dims[1] == 0)]

    def folded(x: Tensor, dim: int | None) -> Tensor:
        x = x.expand(V, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.expand(V, B, *x.shape[2:]).flatten(0, 1)

    out: list[Any] = []
    for at, (x, dim) in enumerate(zip(args, in_dims, strict=True)):
        part = at - num
        by_sample = part < 0 or (x is not None and 4 <= part < 7 and (dim is not None or x.shape[0] > 1 or part < 6))
        if dim is not None and not by_sample:
            _refuse("vmap over tables of distances")
        out.append(folded(x, dim) if by_sample and x is not None else x)
    ys = function.apply(*out)
    return tuple(y.unflatten(0, (V, B)) for y in ys), (0,) * len(ys)
