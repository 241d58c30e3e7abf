"""Batch normalisation over the rows of all ranks, as on one device."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from shardfn.collectives import axis_size, psum, pvary
from shardfn.core import Axes


def global_batch_norm(axis: Axes) -> Callable[..., Tensor]:
    """Returns the replacement of `batch_norm` where ranks along `axis` hold parts of the batch.

    Mean and variance are over all rows, for any number of rows per rank, for example 3, 2 and 2. Gradients of mean and
    variance are summed over ranks, since every rank's output depends on both. Sums are taken in float32 at least.
    Running statistics keep their dtype.
    """
    return functools.partial(_batch_norm, axis)


def _batch_norm(
    axis: Axes,
    func: Callable[..., Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    count = input.numel() // max(1, input.shape[1])
    if axis_size(axis) == 1 and count < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    over = [d for d in range(x.ndim) if d != 1]
    shape = [-1 if d == 1 else 1 for d in range(x.ndim)]
    num = psum(torch.tensor(float(count), dtype=x.dtype, device=x.device), axis)
    mean = psum(x.sum(over), axis) / num
    centred = x - pvary(mean, axis).view(shape)
    var = psum(centred.square().sum(over), axis) / num
    _update_running(running_mean, running_var, mean.detach(), (var * (num / (num - 1).clamp(min=1))).detach(), momentum)
    out = centred * torch.rsqrt(pvary(var, axis) + eps).view(shape)
    for scale, op in ((weight, torch.mul), (bias, torch.add)):
        out = out if scale is None else op(out, scale.to(x.dtype).view(shape))
    return out.to(input.dtype)


def _update_running(
    mean: Tensor | None, var: Tensor | None, new_mean: Tensor, new_var: Tensor, momentum: float
) -> None:
    """Updates the running statistics, which are buffers of this call."""
    for old, new in ((mean, new_mean), (var, new_var)):
        if old is not None:
            old.mul_(1 - momentum).add_(momentum * new.to(old.dtype))
