"""Products of two tensors, with the gradient of each operand by itself."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shardfn._torch import grouped_mm
from shardfn.core import save_tensors
from shardfn.kernels import grouped_outer, grouped_product

# The three derivatives, each as a function of the two other tensors in order, and of shared integers.
Trilinear = tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]


def derivative(form: Trilinear, at: int, a: Tensor, b: Tensor, *integers: Tensor) -> Tensor:
    """Returns the derivative of `form` with regard to tensor `at`, as a function of the other two tensors in order.

    Differentiable.
    """
    return _Derivative.apply(form, at, a, b, *integers)  # pyright: ignore[reportReturnType]


class _Derivative(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(form: Trilinear, at: int, a: Tensor, b: Tensor, *integers: Tensor) -> Tensor:
        return form[at](a, b, *integers)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.form, ctx.at, *tensors = inputs
        save_tensors(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        a, b, *integers = ctx.saved_tensors
        first, second = (i for i in range(3) if i != ctx.at)
        held = {ctx.at: grad_outputs[0], first: a, second: b}
        grads: list[Tensor | None] = [None, None]
        for i, (at, x) in enumerate(((first, a), (second, b))):
            if ctx.needs_input_grad[2 + i]:
                others = (held[j] for j in range(3) if j != at)
                # The sums of weights may be in a wider dtype than weights.
                grads[i] = derivative(ctx.form, at, *others, *integers).to(x.dtype)
        return None, None, *grads, *(None for _ in integers)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        (a, b, *integers), (_, _, da, db, *_) = ctx.saved_tensors, grad_inputs
        parts = [] if da is None else [derivative(ctx.form, ctx.at, da, b, *integers)]
        parts += [] if db is None else [derivative(ctx.form, ctx.at, a, db, *integers)]
        return functools.reduce(torch.add, parts)


# (dy, the other operand, shape of the operand) -> the gradient of an operand.
OperandGrad = Callable[[Tensor, Tensor, torch.Size], Tensor]


@dataclasses.dataclass(frozen=True)
class Product:
    """Function of two tensors, linear in each, such as `matmul`, with a separate gradient of each tensor.

    Use a `Product` for a custom kernel: called on a weight and an activation, the two gradients are computed separately
    where a pipeline's schedule splits backwards, as for torch's products. The product can be differentiated again if
    the gradients can.

    Attributes:
        forward: `forward(a, b) -> Tensor`.
        grads: gradients of a and of b: `grad(dy, the other operand, shape of the operand) -> Tensor`.

    Example:
        >>> gram = Product(lambda a, b: a @ b.t(), (lambda dy, b, _: dy @ b, lambda dy, a, _: dy.t() @ a))
        >>> w = torch.ones(2, 3, requires_grad=True)
        >>> torch.autograd.grad(gram(torch.ones(1, 3), w).sum(), w)[0]
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """

    forward: Callable[..., Tensor]
    grads: tuple[OperandGrad, OperandGrad]

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns the product of the operands."""
        if has_torch_function((a, b)):  # a lazy leaf, or `_Splitting` of backwards
            return handle_torch_function(self, (a, b), a, b)
        return _TwoOperands.apply(self, a, b)  # pyright: ignore[reportReturnType]


class Weight(abc.ABC):
    """Object in place of a weight [out, in], with a custom product for `linear`."""

    @property
    @abc.abstractmethod
    def source(self) -> Tensor | None:
        """Returns the weight itself, or None without a derivative."""

    @property
    @abc.abstractmethod
    def product(self) -> Product:
        """Returns the product of an input and the weight."""


