"""Activations of single elements, with the same bits in any batch and on any processor."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ._arguments import check_dtype, check_shape, threads_for
from ._build import function
from ._chain import Arguments, KernelCall, addresses, are_dense, define_call
from ._fixed_bits import exponential, multiply_add
from ._op import EXACT, KernelOp

LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR
# Elements up to which a second thread does not pay.
FEW = 1 << 17
# Elements of a part of a gradient: on a CPU a thread's elements, which fit in the cache.
_PART, _LARGE_PART = 1 << 15, 1 << 24
_SOURCE = "_pointwise.cpp"


def gated_silu(gate: Float[Tensor, "*shape"], up: Float[Tensor, "*factors"]) -> Float[Tensor, "*shape"]:
    """Returns `gate / (1 + e^-gate) * up`, each element by the same fixed expression.

    Torch's silu rounds the last elements of a thread's range otherwise than the rest, so torch's bits depend on the
    number of rows. For a derivative take `nn.swiglu` with `nn.BatchInvariantWeight`s.

    Args:
        gate: the argument of silu, float32 or float64.
        up: the factor, of the same dtype and shape.

    Raises:
        TypeError: for other dtypes.
        ValueError: shapes differ.
        NotImplementedError: in a backward.

    Example:
        >>> gated_silu(torch.tensor([0.0, 100.0]), torch.tensor([2.0, 3.0]))
        tensor([  0., 300.])
    """
    return _apply_gate(GATED_SILU, gate, up)


def gated_sigmoid(gate: Float[Tensor, "*shape"], up: Float[Tensor, "*factors"]) -> Float[Tensor, "*shape"]:
    """Returns `up / (1 + e^-gate)`, each element by the same fixed expression: a gate of an LSTM times a vector.

    Args:
        gate: the argument of the sigmoid, float32 or float64.
        up: the factor, of the same dtype and shape.

    Raises:
        TypeError: for other dtypes.
        ValueError: shapes differ.
        NotImplementedError: in a backward.

    Example:
        >>> gated_sigmoid(torch.tensor([0.0, 100.0]), torch.tensor([2.0, 3.0]))
        tensor([1., 3.])
    """
    return _apply_gate(GATED_SIGMOID, gate, up)


def gelu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns GELU in GPT-2's form with tanh, as `x / (1 + e^-a)`, a = x (c + 0.044715 c x^2), c = 2 sqrt(2 / pi).

    Each element is the same fixed expression, equal to x (1 + tanh(a / 2)) / 2. For a derivative take `nn.mlp` with
    `nn.BatchInvariantWeight`s.

    Args:
        x: float32 or float64, any shape.

    Raises:
        TypeError: for other dtypes.
        NotImplementedError: in a backward.

    Example:
        >>> gelu(torch.tensor([-100.0, 0.0, 100.0]))
        tensor([ -0.,   0., 100.])
    """
    GELU.check_dtype("x", x)
    return GELU(x)


def rotate(x: Float[Tensor, "t h k"], cos: Float[Tensor, "t k"], sin: Float[Tensor, "t k"]) -> Float[Tensor, "t h k"]:
    """Returns `x cos + (-b, a) sin` of rows x = (a, b) of two halves: `nn.rope` in a single pass, with the same bits.

    Args:
        x: queries or keys of tokens, float32 or float64. K is even.
        cos: cosines of each token, in the dtype of x.
        sin: sines of the angles, in the shape of `cos`.

    Raises:
        TypeError: for other dtypes.
        ValueError: shapes differ, or K is odd.
        NotImplementedError: in a backward.

    Example:
        >>> rotate(torch.tensor([[[1.0, 2.0]]]), torch.zeros(1, 2), torch.ones(1, 2))
        tensor([[[-2.,  1.]]])
    """
    T, _, K = x.shape
    ROTATE.check_dtype("x", x)
    for name, table in (("cos", cos), ("sin", sin)):
        check_dtype(name, table, x.dtype)
        check_shape(name, table, (T, K), "a row for each token")
    if K % 2:
        raise ValueError(f"K must be even, as rotation pairs the two halves of a row, got x of shape {tuple(x.shape)}")
    return ROTATE(x, cos, sin)


