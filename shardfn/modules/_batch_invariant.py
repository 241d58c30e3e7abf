"""Function modes that make a module batch-invariant: each row has the bits of a batch with only that row.

Torch's matrix products, and the last elements of some of its pointwise functions, depend on the number of rows. While
`ExactRows` is open, linear layers read packed weights by `kernels.row_linear`, and the functions of a small table are
computed by fixed expressions. Other functions run unchanged; a probe finds whether such functions are batch-invariant.

Several ranks cut a weight only by outputs. So each element is computed by a single rank, from a whole row of inputs,
and
ranks exchange elements without sums: results have the same bits on any number of ranks.
"""

import enum
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from shardfn import nn
from shardfn.collectives import all_gather_invariant, take_own_block
from shardfn.core import Axes, op_by_op
from shardfn.kernels import Activations, gated_silu, gelu, grouped_product, linears, row_norm
from shardfn.nn import batch_invariant_softmax, rank_range

from ._buffers import tensors_of
from ._call import ModuleRun, Replacement

_PRODUCTS = ("matmul", "__matmul__", "bmm", "mm", "baddbmm", "einsum", "conv1d")


# A linear layer, from its input and its bias.
Linear = Callable[[Tensor, Tensor | None], Tensor]


class RowEdge(enum.Enum):
    """Values that ranks hold before and behind a layer with cut outputs."""

    WHOLE = "whole"  # all features on both sides
    ENTER = "enter"  # all features before the layer, a rank's features behind
    LEAVE = "leave"  # a rank's features before the layer, all behind


class PackedWeight(NamedTuple):
    """Linear layer with a weight in the form for `kernels.row_linear`.

    Attributes:
        panels: panels of this rank's outputs, from `kernels.pack_rows`.
        num: number of outputs of all ranks.
        axis: mesh axes that cut the outputs. None is a single device.
        edge: the values on both sides.
        inputs: number of inputs of the layer. None is the number of rows in panels of floats. Panels of codes need the
            number.
        activations: "int8" rounds inputs of panels of codes.

    Example:
        >>> import torch
        >>> from shardfn.kernels import pack_rows
        >>> PackedWeight(pack_rows(torch.ones(3, 5)), 3)(torch.ones(2, 5), None).shape
        torch.Size([2, 3])
    """

    panels: Tensor
    num: int
    axis: Axes = None
    edge: RowEdge = RowEdge.WHOLE
    inputs: int | None = None
    activations: Activations | None = None

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the affine map, computed in float32. `bias` has all outputs."""
        if self.edge is RowEdge.LEAVE:
            size = self.panels.shape[1] if self.inputs is None else self.inputs
            x = all_gather_invariant(x, self.axis, dim=-1, size=size)
        how: Any = {"biases": [self.take_bias(bias)], "activations": self.activations}
        [y] = linears(x.float(), [self.panels], [self.num_rank_outputs], **how)
        return self.join_outputs(y.to(x.dtype))

    @property
    def num_rank_outputs(self) -> int:
        """Returns the number of outputs of this rank."""
        start, stop = rank_range(self.num, self.axis)
        return stop - start

    def take_bias(self, bias: Tensor | None) -> Tensor | None:
        """Returns the bias of this rank's outputs, float32."""
        return None if bias is None else take_own_block(bias, self.axis, dim=0).float()

    def join_outputs(self, y: Tensor) -> Tensor:
        """Returns the layer's result, from this rank's outputs."""
        return y if self.edge is RowEdge.ENTER else all_gather_invariant(y, self.axis, dim=-1, size=self.num)


class RowByRow(TorchFunctionMode):
    """Mode in which every function, also of torch, has the bits of the eager call in every graph."""

    def __init__(self) -> None:
        super().__init__()
        self._op_by_op = op_by_op()

    def __enter__(self) -> Self:
        super().__enter__()
        self._op_by_op.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._op_by_op.__exit__(*error)
        super().__exit__(*error)


