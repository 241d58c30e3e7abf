"""Activations of single elements, with the same bits in any batch and on any processor."""

import functools

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_exact, check_shape
from shardfn.kernels._chain import define_call
from shardfn.kernels._dispatch import implementation_of_rows
from shardfn.kernels._library import define, map_rows, refuse_backward

from . import _native


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
    check_exact("gate", gate)
    check_dtype("up", up, gate.dtype)
    check_shape("up", up, tuple(gate.shape), "that of gate")
    return torch.ops.shardfn_kernels.gated_silu(gate, up)


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
    check_exact("x", x)
    return torch.ops.shardfn_kernels.gelu(x)


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
    check_exact("x", x)
    for name, table in (("cos", cos), ("sin", sin)):
        check_dtype(name, table, x.dtype)
        check_shape(name, table, (T, K), "a row for each token")
    if K % 2:
        raise ValueError(f"K must be even, as rotation pairs the two halves of a row, got x of shape {tuple(x.shape)}")
    return torch.ops.shardfn_kernels.rotate(x, cos, sin)


def gated_silu_gradient(x: Float[Tensor, "*rows i"], dy: Float[Tensor, "*rows f"]) -> Float[Tensor, "*rows i"]:
    """Returns the gradient of `silu(gate) * up` for `x = (gate, up)`, with the bits of torch's ops.

        gate, up = x.chunk(2, -1)
        torch.cat([torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)], -1)

    The op needs no memory in addition to the result. A captured step writes the result over `x` where `x` is not used
    again.

    Args:
        x: of any floating-point dtype, I = 2 F.
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
    return torch.ops.shardfn_kernels.gated_silu_gradient(x, dy)


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


def _gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    return implementation_of_rows("pointwise", "gated_silu", gate)(gate.contiguous(), up.contiguous())


def _gelu_rows(x: Tensor) -> Tensor:
    return implementation_of_rows("pointwise", "gelu", x)(x.contiguous())


def _rotate_rows(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return implementation_of_rows("pointwise", "rotate", x)(*(t.contiguous() for t in (x, cos, sin)))


# Elements of a part: on a CPU a thread's elements, which fit in the cache.
_PART, _LARGE_PART = 1 << 15, 1 << 24


def _empty_like(x: Tensor, *others: Tensor) -> Tensor:
    del others
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define("gated_silu(Tensor gate, Tensor up) -> Tensor", _gated_silu, _empty_like)
define("gelu(Tensor x) -> Tensor", _gelu_rows, _empty_like)
define("gated_silu_gradient(Tensor x, Tensor dy) -> Tensor", _gated_silu_gradient, _empty_like)
define("gated_silu_gradient_(Tensor(a!) x, Tensor dy) -> Tensor(a!)", _gated_silu_gradient_, lambda x, dy: x)
define("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rotate_rows, _empty_like)
refuse_backward("rotate", "use nn.rope, or detach its arguments.")
for _name, _num, _layer in (("gated_silu", 2, "swiglu"), ("gelu", 1, "mlp")):
    map_rows(_name, _num)
    refuse_backward(_name, f"use nn.{_layer} with nn.BatchInvariantWeight.of(weight, chunks), or detach its arguments.")
map_rows("gated_silu_gradient", 2)
for _name in ("gated_silu_gradient", "gated_silu_gradient_"):
    refuse_backward(_name, "differentiate F.silu(gate) * up twice.")
for _name in ("gated_silu", "gelu"):
    define_call(f"shardfn_kernels::{_name}.default", functools.partial(_native.call, _name))
define_call("shardfn_kernels::rotate.default", _native.call_rotate)
for _names, _call in (
    (("add.Tensor", "add_.Tensor"), _native.call_add),
    (("mul.Tensor", "mul_.Tensor"), _native.call_multiply),
    (("pow.Tensor_Scalar", "pow_.Scalar"), _native.call_square),
    (("rsqrt.default", "rsqrt_.default"), _native.call_inverse_root),
):
    for _name in _names:
        define_call(f"aten::{_name}", _call)
