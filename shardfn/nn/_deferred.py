"""Backwards in two parts: gradients of activations first, gradients of weights on request.

    y = x @ w        first:  dx = dy @ w.t()        later:  dw = x.t() @ dy

A pipeline sends dx to the stage before at once, and makes dw when the stage would be idle. Only products of an
activation and a weight are deferred. Such products are nearly all of a model's arithmetic. Autograd cannot split a
backward without running the chain of activations twice: a graph with both parts has paths from a layer's weights
through other layers, wherever leaves are stacked or tied. So such a product is a single node of autograd here, with
only the activation as an input. The node's backward records dy and x, and how to make dw from dy and x.

The graph determines the weight: the operand reached from a leaf through only views and casts. If neither operand is a
weight, or both are, the product is not split, and both gradients come in the first part.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from shardfn._torch import function_modes
from shardfn.collectives import transforming
from shardfn.core import Again, Ambient, rebind_ambient, rebind_in_checkpoints

from ._products import Product, product_of

_DEFERRING = Ambient["DeferredGradients"]("puts off the gradients of weights")
# Nodes of autograd with a backward of only the cotangent and sizes.
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "AsStrided", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes"),
        *("Squeeze", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View", "Clone"),
    )
) | {"SqueezeBackward1", "SqueezeBackward2", "SplitBackward1", "ViewBackward1"}


_ITSELF = (
    "a function that differentiates something itself cannot have its backward split, since it would get no gradients of"
    " weights. Use a schedule that does not split, such as '1f1b'."
)


class _Put(NamedTuple):
    """Deferred gradient of a weight: the weight's edge in the graph, and the function that makes the gradient."""

    weight: GradientEdge
    make: Callable[[], Tensor]


