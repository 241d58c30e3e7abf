"""A plan as tensors, of sizes that follow only from its bucket."""

import itertools
import operator
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int
from torch import Tensor

from ._cache import HostCacheBlocks, SourceTables, find_host_blocks
from ._image_rows import ImageRows, ImageRule
from ._limits import Limits
from ._low_rank import LowRank
from ._options import Option
from ._plan import StepPlan
from ._requests import DRAW, MOST_BIASES, PENALTIES, Sampling
from ._state import SourceFill


class RowBiases(NamedTuple):
    """Numbers that are added to logits. Rows with fewer biases add 0 to the logit of token 0.

    Attributes:
        tokens: int64 [R, most].
        values: float32 [R, most].
    """

    tokens: Int[Tensor, "r most"]
    values: Float32[Tensor, "r most"]


def make_image_padding(bucket: int, limits: Limits, rule: ImageRule | None, width: int) -> ImageRows:
    """Returns the tensors of a step without an image, for features of a width."""
    words = -(-limits.width * limits.block // 32)
    return ImageRows(
        torch.zeros(min(bucket, limits.running) + 1, words, dtype=torch.int32),
        torch.zeros(bucket, dtype=torch.bool),
        torch.zeros(bucket, width),
        torch.zeros(3, bucket, dtype=torch.int32) if rule is not None and rule.grid else None,
    )


class StepTensors(NamedTuple):
    """Tensors of a plan: B tokens, S sequences, R wanted rows. `StepPlan` documents attributes of the same name.

    Attributes:
        tokens: int32 [B].
        positions: int32 [B].
        sequences: int32 [B].
        slots: int32 [B].
        tables: int32 [S, width].
        rows: int32 [R].
        keys: int64 [R].
        places: int64 [R].
        targets: int64 [R].
        draw: arguments of `kernels.draw` by name, [R] each, as the options of `Sampling` have them.
        penalties: arguments of `kernels.penalise` by name, [R] each, with `history`, int32 [R, context], tokens before
            a row's place, then -1, and `prompts`, int32 [R], number of prompt tokens among them. None where no row has
            an extended sampling.
        biases: biases where a row has an extended sampling, else None.
        allowed: bool [R, vocab] where a row has a grammar, else None. The tokens that a row may draw.
        low: adapters where a row has an adapter, else None.
        tree: bool [B, B] in an engine that has drafts, else None. See `kernels.ragged_attention`.
        host_blocks: blocks of the step where the cache is on the host, else None.
        source: blocks of the sources of an encoder-decoder model, else None.
        images: image tokens of the step in an engine of a model with images, or embeddings of prompts, else None.
    """

    tokens: Int[Tensor, " b"]
    positions: Int[Tensor, " b"]
    sequences: Int[Tensor, " b"]
    slots: Int[Tensor, " b"]
    tables: Int[Tensor, "s width"]
    rows: Int[Tensor, " r"]
    keys: Int[Tensor, " r"]
    places: Int[Tensor, " r"]
    targets: Int[Tensor, " r"]
    draw: dict[str, Tensor]
    penalties: dict[str, Tensor] | None = None
    biases: RowBiases | None = None
    allowed: Bool[Tensor, "r vocab"] | None = None
    low: LowRank | None = None
    tree: Bool[Tensor, "b b"] | None = None
    host_blocks: HostCacheBlocks | None = None
    source: SourceTables | None = None
    images: ImageRows | None = None


_PlanTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class StepBuffers:
    """Memory of the tensors of an engine's steps, by bucket: a step writes over the tensors of the step before.

    Options of rows are kept as well, since most steps have the rows of the step before. Tensors elsewhere than on a CPU
    are copies.

    Args:
        limits: sizes.
        device: device of the tensors.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self._limits, self._device = limits, device
        self._made: dict[int, tuple[bytearray, bytearray, list[np.ndarray], _PlanTensors]] = {}
        self._options: tuple[tuple[Sampling, ...], int, dict[str, Tensor]] = (), 0, {}

    def write_plan(self, plan: StepPlan) -> _PlanTensors:
        """Returns the first tensors of `StepTensors`, up to `targets`, with the numbers of a plan."""
        if plan.bucket not in self._made:
            self._made[plan.bucket] = self._make_buffers(plan)
        ints, keys, wide, tensors = self._made[plan.bucket]
        # A size that differs from the bucket's is an error here, as the tensors hold the memory.
        ints[:] = b"".join(_list_ints(plan))
        keys[:] = plan.keys
        for buffer, own in zip(wide, (plan.places, plan.targets), strict=True):
            buffer[:] = own
        if self._device.type == "cpu":
            return tensors
        moved: Any = tuple([x.to(self._device) for x in tensors])
        return moved

    def make_options(self, plan: StepPlan) -> dict[str, Tensor]:
        """Returns the arguments of `kernels.draw` for the rows of a plan, with padding."""
        rows, num = plan.sampling, len(plan.rows)
        before, size, made = self._options
        if size != num or len(rows) != len(before) or not all(map(operator.is_, rows, before)):
            made = _make_columns(DRAW, rows, num, self._limits, self._device)
            self._options = rows, num, made
        return made

    def _make_buffers(self, plan: StepPlan) -> tuple[bytearray, bytearray, list[np.ndarray], _PlanTensors]:
        """Returns the memory of int32 numbers, keys, places and targets, and the tensors that share the memory."""
        arrays, num = _list_ints(plan), len(plan.rows)
        ints, keys = bytearray(sum([4 * len(a) for a in arrays])), bytearray(8 * num)
        ends = [*itertools.accumulate([4 * len(a) for a in arrays], initial=0)]
        # Each tensor has a storage of its own: tensors that share a storage would count as one value.
        tokens, positions, sequences, slots, tables, rows = (
            torch.frombuffer(ints, dtype=torch.int32, offset=start, count=len(a))
            for a, start in zip(arrays, ends, strict=False)
        )
        wide = [np.zeros(num, np.int64) for _ in range(2)]
        keys_R, places, targets = torch.frombuffer(keys, dtype=torch.int64), *map(torch.from_numpy, wide)
        tables = tables.view(-1, self._limits.width)
        return ints, keys, wide, (tokens, positions, sequences, slots, tables, rows, keys_R, places, targets)


def _list_ints(plan: StepPlan) -> tuple[array, ...]:
    return plan.tokens, plan.positions, plan.sequences, plan.slots, plan.tables, plan.rows


def make_tensors(
    plan: StepPlan,
    limits: Limits,
    device: torch.device,
    allowed: Bool[np.ndarray, "r vocab"] | None = None,
    low: LowRank | None = None,
    *,
    host_cache: bool = False,
    buffers: StepBuffers | None = None,
    images: ImageRows | None = None,
) -> StepTensors:
    """Returns the tensors of a plan, for a cache on the device or on the host.

    With `buffers` the tensors are valid until the buffers' next step.
    """
    buffers = StepBuffers(limits, device) if buffers is None else buffers
    penalties = biases = None
    num_rows = len(plan.rows)
    if plan.histories is not None and plan.prompts is not None:
        history, prompts = (_make_tensor(a, torch.int32, device) for a in (plan.histories, plan.prompts))
        penalties = {"history": history.view(-1, limits.context), "prompts": prompts}
        penalties |= _make_columns(PENALTIES, plan.sampling, num_rows, limits, device)
        biases = _make_biases(plan.sampling, num_rows, device)
    return StepTensors(
        *buffers.write_plan(plan),
        buffers.make_options(plan),
        penalties=penalties,
        biases=biases,
        allowed=None if allowed is None else torch.from_numpy(allowed).to(device),
        low=low,
        tree=_make_tree(plan).to(device) if limits.drafts else None,
        host_blocks=find_host_blocks(plan, limits, device) if host_cache else None,
        source=_make_source(plan, limits, device),
        images=None if images is None else images.to(device),
    )


def _make_source(plan: StepPlan, limits: Limits, device: torch.device) -> SourceTables | None:
    if plan.source is None:
        return None
    tables, last = (_make_tensor(a, torch.int32, device) for a in plan.source)
    return SourceTables(tables.view(-1, limits.source_width), last)


def _make_columns(
    options: Mapping[str, Option], rows: Sequence[Sampling], num: int, limits: Limits, device: torch.device
) -> dict[str, Tensor]:
    columns = {name: option.column(rows, num, limits) for name, option in options.items()}
    return {name: _make_tensor(x, options[name].dtype, device) for name, x in columns.items()}


def _make_biases(sampling: Sequence[Sampling], num: int, device: torch.device) -> RowBiases:
    tokens, values = np.zeros((num, MOST_BIASES), np.int64), np.zeros((num, MOST_BIASES), np.float32)
    for row, one in enumerate(sampling):
        if own := len(one.logit_bias):
            tokens[row, :own], values[row, :own] = zip(*one.logit_bias, strict=True)
    return RowBiases(*(torch.from_numpy(x).to(device) for x in (tokens, values)))


def _make_tree(plan: StepPlan) -> Tensor:
    """Returns the tree of a plan. A draft that may have siblings has bits of its ancestors and itself."""
    tree = torch.zeros(plan.bucket, plan.bucket, dtype=torch.bool)
    for first, parents in plan.branches:
        for i, parent in enumerate(parents, first):
            if parent >= 0:
                tree[i] = tree[first + parent]
            tree[i, i] = True
    return tree


def _make_tensor(a: array, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.frombuffer(a, dtype=dtype).to(device)


class FillTensors(NamedTuple):
    """A source and its places in the cache.

    Attributes:
        tokens: ids, int64 [S], or features, float32 [F, M].
        slots: places of each token, int64 [S].
    """

    tokens: Int[Tensor, " s"] | Float32[Tensor, "f m"]
    slots: Int[Tensor, " s"]


def fill_tensors(fill: SourceFill, device: torch.device) -> FillTensors:
    """Returns a source as tensors."""
    tokens = torch.tensor(fill.tokens) if fill.features is None else fill.features.values
    return FillTensors(tokens.to(device), torch.tensor(fill.slots, device=device))
