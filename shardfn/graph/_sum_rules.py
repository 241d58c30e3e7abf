"""Sharding rules of reductions, softmax and losses, along the cut dim too.

The cross entropy over cut classes is Megatron's (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053): a maximum, a
sum and the target's logit travel, a number a row each. No rank has whole logits.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._einsum_rules import Dims, Labels, list_strategies
from ._forms import PARTIAL, VARYING, WHOLE, Form, Operand, OpUse, Ranks, Run, Strategy, whole


def _label_reduction(use: OpUse) -> tuple[Dims, Dims, list[int]]:
    """Returns labels of the operand and of the result, and the reduced dims."""
    x, out = use.operands[0], use.outs[0]
    named = use.args[1] if len(use.args) > 1 else None
    if isinstance(named, int) and not isinstance(named, bool):
        named = [named]
    dims = [d % max(x.ndim, 1) for d in named] if isinstance(named, list | tuple) and named else list(range(x.ndim))
    kept = out.ndim == x.ndim
    result: Dims = tuple(None if i in dims else i for i in range(x.ndim) if kept or i not in dims)
    return tuple(range(x.ndim)), result, dims


def label_reduced_sum(use: OpUse) -> Labels:
    """Labels `sum`: partial if a summed dim is cut."""
    own, result, _ = _label_reduction(use)
    return Labels((own,), (result,), sums=True, together=(0,))


def label_mean(use: OpUse) -> Labels:
    """Labels `mean`: the sum of this rank's part, divided by the number of all elements."""
    own, result, dims = _label_reduction(use)
    count = math.prod(use.operands[0].shape[d] for d in dims)

    def make_run(outs: tuple[Form, ...]) -> Run | None:
        del outs

        def mean(ranks: Ranks, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
            del ranks
            keep = bool(args[2]) if len(args) > 2 else kwargs.get("keepdim", False)
            local = math.prod(args[0].shape[d] for d in dims)
            if not local < count:
                return args[0].mean(dims, keep, dtype=kwargs.get("dtype"))
            # Not the sum: 16 bits may not hold the sum.
            part = args[0].mean if local else args[0].sum
            return part(dims, keep, dtype=kwargs.get("dtype")) * (local / count)

        return mean

    return Labels((own,), (result,), sums=True, together=(0,), run=make_run)


def label_reduction(use: OpUse) -> Labels:
    """Labels other reductions, for example `amax`: the dims that stay."""
    _, result, dims = _label_reduction(use)
    x = use.operands[0]
    own: Dims = tuple(None if i in dims else i for i in range(x.ndim))
    return Labels((own,), tuple(result for _ in use.outs))


def label_norm(use: OpUse) -> Labels:
    """Labels layer and RMS norm, `x, shape, weight, bias` -> y and statistics: leading dims."""
    x, num = use.operands[0], len(use.args[1])
    lead = tuple(range(x.ndim - num))
    own: Dims = (*lead, *(None,) * num)
    return Labels((own, *((None,) * s.ndim for s in use.operands[1:])), (own,) * len(use.outs))


def shard_softmax(use: OpUse) -> list[Strategy]:
    """Returns the strategies of `_softmax` and `_log_softmax`.

    A dim other than the softmax dim may be cut. If the softmax dim is cut, ranks exchange a maximum and a sum.
    """
    x = use.operands[0]
    dim = use.args[1] % max(x.ndim, 1)
    own: Dims = tuple(None if i == dim else i for i in range(x.ndim))
    out = [whole(use), *list_strategies(use, Labels((own,), (own,)))]
    if x.ndim and x.shape[dim] > 1 and not use.args[2]:
        form = use.forms[0]
        here = form if form.kind == "cut" and form.dim == dim else use.cut(dim, x.shape[dim])
        rows = math.prod(x.shape) // x.shape[dim] * x.itemsize
        sent = 6 * rows * (use.num - 1) / use.num  # forward a maximum and a sum, backward a sum
        run = _softmax_over_ranks(dim, logarithm="log" in use.target.__name__)
        out.append(Strategy((here,), (here,), run, sent, "pmax and psum of a number a row"))
    return out


def _softmax_over_ranks(dim: int, *, logarithm: bool) -> Run:
    def run_softmax(ranks: Ranks, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        del kwargs
        x = _to_wide(args[0])
        held = x.detach()
        none = held.new_full([1 if i == dim else n for i, n in enumerate(held.shape)], -math.inf)
        top = ranks.pmax(held.amax(dim, keepdim=True) if held.shape[dim] else none)
        # A row of only minus infinities gives NaN, as on a single device.
        shifted = x - top
        powers = shifted.exp()
        total = ranks.pvary(ranks.psum(powers.sum(dim, keepdim=True)))
        return (shifted - total.log() if logarithm else powers / total).to(args[0].dtype)

    return run_softmax


def shard_nll(use: OpUse) -> list[Strategy]:
    """Returns the strategies of `nll_loss_forward`: log probabilities [N, V], targets [N] -> loss, total weight."""
    x = use.operands[0]
    out = [whole(use)]
    if len(use.operands) != 2 or x.ndim != 2 or len(use.outs) != 2:
        return out
    reduction, form = use.args[3], use.forms[0]
    multiple = form.multiple if form.kind == "cut" else 1
    if reduction == 2:
        out += list_strategies(use, Labels((("n", None), ("n",)), ((), ()), sums=True))
    elif reduction == 1 and x.shape[0] > 1:
        at = form.multiple if form.kind == "cut" and form.dim == 0 else 1
        rows = use.cut(0, x.shape[0], at), use.cut(0, x.shape[0], at)
        out.append(Strategy(rows, (PARTIAL, WHOLE), _mean_of_rows, 2 * x.itemsize, "psum of the number of targets"))
    if x.shape[1] > 1:
        classes = use.cut(1, x.shape[1], multiple if form.dim == 1 else 1)
        out.append(Strategy((classes, VARYING), (PARTIAL, WHOLE), _nll_of_own(x, classes.multiple)))
    return out


def _mean_of_rows(ranks: Ranks, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    del kwargs
    x, target, weight, _, ignored = args
    total, count = torch.ops.aten.nll_loss_forward.default(_to_wide(x), target, weight, 2, ignored)
    count = ranks.psum(count.detach())
    return (total / count).to(x.dtype), count.to(x.dtype)


def _to_wide(x: Tensor) -> Tensor:
    """Returns the value in a dtype that holds sums, as the kernels of the whole do."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _nll_of_own(x: Operand, multiple: int) -> Run:
    def run_nll(ranks: Ranks, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        del kwargs
        logs, target, _, reduction, ignored = args
        start, stop = ranks.bounds(x.shape[1], multiple)
        counted = target != ignored
        inside = (~counted | ((target >= 0) & (target < x.shape[1]))).all()
        torch.ops.shardfn.check(inside, True, f"a target is not in [0, {x.shape[1]}), and is not ignored ({ignored})")
        own = counted & (target >= start) & (target < stop)
        count = counted.sum().to(_to_wide(logs).dtype)
        if stop == start:
            each = logs.sum() * logs.new_zeros(target.shape)
        else:
            at = (target - start).clamp(0, stop - start - 1)
            each = -logs.gather(1, at.unsqueeze(1)).squeeze(1).masked_fill(~own, 0)
        if reduction == 0:
            return each, count.new_zeros(())
        total = _to_wide(each).sum()
        return (total / count if reduction == 1 else total).to(logs.dtype), count.to(logs.dtype)

    return run_nll


def shard_attention(use: OpUse) -> list[Strategy]:
    """Returns the strategies of attention, `(q [B, H, T, K], k, v [B, G, S, K], ...)`.

    Samples, or heads. G divides H.
    """
    q, k = use.operands[:2]
    samples = ("b", None, None, None)
    mask = [s for s in use.operands[3:]]
    into = [_mask_dims(s, q, 0, "b") for s in mask]
    labels = Labels((samples,) * 3 + tuple(into), tuple(("b", *(None,) * (o.ndim - 1)) for o in use.outs))
    out = [whole(use), *(s._replace(run=_attend_local(use.target)) for s in list_strategies(use, labels))]
    times = q.shape[1] // k.shape[1]
    for multiple in sorted(
        {1, *(f.multiple // r for f, r in zip(use.forms, (times, 1, 1), strict=False) if f.dim == 1)}
    ):
        if k.shape[1] < 2 or not multiple or k.shape[1] % multiple:
            continue
        heads, groups = use.cut(1, q.shape[1], multiple * times), use.cut(1, k.shape[1], multiple)
        masks = tuple(heads if s.ndim == 4 and s.shape[1] == q.shape[1] else VARYING for s in mask)
        outs = tuple(use.cut(1, o.shape[1], multiple * times) for o in use.outs)
        out.append(Strategy((heads, groups, groups, *masks), outs, _attend_local(use.target)))
    return out


def _mask_dims(s: Operand, q: Operand, dim: int, name: str) -> Dims:
    at = dim - (q.ndim - s.ndim)
    return tuple(name if i == at and size == q.shape[dim] else None for i, size in enumerate(s.shape))


def _attend_local(target: Any) -> Run:
    def run_attention(ranks: Ranks, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        del ranks
        q, k, v = args[:3]
        if q.numel():
            return target(*args, **kwargs)
        # Kernels do not expect a rank without heads, or without samples.
        if q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2)
        return scores @ v, scores.sum(-1)

    return run_attention
