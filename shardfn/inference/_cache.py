"""The KV cache on the device or the host, and the body of attention that writes and reads the cache.

Both are copies of bits, so that attention over the part has the bits of attention over the whole.

T tokens of all sequences, H query heads, G key and value heads, K head dim.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64, Shaped
from torch import Tensor

from shardfn import kernels, nn
from shardfn._torch import FakeTensorMode
from shardfn.collectives import GlobalTensor
from shardfn.core import TENSOR_KINDS, Axes, MemoryKind, Mesh, P, Sharding, is_device
from shardfn.memory import Pool, rows_to_device, rows_to_host
from shardfn.state import change, zero_block

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
        self, cache: Shaped[Tensor, "blocks parts g block row"], device: torch.device
    ) -> Shaped[Tensor, "blocks parts g block row"]:
        """Returns the cache on the device. Only the blocks of the step have content."""
        return rows_to_device(cache, self.blocks, device).result()

    def store_rows(
        self, here: Shaped[Tensor, "blocks parts g block row"], cache: Shaped[Tensor, "blocks parts g block row"]
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


DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,  # codes, with a scale for each token, key head, and key or value
    "fp8": torch.float8_e4m3fn,  # likewise
    "float64": torch.float64,  # of a model in float64
}


def check_memory(kind: MemoryKind) -> MemoryKind:
    """Returns the kind of memory of a KV cache.

    Raises:
        ValueError: a cache cannot be in this memory.
    """
    if kind not in TENSOR_KINDS:
        hint = ", a dtype: pass it as Limits(cache_dtype=)" if kind in DTYPES else ""
        raise ValueError(
            f"engine: cache must be 'device' or 'host', the memory of keys and values, got {kind!r}{hint}."
        )
    return kind


class LaneAxis(NamedTuple):
    """Parts of the ranks that run plans of disjoint sequences at the same time.

    Attributes:
        axis: mesh axis of the parts, each with a separate cache.
        stages: whether a part has some of the layers, and each plan runs on all parts, one after another. Otherwise
            each part has all layers, and plans of its own.
    """

    axis: str
    stages: bool = False


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Form of a model's KV cache: for each layer [blocks, 2, G, block, K], of keys and values.

    In latent attention a block has the latent rows of tokens, [blocks, 1, 1, block, C + R], on each rank.

    In codes, such as int8, a row has `kernels.cache_row` bytes in place of K numbers.

    Layers of cross attention come after all others. Their blocks have the keys of sources, which are written once and
    shared by all sequences of a source.

    Args:
        layers: number of layers of self-attention.
        heads: G of the whole model.
        head_dim: K.
        axis: mesh axes that cut the heads.
        cross_layers: number of layers of cross attention.
        parts: 2 of keys and values, or 1 of rows that are both.
        lanes: parts of the ranks with a separate cache each, or None. With stages, `layers` is the number of one stage,
            and a rank's cache has the blocks of all lanes, one lane after another.

    Example:
        >>> layout = CacheLayout(layers=2, heads=4, head_dim=8)
        >>> limits = Limits(vocab=100, context=64, blocks=9, block=16)
        >>> layout.shape(limits), layout.num_bytes(limits)
        (torch.Size([9, 2, 4, 16, 8]), 73728)
    """

    layers: int
    heads: int
    head_dim: int
    axis: Axes = None
    cross_layers: int = 0
    parts: int = 2
    lanes: LaneAxis | None = None

    @property
    def spec(self) -> P:
        """Returns the spec of a layer's cache."""
        outer = None if self.lanes is None else self.lanes.axis
        return P(outer, None, self.axis) if self.axis or outer else P()

    def count_blocks(self, blocks: int, mesh: Mesh) -> tuple[int, int]:
        """Returns the number of blocks of a rank's cache, and of the caches of all lanes, for a lane of `blocks`."""
        num = 1 if self.lanes is None else mesh.axis_size(self.lanes.axis)
        own = blocks * num if self.lanes is not None and self.lanes.stages else blocks
        return own, own * num

    def kept(self, memory: MemoryKind) -> P | Sharding:
        """Returns the entry of `in_specs` for the cache in a memory."""
        return self.spec if is_device(memory) else Sharding(self.spec, memory)

    def shape(self, limits: Limits) -> torch.Size:
        """Returns the shape of a layer's cache, on all ranks together."""
        return self.layer_shape(limits.blocks, limits.block, dtype=limits.cache_dtype)

    def layer_shape(self, blocks: int, block: int, *, ranks: int = 1, dtype: str = "float32") -> torch.Size:
        """Returns the shape of a layer's cache on a single rank, for example for half of the heads on 2 ranks.

        Args:
            blocks: number of blocks.
            block: tokens of a block.
            ranks: number of ranks that cut the heads.
            dtype: key of `DTYPES`.
        """
        row = kernels.cache_row(self.head_dim, DTYPES[dtype])
        return torch.Size((blocks, self.parts, self.heads // ranks, block, row))

    def num_bytes(self, limits: Limits) -> int:
        """Returns the bytes of the whole cache, on all ranks together."""
        own = self.layers * math.prod(self.shape(limits)) * DTYPES[limits.cache_dtype].itemsize
        return own + self.num_source_bytes(limits)

    def num_source_bytes(self, limits: Limits) -> int:
        """Returns the bytes of the cache of sources, on all ranks together."""
        shape = self.layer_shape(limits.source_blocks, limits.block, dtype=limits.cache_dtype)
        return self.cross_layers * math.prod(shape) * DTYPES[limits.cache_dtype].itemsize

    def init(
        self, limits: Limits, mesh: Mesh, memory: MemoryKind = "device", pool: Pool | None = None
    ) -> list[GlobalTensor]:
        """Returns an empty cache in a memory.

        Args:
            limits: limits of the engine.
            mesh: mesh of the engine.
            memory: memory of the cache.
            pool: pool of a cache on disk.
        """
        ranks, dtype = mesh.axis_size(self.axis), DTYPES[limits.cache_dtype]

        def make_layer(blocks: int) -> GlobalTensor:
            held, whole = self.count_blocks(blocks, mesh)
            shape = self.layer_shape(whole, limits.block, dtype=limits.cache_dtype)
            own = self.layer_shape(held, limits.block, ranks=ranks, dtype=limits.cache_dtype)
            return GlobalTensor(zero_block(own, dtype, memory, mesh.device, pool), shape, self.spec, mesh, memory)

        numbers = [limits.blocks] * self.layers + [limits.source_blocks] * self.cross_layers
        return [make_layer(blocks) for blocks in numbers]

    def make_bodies(self, cache: Seq[Tensor], step: Any, **kinds: Any) -> list["PagedAttention | SourceAttention"]:
        """Returns the bodies of a step's layers of attention.

        Args:
            cache: this rank's blocks of the cache.
            step: tensors of the step's plan, `StepTensors`.
            **kinds: `images` and `rule` of `PagedAttention`.
        """
        plan = step.slots, step.positions, step.sequences, step.tables, step.tree, step.host_blocks
        own: list[PagedAttention | SourceAttention] = [PagedAttention(x, *plan, **kinds) for x in cache[: self.layers]]
        return own + [SourceAttention(x, step.source, step.sequences) for x in cache[self.layers :]]

    @staticmethod
    def read_block(cache: Seq[Tensor]) -> int:
        """Returns the number of tokens of a block of a cache."""
        return cache[0].shape[3]

    def make_abstract(self, limits: Limits, mesh: Mesh) -> list[GlobalTensor]:
        """Returns a cache without data, for a capture. The mesh may be abstract."""
        ranks, dtype = mesh.axis_size(self.axis), DTYPES[limits.cache_dtype]
        held, whole = self.count_blocks(limits.blocks, mesh)
        own = self.layer_shape(held, limits.block, ranks=ranks, dtype=limits.cache_dtype)
        shape = self.layer_shape(whole, limits.block, dtype=limits.cache_dtype)

        def make_layer() -> GlobalTensor:
            return GlobalTensor(torch.empty(own, dtype=dtype, device=mesh.device), shape, self.spec, mesh)

        with FakeTensorMode():
            return [make_layer() for _ in range(self.layers)]

    def move(
        self, cache: Seq[GlobalTensor], moves: Seq[tuple[int, int]], pool: Pool | None = None
    ) -> Seq[GlobalTensor]:
        """Returns the cache with the content of slots moved to other slots, all at once. A tensor is changed in place.

        Args:
            cache: cache, which is consumed.
            moves: pairs of a slot and the slot that gets its content.
            pool: pool of a cache on disk.
        """
        if not moves:
            return cache

        def move_slots(x: Tensor) -> Tensor:
            old, new = torch.tensor(moves, device=x.device).unbind(1)
            block, by_byte = x.shape[3], x.view(torch.uint8)  # dtypes of codes need not be indexable
            by_byte[new // block, :, :, new % block] = by_byte[old // block, :, :, old % block]
            return x

        own, rest = cache[: self.layers], cache[self.layers :]
        values = [change(x.held, x.placement, pool, move_slots) for x in own]
        return [x if value is x.held else x.with_block(value) for x, value in zip(own, values, strict=True)] + [*rest]


@dataclasses.dataclass(frozen=True, eq=False)
class PagedAttention(nn.Local):
    """Attention over keys and values in blocks of a cache.

    The cache grows by the keys and values of the tokens at hand.

    Attributes:
        cache: cache of a single layer.
        slots: places where keys and values of each token are written.
        positions: positions of tokens in their sequences.
        sequences: sequence of each token.
        tables: blocks of each sequence.
        tree: where drafts may branch, the drafts that each token sees in their slots. See `kernels.ragged_attention`.
        host_blocks: part of a cache on the host. None where the cache is on the device.
        queries: tokens that have a query. None: all tokens.
        images: bits of the positions of image tokens, for multi-modal causal attention. See `kernels.ragged_attention`.
        rule: how images are read, see `ImageRule`.
    """

    cache: Shaped[Tensor, "blocks parts g block row"]
    slots: Int[Tensor, " t"]
    positions: Int[Tensor, " t"]
    sequences: Int[Tensor, " t"]
    tables: Int[Tensor, "s width"]
    tree: Bool[Tensor, "t t"] | None = None
    host_blocks: HostCacheBlocks | None = None
    queries: Int[Tensor, " r"] | None = None
    images: Int[Tensor, "s words"] | None = None
    rule: Literal["separate", "code", "causal", "whole"] = "causal"

    def with_queries(self, rows_R: Tensor) -> "PagedAttention":
        """Returns the body that takes the queries of only these tokens."""
        return dataclasses.replace(self, queries=rows_R.int())

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: nn.OnlineScores, length: int) -> Tensor:
        """Returns the attention of a single row of tokens, each over its sequence."""
        del length
        relative = [x.table_HD for x in how.mask.parts if isinstance(x, nn.Relative)]
        (mask, *more) = [x for x in how.mask.parts if not isinstance(x, nn.Relative)]
        if not isinstance(mask, nn.Window) or mask.right != 0 or more or len(relative) > 1:
            raise ValueError(
                f"a cache must have a mask that looks only back, such as Causal() or a Window, got {how.mask}."
            )
        return self.attended(
            q_BTHK,
            k_BSGK,
            v_BSGK,
            scale=how.scale,
            window=None if mask.left is None else mask.left + 1,
            softcap=how.softcap,
            slopes_H=how.slopes_H,
            sinks_H=how.sinks_H,
            # Of distances 0, 1, .. back.
            relative_HD=x[:, : x.shape[1] // 2 + 1].flip(1) if (x := next(iter(relative), None)) is not None else None,
        )

    def attended(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None = None,
        slopes_H: Tensor | None = None,
        sinks_H: Tensor | None = None,
        relative_HD: Tensor | None = None,
    ) -> Tensor:
        """Returns attention over the cache, computed by `kernels.ragged_attention`."""
        kind = torch.float64 if self.cache.dtype == torch.float64 else torch.float32
        q_THK, k_TGK, v_TGK = (x[0].to(kind) for x in (q_BTHK, k_BTGK, v_BTGK))
        with self._load_cache() as cache:
            attend = functools.partial(
                kernels.ragged_attention,
                *(q_THK, k_TGK, v_TGK),
                *(cache, self.slots, self.positions, self.sequences, self.tables),
                scale=scale,
                window=window,
                softcap=softcap,
                slopes=slopes_H,
                sinks=sinks_H,
                tree=self.tree,
                rows=self.queries,
                relative=None if relative_HD is None else relative_HD.to(kind),
                images=self.images,
            )
            branches = {"code": "text_of_all", "whole": "whole"}
            y_THK, _ = attend(branch=branches.get(self.rule, "text"))
            if self.rule in ("separate", "code"):
                y_THK = y_THK + attend(branch="images")[0]
        return y_THK[None].to(q_BTHK.dtype)

    @contextlib.contextmanager
    def _load_cache(self) -> Iterator[Tensor]:
        """Yields the cache on the device. Rows written there are copied back to a cache on the host."""
        here = self.cache if self.host_blocks is None else self.host_blocks.load_blocks(self.cache, self.slots.device)
        yield here
        if self.host_blocks is not None:
            self.host_blocks.store_rows(here, self.cache)


class SourceTables(NamedTuple):
    """Blocks of the sources of a step's sequences.

    Attributes:
        tables: blocks of each sequence's source. int32.
        last: last position of the source of each token's sequence. int32.
    """

    tables: Int[Tensor, "s width"]
    last: Int[Tensor, " t"]


@dataclasses.dataclass(frozen=True, eq=False)
class SourceAttention(nn.Local):
    """Cross attention over the keys and values of sources, in blocks of a cache that no step of tokens changes.

    Attributes:
        cache: cache of a single layer.
        source: blocks of sources.
        sequences: sequence of each token.
    """

    cache: Shaped[Tensor, "blocks parts g block row"]
    source: SourceTables
    sequences: Int[Tensor, " t"]

    def attend(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, how: nn.OnlineScores, length: int) -> Tensor:
        """Returns the attention of a single row of tokens, each over its source. Keys at hand are not read."""
        del k_BSGK, v_BSGK, length
        q_THK = q_BTHK[0].to(torch.float64 if self.cache.dtype == torch.float64 else torch.float32)
        # Each token sees all of its source, as the last token of the source would. Only block 0 is written, with zeros.
        zeros = q_THK.new_zeros(len(q_THK), self.cache.shape[2], q_THK.shape[2])
        slots, (tables, last) = torch.zeros_like(self.sequences), self.source
        y_THK, _ = kernels.ragged_attention(
            *(q_THK, zeros, zeros, self.cache, slots, last, self.sequences, tables),
            scale=how.scale,
            softcap=how.softcap,
            sinks=how.sinks_H,
        )
        return y_THK[None].to(q_BTHK.dtype)


def make_single_bodies(
    layout: CacheLayout, num: int, *, ranks: int = 1, dtype: str = "float32"
) -> list[PagedAttention]:
    """Returns the bodies of one forward of a single sequence, with a cache for this forward only.

    An engine's attention has the same bits.

    Args:
        layout: layout of the model's cache.
        num: tokens of the sequence.
        ranks: number of ranks that cut the heads.
        dtype: key of `DTYPES`.

    Example:
        >>> len(make_single_bodies(CacheLayout(layers=2, heads=4, head_dim=8), 5))
        2
    """
    at_T = torch.arange(num, dtype=torch.int32)
    plan = at_T + num, at_T, torch.zeros_like(at_T), torch.ones(1, 1, dtype=torch.int32)  # block 1 of two
    shape = layout.layer_shape(2, num, ranks=ranks, dtype=dtype)
    return [PagedAttention(torch.zeros(shape, dtype=DTYPES[dtype]), *plan) for _ in range(layout.layers)]
