"""Model states: the bytes of parameters, gradients and optimizer state on the rank with the most.

Counted piece by piece from the layout of `sharded_step`, including padding, whole leaves and tensor parallelism. For N
parameters over n ranks the sum is (Rajbhandari et al. 2019, arXiv 1910.02054, section 5) p N + g N + o N at stage 0, (p
+ g) N + o N / n at 1, p N + (g + o) N / n at 2, (p + g + o) N / n at 3.

Bytes of activations, stored by the forward for the backward, by formula.

A block keeps, for each token, the inputs of its products, norms and attention. In units of the element size: 4 D (two
norms: input and output) + 2 D + 2 G K (q, k, v, attention's output) + 2 F for gelu, 4 F for swiglu. The scores are not
kept (attention is fused). For 16-bit elements, G K = D and F = 4 D that is 32 D bytes: the 34 D of Korthikanti et al.
2022, arXiv 2205.05198, less the dropout masks, which add 2 D bytes where dropout is on. Tensor parallelism over t ranks
divides all but the 4 D and the masks. A rank of a pipeline stores the activations of the rank's blocks, for each open
microbatch of the schedule. The last rank has the logits as well. With experts F is the sum over a token's choices, in
the mean of the layers, and each choice has three rows of D: the input, the sorted input, and the result.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from shardfn import core
from shardfn.collectives import Cuts
from shardfn.core import Zero
from shardfn.graph import Cluster
from shardfn.models import gpt
from shardfn.nn.moe import AllToAll, Local
from shardfn.transforms import LeafLayout, gather_units, leaf_layout, reduce_units, refresh_units

_Leaf = tuple[torch.Size, core.P]
_Adapters = tuple[int, core.Quantization | None]  # rank, and codes of the matrices


@dataclasses.dataclass(frozen=True)
class Precision:
    """Bytes of each kind of state for one parameter.

    Attributes:
        dtype: dtype of the loss's computation.
        params: bytes of the parameter.
        grads: bytes of its gradient.
        optimizer: bytes of its optimizer state.
        about: the components of the optimizer state.
    """

    dtype: str
    params: int
    grads: int
    optimizer: int
    about: str


PRECISIONS: Mapping[str, Precision] = {
    "fp16-adam": Precision("float16", 2, 2, 12, "float32 master copy, mu, nu"),
    "bf16-adam": Precision("bfloat16", 2, 2, 12, "float32 master copy, mu, nu"),
    "fp32-adam": Precision("float32", 4, 4, 8, "float32 mu, nu"),
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings of a run.

    Attributes:
        model: name given by the user.
        config: config of the model.
        mesh: sizes of the axes, by name.
        cluster: machines of the run.
        zero: ZeRO rule.
        precision: a key of `PRECISIONS`.
        batch: sequences per rank and step.
        seq: tokens per sequence.
        accumulate: microbatches per step.
        remat: whether blocks are computed again in the backward.
        efficiency: fraction of the device's peak reached by matrix products.
        schedule: schedule of the pipeline, if the mesh has an axis "pp", with `accumulate` microbatches.
        ep: number of ranks along dp on which the experts lie, a divisor of dp.
        lora: rank of adapters of the blocks' matrices, which alone are trained then, or 0 to train all weights.
        quantization: "int8" or "int4" of the matrices that have an adapter, or None.
        activations: memory of the blocks' inputs between forward and backward, with `remat`: "device" or "host".
    """

    model: str
    config: gpt.Config
    mesh: Mapping[str, int]
    cluster: Cluster
    zero: Zero
    precision: str = "bf16-adam"
    batch: int = 1
    seq: int = 1024
    accumulate: int = 1
    remat: bool = False
    efficiency: float = 0.6
    schedule: str = "1f1b"
    ep: int = 1
    activations: core.MemoryKind = "device"
    lora: int = 0
    quantization: core.Quantization | None = None

    @property
    def bytes_of(self) -> Precision:
        """Returns the row of `PRECISIONS` of this run."""
        return PRECISIONS[self.precision]

    @property
    def micro(self) -> int:
        """Returns the sequences per rank and microbatch."""
        return self.batch // self.accumulate

    @property
    def world(self) -> int:
        """Returns the number of ranks."""
        return self.axis("dp") * self.axis("tp") * self.axis("pp")

    @property
    def tokens(self) -> int:
        """Returns the tokens per step, over all ranks."""
        return self.axis("dp") * self.batch * self.seq

    def axis(self, name: str) -> int:
        """Returns the number of ranks along an axis, or 1 if the mesh lacks the axis."""
        return self.mesh.get(name, 1)

    @property
    def homes(self) -> dict[str, core.MemoryKind]:
        """Returns the memories of the kinds that are away from the device."""
        kinds: dict[str, core.MemoryKind] = {"params": self.zero.params, "grads": self.zero.grads}
        kinds |= {"optimizer": self.zero.optimizer, "activations": self.activations}
        return {kind: memory for kind, memory in kinds.items() if not core.is_device(memory)}

    @property
    def ranks_of_machine(self) -> int:
        """Returns the number of ranks on a single machine."""
        return max(1, min(self.world, self.cluster.per_node))

    @property
    def has_uneven_heads(self) -> bool:
        """Returns whether tp does not divide the number of heads."""
        return self.config.num_heads % self.axis("tp") > 0

    @property
    def heads_on_a_rank(self) -> tuple[int, int]:
        """Returns the largest number of heads on a rank along tp, and the number of key heads for these.

        For example 28 heads over 8 ranks: 4, since the last rank has no heads.
        """
        heads = -(-self.config.num_heads // self.axis("tp"))
        shared = self.config.num_heads // self.config.kv_heads  # heads that read one head of keys
        apart = 1 if heads % shared and shared % heads else 0  # a rank's heads may begin inside a run of them
        return heads, min(self.config.kv_heads, -(-heads // shared) + apart)


@dataclasses.dataclass(frozen=True)
class States:
    """Bytes of model states on the rank with the most, and bytes of the transfers.

    Attributes:
        params: parameters between steps.
        grads: gradients at the end of the backward.
        optimizer: the optimizer's state.
        window: whole parameters in memory at once, gathered for use.
        reducing: whole gradients in memory at once before each rank keeps only the rank's rows.
        gathered: bytes of this rank's blocks that are gathered for use.
        refreshed: bytes of this rank's blocks that are gathered after the update.
        scattered: bytes of gradients that are reduced to each rank's rows.
        summed: bytes of gradients that are summed whole.
        shared: bytes of the gradients of the leaves outside the blocks, which all ranks of a pipeline have.
        messages: for each of gathered, refreshed, scattered and summed, the number of transfers that send it once.
        largest: parameters of the largest leaf on a rank, whole.
    """

    params: int
    grads: int
    optimizer: int
    window: int
    reducing: int
    gathered: int
    refreshed: int
    scattered: int
    summed: int
    shared: int
    messages: Mapping[str, int]
    largest: int = 0

    @property
    def total(self) -> int:
        """Returns the sum of params, grads and optimizer."""
        return self.params + self.grads + self.optimizer


def model_states(setup: Setup, num_layers: int | None = None) -> States:
    """Returns the states of a run's fullest rank, from the layout of its step.

    Args:
        setup: the run.
        num_layers: number of blocks of the rank. Default: an even share of the pipeline's.

    Example:
        >>> from shardfn.graph import cluster
        >>> from shardfn.cli import parse_model
        >>> run = Setup("1t", parse_model("1t"), {"dp": 1024}, cluster("a100-80"), Zero(stage=3), "fp16-adam")
        >>> round(model_states(run).total / 1e9, 1)
        15.8
    """
    layers = -(-setup.config.num_layers // setup.axis("pp")) if num_layers is None else num_layers
    # Heads that tp does not divide need leaves by heads, and the first ranks have more heads.
    config = dataclasses.replace(setup.config, per_head=True) if setup.has_uneven_heads else setup.config
    adapters = setup.lora, setup.quantization
    return _model_states(config, tuple(setup.mesh.items()), setup.zero, setup.precision, layers, setup.ep, adapters)


@functools.lru_cache(maxsize=256)
def _model_states(
    config: gpt.Config,
    shape: tuple[tuple[str, int], ...],
    zero: Zero,
    precision: str,
    num_layers: int,
    ep: int,
    adapters: _Adapters,
) -> States:
    size, dp = PRECISIONS[precision], dict(shape).get("dp", 1)
    if ep > 1:
        # Minor to the rest of dp: ranks of experts are near each other.
        shape = tuple(item for x in shape for item in ([("dp", dp // ep), ("ep", ep)] if x[0] == "dp" else [x]))
        zero = dataclasses.replace(zero, axis=("dp", "ep"))
    mesh = core.Mesh(dict(shape), torch.device("cpu"))
    before, blocks, after = _place_leaves(config, mesh, zero, getattr(torch, size.dtype), num_layers, adapters)
    leaves = before + blocks + after
    trained = [x for x in leaves if x.trainable]

    def ring_bytes(unit: Any) -> float:
        """Returns the bytes for which a ring over all ranks of dp sends as much as the unit's ring."""
        first = leaves[unit.leaves[0]]
        own = dp // ep if "ep" in first.compute.axes else dp
        nbytes = unit.nbytes * _count_bytes(first, 32, size) / (32 * size.params)  # codes travel as codes
        return nbytes * ((own - 1) / own) / ((dp - 1) / dp) if own != dp else nbytes

    gathers, reduces, refreshes = (
        gather_units(leaves, zero.travel.bucket_bytes),
        reduce_units(leaves, zero, mesh),
        refresh_units(leaves, zero),
    )
    whole = [u for u in reduces if not leaves[u.leaves[0]].ways.reduce.scatters]
    cut = [u for u in reduces if leaves[u.leaves[0]].ways.reduce.scatters]
    biggest = max((u.nbytes for u in gathers), default=0)
    gathered = sum(u.nbytes for u in gathers)
    largest = size.params * max(x.block.numel() for x in leaves)
    if not core.is_device(zero.params):  # leaves come from elsewhere at any stage
        biggest, gathered = max(biggest, largest), sum(size.params * x.block.numel() for x in leaves)
    ratio = size.grads / size.params
    return States(
        params=sum(_count_bytes(x, _largest_piece(x.used), size) for x in leaves),
        # By ZeRO's definition. The step's own stage 1 frees whole gradients as stage 2 does.
        grads=size.grads * sum(_largest_piece(x.pieces) if zero.stage >= 2 else x.block.numel() for x in trained),
        optimizer=size.optimizer * sum(_largest_piece(x.pieces) for x in trained),
        window=max(biggest, min(zero.pace.prefetch_bytes, gathered)),
        reducing=int(ratio * max((u.nbytes for u in cut), default=0)) if zero.stage >= 2 else 0,
        gathered=int(sum(map(ring_bytes, gathers))),
        refreshed=int(sum(map(ring_bytes, refreshes))),
        scattered=int(ratio * sum(map(ring_bytes, cut))),
        summed=int(ratio * sum(map(ring_bytes, whole))),
        shared=size.grads
        * sum(_largest_piece(x.pieces) if zero.stage >= 2 else x.block.numel() for x in before + after if x.trainable),
        messages={
            "gathered": len(gathers),
            "refreshed": len(refreshes),
            "scattered": len(cut),
            "summed": len(whole),
        },
        largest=largest,
    )


def _count_bytes(leaf: LeafLayout, elements: int, size: Precision) -> int:
    """Returns the bytes of some elements of a leaf: whole rows, for a leaf in codes."""
    quantization = leaf.places.quantization
    if quantization is None:
        return size.params * elements
    last = min(leaf.block[-1], elements)
    return elements // last * -(-last // core.GROUP) * core.GROUP_BYTES[quantization]


def _largest_piece(cuts: Cuts) -> int:
    """Returns the elements of the first rank's piece, which is the largest."""
    if cuts.dim is None:
        return cuts.whole.numel()
    lo, hi = cuts.bounds[0]
    return cuts.whole.numel() // cuts.whole[cuts.dim] * (hi - lo)


def _place_leaves(
    config: gpt.Config, mesh: core.Mesh, zero: Zero, dtype: torch.dtype, num_layers: int, adapters: _Adapters
) -> tuple[list[LeafLayout], list[LeafLayout], list[LeafLayout]]:
    """Returns the layout of every leaf: before the blocks, in the blocks, and after the blocks.

    Leaves of equal shape and spec share a layout, which takes time to compute.
    """
    axes, (rank, quantization) = mesh.axes(("dp", "ep") if "ep" in mesh.shape else "dp"), adapters

    @functools.cache
    def place_leaf(
        size: torch.Size, compute: core.P, trainable: bool = not rank, codes: core.Quantization | None = None
    ) -> LeafLayout:
        how: Any = {"zero": zero, "mesh": mesh, "batch_axes": axes, "trainable": trainable, "quantization": codes}
        return leaf_layout("", size, dtype, compute, **how)

    # Layers of a stack are cut, gathered and reduced one by one, as layers of a list.
    experts, cut = config.experts, mesh.axis_size("tp") > 1
    # Layers may have separate windows and rotary positions, but these are not leaves.
    one = dataclasses.replace(config, num_layers=1, stacked=False, experts=None, window=None, rope=None)
    before, block, after = ([place_leaf(*leaf) for leaf in part] for part in _list_leaves(one, cut))
    if rank:
        block = []
        for size, compute in _list_leaves(one, cut)[1]:
            matrix = len(size) == 2
            block.append(place_leaf(size, compute, codes=quantization if matrix else None))
            if matrix:  # [out, r] and [r, in], cut as the matrix is
                rows, columns = (*compute, None, None)[:2]
                block.append(place_leaf(torch.Size((size[0], rank)), core.P(rows), trainable=True))
                block.append(place_leaf(torch.Size((rank, size[1])), core.P(None, columns), trainable=True))
    if experts is None:
        return before, block * num_layers, after
    exchange = AllToAll("ep") if "ep" in mesh.shape else Local()
    # The fullest stage of a pipeline has only layers with experts, those with the most, until none is left.
    nums = sorted(config.num_experts, reverse=True)[:num_layers]
    mixtures = list[LeafLayout]()
    for num in nums:
        rule = dataclasses.replace(experts, num=num, first=0, every=1, layers=None, exchange=exchange)
        mixtures += [place_leaf(*leaf) for leaf in _list_leaves(dataclasses.replace(one, experts=rule), cut)[1]]
    return before, block * (num_layers - len(nums)) + mixtures, after


@functools.lru_cache(maxsize=64)
def _list_leaves(config: gpt.Config, cut: bool) -> tuple[list[_Leaf], list[_Leaf], list[_Leaf]]:
    """Returns the shape and compute spec of the leaves of a model with a single block.

    Leaves before the block, inside, and after.
    """
    with core.deferred():
        params = gpt.init(config, core.key(0))
    paths = core.tree_paths(params, "params")
    specs = core.tree_leaves(gpt.specs(config, tp="tp" if cut else None))
    leaves = [(x.shape, spec) for x, spec in zip(core.tree_leaves(params), specs, strict=True)]
    inside = [i for i, p in enumerate(paths) if "['blocks']" in p]
    first, last = inside[0], inside[-1] + 1
    return leaves[:first], leaves[first:last], leaves[last:]
