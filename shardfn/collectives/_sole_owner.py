"""Whether anybody else can see a tensor's memory, so that it may be written over."""

import torch
from torch import Tensor


def is_sole_owner(flat: Tensor) -> bool:
    """Whether a fresh `x.view(-1)`, and the `x` it keeps alive, are all that hold their memory."""
    return _holders(flat) <= _SOLE


def _holders(flat: Tensor) -> int:
    storage = flat.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore[reportAttributeAccessIssue]


def _count_sole() -> int:
    view = torch.empty(4).detach().view(-1)
    return _holders(view)


# How many holders that makes depends on torch's build.
_SOLE = _count_sole()
