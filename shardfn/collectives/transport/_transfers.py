"""Single steps of a channel's transfers by backend, and the local sum.

`is_sole_owner` decides whether a tensor shares memory with no other tensor, so that the memory may be written over.
"""

import itertools
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn._torch import all_gather_single, storage_use_count


def as_raw(x: Tensor) -> Tensor:
    """Returns a tensor's bytes, 1-D."""
    return x.view(-1).view(torch.uint8)


def ordered_sum(rows: list[Tensor], out: Tensor | None) -> Tensor:
    """Returns the sum of rows, in order, in `out` if given. 16-bit floats are summed in 32 bits, rounded once."""
    if rows[0].dtype in (torch.bfloat16, torch.float16):
        total = rows[0].float()
        for row in rows[1:]:
            total.add_(row)
        return total.to(rows[0].dtype) if out is None else out.copy_(total)
    if len(rows) == 2:
        return torch.add(rows[0], rows[1], out=out)
    total = torch.add(rows[0], rows[1])
    for row in rows[2:]:
        total.add_(row)
    return total if out is None else out.copy_(total)


def broadcast_from(rank: int) -> dist.BroadcastOptions:
    """Returns the options of an asynchronous broadcast."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = rank, 0, True
    return options


def native_all_gather(blocks: Sequence[Tensor], mine: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Gathers every rank's block into place, by the backend's native operation."""
    equal = len({b.numel() for b in blocks}) == 1
    adjacent = all(a.data_ptr() + a.numel() * a.element_size() == b.data_ptr() for a, b in itertools.pairwise(blocks))
    if equal and adjacent:
        out = blocks[0].as_strided((len(blocks) * mine.numel(),), (1,))
        work = all_gather_single(out, mine.view(-1), group=group, async_op=True)
    else:
        work = dist.all_gather(list(blocks), mine, group=group, async_op=True)
    assert work is not None
    return work


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
