"""Leaves in codes, in a checkpoint: the bytes of their codes, so that a restored leaf has the same ones.

A leaf [..., K] is there as uint8 [..., bytes of a row's blocks], cut along the same dims.
"""

from typing import Any

import torch

from shardfn.collectives import GlobalTensor
from shardfn.kernels import block_bytes
from shardfn.state import codes_of, with_codes


def as_codes(x: Any) -> Any:
    """A leaf in codes as a leaf of their bytes, which shares its memory; other values themselves."""
    code = x.code if isinstance(x, GlobalTensor) and not x.donated else None
    if not isinstance(code, str):
        return x
    shape = torch.Size((*x.shape[:-1], block_bytes(x.shape[-1], code)))
    return GlobalTensor(codes_of(x.held), shape, x.spec, x.mesh, x.memory_kind, x.frozen)


def from_codes(found: Any, like: Any) -> Any:
    """The inverse: a leaf like another one, from the bytes of its codes."""
    if not isinstance(like, GlobalTensor) or like.donated or not isinstance(like.code, str):
        return found
    return like.with_block(with_codes(like.held, found.held, like.memory_kind))
