"""A tensor plus the previous error, as signs and scales: the definition."""

import torch
from torch import Tensor

from shardfn.kernels._sums import root_mean, sum_squares
from shardfn.kernels.signs import _reference as signs


def sign_compress(x: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Maps flat [n], fp32 [r, c] with n <= r c to uint8 [r, c / 8], fp32 [r]. Overwrites the error."""
    r, c = error.shape
    y = torch.nn.functional.pad(x.float(), (0, r * c - x.numel())).reshape(r, c) + error
    return compress_into(y, error, whole)


def compress_into(y: Tensor, error: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Returns the codes of y, and writes y minus the values of the codes to `error` (y is allowed)."""
    r, c = y.shape
    squares = sum_squares(y.reshape(1, r * c)) if whole else sum_squares(y)
    scale = root_mean(squares, r * c if whole else c).expand(r).contiguous()
    error.copy_(y - torch.where(y >= 0, scale[:, None], -scale[:, None]))
    return signs.pack_signs(y), scale