class ExactRows(RowByRow):
    """Computes linear layers and some other functions row by row, in float32 inside.

    Args:
        linear: layers, by the identity of the weight tensor in the module.
    """

    def __init__(self, linear: Mapping[int, Linear]) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function, or the batch-invariant form."""
        del types
        kwargs = kwargs or {}
        if (read := _WEIGHT.get(func)) is not None:
            x, weight, bias = read(*args, **kwargs)
            if (found := self._linear.get(id(weight))) is not None:
                return found(x, bias)
        handler = _HANDLERS.get(func)
        return func(*args, **kwargs) if handler is None else handler(func, *args, **kwargs)


class WeightUses(TorchFunctionMode):
    """Records the functions in which a module's parameters take part.

    Args:
        params: parameters by name, as in the module.

    Attributes:
        linear: names of the weights of linear layers, and whether the weight is [inputs, outputs].
        others: names of parameters with uses in other functions, too.
        products: names of functions that multiply matrices and are not linear layers of a parameter.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in params.items()}
        self.linear: dict[str, bool] = {}
        self.others: set[str] = set()
        self.products: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function."""
        del types
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        seen = [self._names[id(x)] for x in tensors_of((args, tuple(kwargs.values()))) if id(x) in self._names]
        weight = None
        if (read := _WEIGHT.get(func)) is not None:
            weight = self._names.get(id(read(*args, **kwargs)[1]))
        if weight is not None:
            transposed = func is not F.linear
            if self.linear.setdefault(weight, transposed) != transposed:
                self.products.add(name)
            seen.remove(weight)
        elif read is not None or name in _PRODUCTS:
            self.products.add(name)
        if func not in _DESCRIPTIONS:
            self.others.update(seen)
        return func(*args, **kwargs)


def linear_operands(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Returns the input, weight and bias of a call of a linear layer, or None for other functions."""
    read = _WEIGHT.get(func)
    return None if read is None else read(*args, **kwargs)


