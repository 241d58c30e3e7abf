"""`Placement`: where and how a leaf is stored. `StoredValue`: a block that is stored so. `Pending`: a value in flight.

A placement holds how a leaf is cut over the mesh, the axes of a sum that is still to be taken, memory and dtype, and
whether elements are rounded to codes. A training step keeps, uses and sends leaves at placements, and a route leads
from one placement to another (`shardfn.collectives.route`).

    parameter, ZeRO 3        A[I_dp, J]             P("dp")
    the same when used       A[I, J]                P()
    its gradient as it comes A[I, J]{U_dp}          P(), unreduced=("dp",)
    its gradient as kept     A[I_dp, J]             P("dp")
    of 2 nodes of 2, after
    a first hop, across them A[I_gpu of each I_node]  P(("node", "gpu")), brought=("node",)

The types are defined here so that rooms which carry such values need not import the rooms that keep them. The
operations on them that move a value (`store`, `prefetch`, successors, inputs and outputs of graphs) are in
`shardfn.state`.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeGuard, TypeVar, cast, get_args, runtime_checkable

import torch
from torch import Tensor

from ._mesh import Mesh, all_coords
from ._spec import MemoryKind, P, Quantization, block_slices
from ._texts import did_you_mean

# A code of leaves on the wire, (bits, elements that share a scale), or a code of frozen leaves.
AnyQuantization = tuple[int, int] | Quantization
# A group of the codes of frozen leaves: elements, neighbours along the last dim, and bytes.
GROUP = 32
GROUP_BYTES: Mapping[Quantization, int] = MappingProxyType({"int8": 34, "int4": 20})


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where and how a leaf is stored. A value: two leaves of one placement are held in the same way.

    Attributes:
        spec: cut of the leaf. Along an axis that is neither here nor in `unreduced` all ranks hold the same.
        unreduced: the axes along which each rank holds a summand: the leaf is the sum.
        memory_kind: "device", "host" or "disk".
        dtype: dtype of the elements, with a code of the decoded elements.
        quantization: (bits, elements that share a scale) of a leaf rounded to codes on the wire, "int8" or "int4" of a
            quantized frozen leaf (`Sharding.quantization`), or None if not rounded.
        stacked: whether the leading dim stacks layers that are used, and cut, one by one. Where `spec` cuts the leading
            dim, each rank has some of the layers.
        brought: axes of `spec` along which every block is here, in sequence: the result of the first hop of a gather in
            two. Each axis belongs to a single dim, and some axis of the dim is still to be gathered.

    Example:
        >>> kept = Placement(P("dp"))
        >>> used = Placement(P())
        >>> used.cotangent(("dp",)).unreduced
        ('dp',)

    References:
        Xu et al., GSPMD, 2021, https://arxiv.org/abs/2105.04663 (partial sums as a sharding)
    """

    spec: P = P()  # noqa: RUF009  # P is immutable
    unreduced: tuple[str, ...] = ()
    memory_kind: MemoryKind = "device"
    dtype: torch.dtype = torch.float32
    quantization: AnyQuantization | None = None
    stacked: bool = False
    brought: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Returns whether the leaf is in the device's memory, without a code, and can be written over."""
        return self.memory_kind == "device" and self.quantization is None

    @property
    def is_stored(self) -> bool:
        """Returns whether the leaf is `Stored`: not a tensor, and replaced by an update, never written over."""
        return self.memory_kind == "disk" or self.quantization is not None

    def with_(self, **changes: object) -> "Placement":
        """Returns this placement with other values of some fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def cotangent(self, varying: tuple[str, ...]) -> "Placement":
        """Returns the placement of the gradient of a leaf that is used differently along the axes `varying`.

        The gradient of a block is a block. A leaf that all ranks hold gets a summand from each rank with a different
        use. The gradient of a summand is whole on every rank, since the summand counts once in the sum.
        """
        held = (*self.spec.axes, *self.unreduced)
        return self.with_(unreduced=tuple(a for a in varying if a not in held))

    def block_shape(self, shape: tuple[int, ...], sizes: Mapping[str, int], coords: Mapping[str, int]) -> torch.Size:
        """Returns the shape of the block of a leaf of global `shape` that the rank at `coords` holds."""
        if not self.brought:
            return torch.Size(s.stop - s.start for s in block_slices(shape, self.spec, sizes, coords))
        blocks = [
            block_slices(shape, self.spec, sizes, {**coords, **at})
            for at in all_coords({a: sizes[a] for a in self.brought})
        ]
        dim = next(d for d in range(len(self.spec)) if set(self.brought) & set(self.spec.dim_axes(d)))
        lengths = [s.stop - s.start for s in blocks[0]]
        lengths[dim] = sum(block[dim].stop - block[dim].start for block in blocks)
        return torch.Size(lengths)

    def nbytes(self, shape: tuple[int, ...], sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
        """Returns the bytes of the block: of elements, or of codes and scales (4 bytes each on the wire)."""
        block = self.block_shape(shape, sizes, coords)
        count = block.numel()
        if self.quantization is None:
            return count * self.dtype.itemsize
        if isinstance(self.quantization, str):
            return block[:-1].numel() * -(-block[-1] // GROUP) * GROUP_BYTES[self.quantization]
        bits, per_scale = self.quantization
        return 4 * -(-count // per_scale) + -(-count * bits // 8)

    def problems(self, shape: tuple[int, ...], mesh: Mesh) -> Iterator[str]:
        """Yields the reasons why a leaf of global `shape` cannot be placed on `mesh`, if any."""
        if len(self.spec) > len(shape):
            yield f"{self.spec!r} has {len(self.spec)} entries, but the leaf has {len(shape)} dims"
        foreign = [a for a in (*self.spec.axes, *self.unreduced) if not _has_axis(mesh, a)]
        if foreign:
            yield f"axes {foreign} are not in the mesh, which has {mesh.axis_names}"
        both = sorted(set(self.spec.axes) & set(self.unreduced) - set(self.brought))
        if both:
            yield f"along {both} it would be cut and unreduced at once; a value is one of the two"
        if self.memory_kind not in get_args(MemoryKind):
            yield f"memory_kind={self.memory_kind!r}; the memories are {get_args(MemoryKind)}"
        if self.quantization is not None and not _is_quantization(self.quantization):
            yield (
                f"quantization must be (8 or 4 bits, an even number of elements that share a scale), or one of"
                f" {(*GROUP_BYTES,)}, got {self.quantization!r}"
            )
        if isinstance(self.quantization, str) and not shape:
            yield f"quantization={self.quantization!r} needs a last dim for groups of {GROUP}, got a leaf of no dims"
        if self.quantization is not None and not self.dtype.is_floating_point:
            yield f"{self.dtype} cannot be quantized; only floating-point elements are rounded"
        cut = [self.spec.dim_axes(d) for d in range(len(self.spec))]
        if self.brought and not any(set(self.brought) < set(axes) for axes in cut):
            yield f"brought={self.brought} are not some, and not all, of the axes that cut one dim"
        if self.stacked and not shape:
            yield "a leaf of no dims has no layers; leave out stacked=True"

    def __repr__(self) -> str:
        parts = [repr(self.spec)]
        parts += [f"unreduced={self.unreduced}"] if self.unreduced else []
        parts += [] if self.memory_kind == Placement.memory_kind else [self.memory_kind]
        parts += [dtype_name(self.dtype)]
        parts += [f"quantization={self.quantization!r}"] if self.quantization is not None else []
        parts += ["stacked"] if self.stacked else []
        parts += [f"brought={self.brought}"] if self.brought else []
        return f"Placement({', '.join(parts)})"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as people write it, such as "bfloat16".

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _has_axis(mesh: Mesh, axis: str) -> bool:
    try:
        mesh.axes(axis)
    except ValueError:
        return False
    return True


def _is_quantization(quantization: AnyQuantization) -> bool:
    if isinstance(quantization, str):
        return quantization in GROUP_BYTES
    return len(quantization) == 2 and quantization[0] in (4, 8) and quantization[1] >= 2 and quantization[1] % 2 == 0


# The quantization of all weights of linear layers, or by regular expression. None keeps floats.
QuantizationPolicy = Quantization | Mapping[str, Quantization | None] | None


def find_quantization(policy: QuantizationPolicy, name: str) -> Quantization | None:
    """Returns the quantization of a weight.

    The first regular expression that is found in the name counts. None if no expression is found.

    Args:
        policy: quantization of all weights, or by regular expressions.
        name: name of the weight, such as "model.layers.0.mlp.down_proj.weight" or "blocks.0.w_down".

    Example:
        >>> policy = {"embed|head": "int8", "": "int4"}
        >>> find_quantization(policy, "lm_head.weight"), find_quantization(policy, "blocks.0.wq")
        ('int8', 'int4')
    """
    if policy is None or isinstance(policy, str):
        return policy
    return next((quantization for pattern, quantization in policy.items() if re.search(pattern, name)), None)


def check_policy(policy: str | Mapping[str, Any] | None, names: list[str], who: str) -> None:
    """Refuses a policy with unknown names, or with a pattern that fits no weight.

    Raises:
        ValueError: names each problem.
    """
    if policy is None:
        return
    rules = {"": policy} if isinstance(policy, str) else policy
    problems = [
        f"quantization={quantization!r}{f' of {pattern!r}' if pattern else ''}: 'int8' or 'int4'."
        f"{did_you_mean(str(quantization), GROUP_BYTES)}"
        for pattern, quantization in rules.items()
        if quantization is not None and quantization not in GROUP_BYTES
    ]
    problems += [
        f"the pattern {pattern!r} of quantization= matches no name of a linear weight, such as {', '.join(names[:3])}"
        for pattern in rules
        if not any(re.search(pattern, name) for name in names)
    ]
    if problems:
        raise ValueError("\n  - ".join([f"{who}: quantization= does not fit:", *problems]))


T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Pending(Generic[T_co]):
    """Value on its way. The source must not change until the value has arrived.

    The function that starts a transfer returns a `Pending`. The caller asks for the value once. Any thread may ask, but
    only a single thread at a time.

    Args:
        result: function that waits, and returns the value or raises the transfer's error. None in a subclass that
            overrides `result` and `done`. (A subclass that passed methods would hold itself, and so the sources.)
        done: function that returns whether the value has arrived, without waiting. Default: unknown, thus False.
        left: function that waits until the source may be overwritten. Default: waits for the value.

    Example:
        >>> Pending(lambda: 3).then(lambda x: x + 1).result()
        4
        >>> Pending.of(5).done()
        True
    """

    def __init__(
        self,
        result: Callable[[], T_co] | None = None,
        done: Callable[[], bool] | None = None,
        left: Callable[[], object] | None = None,
    ) -> None:
        self._result, self._done, self._left = result, done, left

    @staticmethod
    def of(value: U) -> "Pending[U]":
        """Returns a value that is here already."""
        return Pending(lambda: value, _is_done)

    def done(self) -> bool:
        """Returns whether `result` would return, or raise, at once. False if unknown."""
        return self._done is not None and self._done()

    def result(self) -> T_co:
        """Returns the value, and waits for it.

        For a tensor on an accelerator the current stream is made to wait, not the caller.

        Raises:
            Exception: the transfer's error.
        """
        assert self._result is not None
        return self._result()

    def wait(self) -> None:
        """Waits until the source may be overwritten."""
        (self._left or self.result)()

    def then(self, f: Callable[[T_co], U]) -> "Pending[U]":
        """Returns the value `f(x)` of the arriving `x`. `f` runs where the value is asked for."""
        return Pending(lambda: f(self.result()), self.done, self.wait)


def _is_done() -> bool:
    return True


@runtime_checkable
class StoredValue(Protocol):
    """A block of a leaf, wherever it is kept: on the device, the host or disk; in codes; a slice or a stack of these.

    A tensor is one by its attributes. On the device it is the identity element: `store`, `load` and `prefetch` return
    it unchanged, and in a graph it stands for itself. So code for any value has no cost for a plain tensor.

    Attributes:
        shape: shape of the value.
        dtype: dtype of its elements; in codes, of the decoded elements.
        nbytes: number of bytes in its place.

    Example:
        >>> x: StoredValue = torch.zeros(2)
        >>> load(x) is x
        True
    """

    @property
    def shape(self) -> torch.Size:
        """Shape of the value."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""
        ...

    @property
    def nbytes(self) -> int:
        """Number of bytes in its place."""
        ...


