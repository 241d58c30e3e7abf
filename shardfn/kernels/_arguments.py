"""Checks of the kernels' arguments."""

import torch
from torch import Tensor


def check_floating(name: str, x: Tensor) -> None:
    """Raises TypeError unless the tensor has floating-point numbers."""
    if not x.is_floating_point():
        raise TypeError(f"{name} must be of floating-point numbers, got {x.dtype}. Convert {name}")


def check_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raises TypeError unless the tensor has this dtype."""
    if x.dtype != dtype:
        raise TypeError(f"{name} is {x.dtype}, must be {dtype}")


def check_shape(name: str, x: Tensor, shape: tuple[int, ...], why: str) -> None:
    """Raises ValueError unless the tensor has this shape."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} is of shape {tuple(x.shape)}, must be {shape}: {why}")


def check_written(name: str, x: Tensor) -> None:
    """Raises ValueError unless an output tensor is contiguous."""
    if not x.is_contiguous():
        raise ValueError(f"{name} is written in place and must be contiguous, has strides {x.stride()}: copy it first")


def check_bytes(name: str, c: int) -> None:
    """Raises ValueError unless 8 divides the length of a row, so that the row's signs fill whole bytes."""
    if c % 8:
        raise ValueError(f"{name} has rows of {c} elements, no multiple of 8: pad them, 8 signs make a byte")


def check_block(bits: int, block: int) -> None:
    """Raises ValueError for numbers of bits, or block sizes, without support by the quantizers."""
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if block < 1 or (bits == 4 and block % 2):
        raise ValueError(f"block must be at least 1, with 4 bits an even number, got {block}")
