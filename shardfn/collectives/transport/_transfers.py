"""Single steps of a channel's transfers by backend, and the local sum."""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn._torch import all_gather_single


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
