"""`Zero`: the rule from shapes and compute specs to storage specs.

stage 0 keeps everything replicated; 1 shards the optimizer state; 2 the gradients too; 3 the parameters too.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2019,
https://arxiv.org/abs/1910.02054
"""

import dataclasses
import math
from typing import get_args

from ._errors import did_you_mean
from ._mesh import Mesh
from ._spec import MemoryKind, P

BITS = {"int8": 8, "int4": 4}
# Elements that share a scale unless the rule says otherwise.
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Zero:
    """Which states are kept in pieces, over which axis and in which memory, and how they travel.

    `stage`, `axis` and `accumulate` say what is summed in which order; `gather` and `reduce` round what travels; the
    others never change a bit.

    Attributes:
        stage: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters.
        axis: mesh axis or axes over which states are cut.
        prefetch: stage 3: bytes of gathered parameters that may be alive ahead of their use.
        persist: stage 3: leaves of at most this many elements stay gathered.
        bucket: bytes; smaller leaves travel together up to this size, larger ones alone.
        accumulate: with `sf.accumulate`: "each" reduces every microbatch (gradients stay sharded), "once" reduces their
            local sum at the end (fewer bytes sent, full gradients held).
        gather: stage 3: what leaves kept in pieces travel as when they are gathered: "int8" or "int4" with a scale a
            block (ZeRO++'s qwZ); None = in the dtype that the loss sees.
        secondary_axis: stage 3: the axis or axes, of those in `axis`, that are near (within a node). A leaf crosses the
            others once a step; what has come is kept until the step's end, cut over these, and the step's later gathers
            run over these alone (ZeRO++'s hpZ).
        reduce: what the gradients of leaves of more than `persist` elements travel as: "int8" or "int4" (ZeRO++'s
            qgZ); with `secondary_axis` they are summed along it first. None = as the precision policy says.
        block: with `gather` or `reduce`: elements that share a scale.
        params: the memory in which parameters of more than `persist` elements are kept: "device", "host" or "disk".
        grads: the memory in which summed gradients wait for the update.
        optimizer: the memory in which the optimizer's state is kept; the update runs on the host unless it is "device".
        ratio: the fraction of the optimizer's state, by elements, that is kept at `optimizer`; the rest, that of the
            first leaves, whose gradients come last, stays on the device.
        directory: where "disk" is; each rank makes a directory of its own in it.
        chunk: bytes in which the optimizer's state goes through the memory of the update.
        checksum: whether what is read from the disk is compared with what was written.
        durable: whether commits outlive a loss of power too: a step waits until the device has what it wrote.

    Raises:
        ValueError: a field is out of range, or has no effect.

    Example:
        >>> Zero(stage=3).axis
        'dp'
        >>> Zero(stage=2, grads="host", optimizer="host").params  # ZeRO-Offload
        'device'
        >>> Zero(stage=3, axis=("node", "gpu"), gather="int8", secondary_axis="gpu", reduce="int4").near  # ZeRO++
        ('gpu',)

    References:
        Ren et al., ZeRO-Offload, 2021, https://arxiv.org/abs/2101.06840
        Rajbhandari et al., ZeRO-Infinity, 2021, https://arxiv.org/abs/2104.07857
        Wang et al., ZeRO++, 2023, https://arxiv.org/abs/2306.10209
    """

    stage: int = 0
    axis: str | tuple[str, ...] = "dp"
    prefetch: int = 32 << 20
    persist: int = 8192
    bucket: int = 1 << 20
    accumulate: str = "each"
    gather: str | None = None
    secondary_axis: str | tuple[str, ...] | None = None
    reduce: str | None = None
    block: int = BLOCK
    params: MemoryKind = "device"
    grads: MemoryKind = "device"
    optimizer: MemoryKind = "device"
    ratio: float = 1.0
    directory: str | None = None
    chunk: int = 64 << 20
    checksum: bool = False
    durable: bool = False

    @property
    def near(self) -> tuple[str, ...]:
        """The secondary axes."""
        return () if self.secondary_axis is None else _tuple(self.secondary_axis)

    @property
    def kinds(self) -> set[MemoryKind]:
        """The memories that it uses."""
        return {self.params, self.grads, self.optimizer}

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"Zero(stage={self.stage!r}): the stages are 0, 1, 2 and 3.")
        if self.accumulate not in ("each", "once"):
            hint = did_you_mean(str(self.accumulate), ("each", "once"))
            raise ValueError(f"Zero(accumulate={self.accumulate!r}): use 'each' or 'once'.{hint}")
        for name in ("prefetch", "persist", "bucket"):
            if getattr(self, name) < 0:
                raise ValueError(f"Zero({name}={getattr(self, name)}): must not be negative.")
        self._check_memory()
        self._check_travel()

    def _check_travel(self) -> None:
        if self.reduce in ("each", "once"):
            raise ValueError(
                f"Zero(reduce={self.reduce!r}): reduce says in how many bits gradients travel; when those of"
                f" microbatches do is Zero(accumulate={self.reduce!r})."
            )
        for name in ("gather", "reduce"):
            how = getattr(self, name)
            if how is not None and how not in BITS:
                raise ValueError(f"Zero({name}={how!r}): use None or one of {tuple(BITS)}.{did_you_mean(how, BITS)}")
        idle = [n for n in ("gather", "secondary_axis") if getattr(self, n) is not None and self.stage < 3]
        idle += ["reduce"] if self.reduce is not None and self.stage == 0 else []
        idle += ["block"] if self.block != BLOCK and self.gather is None and self.reduce is None else []
        if idle:
            given = ", ".join(f"{n}={getattr(self, n)!r}" for n in ("stage", *idle))
            why = "no option quantises" if idle == ["block"] else "too little is kept in pieces at this stage"
            raise ValueError(f"Zero({given}): {' and '.join(idle)} would have no effect: {why}.")
        if self.block < 2 or self.block % 2:
            raise ValueError(f"Zero(block={self.block}): must be even and at least 2.")
        self._check_near()

    def _check_near(self) -> None:
        if self.secondary_axis is None:
            return
        axes, given = _tuple(self.axis), f"Zero(axis={self.axis!r}, secondary_axis={self.secondary_axis!r})"
        foreign = [a for a in self.near if a not in axes]
        if foreign or not self.near:
            hint = did_you_mean(foreign[0], axes) if foreign else ""
            raise ValueError(f"{given}: the secondary axis must be of those along which leaves are cut.{hint}")
        if set(self.near) == set(axes):
            raise ValueError(f"{given} has no effect: there is no other axis to spare; name the near ones alone.")

    def _check_memory(self) -> None:
        kinds = get_args(MemoryKind)
        for name in ("params", "grads", "optimizer"):
            kind = getattr(self, name)
            if kind not in kinds:
                raise ValueError(f"Zero({name}={kind!r}): the memories are {kinds}.{did_you_mean(str(kind), kinds)}")
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"Zero(ratio={self.ratio}): a fraction lies between 0 and 1.")
        if self.ratio < 1 and self.optimizer == "device":
            raise ValueError(
                f"Zero(ratio={self.ratio}) has no effect with optimizer='device'; choose 'host' or 'disk'."
            )
        if self.chunk < 1:
            raise ValueError(f"Zero(chunk={self.chunk}): must be positive.")
        if "disk" in self.kinds and self.directory is None:
            raise ValueError(f"{self!r} keeps states on disk; say where: Zero(directory='/path/to/a/fast/disk').")


def _tuple(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def zero_spec(shape: tuple[int, ...], compute: P, axis: str | tuple[str, ...], mesh: Mesh) -> P:
    """The compute spec with the ZeRO axes added on the dim that they cut best.

    Dim 0 is taken when it wastes at most an eighth in padding, since blocks along it are contiguous; else the dim with
    the least waste. A leaf without a dim of 2 or more stays as it is.

    Example:
        >>> import torch
        >>> zero_spec((10, 3), P(), "dp", Mesh({"dp": 1}, torch.device("cpu")))
        P()
    """
    wanted = mesh.axes(axis)
    axes = tuple(a for a in mesh.axis_names if a in wanted and a not in compute.axes)
    n = math.prod(mesh.shape[a] for a in axes)
    if n == 1:
        return compute
    local = [-(-s // math.prod(mesh.shape.get(a, 1) for a in compute.dim_axes(d))) for d, s in enumerate(shape)]
    waste = [-(-s // n) * n / s if s > 1 else math.inf for s in local]
    if not waste or min(waste) == math.inf:
        return compute
    dim = 0 if waste[0] <= 1.125 else waste.index(min(waste))
    return compute.with_axes(dim, axes)
