"""Batch-invariant activations, norms, scores of routers and rotary tables, with derivatives.

A row has the same bits next to any other rows. The derivatives are closed forms in torch's operations, differentiable
again. `_batch_invariant.py` has the law.

Torch's sums, exponentials and sigmoids depend on the width of a processor's vectors, and some of them on the number of
rows. Here e^x and the sigmoid of a score are made of `kernels.gated_silu`, a fixed expression, and sums are added by
halving. Rotary tables have the same numbers on every processor, from only additions and multiplications.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shardfn import kernels
from shardfn.core import save_inputs, save_tensors

from ._batch_invariant import AnyWeight, BatchInvariantWeight, wrong_dtype_error


def gelu(x_F: Tensor, w: AnyWeight) -> Tensor:
    """Returns GELU in the form with tanh, by `batch_invariant_gelu` after a layer with a batch-invariant weight."""
    if isinstance(w, BatchInvariantWeight):
        return batch_invariant_gelu(x_F)
    return F.gelu(x_F, approximate="tanh")


def gated_silu(gate_F: Tensor, up_F: Tensor, w: AnyWeight) -> Tensor:
    """Returns silu(gate) * up, by `batch_invariant_gated_silu` after a layer with a batch-invariant weight."""
    if isinstance(w, BatchInvariantWeight):
        return batch_invariant_gated_silu(gate_F, up_F)
    return F.silu(gate_F) * up_F


def batch_invariant_gelu(x_F: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns GELU in the form with tanh, by `kernels.gelu`: each element by the same expression.

    Args:
        x_F: float32 or float64.

    Example:
        >>> batch_invariant_gelu(torch.zeros(2)).tolist()
        [0.0, 0.0]
    """
    return pointwise(kernels.gelu, _gelu_partials, x_F)