@runtime_checkable
class Stored(StoredValue, Protocol):
    """A `StoredValue` that is not a tensor of its elements, for instance a value on disk. Immutable.

    Attributes:
        kind: memory kind of the place.
        quantization: code that the elements are rounded to, see `Placement.quantization`. None: they are not rounded.

    Example:
        >>> isinstance(torch.zeros(2), Stored)
        False
    """

    @property
    def kind(self) -> MemoryKind:
        """Returns the memory kind of the place."""
        ...

    @property
    def quantization(self) -> AnyQuantization | None:
        """Returns the quantization of the elements, or None if they are not rounded."""
        ...

    def flat(self) -> "Stored":
        """Returns the same value as one dim."""
        ...

    def load(self) -> Tensor:
        """The whole value as a fresh host tensor; waits for it."""
        ...

    def read(self, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> Pending[Tensor]:
        """Rows `lo:hi` of dim 0, asynchronously, in `out` or in a fresh host tensor."""
        ...


def as_stored(value: StoredValue) -> Stored | None:
    """Returns a value that is not a tensor; None for a tensor."""
    return None if isinstance(value, Tensor) else cast(Stored, value)


def are_tensors(values: Sequence[Any]) -> TypeGuard[list[Tensor]]:
    """Returns whether all values are tensors, on the device or the host.

    Example:
        >>> are_tensors([torch.zeros(2)]), are_tensors([torch.zeros(2), None])
        (True, False)
    """
    return all(map(isinstance, values, itertools.repeat(Tensor)))


def load(value: StoredValue) -> Tensor:
    """Returns a value as a tensor, in the memory where it lies; reads and decodes it where it is not a tensor.

    Example:
        >>> load(torch.ones(2))
        tensor([1., 1.])
    """
    return value if isinstance(value, Tensor) else cast(Stored, value).load()


def read_rows(value: StoredValue, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> Pending[Tensor]:
    """Starts to read rows `lo:hi` of dim 0 of a value, into `out` or a fresh host tensor; a tensor's rows are a view.

    Example:
        >>> read_rows(torch.arange(3), 1).result()
        tensor([1, 2])
    """
    if isinstance(value, Tensor):
        rows = value[lo:hi] if value.ndim else value
        return Pending.of(rows if out is None else out.copy_(rows))
    return cast(Stored, value).read(lo, hi, out)


class Absent:
    """Placeholder for a leaf on a mesh without this rank. Has a dtype, but neither elements nor a value.

    Args:
        ndim: number of dims of the leaf.
        dtype: dtype of the leaf.
        kind: memory of the leaf on the ranks of the mesh.
        why: text of the error that `load` raises.
    """

    nbytes = 0
    quantization: AnyQuantization | None = None

    def __init__(self, ndim: int, dtype: torch.dtype, kind: MemoryKind, why: str) -> None:
        self.shape, self.dtype, self._why = torch.Size([0] * ndim), dtype, why
        self.kind: MemoryKind = kind

    def flat(self) -> "Absent":
        """The same, as a single dim."""
        return Absent(1, self.dtype, self.kind, self._why)

    def load(self) -> Tensor:
        """There is nothing to load.

        Raises:
            ValueError: always.
        """
        raise ValueError(self._why)

    def read(self, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> Pending[Tensor]:
        """There is nothing to read.

        Raises:
            ValueError: always.
        """
        raise ValueError(self._why)
