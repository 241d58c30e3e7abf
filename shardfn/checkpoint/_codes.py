"""Leaves in codes, in a checkpoint: the bytes of their codes, so that a restored leaf has the same ones.

A leaf [..., K] is there as uint8 [..., bytes of a row's blocks], cut along the same dims.
"""

from typing import Any

import torch

from shardfn.collectives import GlobalTensor
from shardfn.kernels import block_bytes
from shardfn.memory import Coded


def as_codes(x: Any) -> Any:
    """A leaf in codes as a leaf of their bytes, which shares its memory; other values themselves."""
    if not isinstance(x, GlobalTensor) or x.donated or not isinstance(x.held, Coded):
        return x
    shape = torch.Size((*x.shape[:-1], block_bytes(x.shape[-1], x.held.code)))
    return GlobalTensor(x.held.blocks, shape, x.spec, x.mesh, x.memory_kind, x.frozen)


def from_codes(found: Any, like: Any) -> Any:
    """The inverse: a leaf like another one, from the bytes of its codes."""
    if not isinstance(like, GlobalTensor) or like.donated or not isinstance(like.held, Coded):
        return found
    return like.with_block(like.held.with_blocks(found.held, like.memory_kind))
