"""The part of a layer's KV cache on the host that a step moves: blocks to the device, and new rows back.

Both are copies of bits, so that attention over the part has the bits of attention over the whole.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int64, Shaped
from torch import Tensor

from shardfn.memory import rows_to_device, rows_to_host

from ._limits import Limits
from ._plan import StepPlan


class HostCacheBlocks(NamedTuple):
    """Places of a step in the cache of each layer.

    Attributes:
        blocks: blocks with tokens that the step writes or reads, in any order, and block 0. int32, on the CPU.
        places: block that each token is written to, and its place in the block. int64 [2, B], on the CPU.
        here: `places` on the device.
    """

    blocks: Int[Tensor, " n"]
    places: Int64[Tensor, "2 b"]
    here: Int64[Tensor, "2 b"]

    def load_blocks(
        self, cache: Shaped[Tensor, "blocks 2 g block row"], device: torch.device
    ) -> Shaped[Tensor, "blocks 2 g block row"]:
        """Returns the cache on the device. Only the blocks of the step have content."""
        return rows_to_device(cache, self.blocks, device).result()

    def store_rows(
        self, here: Shaped[Tensor, "blocks 2 g block row"], cache: Shaped[Tensor, "blocks 2 g block row"]
    ) -> None:
        """Writes the rows of the step's tokens from the device to the cache on the host."""
        # By bytes, as dtypes of codes need not be indexable.
        new, old = (x.view(torch.uint8).permute(0, 3, 1, 2, 4) for x in (here, cache))
        rows_to_host(new[*self.here.unbind()], old, self.places.unbind()).result()


def find_host_blocks(plan: StepPlan, limits: Limits, device: torch.device) -> HostCacheBlocks:
    """Returns the places of a plan.

    Example:
        >>> from ._plan import make_padding
        >>> limits = Limits(vocab=100, context=8, blocks=5, block=4, buckets=(4, 8), running=2)
        >>> find_host_blocks(make_padding(4, limits), limits, torch.device("cpu")).blocks.tolist()
        [0, 0, 0, 0, 0, 0]
    """
    slots = np.frombuffer(plan.slots, np.int32)
    tables = np.frombuffer(plan.tables, np.int32).reshape(-1, limits.width)
    filled = -(-np.frombuffer(plan.lengths, np.int32) // limits.block)
    blocks = np.where(np.arange(limits.width) < filled[:, None], tables, 0).reshape(-1)
    places = torch.from_numpy(np.stack(np.divmod(slots, limits.block)).astype(np.int64))
    return HostCacheBlocks(torch.from_numpy(blocks), places, places.to(device))
