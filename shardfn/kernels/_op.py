"""Records of kernels, and the only place that chooses the implementation of a kernel.

A `KernelOp` has all facts about a kernel, in the kernel's file, and defines the kernel as an op of torch, so that the
kernel is a single node of a captured graph. The dispatch below, the costs, the partition and the chains of graphs read
the record.

Tensors on a CPU are computed by `native`, in C++, if a C++ compiler exists. Tensors elsewhere are computed by `triton`,
where the package `triton` is installed. In all other cases the `reference` runs, with the same bits. The reference is
the definition, and runs wherever torch runs.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn._torch import AutogradInfo, OpOverload, has_kernel_for_dispatch_key, make_autograd_impl

from ._build import SHARED, library

LIBRARY = torch.library.Library("shardfn_kernels", "DEF")
# Dtypes of inputs that are computed in fp32.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Dtypes of batch-invariant rows. Only the definitions compute float64.
EXACT = (torch.float32, torch.float64)
# Records by name of the op.
KERNELS: dict[str, "KernelOp"] = {}

_KINDS = ("reference", "native", "triton")
_CHOSEN: list[str] = []
# Candidates in the place of implementations, by name of the kernel, see `_harness.py`.
SWAPPED: dict[str, Callable[..., Any]] = {}


class DimLabels(NamedTuple):
    """Dims of a kernel along which ranks may share the work, as labels. Reads as `torch.einsum`, without its sums.

    For example `".d,m.->md"`: the columns d of the first operand are the columns of the result, the rows m of the
    second operand are the rows of the result. A point is a dim that is not cut.

    Attributes:
        labels: a term for each tensor among the operands, and for each result. A label names equal dims.
        linear: operands in which the kernel is linear, each separately, by number.
        sums: whether a label without a place in the result may be cut, since the kernel is a sum over the label.
        grouped: whether operand 0 has rows by group, operand 1 a matrix for each group, and operand 2 the number of
            rows of each group, so that a rank may compute only the rows of some groups.
    """

    labels: str
    linear: tuple[int, ...] = ()
    sums: bool = False
    grouped: bool = False


def _refuse_call(*args: Any) -> Any:
    del args
    raise NotImplementedError("this kernel has no reference")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KernelOp:
    """Kernel: an op of torch, with all facts about the op. To make a record defines the op.

    The implementations take the arguments of the schema by position.

    Attributes:
        schema: schema of the op, for example "gelu(Tensor x) -> Tensor".
        abstract: function of the arguments that returns results without data. Default: a result like the first tensor,
            contiguous, or none for a schema without results.
        reference: definition in plain torch, on any device.
        dtypes: dtypes that the first tensor may have. Empty: any.
        native: implementation in C++ on a CPU, or None.
        source: C++ file of `native`.
        triton: implementation in Triton, as "file.function", imported when first used, or "".
        fast_dtypes: dtypes of the first tensor that `native` and `triton` take. The reference computes the rest. Empty:
            all.
        contiguous: whether tensors that are only read are made contiguous for the implementations.
        no_derivative: remedy that a backward names in its error. Empty: the op has a derivative.
        mapped: rule for vmap. A number: a mapped dim of so many first tensors joins the leading dims, and each part of
            another mapped argument gets a separate call. None: no rule.
        flops: function of the arguments that returns floating-point operations, or None for operations not counted.
        scratch: function of the arguments that returns the bytes that the C++ allocates and frees again, or None for
            few bytes.
        sharding: labels of dims, or a function from the arguments to the labels, or None for whole values only.
        rows: use of values that may lack the last rows, see `graph.exact_rows`. Empty: whole values only.
        in_place: name of the op that writes the result over the first operand.
        written_from: names of the arguments that the written arguments depend on. (): all arguments.
        chain: function of arguments and results that returns the C++ call in a `KernelChain`, or None.

    Raises:
        ValueError: a record without a reference.

    Example:
        >>> KERNELS["gelu"].run(torch.tensor([0.0, 100.0]))
        tensor([  0., 100.])
    """

    schema: str
    abstract: Callable[..., Any] | None = None
    reference: Callable[..., Any] = _refuse_call
    dtypes: tuple[torch.dtype, ...] = ()
    native: Callable[..., Any] | None = None
    source: str = SHARED
    triton: str = ""
    fast_dtypes: tuple[torch.dtype, ...] = ()
    contiguous: bool = True
    no_derivative: str = ""
    mapped: int | Callable[..., Any] | None = None
    flops: Callable[..., int] | None = None
    scratch: Callable[..., int] | None = None
    sharding: DimLabels | Callable[..., DimLabels] | None = None
    rows: str = ""
    in_place: str = ""
    written_from: tuple[str, ...] = ()
    chain: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.reference is _refuse_call:
            raise ValueError(
                f"the kernel {self.name!r} must have a reference, the definition of the results, got none. Pass"
                " reference=, a function of plain torch"
            )
        LIBRARY.define(self.schema)
        LIBRARY.impl(self.name, self.run, "CompositeExplicitAutograd")
        abstract = self.abstract or (_make_none if self.schema.endswith("-> ()") else _empty_like)
        torch.library.register_fake(f"shardfn_kernels::{self.name}", abstract, lib=LIBRARY)
        if self.no_derivative:
            self._refuse_backward()
        if self.mapped is not None:
            rule = functools.partial(self._map_in_turn, self.mapped) if isinstance(self.mapped, int) else self.mapped
            torch.library.register_vmap(f"shardfn_kernels::{self.name}", rule, lib=LIBRARY)
        KERNELS[self.name] = self

    @functools.cached_property
    def name(self) -> str:
        """Returns the name of the op."""
        return self.schema.partition("(")[0]

    @functools.cached_property
    def argument_names(self) -> tuple[str, ...]:
        """Returns the names of the arguments by position."""
        return tuple(a.name for a in self.op.default._schema.arguments)

    @functools.cached_property
    def written(self) -> tuple[int, ...]:
        """Returns the positions of arguments that the op writes."""
        schema = enumerate(self.op.default._schema.arguments)
        return tuple(i for i, a in schema if a.alias_info is not None and a.alias_info.is_write)

    @functools.cached_property
    def has_derivative(self) -> bool:
        """Returns whether a backward through the op gives gradients."""
        return not self.no_derivative and has_kernel_for_dispatch_key(f"shardfn_kernels::{self.name}", "Autograd")

    @functools.cached_property
    def op(self) -> Any:
        """Returns the op of torch."""
        return getattr(torch.ops.shardfn_kernels, self.name)

    def __call__(self, *args: Any) -> Any:
        """Calls the op of torch."""
        return self.op(*args)

    def run(self, *args: Any) -> Any:
        """Computes the op by the implementation for the arguments, without autograd and transforms."""
        kind = _CHOSEN[-1] if _CHOSEN else _choose_kind(args[0].device.type)
        implementation = _find_implementation(self, kind, args[0].dtype)
        if self.name in SWAPPED and self.is_fast_dtype(args[0].dtype):
            implementation = SWAPPED[self.name]
        if self.contiguous:
            args = tuple(x.contiguous() if i in self._read and x is not None else x for i, x in enumerate(args))
        return implementation(*args)

    def check_dtype(self, name: str, x: Tensor) -> None:
        """Checks the dtype of the first tensor.

        Raises:
            TypeError: a dtype that the kernel does not take.
        """
        if x.dtype not in self.dtypes:
            *first, last = (str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            known = " or ".join(filter(None, (", ".join(first), last)))
            raise TypeError(f"{name} must be {known}, got {x.dtype}. Convert {name}")

    def is_fast_dtype(self, dtype: torch.dtype) -> bool:
        """Returns whether other implementations than the reference take a first tensor of this dtype."""
        return not self.fast_dtypes or dtype in self.fast_dtypes

    @functools.cached_property
    def _read(self) -> frozenset[int]:
        """Returns the positions of tensors that the op only reads."""
        arguments = enumerate(self.op.default._schema.arguments)
        tensors = {i for i, a in arguments if str(a.type) in ("Tensor", "Optional[Tensor]")}
        return frozenset(tensors.difference(self.written))

    def _refuse_backward(self) -> None:
        """Makes a backward through the op an error. Otherwise torch would warn, and leave the gradients out."""

        def raise_no_derivative(context: Any, *cotangents: Any) -> Any:
            del context, cotangents
            raise NotImplementedError(f"kernels.{self.name} has no derivative: {self.no_derivative}")

        if self.op.default._schema.is_mutable:  # to register a derivative of such an op is an error in torch, even this
            refusal = make_autograd_impl(self.op.default, AutogradInfo(raise_no_derivative, None))
            LIBRARY.impl(self.name, refusal, "Autograd", with_keyset=True)
        else:
            torch.library.register_autograd(f"shardfn_kernels::{self.name}", raise_no_derivative, lib=LIBRARY)

    def _map_in_turn(self, num: int, info: Any, in_dims: Any, *args: Any) -> Any:
        pairs = list(zip(args, in_dims, strict=True))
        if all(dim is None for dim in in_dims[num:]):
            return self(*(_move_to_front(x, dim, info.batch_size) for x, dim in pairs[:num]), *args[num:]), 0
        each = range(info.batch_size)
        return torch.stack([self(*(x if d is None else x.select(d, i) for x, d in pairs)) for i in each]), 0


def _empty_like(x: Tensor, *rest: Any) -> Tensor:
    del rest
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _make_none(*args: Any) -> None:
    del args


def _move_to_front(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


# The choice of an implementation.


@functools.cache
def _choose_kind(device: str) -> str:
    if device == "cpu":
        return "native" if library() else "reference"
    return "triton" if importlib.util.find_spec("triton") else "reference"


@functools.cache
def _find_implementation(kernel: KernelOp, kind: str, dtype: torch.dtype) -> Callable[..., Any]:
    fast = kernel.is_fast_dtype(dtype)
    if kind == "native" and fast and kernel.native is not None and library(kernel.source) is not None:
        return kernel.native
    if kind == "triton" and fast and kernel.triton:
        file, _, function = kernel.triton.partition(".")
        return getattr(importlib.import_module(f"shardfn.kernels.{file}"), function)
    return kernel.reference


@contextlib.contextmanager
def implemented_by(kind: str) -> Iterator[None]:
    """Returns a context in which all kernels run in the same implementation, on any device: for tests and benchmarks.

    Triton's kernels take CPU tensors only under its interpreter: set `TRITON_INTERPRET=1` before triton is imported.

    Args:
        kind: "reference", "native" (C++) or "triton". A kernel without the implementation runs as "reference".

    Raises:
        ValueError: for another kind, and for "native" where there is no compiler.

    Example:
        >>> from shardfn.kernels import pack_signs
        >>> with implemented_by("reference"):
        ...     pack_signs(torch.tensor([[1.0, -1, 1, 1, -1, -1, -1, 1]]))
        tensor([[177]], dtype=torch.uint8)
    """
    if kind not in _KINDS:
        raise ValueError(f"kernels must be implemented by {', '.join(map(repr, _KINDS))}, got {kind!r}")
    if kind == "native" and library() is None:
        raise ValueError("'native' kernels must have a C++ compiler, got none. Install a compiler, or use 'reference'")
    # For all threads: a backward may run on another thread.
    _CHOSEN.append(kind)
    try:
        yield
    finally:
        _CHOSEN.pop()


def is_implementation_chosen() -> bool:
    """Returns whether `implemented_by` has chosen an implementation."""
    return bool(_CHOSEN)


def is_native(name: str) -> bool:
    """Returns whether a kernel runs in C++ on CPU tensors here: the kernel's C++ was built, or can be built.

    Args:
        name: name of the kernel.

    Example:
        >>> is_native("no_such_kernel")
        False
    """
    kernel = KERNELS.get(name)
    return kernel is not None and kernel.native is not None and library(kernel.source) is not None


# Records of ops.


def kernel_of(op: Any) -> KernelOp | None:
    """Returns the record of an op of torch, or None for an op that is not a kernel.

    Example:
        >>> kernel_of(torch.ops.aten.add.Tensor) is None, kernel_of(torch.ops.shardfn_kernels.gelu.default).name
        (True, 'gelu')
    """
    return KERNELS.get(op.__name__.partition(".")[0]) if getattr(op, "namespace", "") == "shardfn_kernels" else None


def without_dispatch(op: Any) -> Callable[..., Any] | None:
    """Returns the function of a kernel's op, for calls by position without autograd and transforms.

    None for other ops.

    Torch's dispatcher takes 10 us for an op in Python, twice as long as the called function.

    Example:
        >>> without_dispatch(torch.ops.aten.add.Tensor) is None
        True
    """
    kernel = kernel_of(op) if isinstance(op, OpOverload) else None
    return None if kernel is None else _bind_run(kernel)


@functools.cache
def _bind_run(kernel: KernelOp) -> Callable[..., Any]:
    """Returns the same function at each call, so that emitted code names the function once."""
    return kernel.run


def scratch_bytes(op: Any, args: Sequence[Any]) -> int:
    """Returns the bytes that a kernel's op allocates on a CPU for a run, and frees again, or 0 for other ops.

    Args:
        op: op of torch.
        args: tensors and numbers. Only shapes and dtypes of tensors are read.

    Example:
        >>> scratch_bytes(torch.ops.aten.add.Tensor, (torch.ones(2), torch.ones(2)))
        0
    """
    kernel = kernel_of(op)
    return 0 if kernel is None or kernel.scratch is None else kernel.scratch(*args)
