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


@dataclasses.dataclass(frozen=True)
class Zero:
    """Which states are kept in pieces, over which axis and in which memory, and how they travel.

    Only `stage`, `axis` and `reduce` say what is summed in which order; the others never change a bit.

    Attributes:
        stage: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters.
        axis: mesh axis or axes over which states are cut.
        prefetch: stage 3: bytes of gathered parameters that may be alive ahead of their use.
        persist: stage 3: leaves of at most this many elements stay gathered.
        bucket: bytes; smaller leaves travel together up to this size, larger ones alone.
        reduce: with `accumulate`: "each" reduces every microbatch (gradients stay sharded), "once" reduces their local
            sum at the end (fewer bytes sent, full gradients held).
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

    References:
        Ren et al., ZeRO-Offload, 2021, https://arxiv.org/abs/2101.06840
        Rajbhandari et al., ZeRO-Infinity, 2021, https://arxiv.org/abs/2104.07857
    """

    stage: int = 0
    axis: str | tuple[str, ...] = "dp"
    prefetch: int = 32 << 20
    persist: int = 8192
    bucket: int = 1 << 20
    reduce: str = "each"
    params: MemoryKind = "device"
    grads: MemoryKind = "device"
    optimizer: MemoryKind = "device"
    ratio: float = 1.0
    directory: str | None = None
    chunk: int = 64 << 20
    checksum: bool = False
    durable: bool = False

    @property
    def kinds(self) -> set[MemoryKind]:
        """The memories that it uses."""
        return {self.params, self.grads, self.optimizer}

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"Zero(stage={self.stage!r}): the stages are 0, 1, 2 and 3.")
        if self.reduce not in ("each", "once"):
            hint = did_you_mean(str(self.reduce), ("each", "once"))
            raise ValueError(f"Zero(reduce={self.reduce!r}): use 'each' or 'once'.{hint}")
        for name in ("prefetch", "persist", "bucket"):
            if getattr(self, name) < 0:
                raise ValueError(f"Zero({name}={getattr(self, name)}): must not be negative.")
        self._check_memory()

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