class _TwoOperands(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(product: Product, a: Tensor, b: Tensor) -> Tensor:
        return product.forward(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.product, *operands = inputs
        save_tensors(ctx, *operands)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        (a, b), (_, da, db) = ctx.saved_tensors, grad_inputs
        parts = [] if da is None else [ctx.product.forward(da, b)]
        parts += [] if db is None else [ctx.product.forward(a, db)]
        return functools.reduce(torch.add, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        operands, (of_a, of_b), wants = ctx.saved_tensors, ctx.product.grads, ctx.needs_input_grad
        a, b = operands
        return (
            None,
            of_a(grads[0], b, a.shape) if wants[1] else None,
            of_b(grads[0], a, b.shape) if wants[2] else None,
        )


def product_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Product | None, tuple[Any, ...]]:
    """Returns the product computed by a call of torch, and the operands, or None for an unknown product.

    Known are `linear`, `matmul` and its kinds of tensors of two dims or more, `addmm` without factors, `einsum` of two
    operands, `grouped_mm` of rows in groups, and the aten ops `mm`, `bmm` and `_grouped_mm`; with floating-point
    operands, outside of autocast.
    """
    if isinstance(func, Product):
        return func, args
    read = _READERS.get(func)
    found = None if read is None else read(*args, **kwargs)
    if found is None:
        return None, ()
    product, *operands = found
    tensors = [x for x in operands if x is not None]
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
        return None, ()
    if torch.is_autocast_enabled(tensors[0].device.type):
        return None, ()
    return product, tuple(operands)


def _match_linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
    if isinstance(weight, Weight):
        return None if weight.source is None else (weight.product, input, weight.source, bias)
    return None if weight.ndim != 2 else (_LINEAR, input, weight, bias)


def _match_matmul(input: Tensor, other: Any, **named: Any) -> Any:
    """Matches `matmul`, `mm` and `bmm`. Some name the second operand differently."""
    if named or not isinstance(other, Tensor) or min(input.ndim, other.ndim) < 2:
        return None
    return _MATMUL, input, other


def _matmul_named(input: Tensor, other: Any = None, *, tensor2: Any = None, mat2: Any = None, **named: Any) -> Any:
    return _match_matmul(input, next((x for x in (other, tensor2, mat2) if x is not None), None), **named)


def _match_rmatmul(self: Tensor, other: Any) -> Any:
    return _match_matmul(other, self) if isinstance(other, Tensor) else None


def _match_addmm(input: Tensor, mat1: Tensor, mat2: Any = None, **named: Any) -> Any:
    if named or not isinstance(mat2, Tensor):
        return None
    return _ADDMM, mat1, mat2, input


def _grouped_mm(
    self: Tensor, mat2: Any = None, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None, **named: Any
) -> Any:
    """Matches groups of rows, each times a separate matrix. `mat_a` and `mat_b` are other names of the operands."""
    other = named.pop("mat_b", mat2)
    if named or bias is not None or not isinstance(other, Tensor) or offs is None:
        return None
    if self.ndim != 2 or other.ndim != 3 or out_dtype not in (None, self.dtype):
        return None
    counts = offs.long() - torch.nn.functional.pad(offs[:-1], (1, 0)).long()

    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(a, b, offs=offs)

    def gradient_of_a(dy: Tensor, b: Tensor, shape: torch.Size) -> Tensor:
        del shape
        return grouped_product(dy, b, counts, transposed=True)

    def gradient_of_b(dy: Tensor, a: Tensor, shape: torch.Size) -> Tensor:
        del shape
        return grouped_outer(a, dy, counts)

    return Product(forward, (gradient_of_a, gradient_of_b)), self, other


def _match_einsum(equation: Any, *operands: Any) -> Any:
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or len(tensors) != 2 or not all(isinstance(x, Tensor) for x in tensors):
        return None
    product = _einsum_product(equation.replace(" ", ""))
    return None if product is None else (product, *tensors)


def _einsum_product(equation: str) -> Product | None:
    """Returns the product of an equation, if the gradient of each operand is another such equation."""
    inputs, arrow, out = equation.partition("->")
    a, comma, b = inputs.partition(",")
    if not arrow or not comma or "," in b or "." in equation:
        return None
    plain = all(len(set(term)) == len(term) for term in (a, b, out))
    # A dim in only a single term was summed, or is missing from the inputs of the gradient.
    if not plain or set(a) - set(b + out) or set(b) - set(a + out):
        return None

    def gradient_of_a(dy: Tensor, b_value: Tensor, shape: torch.Size) -> Tensor:
        return torch.einsum(f"{out},{b}->{a}", dy, b_value).sum_to_size(shape)

    def gradient_of_b(dy: Tensor, a_value: Tensor, shape: torch.Size) -> Tensor:
        return torch.einsum(f"{out},{a}->{b}", dy, a_value).sum_to_size(shape)

    return Product(lambda a_value, b_value: torch.einsum(equation, a_value, b_value), (gradient_of_a, gradient_of_b))


def _as_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def _left_gradient(dy: Tensor, b: Tensor, shape: torch.Size) -> Tensor:
    """Returns the gradient of a in a @ b."""
    if b.ndim == 2:
        return (_as_rows(dy) @ b.mT).reshape(shape)
    return (dy @ b.mT).sum_to_size(shape)


def _right_gradient(dy: Tensor, a: Tensor, shape: torch.Size) -> Tensor:
    """Returns the gradient of b in a @ b."""
    if len(shape) == 2:
        return _as_rows(a).mT @ _as_rows(dy)
    return (a.mT @ dy).sum_to_size(shape)


def linear_input(dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """Returns the gradient of the input of `linear`."""
    return (_as_rows(dy) @ weight).reshape(shape)


def linear_weight(dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
    """Returns the gradient of the weight of `linear`."""
    del shape
    return _as_rows(dy).mT @ _as_rows(x)


_LINEAR = Product(torch.nn.functional.linear, (linear_input, linear_weight))
_MATMUL = Product(torch.matmul, (_left_gradient, _right_gradient))
_ADDMM = Product(lambda a, b, bias: torch.addmm(bias, a, b), (_left_gradient, _right_gradient))
_READERS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _match_linear,
    torch.addmm: _match_addmm,
    torch.Tensor.addmm: _match_addmm,
    torch.einsum: _match_einsum,
    torch.nn.functional.grouped_mm: _grouped_mm,
    grouped_mm: _grouped_mm,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.Tensor.__rmatmul__: _match_rmatmul,
} | dict.fromkeys(
    (
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.mm,
        torch.Tensor.mm,
        torch.bmm,
        torch.Tensor.bmm,
        torch.ops.aten.mm.default,  # calls of a graph run op by op
        torch.ops.aten.bmm.default,
    ),
    _matmul_named,
)