def _linear_args(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _addmm_args(input: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the operands of GPT-2's layers, with weights [inputs, outputs], if there are no factors."""
    return mat1, None if more else mat2, input


def grouped_rows(x: Tensor, w: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    """Computes `kernels.grouped_product` without derivatives, as a function visible to modes."""
    if has_torch_function((x, w)):
        return handle_torch_function(grouped_rows, (x, w), x, w, counts, transposed)
    return grouped_product(x, w, counts, transposed=transposed)


def _grouped_rows(func: Any, x: Tensor, w: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    del func
    return grouped_product(x.float(), w.float(), counts, transposed=transposed, batch_invariant=True).to(x.dtype)


def _softmax_rows(
    func: Any, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    if dim not in (-1, input.ndim - 1):
        return func(input, dim, dtype=dtype)
    return batch_invariant_softmax(input.float()).to(dtype or input.dtype)


def _sigmoid_rows(func: Any, input: Tensor) -> Tensor:
    del func
    return (1 / (1 + torch.exp(-input.float()))).to(input.dtype)


def handlers_of(
    silu: Callable[[Tensor], Tensor],
    gelu: Callable[[Tensor], Tensor],
    norm: Callable[[Tensor, Tensor, Tensor | None, float, bool], Tensor],
) -> dict[Any, Callable[..., Tensor]]:
    """Returns handlers of torch's functions, called with the function and the arguments.

    Args:
        silu: batch-invariant silu of a single tensor.
        gelu: batch-invariant gelu with tanh.
        norm: batch-invariant norm of an input, a scale, a shift or None, eps, and whether the mean is subtracted.
    """

    def handle_silu(func: Any, input: Tensor, inplace: bool = False) -> Tensor:
        del func
        y = silu(input)
        return input.copy_(y) if inplace else y

    def handle_gelu(func: Any, input: Tensor, approximate: str = "none") -> Tensor:
        del func
        if approximate == "tanh":
            return gelu(input)
        x = input.float()
        return (x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))).to(input.dtype)

    def handle_layer_norm(
        func: Any,
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        if len(normalized_shape) != 1:
            return func(input, normalized_shape, weight, bias, eps)
        return norm(input, _norm_scale(input, weight), bias, eps, True)

    def handle_rms_norm(
        func: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if len(normalized_shape) != 1:
            return func(input, normalized_shape, weight, eps)
        eps = torch.finfo(input.dtype).eps if eps is None else eps
        return norm(input, _norm_scale(input, weight), None, eps, False)

    batch_invariant = {
        F.silu: handle_silu,
        F.gelu: handle_gelu,
        F.layer_norm: handle_layer_norm,
        F.rms_norm: handle_rms_norm,
    }
    return _ALIKE | batch_invariant


def _norm_scale(x: Tensor, weight: Tensor | None) -> Tensor:
    return x.new_ones(x.shape[-1]) if weight is None else weight


def _silu_rows(x: Tensor) -> Tensor:
    wide = x.float()
    return gated_silu(wide, torch.ones_like(wide)).to(x.dtype)


def _gelu_rows(x: Tensor) -> Tensor:
    return gelu(x.float()).to(x.dtype)


def _norm_rows(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    bias = None if bias is None else bias.float()
    return row_norm(x.float(), weight.float(), bias, eps=eps, centered=centered).to(x.dtype)


_WEIGHT: dict[Any, Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]] = {
    F.linear: _linear_args,
    torch.addmm: _addmm_args,
}
# Functions whose batch-invariant form has derivatives, too.
_ALIKE: dict[Any, Callable[..., Tensor]] = {
    grouped_rows: _grouped_rows,
    F.softmax: _softmax_rows,
    F.sigmoid: _sigmoid_rows,
    torch.sigmoid: _sigmoid_rows,
    torch.Tensor.sigmoid: _sigmoid_rows,
}
_HANDLERS = handlers_of(_silu_rows, _gelu_rows, _norm_rows)
# A packed weight answers like the weight.
_DESCRIPTIONS = frozenset(
    {torch.Tensor.dtype.__get__, torch.Tensor.device.__get__}  # pyright: ignore[reportAttributeAccessIssue]
)


class BatchInvariance(Replacement):
    """Gives each row of a module in training the bits of an engine of `hf_decoder`, for example in another batch.

    A training forward then has the log probabilities of the engine, bit for bit, where the decoder is batch-invariant.
    """

    order = 100

    def running(self, run: ModuleRun) -> AbstractContextManager[Any]:
        """Returns the function mode that is active while the module runs."""
        return BatchInvariantForward(run.placed.given.params)


class BatchInvariantForward(RowByRow):
    """Computes linear layers and some other functions row by row, in float32, with derivatives.

    Args:
        params: parameters in the module. Products with other tensors are torch's, as in `ExactRows`.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._params = {id(p) for p in params.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function, or the batch-invariant form."""
        del types
        kwargs = kwargs or {}
        found = linear_operands(func, args, kwargs)
        if found is not None and id(found[1]) in self._params:
            x, weight, bias = found
            assert weight is not None
            if x.dtype == torch.float64:
                raise TypeError(
                    "from_module(batch_invariant=True) needs inputs of linear layers in float32, as in an engine, got"
                    f" {x.dtype}. Use parameters in float32, or Policy(compute=torch.float32)."
                )
            return nn.linear(x, nn.BatchInvariantWeight.of(weight if func is F.linear else weight.T), bias)
        handler = _EXACT_HANDLERS.get(func)
        return func(*args, **kwargs) if handler is None else handler(func, *args, **kwargs)


def _apply_silu(x: Tensor) -> Tensor:
    return nn.batch_invariant_gated_silu(x, torch.ones_like(x))


def _apply_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    if centered:
        return nn.batch_invariant_layer_norm(x, weight, bias, eps=eps)
    return nn.batch_invariant_rms_norm(x, weight, eps=eps)


_EXACT_HANDLERS = handlers_of(_apply_silu, nn.batch_invariant_gelu, _apply_norm)


class SameInput:
    """Linear layers that a module calls in sequence with one input, computed in a single call.

    For example the projections to queries, keys and values. The first call computes all layers. Later calls find the
    results.

    Args:
        layers: layers by name, in any order. A rank must have all inputs: no layer is `RowEdge.LEAVE`.

    Example:
        >>> import torch
        >>> from shardfn.kernels import pack_rows
        >>> x, panels = torch.ones(2, 5), pack_rows(torch.ones(3, 5))
        >>> both = SameInput({"k": PackedWeight(panels, 3), "v": PackedWeight(panels, 3)})
        >>> torch.equal(both("k", x, None), both("v", x, None))
        True
    """

    def __init__(self, layers: Mapping[str, PackedWeight]) -> None:
        self._layers = layers
        self._input: Tensor | None = None
        self._results: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the affine map of one of the layers."""
        if x is not self._input or name not in self._results:
            layers = list(self._layers.values())
            assert all(layer.edge is not RowEdge.LEAVE for layer in layers)
            nums, activations = [layer.num_rank_outputs for layer in layers], layers[0].activations
            ys = linears(x.float(), [layer.panels for layer in layers], nums, activations=activations)
            self._input, self._results = x, dict(zip(self._layers, ys, strict=True))
        y = self._results.pop(name)
        if not self._results:
            self._input = None
        own = self._layers[name].take_bias(bias)
        return self._layers[name].join_outputs((y if own is None else y + own).to(x.dtype))


class InputUses(TorchFunctionMode):
    """Records the weights of linear layers that multiply the same input.

    Args:
        params: parameters by name, as in the module.

    Attributes:
        groups: names of weights that are called in sequence with a single tensor.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in params.items()}
        self._input: Tensor | None = None
        self.groups: list[list[str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function."""
        del types
        kwargs = kwargs or {}
        found = linear_operands(func, args, kwargs)
        name = None if found is None else self._names.get(id(found[1]))
        if found is not None and name is not None:
            if found[0] is not self._input:
                self.groups.append([])
            self._input = found[0]
            self.groups[-1].append(name)
        return func(*args, **kwargs)
