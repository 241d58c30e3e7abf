"""A plan as tensors, of sizes that follow only from its bucket."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int
from torch import Tensor

from shardfn.core import MemoryKind, is_host

from ._host_cache import HostCacheBlocks, find_host_blocks
from ._limits import Limits
from ._low_rank import LowRank
from ._plan import StepPlan
from ._requests import MOST_BIASES, Sampling

_NEUTRAL = Sampling(temperature=0.0)


class Penalties(NamedTuple):
    """Arguments of `kernels.penalise`.

    Attributes:
        history: int32 [R, context], tokens before a row's place, then -1.
        prompts: int32 [R], number of prompt tokens among them.
        repetition: float64 [R].
        presence: float64 [R].
        frequency: float64 [R].
    """

    history: Int[Tensor, "r context"]
    prompts: Int[Tensor, " r"]
    repetition: Float64[Tensor, " r"]
    presence: Float64[Tensor, " r"]
    frequency: Float64[Tensor, " r"]


class Biases(NamedTuple):
    """Numbers that are added to logits. Rows with fewer biases add 0 to the logit of token 0.

    Attributes:
        tokens: int64 [R, most].
        values: float32 [R, most].
    """

    tokens: Int[Tensor, "r most"]
    values: Float32[Tensor, "r most"]


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
        temperature: float64 [R].
        top_k: int64 [R].
        top_p: float64 [R].
        min_p: float64 [R].
        penalties: penalties where a row has an extended sampling, else None.
        biases: biases where a row has an extended sampling, else None.
        allowed: bool [R, vocab] where a row has a grammar, else None. The tokens that a row may draw.
        low: adapters where a row has an adapter, else None.
        tree: bool [B, B] in an engine that has drafts, else None. See `kernels.ragged_attention`.
        host_blocks: blocks of the step where the cache is on the host, else None.
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
    temperature: Float64[Tensor, " r"]
    top_k: Int[Tensor, " r"]
    top_p: Float64[Tensor, " r"]
    min_p: Float64[Tensor, " r"]
    penalties: Penalties | None = None
    biases: Biases | None = None
    allowed: Bool[Tensor, "r vocab"] | None = None
    low: LowRank | None = None
    tree: Bool[Tensor, "b b"] | None = None
    host_blocks: HostCacheBlocks | None = None


def make_tensors(
    plan: StepPlan,
    limits: Limits,
    device: torch.device,
    allowed: Bool[np.ndarray, "r vocab"] | None = None,
    low: LowRank | None = None,
    *,
    cache: MemoryKind = "device",
) -> StepTensors:
    """Returns the tensors of a plan, for a cache in a memory.

    Tensors on a CPU share the memory of the plan's arrays.
    """
    num_rows = len(plan.rows)
    sampling = [*plan.sampling, *[_NEUTRAL] * (num_rows - len(plan.sampling))]

    def make_floats(name: str) -> Tensor:
        return _make_tensor(array("d", [getattr(s, name) for s in sampling]), torch.float64, device)

    top_k = array("q", [s.top_k if s.top_k < limits.vocab else 0 for s in sampling])
    ints = (plan.tokens, plan.positions, plan.sequences, plan.slots, plan.tables, plan.rows)
    tokens, positions, sequences, slots, tables, rows = (_make_tensor(a, torch.int32, device) for a in ints)
    places, targets = (_make_tensor(a, torch.int32, device).long() for a in (plan.places, plan.targets))
    penalties = biases = None
    if plan.histories is not None and plan.prompts is not None:
        history, prompts = (_make_tensor(a, torch.int32, device) for a in (plan.histories, plan.prompts))
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        penalties = Penalties(history.view(-1, limits.context), prompts, *map(make_floats, names))
        biases = _make_biases(sampling, device)
    return StepTensors(
        *(tokens, positions, sequences, slots, tables.view(-1, limits.width), rows),
        *(_make_tensor(plan.keys, torch.int64, device), places, targets),
        *(
            make_floats("temperature"),
            _make_tensor(top_k, torch.int64, device),
            make_floats("top_p"),
            make_floats("min_p"),
        ),
        penalties=penalties,
        biases=biases,
        allowed=None if allowed is None else torch.from_numpy(allowed).to(device),
        low=low,
        tree=_make_tree(plan).to(device) if limits.drafts else None,
        host_blocks=find_host_blocks(plan, limits, device) if is_host(cache) else None,
    )


def _make_biases(sampling: Sequence[Sampling], device: torch.device) -> Biases:
    tokens = np.zeros((len(sampling), MOST_BIASES), np.int64)
    values = np.zeros((len(sampling), MOST_BIASES), np.float32)
    for row, one in enumerate(sampling):
        if num := len(one.logit_bias):
            tokens[row, :num], values[row, :num] = zip(*one.logit_bias, strict=True)
    return Biases(*(torch.from_numpy(x).to(device) for x in (tokens, values)))


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