def batch_invariant_gated_silu(
    gate_F: Float[Tensor, "*shape"], up_F: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Returns silu(gate) * up, by `kernels.gated_silu`: each element by the same expression.

    Args:
        gate_F: float32 or float64.
        up_F: weights as `gate_F`.

    Example:
        >>> batch_invariant_gated_silu(torch.zeros(2), torch.ones(2)).tolist()
        [0.0, 0.0]
    """
    return pointwise(kernels.gated_silu, partials_of_gated_silu, gate_F, up_F)


def softcap(x: Float[Tensor, "*shape"], bound: float, *, batch_invariant: bool = False) -> Float[Tensor, "*shape"]:
    """Returns bound tanh(x / bound), nearly x for small x, and never beyond the bound. Gemma 2 uses it for logits.

    Args:
        x: any shape. With `batch_invariant`, float32 or float64.
        bound: above 0.
        batch_invariant: whether each element is computed by the same expression.

    Example:
        >>> softcap(torch.tensor([0.0, 1000.0]), 30.0).tolist()
        [0.0, 30.0]
    """
    if not batch_invariant:
        return (x / bound).tanh() * bound
    return pointwise(functools.partial(_compute_softcap, bound), functools.partial(_softcap_partials, bound), x)


def _compute_softcap(bound: float, x: Tensor) -> Tensor:
    return (_compute_sigmoid(x * (2 / bound)) - 0.5) * (2 * bound)  # tanh z = 2 sigmoid(2 z) - 1


def _softcap_partials(bound: float, x: Tensor) -> tuple[Tensor]:
    bounded = (x / bound).tanh()
    return (1 - bounded * bounded,)


def pointwise(run: Callable[..., Tensor], partials: Callable[..., Any], *xs: Tensor) -> Tensor:
    """Returns an elementwise function of tensors of equal shape, with derivatives from the partial derivatives."""
    return _Pointwise.apply(run, partials, *xs)  # pyright: ignore[reportReturnType]


def batch_invariant_layer_norm(
    x_D: Float[Tensor, "*batch d"],
    w_D: Float[Tensor, " d"],
    b_D: Float[Tensor, " d"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "*batch d"]:
    """Applies a batch-invariant `layer_norm`: rows have the same bits next to any other rows, by `kernels.row_norm`.

    Args:
        x_D: float32 or float64, any leading dims.
        w_D: scale, in the dtype of x.
        b_D: shift in the dtype of the scale, or None.
        eps: added to the variance.

    Raises:
        TypeError: for other dtypes.

    Example:
        >>> batch_invariant_layer_norm(torch.tensor([-1.0, 1.0]), torch.ones(2), eps=0.0).tolist()
        [-1.0, 1.0]
    """
    return _apply_norm(x_D, w_D, b_D, eps, True)


def batch_invariant_rms_norm(
    x_D: Float[Tensor, "*batch d"], w_D: Float[Tensor, " d"], *, eps: float = 1e-5
) -> Float[Tensor, "*batch d"]:
    """Applies a batch-invariant `rms_norm`: rows have the same bits next to any other rows, by `kernels.row_norm`.

    Args:
        x_D: float32 or float64, any leading dims.
        w_D: scale, in the dtype of x.
        eps: added to the mean square.

    Raises:
        TypeError: for other dtypes.

    Example:
        >>> batch_invariant_rms_norm(torch.tensor([2.0, -2.0]), torch.ones(2), eps=0.0).tolist()
        [1.0, -1.0]
    """
    return _apply_norm(x_D, w_D, None, eps, False)


def _apply_norm(x: Tensor, w: Tensor, b: Tensor | None, eps: float, centered: bool) -> Tensor:
    if has_torch_function((x, w, b)):  # a lazy leaf
        return handle_torch_function(_apply_norm, (x, w, b), x, w, b, eps, centered)
    dtypes = dict.fromkeys(t.dtype for t in (x, w, b) if t is not None)
    if len(dtypes) > 1 or x.dtype not in kernels.EXACT:
        raise wrong_dtype_error(f"a batch-invariant norm of {', '.join(map(str, dtypes))}:")
    return _Norm.apply(x, w, b, eps, centered)  # pyright: ignore[reportReturnType]


class _Pointwise(torch.autograd.Function):
    """Maps (an elementwise function of tensors of equal shape, the partial derivatives, the tensors) to the value."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., Tensor], partials: Callable[..., Any], *xs: Tensor) -> Tensor:
        del partials
        return run(*xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        _, ctx.partials, *xs = inputs
        save_tensors(ctx, *xs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return None, None, *(grad_outputs[0] * partial for partial in ctx.partials(*ctx.saved_tensors))

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        pairs = zip(grad_inputs[2:], ctx.partials(*ctx.saved_tensors), strict=True)
        return functools.reduce(torch.add, [t * partial for t, partial in pairs if t is not None])


def partials_of_gated_silu(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the derivatives of silu(gate) * up with regard to gate and to up.

    Example:
        >>> partials_of_gated_silu(torch.zeros(1), torch.ones(1))
        (tensor([0.5000]), tensor([0.]))
    """
    s = gate.sigmoid()
    return up * s * (1 + gate * (1 - s)), gate * s


_C = 2 * math.sqrt(2 / math.pi)


def _gelu_partials(x: Tensor) -> tuple[Tensor]:
    square = x * x
    s = (_C * x * (1 + 0.044715 * square)).sigmoid()
    # 1 - s is 0 before the factor overflows.
    return (s + x * s * (1 - s) * (_C * (1 + 3 * 0.044715 * square)),)


class _Norm(torch.autograd.Function):
    """Maps (x, w, b, eps, centered) to y = n w + b, n = (x - m) r, r = 1 / sqrt(mean((x - m)^2) + eps).

    backward  dx = r (g - [mean(g)] - n mean(g n)), g = dy w;  dw = sum of dy n;  db = sum of dy
    jvp       dy = r (t - [mean(t)] - n mean(t n)) w + n dw + db
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None, eps: float, centered: bool) -> Tensor:
        return kernels.row_norm(x, w, b, eps=eps, centered=centered)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        x, w, b, ctx.eps, ctx.centered = inputs
        ctx.biased = b is not None
        save_tensors(ctx, x, w)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (dy,), (x, w) = grad_outputs, ctx.saved_tensors
        n, r = _normalize_rows(ctx, x)
        dx = _project_direction(ctx, dy * w, n, r) if ctx.needs_input_grad[0] else None
        return dx, (dy * n).sum_to_size(w.shape), dy.sum_to_size(w.shape) if ctx.biased else None, None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        (x, w), (tx, tw, tb, *_) = ctx.saved_tensors, grad_inputs
        n, r = _normalize_rows(ctx, x)
        parts = [] if tx is None else [_project_direction(ctx, tx, n, r) * w]
        parts += [] if tw is None else [n * tw]
        parts += [] if tb is None else [tb.expand_as(x)]
        return functools.reduce(torch.add, parts)


def _normalize_rows(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x - x.mean(-1, keepdim=True) if ctx.centered else x
    r = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    return x * r, r


def _project_direction(ctx: Any, g: Tensor, n: Tensor, r: Tensor) -> Tensor:
    """Returns the derivative of n in the direction g, a symmetric map."""
    inner = g - n * (g * n).mean(-1, keepdim=True)
    return r * (inner - g.mean(-1, keepdim=True) if ctx.centered else inner)


_LEAST = -87.0  # below the bound e^x is 0, without subnormal numbers
_NEAR = 2.0**-60  # nearer to 0 the sigmoid is 1/2, and x no divisor


def batch_invariant_softmax(x_E: Float[Tensor, "*batch e"]) -> Float[Tensor, "*batch e"]:
    """Returns the softmax over the last dim. Rows have the same bits next to any other rows.

    Args:
        x_E: finite scores in float32 or float64, where e is 1 or more.

    Raises:
        TypeError: for other dtypes.

    Example:
        >>> batch_invariant_softmax(torch.tensor([1.0, 1.0])).tolist()
        [0.5, 0.5]
    """
    _check_dtype(x_E)
    return _Softmax.apply(x_E)  # pyright: ignore[reportReturnType]


def batch_invariant_sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the sigmoid of each element, by the same expression.

    Args:
        x: float32 or float64, finite.

    Raises:
        TypeError: for other dtypes.

    Example:
        >>> batch_invariant_sigmoid(torch.tensor([0.0, -200.0])).tolist()
        [0.5, 0.0]
    """
    _check_dtype(x)
    return pointwise(_compute_sigmoid, _sigmoid_partials, x)


def batch_invariant_sum(x_E: Float[Tensor, "*batch e"]) -> Float[Tensor, "*batch 1"]:
    """Sums over the last dim by halving: the first half of the elements plus the second, until a single sum is left.

    Example:
        >>> batch_invariant_sum(torch.tensor([1.0, 2.0, 3.0]))
        tensor([6.])
    """
    width = 1 << (x_E.shape[-1] - 1).bit_length()
    x_E = F.pad(x_E, (0, width - x_E.shape[-1]))
    while width > 1:
        width //= 2
        x_E = x_E[..., :width] + x_E[..., width:]
    return x_E


def _check_dtype(x: Tensor) -> None:
    if x.dtype not in kernels.EXACT:
        raise wrong_dtype_error(f"batch-invariant scores of {x.dtype}:")


def _compute_sigmoid(x: Tensor) -> Tensor:
    near = x.abs() < _NEAR
    divisor = torch.where(near, 1.0, x)
    return torch.where(near, 0.5, kernels.gated_silu(divisor, torch.ones_like(divisor)) / divisor)


def _sigmoid_partials(x: Tensor) -> tuple[Tensor]:
    s = x.sigmoid()
    return (s * (1 - s),)


def _compute_exponential(x: Tensor) -> Tensor:
    """Returns e^x for x <= 0 as s / (1 - s), where s = sigmoid(x) is at most 1/2."""
    s = _compute_sigmoid(x.clamp(min=_LEAST))
    return torch.where(x < _LEAST, 0.0, s / (1 - s))


class _Softmax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        weights = _compute_exponential(x - x.amax(-1, keepdim=True))
        return weights / batch_invariant_sum(weights)

    setup_context = staticmethod(save_inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _project_softmax(x, grad_outputs[0])

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return _project_softmax(x, grad_inputs[0])


def _project_softmax(x: Tensor, g: Tensor) -> Tensor:
    """Returns the derivative in the direction g, a symmetric map."""
    p = x.softmax(-1)
    return p * (g - (g * p).sum(-1, keepdim=True))


# pi / 2 in two parts. Products of the first and a whole number below 2^20 are exact.
_HIGH, _LOW = 1.5707963267341256, 6.077100506506192e-11
_MAGIC = 6755399441055744.0  # 1.5 * 2^52: added numbers are rounded to whole numbers, ties to even
_TERMS = 9


def batch_invariant_rope_table(
    positions_T: Int64[Tensor, " t"],
    head_dim: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    frequencies: Sequence[float] | None = None,
) -> tuple[Float[Tensor, "t k"], Float[Tensor, "t k"]]:
    """Returns `rope_table` with the same numbers on every processor: a row depends only on the row's position.

    In float64, powers of the base come from the C library, and may differ in the last bit from another library.

    Args:
        positions_T: global positions of the tokens.
        head_dim: K, even.
        base: the longest wave is 2 pi base tokens.
        dtype: float32 or float64.
        frequencies: K/2 angles of a step from position to position, in place of the powers of `base`.

    Returns:
        cos_TK and sin_TK, for `rope`.

    Raises:
        ValueError: `head_dim` is odd.

    Example:
        >>> cos_TK, sin_TK = batch_invariant_rope_table(torch.arange(3), 4)
        >>> cos_TK[0].tolist(), sin_TK[0].tolist()
        ([1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0])
    """
    if head_dim % 2:
        raise ValueError(
            f"batch_invariant_rope_table(head_dim={head_dim}): rotation pairs dims, so the head dim must be even."
        )
    steps = [base ** -(i / head_dim) for i in range(0, head_dim, 2)] if frequencies is None else frequencies
    inverse = torch.tensor(steps, dtype=dtype, device=positions_T.device)
    x = (positions_T.to(dtype)[:, None] * inverse).double()
    quarters = (x * (1 / (_HIGH + _LOW)) + _MAGIC) - _MAGIC
    r = (x - quarters * _HIGH) - quarters * _LOW
    square, near_cos, near_sin = r * r, torch.ones_like(r), torch.ones_like(r)
    for i in range(2 * _TERMS - 1, 0, -2):
        near_cos = 1 - near_cos * square * (1 / (i * (i + 1)))
        near_sin = 1 - near_sin * square * (1 / ((i + 1) * (i + 2)))
    near_sin = near_sin * r
    quarter = quarters.to(torch.int64) & 3
    swapped = quarter % 2 == 1
    cos, sin = torch.where(swapped, near_sin, near_cos), torch.where(swapped, near_cos, near_sin)
    cos = torch.where((quarter == 1) | (quarter == 2), -cos, cos)
    sin = torch.where(quarter >= 2, -sin, sin)
    return cos.to(dtype).repeat(1, 2), sin.to(dtype).repeat(1, 2)
