"""A moving average in place."""

import torch
from jaxtyping import Float32
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_shape, check_written
from shardfn.kernels._dispatch import implementation
from shardfn.kernels._library import define


def moving_average_(m: Float32[Tensor, "*shape"], x: Float32[Tensor, "*shape"], b: float) -> None:
    """Computes `m = b m + (1 - b) x` in a single pass over memory, each operation rounded once.

    Args:
        m: the average, contiguous, overwritten.
        x: the new value.
        b: the rate of decay.

    Raises:
        TypeError: for other dtypes.
        ValueError: if shapes differ, or m is not contiguous.

    Example:
        >>> m = torch.tensor([1.0, 2.0])
        >>> moving_average_(m, torch.tensor([3.0, 2.0]), 0.5)
        >>> m
        tensor([2., 2.])
    """
    check_dtype("m", m, torch.float32)
    check_dtype("x", x, torch.float32)
    check_shape("x", x, tuple(m.shape), "that of m")
    check_written("m", m)
    torch.ops.shardfn_kernels.moving_average_(m, x, b)


def _moving_average_(m: Tensor, x: Tensor, b: float) -> None:
    implementation("moving_average", "moving_average", m.device)(m.view(-1), x.contiguous().view(-1), b)


define("moving_average_(Tensor(a!) m, Tensor x, float b) -> ()", _moving_average_, lambda *args: None)
