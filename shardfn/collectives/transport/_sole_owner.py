"""Whether a tensor shares memory with no other tensor, so that the memory may be written over."""

import sys

import torch
from torch import Tensor

from shardfn._torch import storage_use_count


def is_sole_owner(x: Tensor) -> bool:
    """Returns whether only `x`, and the base of the view `x`, hold the memory.

    The caller must have made both, for example by `x.detach()`, and must not have passed either on: references to a
    tensor itself are not counted, only tensors that share the memory. Foreign memory (of numpy, of another library, of
    several processes) always counts as shared.

    Example:
        >>> x = torch.ones(4)
        >>> is_sole_owner(x.view(2, 2)), is_sole_owner(x.view(2, 2).detach())
        (True, False)
    """
    storage = x.untyped_storage()
    if type(x) is not Tensor:  # a capture's storage without memory: the tracer may hold the storage, too
        return _count_holders(storage) <= _WITH_BASE
    most = _ALONE if x._base is None else _WITH_BASE
    return _count_holders(storage) <= most and sys.getrefcount(storage) <= _REFERENCES and storage.resizable()


def may_be_added_to(x: Tensor) -> bool:
    """Returns whether `x.add_(y)` is `x + y` in the memory of `x`, which no other tensor may share.

    See `is_sole_owner`.

    Example:
        >>> may_be_added_to(torch.ones(2, 3).t()), may_be_added_to(torch.ones(1).expand(3))
        (True, False)
    """
    # A subclass may hold other tensors, not shown by the subclass's memory.
    plain = type(x) is Tensor and x.layout is torch.strided and not (x.is_conj() or x.is_neg() or x._is_zerotensor())
    return plain and (x.is_contiguous() or _is_dense(x)) and is_sole_owner(x)


def _is_dense(x: Tensor) -> bool:
    """Returns whether elements lie without overlaps and without gaps."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _count_holders(storage: torch.UntypedStorage) -> int:
    return storage_use_count(storage._cdata)  # pyright: ignore[reportAttributeAccessIssue]


def _count_references(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    # Python has a single object for a storage: a single holder, for any number of references.
    return _count_holders(storage), sys.getrefcount(storage)


# The number of holders, this question included, depends on torch's build.
_ALONE, _REFERENCES = _count_references(torch.empty(4))
_WITH_BASE, _ = _count_references(torch.empty(4).detach().view(-1))
