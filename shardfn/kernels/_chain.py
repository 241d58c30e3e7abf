"""Chains: calls of C++ functions in order, by a single call from Python.

A captured step calls the same functions on the same shapes again and again. Only addresses differ. So the list of calls
is made once, and a run takes the addresses of the incoming tensors, and memory for the results.
"""

import ctypes
import dataclasses
import itertools
import operator
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._arguments import num_threads
from ._build import function, library
from ._op import SWAPPED, is_implementation_chosen, kernel_of

_SOURCE = "_chain.cpp"
_MOST = 64  # arguments of a call


Arguments = tuple[Tensor | int | float | None, ...]


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """Call of a C++ function. All such functions have the same type (`_chain.h`).

    Attributes:
        source: the file of the function.
        name: name of the function.
        arguments: tensors pass as addresses, None as null.
        check: check of a function that may fail: a function that raises the error, and the arguments of the function.
            Tensors that the chain has made pass as None.
        kernel: name of the record that the call comes from, or "" for an operation of torch.
    """

    source: str
    name: str
    arguments: Arguments
    check: tuple[Callable[..., None], tuple[Any, ...]] | None = None
    kernel: str = ""


def addresses(arguments: Arguments) -> list[int | float | None]:
    """Returns the arguments of a call from Python: tensors pass as addresses."""
    return [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]


# Calls of ops of torch: by name, from arguments and results, without data, to the call or None.
_CALLS: dict[str, Callable[..., KernelCall | None]] = {}


def define_call(op: str, call: Callable[..., KernelCall | None]) -> None:
    """Makes an op of torch callable in chains: `call(arguments, results)` gives the call, or None for other arguments.

    Kernels have the function in the record.
    """
    _CALLS[op] = call


def call_of(op: Any, arguments: Sequence[Any], results: Any) -> KernelCall | None:
    """Returns the kernel call for an op on a CPU, given the shapes, strides and dtypes of the tensors. Other ops: None.

    Args:
        op: op of torch.
        arguments: arguments by position.
        results: tensor that the op returns, or the list of tensors.

    Example:
        >>> x = torch.ones(2, 3)
        >>> call_of(torch.ops.aten.add.Tensor, (x, x), x).name
        'added'
    """
    kernel = kernel_of(op)
    if kernel is not None:
        make = None if kernel.name in SWAPPED else kernel.chain
    else:
        make = _CALLS.get(f"{op._schema.name}.{op._overloadname}") if hasattr(op, "_schema") else None
    call = None if make is None else make(arguments, results)
    if call is None or len(call.arguments) > _MOST:
        return None
    if not all(_is_plain(x) for x in call.arguments if isinstance(x, Tensor)):
        return None
    return call if kernel is None else dataclasses.replace(call, kernel=kernel.name)


def are_built(calls: Sequence[KernelCall]) -> bool:
    """Builds the C++ of calls, and returns whether the C++ is built.

    Example:
        >>> are_built([]) == (library() is not None)
        True
    """
    return all(library(source) is not None for source in {_SOURCE, *(call.source for call in calls)})


def are_dense(*tensors: Tensor | None) -> bool:
    """Returns whether tensors are contiguous in float32."""
    return all(x is None or (x.dtype == torch.float32 and x.is_contiguous() and not x.is_neg()) for x in tensors)


def _is_plain(x: Tensor) -> bool:
    return x.device.type == "cpu" and all(type(size) is int for size in (*x.shape, *x.stride()))


class TensorLayouts:
    """Shapes, strides, dtypes and devices that tensors must have, compared once for each tensor.

    torch makes new objects for a shape, so that to compare the weights of a decode step takes longer than the step's
    other Python. A tensor that was compared in the call before is known by a weak reference. Only the number of bytes
    is compared on each call, so that `x.resize_` or `x.data = x.half()` between two calls is noticed. A change in place
    that keeps the number of bytes is not noticed, for example `x.data = x.t()`.

    Args:
        tensors: tensors of these layouts.

    Example:
        >>> layouts, x = TensorLayouts([torch.ones(2, 3)]), torch.zeros(2, 3)
        >>> layouts.match([x]), layouts.match([x]), layouts.match([x.double()]), layouts.match([x[:, :2]])
        (True, True, False, False)
        >>> x.data = x.half()
        >>> layouts.match([x])
        False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._layouts, self._strides = [*map(_LAYOUT, tensors)], [x.stride() for x in tensors]
        self._num_bytes = [*map(_NUM_BYTES, tensors)]
        self._matched: list[Callable[[], Tensor | None]] = [lambda: None] * len(tensors)

    def match(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether all tensors have their layouts."""
        if [*map(_NUM_BYTES, tensors)] != self._num_bytes:
            return False
        is_new = [*map(operator.is_not, tensors, map(operator.call, self._matched))]
        if not any(is_new):
            return True
        new = [*itertools.compress(tensors, is_new)]
        if [*map(_LAYOUT, new)] != [*itertools.compress(self._layouts, is_new)]:
            return False
        if [*map(Tensor.stride, new)] != [*itertools.compress(self._strides, is_new)]:
            return False
        self._matched = [*map(weakref.ref, tensors)]
        return True


