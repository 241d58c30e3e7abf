"""Candidates for kernels: checks against the definition, and a context in which the library uses a candidate.

A candidate is a function with the arguments of an op's schema by position, as `KernelOp.reference`. For example
`f(x, weight, bias, eps, centered)` is a candidate for `row_norm`. A candidate in a file runs in a separate process, see
`_harness_process.py`.
"""

import contextlib
import ctypes
import functools
import gc
import inspect
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._harness_cases import EMPTY, EVEN, ODD, OpCases, Size
from ._harness_modules import ModuleOp, cases_of, find_op
from ._harness_process import CandidateError, ProcessLimits, load_candidate, run_apart
from ._op import SWAPPED, KernelOp, implemented_by

Candidate = Callable[..., Any]
# Relative differences from the definition that the check of values allows, by dtype.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_BATCH = (33, 128)
_LIMITS = ProcessLimits()
# Calls between two readings of the memory, and the bytes a call that may stay in caches.
_CALLS, _KEPT = 16, 1024


class Verdict(NamedTuple):
    """Result of one check.

    Attributes:
        check: name of the check, for example "odd sizes".
        status: "passed", "failed" or "skipped".
        message: the first difference, or the reason of a skipped check.
    """

    check: str
    status: str
    message: str = ""


class CheckReport(NamedTuple):
    """Verdicts on a candidate.

    Attributes:
        name: name of the op.
        verdicts: a verdict for each check.
    """

    name: str
    verdicts: tuple[Verdict, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Returns the names of failed checks."""
        return tuple(v.check for v in self.verdicts if v.status == "failed")

    @property
    def passed(self) -> bool:
        """Returns whether no check failed."""
        return not self.failures

    def __str__(self) -> str:
        """Returns a line for each check."""
        lines = [f"  {v.check:<18}{v.status:<9}{v.message}".rstrip() for v in self.verdicts]
        return "\n".join([f"{self.name}: {'passed' if self.passed else 'failed'}", *lines])


def check(name: str, f: Candidate | str | pathlib.Path, *, limits: ProcessLimits | None = None) -> CheckReport:
    """Checks a candidate for an op against the op's definition.

    Args:
        name: name of the op: a kernel, or a function of transformers' models, see `MODULE_OPS`.
        f: function in the place of the implementation, with the arguments of the schema by position. A path is a Python
            file with a function of the op's name, and runs in a separate process.
        limits: time and memory of the process. Only for a path.

    Returns:
        A verdict for each check:

            even sizes, odd sizes, empty   values of the definition, up to rounding, and shapes, dtypes and strides
            bits                           the bits of the definition, where the record promises these
            strides                        the same, with tensors that are not contiguous
            dtypes                         all dtypes of the record
            vmap                           the results of each part
            gradient                       derivatives of the op, where the op has some
            batch invariance               a row has the same bits alone and in any batch, where the record promises so
            same bits twice                the bits of a call, after another call, and on a single thread
            inputs                         tensors that are only read keep their values, and no result shares memory
            memory                         calls keep no memory

    Raises:
        ValueError: no such op, or limits with a function.
        CandidateError: the function takes other arguments. For a path: the file has no such function, raises when
            imported, exceeds a limit, or ends the process.

    Example:
        >>> check("gelu", lambda x: torch.nn.functional.gelu(x, approximate="tanh")).failures[0]
        'bits'
        >>> check("rms_norm", find_op("rms_norm").reference).passed
        True
    """
    if isinstance(f, str | pathlib.Path):
        cases_of(name)
        return check_file(pathlib.Path(f), (name,), limits or ProcessLimits())[0]
    if limits is not None:
        raise ValueError(
            "limits must belong to a path, as a function runs in this process, got a function. Leave out limits="
        )
    cases, kernel = cases_of(name), find_op(name)
    check_signature(kernel, f)
    return CheckReport(name, tuple(_judge(label, run, _Trial(kernel, cases, f)) for label, run in _CHECKS.items()))


def check_file(path: pathlib.Path, names: Sequence[str] = (), limits: ProcessLimits = _LIMITS) -> list[CheckReport]:
    """Checks the candidates of a file in a separate process.

    Args:
        path: Python file.
        names: names of ops. Empty: all ops for which the file has functions.
        limits: time and memory of the process.

    Raises:
        CandidateError: see `check`.
    """
    found = run_apart(path, "check", names, limits)
    return [CheckReport(one["name"], tuple(Verdict(*v) for v in one["verdicts"])) for one in found]


@contextlib.contextmanager
def swap(name: str, f: Candidate | str | pathlib.Path, *, report: CheckReport | None = None) -> Iterator[None]:
    """Returns a context in which the whole library uses a candidate in the place of an op's implementation.

    The candidate takes the dtypes that the record's C++ takes (`fast_dtypes`). Captured steps use the candidate, too.

    Args:
        name: name of the op.
        f: function, or path of a file. The file is imported into this process after the check.
        report: result of `check` for the candidate. Default: the candidate is checked here.

    Raises:
        ValueError: a check failed. The message lists the failures.
        CandidateError: see `check`.

    Example:
        >>> gelu = find_op("gelu")
        >>> with swap("gelu", gelu.reference):
        ...     gelu(torch.zeros(1))
        tensor([0.])
    """
    report = check(name, f) if report is None else report
    if not report.passed or report.name != name:
        raise ValueError(f"a candidate for {name!r} must pass its checks before the library uses it, got\n{report}")
    with swapped(name, load_candidate(pathlib.Path(f), name) if isinstance(f, str | pathlib.Path) else f):
        yield


@contextlib.contextmanager
def swapped(name: str, f: Candidate) -> Iterator[None]:
    """Returns the context of `swap`, without a check."""
    before = SWAPPED.get(name)
    SWAPPED[name] = f
    try:
        yield
    finally:
        if before is None:
            del SWAPPED[name]
        else:
            SWAPPED[name] = before


def check_signature(kernel: KernelOp | ModuleOp, f: Candidate) -> None:
    """Refuses a function that cannot be called with the arguments of the schema.

    Raises:
        CandidateError: the signature does not fit.
    """
    names = kernel.argument_names
    try:
        inspect.signature(f).bind(*names)
    except TypeError as error:
        raise CandidateError(
            "signature",
            f"a candidate for {kernel.name!r} must take {len(names)} arguments by position ({', '.join(names)}), got"
            f" {inspect.signature(f)}: {error}. Write def {kernel.name}({', '.join(names)})",
        ) from None
    except ValueError:  # a function in C has no signature
        return


class _Failed(Exception):
    """A check found a difference."""


class _Skipped(Exception):
    """A check does not apply."""


class _Trial(NamedTuple):
    """A candidate with its op.

    Attributes:
        kernel: record of the op.
        cases: cases of the op.
        f: the candidate.
    """

    kernel: KernelOp | ModuleOp
    cases: OpCases
    f: Candidate

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        """Returns the dtypes of first tensors."""
        return self.kernel.dtypes or self.cases.dtypes

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the checks of sizes."""
        return torch.float32 if torch.float32 in self.dtypes else self.dtypes[0]

    def arguments(self, rows: int, width: int, dtype: torch.dtype | None = None) -> tuple[Size, tuple[Any, ...]]:
        """Returns a size with the arguments."""
        size = Size(rows, width, dtype or self.dtype)
        return size, self.cases.make(size)

    def run(self, args: Sequence[Any]) -> list[Tensor]:
        """Returns the results of the candidate, with written arguments."""
        with swapped(self.kernel.name, self.f):
            return self.call(args)

    def define(self, args: Sequence[Any]) -> list[Tensor]:
        """Returns the results of the definition."""
        with implemented_by("reference"):
            return self.call(args)

    def call(self, args: Sequence[Any]) -> list[Tensor]:
        """Returns results and written arguments of the op. The arguments stay."""
        args = _copy(args)
        return [*_list_tensors(self.kernel.op(*args)), *(args[i] for i in self.written)]

    @property
    def written(self) -> Sequence[int]:
        """Returns the positions of arguments that the op writes."""
        return self.kernel.written


def _judge(label: str, run: Callable[[_Trial], None], trial: _Trial) -> Verdict:
    try:
        run(trial)
        return Verdict(label, "passed")
    except _Skipped as reason:
        return Verdict(label, "skipped", str(reason))
    except _Failed as found:
        return Verdict(label, "failed", str(found))
    except CandidateError:
        raise
    except Exception as error:  # of the candidate
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            raise CandidateError("memory", f"{trial.kernel.name} must fit its limit of memory, got {error}") from None
        return Verdict(label, "failed", f"raises {type(error).__name__}: {error}".splitlines()[0])


# The checks.


def _check_sizes(sizes: Sequence[tuple[int, int]], trial: _Trial) -> None:
    for rows, width in sizes:
        size, args = trial.arguments(rows, width)
        _compare(str(size), trial.run(args), trial.define(args))


def _check_empty(trial: _Trial) -> None:
    try:
        trial.define(trial.arguments(*EMPTY[0])[1])
    except (TypeError, ValueError, RuntimeError) as error:
        raise _Skipped(f"the definition takes no empty tensors: {error}") from None
    _check_sizes(EMPTY, trial)


def _check_bits(trial: _Trial) -> None:
    if not trial.cases.exact:
        raise _Skipped("the record does not promise the bits of the definition")
    for rows, width in EVEN + ODD:
        size, args = trial.arguments(rows, width)
        _compare(str(size), trial.run(args), trial.define(args), exact=True)


def _check_strides(trial: _Trial) -> None:
    size, args = trial.arguments(*EVEN[0])
    kept = [x if i in trial.written else _spread(x) for i, x in enumerate(args)]
    try:
        trial.define(kept)
    except (TypeError, ValueError, RuntimeError):
        raise _Skipped("the op takes no such strides") from None
    _compare(f"{size}, strided", trial.run(kept), trial.define(args))


def _check_dtypes(trial: _Trial) -> None:
    for dtype in trial.dtypes:
        size, args = trial.arguments(*EVEN[0], dtype)
        _compare(str(size), trial.run(args), trial.define(args))


def _check_vmap(trial: _Trial) -> None:
    if trial.kernel.mapped is None or trial.written:
        raise _Skipped("the record has no rule for vmap")
    num = max(trial.kernel.mapped, 1) if isinstance(trial.kernel.mapped, int) else 1
    parts = [trial.arguments(*EVEN[0])[1]]
    parts.append((*(_negate(x) for x in parts[0][:num]), *parts[0][num:]))
    stacked = [torch.stack(pair) for pair in zip(*(part[:num] for part in parts), strict=True)]

    def call(*mapped: Tensor) -> tuple[Tensor, ...]:
        return tuple(_list_tensors(trial.kernel.op(*mapped, *parts[0][num:])))

    expected = [torch.stack(pair) for pair in zip(*map(trial.define, parts), strict=True)]
    with swapped(trial.kernel.name, trial.f):
        got = torch.func.vmap(call)(*stacked)
    _compare("a mapped dim of 2", list(got), expected)


def _check_gradient(trial: _Trial) -> None:
    if not trial.kernel.has_derivative:
        raise _Skipped("the op has no derivative")
    size, args = trial.arguments(*ODD[0])
    with implemented_by("reference"):
        expected = _differentiate(trial.kernel, args)
    with swapped(trial.kernel.name, trial.f):
        _compare(f"gradient at {size}", _differentiate(trial.kernel, args), expected)


def _check_batch(trial: _Trial) -> None:
    if not trial.cases.rows:
        raise _Skipped("the record does not promise rows that are independent of each other")
    for rows, width in (_BATCH, (_BATCH[0], ODD[0][1])):
        size, args = trial.arguments(rows, width)
        args = _copy(args)
        with swapped(trial.kernel.name, trial.f):
            returned = _list_tensors(trial.kernel.op(*args))
        by_row = [*returned, *(args[i] for i in trial.written if i in trial.cases.rows)]
        for first, last in ((0, 1), (16, 17), (32, 33), (0, 2), (5, 21), (1, 33)):
            part = [x[first:last] if i in trial.cases.rows and x is not None else x for i, x in enumerate(args)]
            _compare(
                f"rows {first} to {last - 1} of {size}, computed alone,",
                trial.run(part)[: len(by_row)],
                [x[first:last] for x in by_row],
                exact=True,
            )


def _check_twice(trial: _Trial) -> None:
    size, args = trial.arguments(*_BATCH)
    first = trial.run(args)
    trial.run(trial.arguments(*ODD[0])[1])
    _compare(f"the second call at {size}", trial.run(args), first, exact=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        _compare(f"another number of threads at {size}", trial.run(args), first, exact=True)
    finally:
        torch.set_num_threads(threads)


def _check_inputs(trial: _Trial) -> None:
    size, args = trial.arguments(*EVEN[1])
    given = _copy(args)
    with swapped(trial.kernel.name, trial.f):
        results = _list_tensors(trial.kernel.op(*given))
    read = [i for i in range(len(args)) if i not in trial.written]
    for i in read:
        _compare(f"argument {i} after the call at {size}", _list_tensors(given[i]), _list_tensors(args[i]), exact=True)
    taken = {x.untyped_storage().data_ptr() for i in read for x in _list_tensors(given[i])} - {0}
    if any(x.untyped_storage().data_ptr() in taken for x in results):
        raise _Failed("a result must not share memory with an argument that is only read, got a view. Copy it")


def _check_memory(trial: _Trial) -> None:
    if bytes_in_use() is None:
        raise _Skipped("the C library does not count its memory here")
    _, args = trial.arguments(*_BATCH)
    readings = []
    for _ in range(4):
        for _ in range(_CALLS):
            trial.run(args)
        gc.collect()
        readings.append(bytes_in_use() or 0)
    grown = [(b - a) // _CALLS for a, b in itertools.pairwise(readings[1:])]
    if min(grown) > _KEPT:
        raise _Failed(f"calls must keep no memory, got {min(grown)} bytes more after each call. Free them")


# By name, in order.
_CHECKS: dict[str, Callable[[_Trial], None]] = {
    "even sizes": functools.partial(_check_sizes, EVEN),
    "odd sizes": functools.partial(_check_sizes, ODD),
    "empty": _check_empty,
    "bits": _check_bits,
    "strides": _check_strides,
    "dtypes": _check_dtypes,
    "vmap": _check_vmap,
    "gradient": _check_gradient,
    "batch invariance": _check_batch,
    "same bits twice": _check_twice,
    "inputs": _check_inputs,
    "memory": _check_memory,
}


def list_checks() -> tuple[str, ...]:
    """Returns the names of all checks, in their order.

    Example:
        >>> list_checks()[:2]
        ('even sizes', 'odd sizes')
    """
    return tuple(_CHECKS)


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used free keep".split()
    ]


def bytes_in_use() -> int | None:
    """Returns the bytes that the process has from malloc, and from a GPU. None where the C library is not glibc."""
    try:
        read = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    read.restype = _Heap
    heap = read()
    return heap.hblkhd + heap.used + (torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0)


# Tensors of arguments and results.


def _copy(args: Sequence[Any]) -> list[Any]:
    """Returns arguments with copies of tensors, with the strides of the tensors."""
    return [_copy(x) if isinstance(x, list) else _copy_tensor(x) if isinstance(x, Tensor) else x for x in args]


def _copy_tensor(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _list_tensors(results: Any) -> list[Tensor]:
    given = results if isinstance(results, tuple | list) else (results,)
    return [x for x in given if isinstance(x, Tensor)]


def _spread(x: Any) -> Any:
    """Returns a tensor with the same values, with each element next to a zero."""
    if not isinstance(x, Tensor) or x.ndim == 0:
        return x
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


def _negate(x: Any) -> Any:
    return -x if isinstance(x, Tensor) and x.is_floating_point() else x


def _differentiate(kernel: KernelOp | ModuleOp, args: Sequence[Any]) -> list[Tensor]:
    given = [
        x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args
    ]
    results = [x for x in _list_tensors(kernel.op(*given)) if x.requires_grad]
    total = torch.stack([(x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in results]).sum()
    leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [g for g in grads if g is not None]


def _compare(label: str, got: Sequence[Tensor], expected: Sequence[Tensor], *, exact: bool = False) -> None:
    """Raises _Failed with the first differing element."""
    if len(got) != len(expected):
        raise _Failed(f"{label}: there must be {len(expected)} results, got {len(got)}")
    largest = max((float(y[y.isfinite()].abs().max()) for y in expected if _has_finite(y)), default=0.0)
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        for what in ("shape", "dtype"):
            if getattr(x, what) != getattr(y, what):
                raise _Failed(f"{label}: the {what} of result {i} must be {getattr(y, what)}, got {getattr(x, what)}")
        if not exact and y.is_contiguous() and not x.is_contiguous():
            raise _Failed(f"{label}: result {i} must be contiguous, got strides {x.stride()}")
        bad = _find_difference(x, y, None if exact else largest)
        if bad is not None:
            raise _Failed(f"{label}: result {i} at {list(bad)} must be {y[bad].item()!r}, got {x[bad].item()!r}")


def _has_finite(x: Tensor) -> bool:
    return x.is_floating_point() and bool(x.isfinite().any())


def _find_difference(x: Tensor, y: Tensor, largest: float | None) -> tuple[int, ...] | None:
    """Returns the place of the first element that differs, or None without one.

    Args:
        x: the candidate's result.
        y: the expected result.
        largest: largest number of all results, which rounding is relative to. None: no rounding is allowed.
    """
    a, b = x.detach(), y.detach()
    same = (a == b) | ((a != a) & (b != b))
    if largest is not None and y.dtype in _TOLERANCES:
        same |= (a - b).abs() <= _TOLERANCES[y.dtype] * b.abs().clamp(min=largest)
    return None if same.all() else tuple((~same).nonzero()[0].tolist())