class DeferredGradients:
    """Gradients of a run of a function, in two parts.

    Call `recorded` once, around the function, then `first` once, then `rest` once. Between `first` and `rest` the
    object holds the activations of the products, and the cotangents of the products' results. Not thread-safe.

    Args:
        leaves: tensors with gradients. Nothing else is a weight.
        opened: function that makes a tensor from an object in place of a leaf, such as a lazy leaf.

    Example:
        >>> w, x = torch.ones(2, 3, requires_grad=True), torch.ones(4, 2, requires_grad=True)
        >>> deferred = DeferredGradients([w])
        >>> with deferred.recorded():
        ...     y = x @ w
        >>> deferred.first([y.sum()], [torch.tensor(1.0)], [x])  # of w nothing yet
        [None, tensor([[3., 3.],
                [3., 3.],
                [3., 3.],
                [3., 3.]])]
        >>> deferred.rest()
        [tensor([[4., 4., 4.],
                [4., 4., 4.]])]

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, 2023, https://arxiv.org/abs/2401.10241
    """

    def __init__(self, leaves: Sequence[Tensor], opened: Callable[[Any], Any] = lambda x: x) -> None:
        self._leaves, self._opened = list(leaves), opened
        self._roots = {get_gradient_edge(x).node: i for i, x in enumerate(self._leaves)}
        self._noted: dict[int, list[_Put]] = {}
        # Whether the first part is being computed.
        self.runs = False
        # Every deferred product depends on the anchor, so all products are reached even if the activations need no
        # gradient.
        self.anchor = torch.zeros((), requires_grad=True)

    def recorded(self) -> AbstractContextManager[Any]:
        """Returns a context in which products are split."""
        stack = contextlib.ExitStack()
        stack.enter_context(_DEFERRING.bound(self))
        stack.enter_context(rebind_in_checkpoints())
        stack.enter_context(_Splitting(self))
        return stack

    def first(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Differentiates, records the deferred products, and releases the graph.

        Args:
            outputs: results of the function.
            cotangents: theirs.
            inputs: tensors with wanted whole gradients.

        Returns:
            The leaves' gradients from the first part, then the gradients of `inputs`, or None for no gradient.
        """
        wanted = [*self._leaves, *inputs, self.anchor]
        self.runs = True
        try:
            with self.recorded():  # for recomputations: these must save the same tensors
                grads: Sequence[Tensor | None] = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
            return list(grads[:-1])
        finally:
            self.runs = False

    @torch.no_grad()
    def rest(self) -> list[Tensor | None]:
        """Yields the leaves' gradients of the second part in turn: hooks see each gradient as soon as ready."""
        out: list[Tensor | None] = [None] * len(self._leaves)
        while self._noted:
            i = next(iter(self._noted))
            puts = self._noted.pop(i)
            edges = [put.weight for put in puts]
            (out[i],) = torch.autograd.grad(edges, [self._leaves[i]], _make_gradients(puts))
        return out

    def note(self, leaf: int, weight: GradientEdge, make: Callable[[], Tensor]) -> None:
        """Defers a gradient. Called by backward functions of `first`.

        Raises:
            ValueError: another function than `first` differentiates.
        """
        if not self.runs or torch.is_grad_enabled():
            raise ValueError(_ITSELF)
        self._noted.setdefault(leaf, []).append(_Put(weight, make))

    def leaf_of(self, x: Any) -> int | None:
        """Returns the leaf that a tensor is a view or a cast of."""
        if not x.requires_grad:
            return None
        node = get_gradient_edge(x).node
        while node not in self._roots:
            following = [n for n, _ in node.next_functions if n is not None]
            if len(following) != 1 or not _hands_on(node):
                return None
            node = following[0]
        return self._roots[node]

    def check_inputs(self, inputs: Any) -> None:
        """Raises for gradients of leaves requested by the function itself.

        Raises:
            ValueError: an input is a leaf, or a view or cast of a leaf.
        """
        asked = [self._opened(x) for x in (inputs if isinstance(inputs, list | tuple) else [inputs])]
        if any(isinstance(x, Tensor) and self.leaf_of(x) is not None for x in asked):
            raise ValueError(_ITSELF)

    def split(self, product: Product, args: Sequence[Any]) -> Any:
        """Returns the product as a single node without the weight among the inputs, if an operand is a weight."""
        given: list[Any] = [self._opened(x) for x in args]
        leaves = [self.leaf_of(x) for x in given[:2]]
        if (leaves[0] is None) == (leaves[1] is None):
            return product.forward(*given)
        at = 0 if leaves[1] is None else 1
        leaf: Any = leaves[at]
        note = functools.partial(self.note, leaf, get_gradient_edge(given[at]))
        given[at] = given[at].detach()
        return _Split.apply(product, at, note, self.anchor, *given)


@rebind_ambient
def _repeat_splitting() -> list[Again]:
    return [deferring.recorded for deferring in _DEFERRING.all[-1:]]


def splitting() -> bool:
    """Returns whether products now become separate nodes."""
    return any(isinstance(mode, _Splitting) for mode in function_modes())


class _Splitting(TorchFunctionMode):
    """Function mode that defers the products of weights."""

    def __init__(self, deferring: DeferredGradients) -> None:
        super().__init__()
        self._deferring = deferring

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.autograd.grad and not self._deferring.runs:
            self._deferring.check_inputs(args[1])
        if torch.is_grad_enabled() and not transforming():
            product, operands = product_of(func, args, kwargs or {})
            if product is not None:
                return self._deferring.split(product, operands)
        return func(*args, **(kwargs or {}))


class _Split(torch.autograd.Function):
    """Product with a single operand known to autograd. Both operands are saved through hooks, as by an op."""

    @staticmethod
    def forward(ctx: Any, product: Product, at: int, note: Any, anchor: Tensor, *operands: Any) -> Any:
        del anchor
        given: Any = operands
        ctx.product, ctx.at, ctx.note = product, at, note
        ctx.bias = given[2].shape if len(given) > 2 and given[2] is not None else None
        ctx.num = len(given)
        ctx.save_for_backward(given[0], given[1])
        return product.forward(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dy, at, product = grads[0], ctx.at, ctx.product
        operands: Any = ctx.saved_tensors
        wants = ctx.needs_input_grad[4:]
        out: list[Tensor | None] = [None] * ctx.num
        if wants[1 - at]:
            out[1 - at] = product.grads[1 - at](dy, operands[at], operands[1 - at].shape)
        if ctx.bias is not None and wants[2]:
            out[2] = dy.sum_to_size(ctx.bias)
        # Only the activation: the weight, perhaps gathered for the backward, goes.
        ctx.note(functools.partial(product.grads[at], dy, operands[1 - at], operands[at].shape))
        return None, None, None, None, *out


def _hands_on(node: Any) -> bool:
    """Returns whether a node's backward belongs to a view, a cast or an identity.

    Such a backward can run separately.
    """
    return node.name() in _VIEWS or getattr(getattr(type(node), "_forward_cls", None), "hands_on", False)


def _make_gradients(puts: list[_Put]) -> list[Tensor]:
    """Returns the gradients, and frees the inputs of each gradient in turn."""
    made: list[Tensor] = []
    while puts:
        made.append(puts.pop(0).make())
    return made
