"""Functions of two tensors, linear in each, three by three: each function is a derivative of the other two.

    t(a, b, c), linear in a, b and c      da(b, c), db(a, c), dc(a, b): its derivatives

The gradient of dc with regard to a is da of b and the cotangent, and so on. The derivatives of gradients are the same
three functions again, to any order.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

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