def gated_silu_gradient(x: Float[Tensor, "*rows i"], dy: Float[Tensor, "*rows f"]) -> Float[Tensor, "*rows i"]:
    """Returns the gradient of `silu(gate) * up` for `x = (gate, up)`, with the bits of torch's ops.

        gate, up = x.chunk(2, -1)
        torch.cat([torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)], -1)

    The op needs no memory in addition to the result. A captured step writes the result over `x` where `x` is not used
    again.

    Args:
        x: rows of any floating-point dtype, I = 2 F.
        dy: the gradient of the product, in the dtype of `x`.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes do not fit.
        NotImplementedError: in a backward.

    Example:
        >>> gated_silu_gradient(torch.tensor([[0.0, 2.0]]), torch.ones(1, 1))
        tensor([[1., 0.]])
    """
    check_dtype("dy", dy, x.dtype)
    check_shape("dy", dy, (*x.shape[:-1], x.shape[-1] // 2), "half a row of x")
    if x.shape[-1] % 2:
        raise ValueError(f"rows of x have two halves: the length must be even, got x of shape {tuple(x.shape)}")
    return GATED_SILU_GRADIENT(x, dy)


# The definitions. Each operation is rounded once.


def _apply_gate(op: KernelOp, gate: Tensor, up: Tensor) -> Tensor:
    op.check_dtype("gate", gate)
    check_dtype("up", up, gate.dtype)
    check_shape("up", up, tuple(gate.shape), "that of gate")
    return op(gate, up)


def _gate_by_torch(gate: Tensor, up: Tensor) -> Tensor:
    return _multiply_sigmoid(gate, gate) * up


def _gate_up_by_torch(gate: Tensor, up: Tensor) -> Tensor:
    return _multiply_sigmoid(up, gate)


def _gelu_by_torch(x: Tensor) -> Tensor:
    factor = multiply_add(x * x, x.new_tensor(CUBIC), x.new_tensor(LINEAR))
    return _multiply_sigmoid(x, x * factor)


def _rotate_by_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]


def _multiply_sigmoid(x: Tensor, a: Tensor) -> Tensor:
    """Returns x / (1 + e^-a), by only e^-|a|."""
    e = exponential(-a.abs())
    return x * torch.where(a < 0, e, 1.0) / (1 + e)


def _gated_silu_gradient(x: Tensor, dy: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, dpart, to in zip(_split_parts(x), _split_parts(dy, x), _split_parts(out), strict=True):
        _write_gradient(part, dpart, to)
    return out


def _gated_silu_gradient_(x: Tensor, dy: Tensor) -> Tensor:
    # Both halves of the result need gate.
    for part, dpart in zip(_split_parts(x), _split_parts(dy, x), strict=True):
        made = torch.empty_like(part)
        _write_gradient(part, dpart, made)
        part.copy_(made)
    return x


def _write_gradient(x: Tensor, dy: Tensor, out: Tensor) -> None:
    (gate, up), (dgate, dup) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(dy, up, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    torch.ops.aten.silu.out(gate, out=dup)
    dup.mul_(dy)


def _split_parts(x: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Returns the rows of `x` in parts, the same parts for both ops above.

    So both ops have the same bits: torch's silu rounds the last elements of a thread's range otherwise than the rest.
    """
    width = max((x if like is None else like).shape[-1], 1)
    most = _PART * torch.get_num_threads() if x.device.type == "cpu" else _LARGE_PART
    return x.reshape(-1, max(x.shape[-1], 1)).split(max(most // width, 1))


# In C++.


def _run_elements(name: str, *tensors: Tensor) -> Tensor:
    y = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
    function(_SOURCE, name, "p" * (len(tensors) + 1) + "ii")(*addresses(_list_arguments(*tensors, y)))
    return y


def _call_elements(name: str, arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    return KernelCall(_SOURCE, name, _list_arguments(*arguments, y)) if are_dense(*arguments) else None


def _list_arguments(*tensors: Tensor) -> Arguments:
    n = tensors[-1].numel()
    return *tensors, n, threads_for(n, FEW)


def _rotate_natively(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    function(_SOURCE, "rotate", "ppppiii")(*addresses((x, cos, sin, y, *x.shape)))
    return y


def _call_rotate(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    x, cos, sin = arguments
    return KernelCall(_SOURCE, "rotate", (x, cos, sin, y, *x.shape)) if are_dense(x, cos, sin) else None


# Operations of torch with results determined by IEEE 754, so that both have the same bits.


def _call_add(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the kernel call for torch's `add` and `add_` of two tensors of equal shape, or a tensor and a number."""
    x, other = arguments
    if type(other) in (int, float) and abs(other) <= 1 << 53 and are_dense(x, y):
        n = x.numel()
        return KernelCall(_SOURCE, "shifted", (x, y, n, float(other), threads_for(n, FEW)))
    return _call_elements("added", arguments, y) if isinstance(other, Tensor) and x.shape == other.shape else None


def _call_multiply(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the kernel call for torch's `mul` and `mul_` of two tensors of equal shape, or rows and row factors."""
    x, by = arguments
    if not isinstance(by, Tensor) or not are_dense(x, by, y):
        return None
    if x.shape == by.shape:
        return _call_elements("multiplied", arguments, y)
    if y.shape == by.shape:
        x, by = by, x
    rows, size = y.numel() // max(y.shape[-1], 1), y.shape[-1]
    each, alike = (*y.shape[:-1], 1), (*[1] * (by.ndim - 1), size)
    if y.shape != x.shape or y.numel() > FEW or by.shape not in (each, alike):
        return None
    return KernelCall(_SOURCE, "scaled", (x, by, y, rows, size, int(by.shape == each)))


def _call_square(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the kernel call for torch's `pow` with an exponent of two."""
    x, exponent = arguments
    two = type(exponent) in (int, float) and exponent == 2
    return _call_elements("multiplied", (x, x), y) if two and are_dense(x, y) else None


def _call_inverse_root(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the kernel call for torch's `rsqrt` and `rsqrt_`."""
    (x,) = arguments
    return KernelCall(_SOURCE, "inverse_root", (x, y, x.numel())) if are_dense(x, y) else None


def _call_rows(arguments: Sequence[Any], y: Tensor) -> KernelCall | None:
    """Returns the call of torch's `embedding`, and of `index` by the numbers of rows."""
    x, index, *rest = arguments
    from_end = not isinstance(index, Tensor)  # `index` counts negative numbers from the end, `embedding` does not
    index = index[0] if from_end and len(index) == 1 else index
    if rest or not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        return None
    if not are_dense(x, y) or not index.is_contiguous():
        return None
    size, wide = math.prod(x.shape[1:]), int(index.dtype == torch.int64)
    check = _check_rows, (index, len(x), from_end)
    return KernelCall(_SOURCE, "take_rows", (x, index, y, len(x), index.numel(), size, wide, int(from_end)), check)


def _check_rows(index: Tensor | None, num: int, from_end: bool) -> None:
    low = -num if from_end else 0
    if index is not None and torch.any((index < low) | (index >= num)):
        raise IndexError(f"index must be from {low} to {num - 1}, got {int(index.min())} to {int(index.max())}.")


for _names, _call in (
    (("embedding.default", "index.Tensor"), _call_rows),
    (("add.Tensor", "add_.Tensor"), _call_add),
    (("mul.Tensor", "mul_.Tensor"), _call_multiply),
    (("pow.Tensor_Scalar", "pow_.Scalar"), _call_square),
    (("rsqrt.default", "rsqrt_.default"), _call_inverse_root),
):
    for _name in _names:
        define_call(f"aten::{_name}", _call)


def _define(
    schema: str, reference: Callable[..., Tensor], native: Callable[..., Tensor], chain: Callable[..., Any], **more: Any
) -> KernelOp:
    return KernelOp(
        schema=schema,
        reference=reference,
        dtypes=EXACT,
        native=native,
        source=_SOURCE,
        triton=f"_pointwise_triton.{schema.partition('(')[0]}",
        fast_dtypes=(torch.float32,),
        chain=chain,
        **more,
    )


_REMEDY = "use nn.{} with nn.BatchInvariantWeight.of(weight, chunks), or detach its arguments."
GATED_SILU, GATED_SIGMOID, GELU = (
    _define(
        schema,
        reference,
        functools.partial(_run_elements, name),
        functools.partial(_call_elements, name),
        no_derivative=remedy,
        mapped=num,
    )
    for name, schema, reference, remedy, num in (
        ("gated_silu", "gated_silu(Tensor gate, Tensor up) -> Tensor", _gate_by_torch, _REMEDY.format("swiglu"), 2),
        (
            "gated_sigmoid",
            "gated_sigmoid(Tensor gate, Tensor up) -> Tensor",
            _gate_up_by_torch,
            "use torch.sigmoid(gate) * up, or detach its arguments.",
            2,
        ),
        ("gelu", "gelu(Tensor x) -> Tensor", _gelu_by_torch, _REMEDY.format("mlp"), 1),
    )
)
ROTATE = _define(
    "rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    _rotate_by_torch,
    _rotate_natively,
    _call_rotate,
    no_derivative="use nn.rope, or detach its arguments.",
)
GATED_SILU_GRADIENT = KernelOp(
    schema="gated_silu_gradient(Tensor x, Tensor dy) -> Tensor",
    reference=_gated_silu_gradient,
    contiguous=False,
    no_derivative="differentiate F.silu(gate) * up twice.",
    mapped=2,
    rows="each",
    in_place="gated_silu_gradient_",
)
GATED_SILU_GRADIENT_ = KernelOp(
    schema="gated_silu_gradient_(Tensor(a!) x, Tensor dy) -> Tensor(a!)",
    abstract=lambda x, dy: x,
    reference=_gated_silu_gradient_,
    contiguous=False,
    no_derivative="differentiate F.silu(gate) * up twice.",
    rows="each",
)
