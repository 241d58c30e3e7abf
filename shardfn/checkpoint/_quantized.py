"""Leaves in codes, in a checkpoint: the bytes of their codes, so that a restored leaf has the same codes.

A leaf [..., K] is stored as uint8 [..., bytes of a row's blocks], cut along the same dims.
"""

from typing import Any

import torch

from shardfn.collectives import GlobalTensor
from shardfn.kernels import block_bytes
from shardfn.state import codes_of, with_codes


def as_codes(x: Any) -> Any:
    """Returns a view of a leaf in codes as a leaf of bytes, and other values unchanged."""
    quantization = x.quantization if isinstance(x, GlobalTensor) and not x.donated else None
    if not isinstance(quantization, str):
        return x
    shape = torch.Size((*x.shape[:-1], block_bytes(x.shape[-1], quantization)))
    return GlobalTensor(codes_of(x.held), shape, x.spec, x.mesh, x.memory_kind, x.frozen)


def from_codes(found: Any, like: Any) -> Any:
    """Returns a leaf like another leaf, from the bytes of the codes. Inverts `as_codes`."""
    if not isinstance(like, GlobalTensor) or like.donated or not isinstance(like.quantization, str):
        return found
    return like.with_block(with_codes(like.held, found.held, like.memory_kind))
