"""`Zero`: the rule from shapes and compute specs to storage specs.

stage 0 keeps everything replicated; 1 shards the optimizer state; 2 the gradients too; 3 the parameters too.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2019,
https://arxiv.org/abs/1910.02054
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from ._mesh import Mesh
from ._spec import MemoryKind, P, find_directory_problem, is_device, is_disk
from ._texts import did_you_mean


@dataclasses.dataclass(frozen=True)
class Disk:
    """Directory for states with the memory "disk", and their protection there.

    Attributes:
        directory: parent directory. Each rank makes a separate directory inside. Ranks may have different parents.
        checksum: whether bytes that are read are compared with a checksum of the written bytes.
        durable: whether commits also survive a loss of power: each step then waits until the disk has all bytes.

    Raises:
        ValueError: the directory does not exist.

    Example:
        >>> Disk("/path/to/a/fast/disk", checksum=True).durable
        False
    """

    directory: str
    checksum: bool = False
    durable: bool = False

    def __post_init__(self) -> None:
        if not self.directory:
            raise ValueError(f"Disk({self.directory!r}): name a directory, or leave disk= out.")


# The most bytes of parameters that a step gathers before use, and of whole gradients in flight.
PREFETCH_BYTES, IN_FLIGHT_BYTES = 32 << 20, 24 << 20


@dataclasses.dataclass(frozen=True)
class Pace:
    """Pace of transfers: when leaves are gathered and gradients reduced, and how much optimizer state moves at once.

    The fields trade memory against waiting. Only `accumulate` changes results, through the order of sums.

    Attributes:
        prefetch_bytes: at stage 3, the most bytes of parameters that may be gathered before their use.
        accumulate: when to reduce under gradient accumulation (`sf.accumulate`). "each" reduces the gradients of every
            microbatch, so that gradients stay sharded. "once" reduces the local sum at the end: fewer bytes are sent,
            and whole gradients are held.
        chunk_bytes: the size of the chunks in which an offloaded optimizer state passes through the memory of the
            update.

    Raises:
        ValueError: a field is out of range.

    Example:
        >>> Pace(accumulate="once").prefetch_bytes >> 20
        32
    """

    prefetch_bytes: int = PREFETCH_BYTES
    accumulate: str = "each"
    chunk_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.prefetch_bytes < 0:
            raise ValueError(f"Pace(prefetch_bytes={self.prefetch_bytes}): must not be negative.")
        if self.accumulate not in ("each", "once"):
            hint = did_you_mean(str(self.accumulate), ("each", "once"))
            raise ValueError(f"Pace(accumulate={self.accumulate!r}): use 'each' or 'once'.{hint}")
        if self.chunk_bytes < 1:
            raise ValueError(f"Pace(chunk_bytes={self.chunk_bytes}): must be positive.")


BITS = {"int8": 8, "int4": 4}
# The default number of elements that share a scale.
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Travel:
    """Bits, axes and messages in which leaves and gradients are sent.

    `gather` and `reduce` round messages. `secondary_axis` and `bucket_bytes` never change a bit of the result.

    Attributes:
        gather: at stage 3, the format in which sharded leaves are gathered: "int8" or "int4" with a scale for each
            block (ZeRO++'s qwZ). None means the loss's dtype.
        reduce: the format in which gradients of leaves with more than `Zero.persist_elements` elements are sent: "int8"
            or "int4" (ZeRO++'s qgZ). With `secondary_axis` gradients are summed along this axis first. None means the
            `reduce` dtype of the precision policy.
        block_elements: number of elements that share a scale, with `gather` or `reduce`.
        secondary_axis: at stage 3, the axes in `Zero.axis` that are within a node, such as "gpu" of ("node", "gpu"). A
            leaf is sent along the other axes once per step. The result is stored until the end of the step, cut along
            the secondary axes, and later gathers of the step run only along these axes (ZeRO++'s hpZ).
        bucket_bytes: the size up to which smaller leaves are sent together in a message. Larger leaves are sent
            separately.

    Raises:
        ValueError: a field is out of range, or has no effect.

    Example:
        >>> Travel(gather="int8").block_elements
        256

    References:
        Wang et al., ZeRO++, 2023, https://arxiv.org/abs/2306.10209
    """

    gather: str | None = None
    reduce: str | None = None
    block_elements: int = BLOCK
    secondary_axis: str | tuple[str, ...] | None = None
    bucket_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.reduce in ("each", "once"):
            raise ValueError(
                f"Travel(reduce={self.reduce!r}): reduce must be the format of sent gradients, such as 'int8'. To set"
                f" when gradients of microbatches are reduced, pass Pace(accumulate={self.reduce!r})."
            )
        for name in ("gather", "reduce"):
            how = getattr(self, name)
            if how is not None and how not in BITS:
                hint = did_you_mean(str(how), BITS)
                raise ValueError(f"Travel({name}={how!r}): use None or one of {tuple(BITS)}.{hint}")
        if self.block_elements != BLOCK and self.gather is None and self.reduce is None:
            raise ValueError(
                f"Travel(block_elements={self.block_elements!r}): block_elements would have no effect: no option"
                " quantises."
            )
        if self.block_elements < 2 or self.block_elements % 2:
            raise ValueError(f"Travel(block_elements={self.block_elements}): must be even and at least 2.")
        if self.bucket_bytes < 0:
            raise ValueError(f"Travel(bucket_bytes={self.bucket_bytes}): must not be negative.")


T = TypeVar("T")

PARTS: dict[str, type[Any]] = {"travel": Travel, "pace": Pace, "disk": Disk}
# No name is in two parts.
PART_OF = {field.name: part for part, kind in PARTS.items() for field in dataclasses.fields(kind)}


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords of `Zero` for these fields. Fields of a part change the given part, if any.

    Raises:
        ValueError: fields of a disk are set, but no directory.
    """
    out = {name: value for name, value in fields.items() if name not in PART_OF}
    for part, kind in PARTS.items():
        given = {name: value for name, value in fields.items() if PART_OF.get(name) == part}
        before = out.get(part)
        if kind is Disk and given and given.get("directory", before and before.directory) is None:
            asked = [f"{name}={value!r}" for name, value in given.items() if value]
            if asked:
                raise ValueError(f"Zero({', '.join(asked)}) has no effect without a directory: disk=Disk(directory).")
            out[part] = None
        elif given:
            out[part] = kind(**given) if before is None else dataclasses.replace(before, **given)
    return out


def flattened(zero: Any) -> dict[str, Any]:
    """Returns the fields of a rule and of its parts by name."""
    out: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(zero)):
        value = getattr(zero, name)
        if name not in PARTS:
            out[name] = value
        elif value is not None:
            out |= {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return out


def check_names(fields: Mapping[str, Any], own: set[str]) -> None:
    """Refuses names that are not fields of a rule or of its parts.

    Raises:
        TypeError: names the nearest field.
    """
    known = (own - PARTS.keys()) | PART_OF.keys()
    for name in fields:
        if name in PARTS:
            inner = ", ".join(f"{n}=" for n, part in PART_OF.items() if part == name)
            raise TypeError(f"Zero.flat takes the fields of {name} by name: {inner}.")
        if name not in known:
            hint = did_you_mean(name, known) or f" It has {', '.join(sorted(known))}."
            raise TypeError(f"Zero has no field {name!r}.{hint}")


def explains_parts(cls: type[T]) -> type[T]:
    """Refuses a field of a part, and an unknown field, with the right spelling."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self: T, *args: Any, **fields: Any) -> None:
        own = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        check_names({name: value for name, value in fields.items() if name not in own}, own)
        for name in fields.keys() & PART_OF.keys():
            raise TypeError(f"Zero has no field {name!r}: write Zero({_spell_fields({name: fields[name]})}).")
        init(self, *args, **fields)

    cls.__init__ = __init__
    return cls


def _spell_fields(fields: Mapping[str, Any]) -> str:
    """Returns these fields as the text of arguments of `Zero`."""
    out = [f"{name}={value!r}" for name, value in fields.items() if name not in PART_OF]
    for part, kind in PARTS.items():
        given = [f"{name}={value!r}" for name, value in fields.items() if PART_OF.get(name) == part]
        out += [f"{part}={kind.__name__}({', '.join(given)})"] if given else []
    return ", ".join(out)


@explains_parts
@dataclasses.dataclass(frozen=True)
class Zero:
    """Rule of sharding: which states are sharded, over which axis and in which memory, and how states are sent.

    Results depend on `stage`, `axis`, `reduction` and `pace.accumulate` through the order of sums, and on
    `travel.gather` and `travel.reduce`, which round messages. No other field changes a bit.

    Attributes:
        stage: the states that are sharded: 0 none, 1 the optimizer's state, 2 also gradients, 3 also parameters.
        axis: the mesh axis, or axes, along which states are cut.
        params: the memory of parameters with more than `persist_elements` elements: "device", "host" or "disk".
        grads: the memory of summed gradients until the update.
        optimizer: the memory of the optimizer's state. Unless it is "device", the update runs on the host.
        persist_elements: stage 3: leaves of at most this many elements stay gathered.
        optimizer_fraction: the fraction of the optimizer's state, by elements, that is in the memory `optimizer`. The
            rest, the states of the first leaves, stays on the device: the first leaves' gradients are produced last.
        travel: how leaves and gradients are sent: in how many bits, along which axes, and in how large messages.
        pace: when leaves and gradients are sent, and how much at a time.
        disk: the directory for "disk"; None if no field is "disk".
        reduction: "by_rank", or "canonical": the global batch is cut into `reduction_chunks` chunks, which run one by
            one and are summed by a fixed tree, so that a step is bitwise identical on any number of ranks (on one kind
            of processor). Rank r of n passes the rows of chunks r C // n to (r + 1) C // n. `accumulate(loss, k)` and
            `pipeline(num_microbatches=k)` cut each chunk in k.
        reduction_chunks: C, a power of two, at least the number of ranks.

    Raises:
        ValueError: a field is out of range, or has no effect.
        TypeError: a field does not exist.

    Example:
        >>> Zero(stage=3).axis
        'dp'
        >>> Zero(stage=3, pace=Pace(prefetch_bytes=1 << 30)).travel.bucket_bytes
        1048576
        >>> Zero(stage=2, grads="host", optimizer="host").params  # ZeRO-Offload
        'device'
        >>> plus_plus = Travel(gather="int8", secondary_axis="gpu", reduce="int4")
        >>> Zero(stage=3, axis=("node", "gpu"), travel=plus_plus).near  # ZeRO++
        ('gpu',)

    References:
        Ren et al., ZeRO-Offload, 2021, https://arxiv.org/abs/2101.06840
        Rajbhandari et al., ZeRO-Infinity, 2021, https://arxiv.org/abs/2104.07857
        Wang et al., ZeRO++, 2023, https://arxiv.org/abs/2306.10209
    """

    stage: int = 0
    axis: str | tuple[str, ...] = "dp"
    _: dataclasses.KW_ONLY
    params: MemoryKind = "device"
    grads: MemoryKind = "device"
    optimizer: MemoryKind = "device"
    persist_elements: int = 8192
    optimizer_fraction: float = 1.0
    travel: Travel = dataclasses.field(default_factory=Travel)
    pace: Pace = dataclasses.field(default_factory=Pace)
    disk: Disk | None = None
    reduction: str = "by_rank"
    reduction_chunks: int = 8

    @classmethod
    def flat(cls, **fields: Any) -> "Zero":
        """Returns the rule with these fields of the rule and its parts, by name: for a command line or a file.

        Raises:
            TypeError: a field does not exist.

        Example:
            >>> Zero.flat(stage=3, gather="int8", prefetch_bytes=0) == Zero(
            ...     stage=3, travel=Travel(gather="int8"), pace=Pace(prefetch_bytes=0)
            ... )
            True
        """
        check_names(fields, {field.name for field in dataclasses.fields(cls)})
        return cls(**nested(fields))

    def as_flat(self) -> dict[str, Any]:
        """Returns the fields of the rule and its parts, by name: `Zero.flat(**zero.as_flat()) == zero`.

        Example:
            >>> Zero(stage=3, axis="gpu").as_flat()["bucket_bytes"]
            1048576
        """
        return flattened(self)

    @property
    def directory(self) -> str | None:
        """Returns the directory of states on disk, or None."""
        return None if self.disk is None else self.disk.directory

    @property
    def near(self) -> tuple[str, ...]:
        """Returns the secondary axes."""
        return () if self.travel.secondary_axis is None else _axes_tuple(self.travel.secondary_axis)

    @property
    def kinds(self) -> set[MemoryKind]:
        """Returns the memories that the rule uses."""
        return {self.params, self.grads, self.optimizer}

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"Zero(stage={self.stage!r}): the stages are 0, 1, 2 and 3.")
        for name, kind in (("travel", Travel), ("pace", Pace), ("disk", Disk | None)):
            if not isinstance(given := getattr(self, name), kind):
                raise TypeError(
                    f"Zero({name}={given!r}): must be a {name.capitalize()}, Zero({name}=sf.{name.capitalize()}(...))."
                )
        if self.persist_elements < 0:
            raise ValueError(f"Zero(persist_elements={self.persist_elements}): must not be negative.")
        self._check_memory()
        self._check_travel()
        self._check_reduction()

    def _check_reduction(self) -> None:
        if self.reduction not in ("by_rank", "canonical"):
            hint = did_you_mean(str(self.reduction), ("by_rank", "canonical"))
            raise ValueError(f"Zero(reduction={self.reduction!r}): use 'by_rank' or 'canonical'.{hint}")
        chunks = self.reduction_chunks
        if chunks < 1 or chunks & (chunks - 1):
            raise ValueError(f"Zero(reduction_chunks={chunks}): must be a power of two, such as 8.")
        if not self.is_canonical:
            return
        wrong = {
            "travel=Travel(reduce=)": (self.travel.reduce is not None, "codes round by rank"),
            "travel=Travel(secondary_axis=)": (self.travel.secondary_axis is not None, "sums go axis by axis"),
        }
        given = [f"{name} ({why})" for name, (is_given, why) in wrong.items() if is_given]
        if given:
            raise ValueError(
                f"Zero(reduction='canonical') does not support {', '.join(given)}, because the order of a sum would"
                " depend on the number of ranks. Leave these options or the reduction out."
            )

    @property
    def is_canonical(self) -> bool:
        """Returns whether sums do not depend on the number of ranks."""
        return self.reduction == "canonical"

    def _check_travel(self) -> None:
        travel = self.travel
        idle = [n for n in ("gather", "secondary_axis") if getattr(travel, n) is not None and self.stage < 3]
        idle += ["reduce"] if travel.reduce is not None and self.stage == 0 else []
        if idle:
            given = ", ".join(f"{n}={getattr(travel, n)!r}" for n in idle)
            raise ValueError(
                f"Zero(stage={self.stage}, travel=Travel({given})): {' and '.join(idle)} would have no effect."
                " gather and secondary_axis need stage=3, and reduce needs stage 1, 2 or 3."
            )
        if travel.secondary_axis is None:
            return
        axes = _axes_tuple(self.axis)
        given = f"Zero(axis={self.axis!r}, travel=Travel(secondary_axis={travel.secondary_axis!r}))"
        foreign = [a for a in self.near if a not in axes]
        if foreign or not self.near:
            hint = did_you_mean(foreign[0], axes) if foreign else ""
            raise ValueError(f"{given}: the secondary axis must be of those along which leaves are cut.{hint}")
        if set(self.near) == set(axes):
            raise ValueError(f"{given} has no effect, because it names all axes. Name only the axes within a node.")

    def _check_memory(self) -> None:
        kinds = get_args(MemoryKind)
        for name in ("params", "grads", "optimizer"):
            kind = getattr(self, name)
            if kind not in kinds:
                hint = " Did you mean 'host'?" if kind == "cpu" else did_you_mean(str(kind), kinds)
                raise ValueError(f"Zero({name}={kind!r}): the memories are {kinds}.{hint}")
        given = f"Zero(optimizer_fraction={self.optimizer_fraction})"
        if not 0 <= self.optimizer_fraction <= 1:
            raise ValueError(f"{given}: a fraction lies between 0 and 1.")
        if self.optimizer_fraction < 1 and is_device(self.optimizer):
            raise ValueError(f"{given} has no effect with optimizer='device'. Choose 'host' or 'disk'.")
        if find_directory_problem(self.kinds, self.disk) == "missing":
            on = ", ".join(f"{n}='disk'" for n in ("params", "grads", "optimizer") if is_disk(getattr(self, n)))
            raise ValueError(
                f"Zero({on}) keeps states on disk. Name the directory: Zero(disk=Disk('/path/to/a/fast/disk'))."
            )


def _axes_tuple(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def zero_spec(
    shape: tuple[int, ...], compute: P, axis: str | tuple[str, ...], mesh: Mesh, *, dims: int | None = None
) -> P:
    """Returns the compute spec, with the ZeRO axes added to the dim with the best cut.

    Dim 0 is taken if padding wastes at most an eighth, since blocks along dim 0 are contiguous. Else the dim with the
    least waste is taken. A leaf without a dim of 2 or more is not cut. `dims`: only the first `dims` dims are cut.

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
    waste = [-(-s // n) * n / s if s > 1 else math.inf for s in local[:dims]]
    if not waste or min(waste) == math.inf:
        return compute
    dim = 0 if waste[0] <= 1.125 else waste.index(min(waste))
    return compute.with_axes(dim, axes)


def as_zero(zero: Any) -> Zero:
    """Returns the rule: a bare stage is `Zero(stage)`, and None is stage 0.

    Raises:
        TypeError: `zero` is neither.
        ValueError: the stage does not exist.

    Example:
        >>> as_zero(3) == Zero(stage=3), as_zero(None).stage
        (True, 0)
    """
    if isinstance(zero, Zero):
        return zero
    if zero is None or (isinstance(zero, int) and not isinstance(zero, bool)):
        return Zero(zero or 0)
    fields = ", ".join(f"{k}={v!r}" for k, v in zero.items()) if isinstance(zero, dict) else "stage=3"
    raise TypeError(
        f"zero={zero!r} is a {type(zero).__name__}. Pass a stage, as in zero=3, or a rule, as in"
        f" zero=sf.Zero({fields})."
    )