_LAYOUT = operator.attrgetter("shape", "dtype", "device")
_NUM_BYTES = operator.attrgetter("nbytes")


class KernelChain:
    """Calls in order, of the incoming tensors, and of the tensors made by earlier calls.

    Args:
        calls: function without arguments that returns the calls. The calls may depend on the number of threads.
        place: place of a tensor in a call: the number of a memory, and the first byte there. Memories 0 to n - 1 belong
            to the n incoming tensors, memory n is the room, and the rest are the results. For example (1, 64) is byte
            64 of the second incoming tensor.
        given: tensors with the shapes, strides and dtypes of the incoming tensors.
        room: bytes of the values between calls, not seen from outside.
        results: tensors with the shapes and dtypes of the results.
        plain: function that computes the same by operations of torch, for tensors unlike `given`.
    """

    def __init__(
        self,
        calls: Callable[[], Sequence[KernelCall]],
        place: Callable[[Tensor], tuple[int, int]],
        given: Sequence[Tensor],
        room: int,
        results: Sequence[Tensor],
        plain: Callable[..., Sequence[Tensor]],
    ) -> None:
        self._calls, self._place, self._room, self._plain = calls, place, room, plain
        self._given = TensorLayouts(given)
        self._results = [(tuple(x.shape), x.dtype) for x in results]
        self._programs: dict[int, "tuple[array[int], int]"] = {}  # by the number of threads

    def __call__(self, given: list[Tensor]) -> Sequence[Tensor]:
        """Returns the results. Empties the list of the incoming tensors."""
        come = tuple(given)
        given.clear()
        if is_implementation_chosen() or (SWAPPED and self._has_swapped()) or not self._given.match(come):
            return self._plain(*come)
        threads = num_threads()
        program, calls = self._programs.get(threads) or self._programs.setdefault(threads, self._write_program())
        room = torch.empty(self._room, dtype=torch.uint8, device="cpu")
        made = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in self._results]
        bases = array("q", map(Tensor.data_ptr, (*come, room, *made)))
        failed = _load_runner()(program.buffer_info()[0], calls, bases.buffer_info()[0])
        if failed:
            self._raise_failure(self._calls()[failed - 1], come)
        return made

    def _has_swapped(self) -> bool:
        return any(call.kernel in SWAPPED for call in self._calls())

    def _raise_failure(self, call: KernelCall, come: Sequence[Tensor]) -> None:
        if call.check is not None:
            check, arguments = call.check
            check(*(self._find_given(x, come) if isinstance(x, Tensor) else x for x in arguments))
        self._plain(*come)  # raises the error of a value that the chain has made
        raise AssertionError(f"{call.name} in C++ failed without an error")

    def _find_given(self, x: Tensor, come: Sequence[Tensor]) -> Tensor | None:
        memory, _ = self._place(x)
        return come[memory].view(x.shape) if memory < len(come) else None

    def _write_program(self) -> "tuple[array[int], int]":
        """Returns the numbers that `run_chain` reads, and the number of calls."""
        program, calls = array("q"), self._calls()
        for call in calls:
            program.extend((_find_address(call), len(call.arguments)))
            for x in call.arguments:
                program.extend(self._place(x) if isinstance(x, Tensor) else (-1, _float_bits(x)))
        return program, len(calls)


def _load_runner() -> Any:
    return function(_SOURCE, "run_chain", "pip", returns=True)


def _find_address(call: KernelCall) -> int:
    return ctypes.cast(getattr(library(call.source), call.name + "_chained"), ctypes.c_void_p).value or 0


def _float_bits(x: float | None) -> int:
    if isinstance(x, float):
        return ctypes.c_int32.from_buffer(ctypes.c_float(x)).value
    return 0 if x is None else int(x)
