"""Batch-invariant linear layers: rows have the same bits next to any other rows. A weight takes the place of a tensor.

The law of batch-invariant layers: a token's row of a result is a fixed expression of the row's inputs. The bits depend
neither on the number of other tokens (for example 1 or 7), nor on threads and the processor, nor on the ranks of tensor
parallelism.

N outputs, K inputs, P panels.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from shardfn import kernels
from shardfn.collectives import all_gather_invariant, all_to_all, axis_size, current_mesh
from shardfn.core import Axes

from ._products import OperandGrad, Product, Trilinear, Weight, derivative, linear_input, linear_weight

# From the input and the result of a layer to the final result.
Then = Callable[[Tensor, Tensor], Tensor]


class BatchInvariantWeight(Weight):
    """Weight for batch-invariant linear layers, in place of a tensor: `linear(x, w)` is `kernels.row_linear`.

    The layers of `nn` take a `BatchInvariantWeight` in place of a weight. `BatchInvariantWeight.of(weight)` has
    derivatives of any order. A `BatchInvariantWeight` made of panels, which are packed once for many calls, has no
    derivative.

    Args:
        panels: panels from `kernels.pack_rows` of the weight as [N, K], quantized or not.
        shape: shape of the weight: [N, K], or with some output dims, [H, K, D], or some input dims, [D, H, K].
        chunks: number of chunks of K, with sums added by a tree. The number is a part of the result, like a dtype.
        then: function from the layer's input and its result, with the bias, to the result in its place. On several
            ranks the input and the result are the rank's features where the layer cuts features.
        activations: "int8" rounds the layer's inputs if the panels are codes, see `kernels.integer_linears`.
        skipped: number of outputs of the panels that come before the weight's, fewer than a panel has.

    Attributes:
        shape: shape of the weight.
        chunks: number of chunks of K.
        skipped: outputs before the weight's, see the argument.
        activations: rounding of the inputs, see the argument. then: function on the result, see the argument.

    Raises:
        ValueError: panels of another shape.

    Example:
        >>> x, weight = torch.randn(5, 12), torch.randn(7, 12)
        >>> w = BatchInvariantWeight.of(weight)
        >>> torch.equal(F.linear(x, w)[:1], F.linear(x[:1], w))
        True
        >>> packed = BatchInvariantWeight(kernels.pack_rows(weight), weight.shape)
        >>> torch.equal(F.linear(x, packed), F.linear(x, w))
        True
    """

    def __init__(
        self,
        panels: Shaped[Tensor, "p k c"],
        shape: Sequence[int],
        chunks: int = 8,
        *,
        then: Then | None = None,
        activations: kernels.Activations | None = None,
        skipped: int = 0,
    ) -> None:
        self._set_fields(torch.Size(shape), chunks, None, panels, then, activations, skipped)
        splits = [math.prod(self.shape[:i]) for i in range(1, len(self.shape))]
        if tuple(panels.shape) not in [
            kernels.packed_shape(panels, skipped + n, self.shape.numel() // max(n, 1)) for n in splits
        ]:
            raise ValueError(
                f"BatchInvariantWeight of shape {tuple(shape)} and panels {tuple(panels.shape)}: pass the panels that"
                " kernels.pack_rows makes of the weight as [outputs, inputs]."
            )

    @classmethod
    def of(cls, weight: Float[Tensor, "..."], chunks: int = 8) -> "BatchInvariantWeight":
        """Returns the batch-invariant weight of a tensor, with derivatives.

        Args:
            weight: weight of two dims or more.
            chunks: number of chunks of K.

        Example:
            >>> BatchInvariantWeight.of(torch.ones(4, 2, 3)).flatten(1).shape
            torch.Size([4, 6])
        """
        made = cls.__new__(cls)
        made._set_fields(weight.shape, chunks, weight, None)
        return made

    def _set_fields(
        self,
        shape: torch.Size,
        chunks: int,
        source: Tensor | None,
        panels: Tensor | None,
        then: Then | None = None,
        activations: kernels.Activations | None = None,
        skipped: int = 0,
    ) -> None:
        self.shape, self.chunks, self._source, self._panels, self.then = shape, chunks, source, panels, then
        self.activations: kernels.Activations | None = activations
        self.skipped = skipped

    @property
    def source(self) -> Tensor | None:
        """Returns the original weight, or None for a `BatchInvariantWeight` made of panels."""
        return self._source

    @property
    def ndim(self) -> int:
        """Returns the number of dims."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the weight, float32 for codes. Results are float32, or float64 for a float64 weight."""
        stored = self._stored_tensor.dtype
        return stored if stored.is_floating_point else torch.float32

    @property
    def device(self) -> torch.device:
        """Returns the device of the weight."""
        return self._stored_tensor.device

    @property
    def product(self) -> Product:
        """Returns the product of an input and the weight [N, K]."""
        return _make_product(self.chunks)

    @property
    def panels(self) -> Shaped[Tensor, "p k c"]:
        """Returns the packed weight. A weight of more than two dims must have been flattened."""
        return kernels.pack_rows(self._stored_tensor) if self._panels is None else self._panels

    def with_chunks(self, chunks: int) -> "BatchInvariantWeight":
        """Returns the same weight, with inputs in another number of chunks, and without `then`: a part of a sum."""
        made = self._copy_with(self.shape, self.source, chunks)
        made.then = None
        return made

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "BatchInvariantWeight":
        """Returns the same weight with some neighbouring dims as a single dim."""
        start, end = start_dim % self.ndim, end_dim % self.ndim
        shape = torch.Size((*self.shape[:start], self.shape[start : end + 1].numel(), *self.shape[end + 1 :]))
        return self._copy_with(shape, None if self.source is None else self.source.flatten(start, end), self.chunks)

    def linear(self, x: Float[Tensor, "*batch k"], bias: Float[Tensor, " n"] | None = None) -> Float[Tensor, "..."]:
        """Returns the affine map x w^T + bias, in the dtype of x.

        Raises:
            TypeError: x or the bias is neither float32 nor, as the weight is, float64.
            ValueError: the weight has more than two dims.
        """
        if self.ndim != 2:
            raise ValueError(
                f"linear: a BatchInvariantWeight must have two dims, got shape {tuple(self.shape)}. Flatten the dims."
            )
        if x.dtype not in kernels.EXACT or (torch.float64 in (x.dtype, self.dtype) and x.dtype != self.dtype):
            raise wrong_dtype_error(f"linear: x is {x.dtype}, the weight is {self.dtype}, and")
        if self.source is None:
            [y] = linears_of(x, [self], [bias])
            return y
        y = self.product(x, self.source)
        return y if bias is None else y + bias

    def rows(self, index: Tensor) -> Float[Tensor, "*batch k"]:
        """Returns rows of the weight [N, K] by index, for example embeddings of tokens.

        With panels, indices must be from 0 to N - 1.
        """
        if self.source is not None:
            return F.embedding(index, self.source)
        return kernels.take_rows(self.panels, index + self.skipped if self.skipped else index, self.shape[1])

    def __repr__(self) -> str:
        made = "panels" if self.source is None else "a weight"
        return f"BatchInvariantWeight({tuple(self.shape)} of {made}, chunks={self.chunks})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes `linear` and `embedding` with this weight. Refuses other functions of torch.

        Raises:
            TypeError: for other functions.
        """
        del types
        call = _FUNCTIONS.get(func)
        if call is None:
            name = getattr(func, "__name__", func)
            raise TypeError(f"torch's {name} does not take a BatchInvariantWeight: only linear and embedding do.")
        return call(*args, **(kwargs or {}))

    @property
    def _stored_tensor(self) -> Tensor:
        found = self.source if self._panels is None else self._panels
        assert found is not None
        return found

    def _copy_with(self, shape: torch.Size, source: Tensor | None, chunks: int) -> "BatchInvariantWeight":
        made = type(self).__new__(type(self))
        made._set_fields(shape, chunks, source, self._panels, self.then, self.activations, self.skipped)
        return made


# A weight, as a tensor or batch-invariant.
AnyWeight = Tensor | BatchInvariantWeight


def linear_of(x: Tensor, w: AnyWeight, b: Tensor | None) -> Tensor:
    """Applies `linear` with a weight of either kind. Modes of torch's functions see the weight itself."""
    return w.linear(x, b) if isinstance(w, BatchInvariantWeight) else F.linear(x, w, b)


def linears_of(x: Tensor, weights: Sequence[AnyWeight], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Applies `linear_of` with several weights to the same input.

    In a single call if all are packed, with equal bits.
    """
    packed = [w for w in weights if isinstance(w, BatchInvariantWeight) and w.source is None and w.ndim == 2]
    alike: set[tuple[int, kernels.Activations | None]] = {(w.chunks, w.activations) for w in packed}
    if len(packed) < len(weights) or len(alike) > 1 or x.dtype not in kernels.EXACT:
        return [linear_of(x, w, b) for w, b in zip(weights, biases, strict=True)]
    nums, [(chunks, activations)] = [w.skipped + w.shape[0] for w in packed], alike
    shifts = [None if w.skipped else b for w, b in zip(packed, biases, strict=True)]
    ys = kernels.linears(x, [w.panels for w in packed], nums, chunks=chunks, biases=shifts, activations=activations)
    ys = [_drop_outputs(w, y, b) if w.skipped else y for w, y, b in zip(packed, ys, biases, strict=True)]
    return [y if w.then is None else w.then(x, y) for w, y in zip(packed, ys, strict=True)]


def _drop_outputs(w: BatchInvariantWeight, y: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the results without the skipped outputs, and with the bias."""
    y = y[..., w.skipped :]
    return y if bias is None else y + bias


def rows_of(index: Tensor, w: AnyWeight) -> Tensor:
    """Applies `embedding` with a table of either kind."""
    return w.rows(index) if isinstance(w, BatchInvariantWeight) else F.embedding(index, w)


def wrong_dtype_error(begin: str) -> TypeError:
    """Returns the error of a batch-invariant layer in another dtype. The message begins with `begin`."""
    return TypeError(
        f"{begin} batch-invariant layers compute float32, or float64 where all is float64. Remove mixed precision, or"
        " use Policy(compute=torch.float32)."
    )


def rank_node(w: BatchInvariantWeight, inputs: int, axis: Axes) -> BatchInvariantWeight:
    """Returns this rank's block of a weight whose inputs are cut, summed in the same chunks as the whole weight.

    Args:
        w: the block, [N, K_axis].
        inputs: K.
        axis: mesh axes.

    Raises:
        ValueError: the rank's chunks are not a node of the tree.
    """
    n, (num, rest) = axis_size(axis), divmod(w.chunks, axis_size(axis))
    if n == 1:
        return w
    if rest or num & (num - 1):
        raise ValueError(
            f"row_linear: {w.chunks} chunks over the {n} ranks of {axis!r}: each rank needs the same number of chunks,"
            f" a power of two. Use chunks={n * max(1, 8 // n)} on any number of ranks, one too, or other ranks."
        )
    if inputs % n or w.shape[1] != inputs // n:
        raise ValueError(
            f"row_linear: {inputs} inputs in {w.chunks} chunks over the {n} ranks of {axis!r}: a rank would have a part"
            f" of a chunk. Use ranks that divide the inputs (and the heads)."
        )
    return w.with_chunks(num)


def leave_in_order(y_D: Tensor, axis: Axes, sequence: int | None) -> Tensor:
    """Applies `leave_parallel` with a sum in the order of the tree: the ranks' summands take the place of chunks.

        [A] [B]  =>  [A + B] [A + B]

    Transpose, as for `leave_parallel`: each summand gets the result's cotangent.
    """
    n = axis_size(axis)
    if sequence is None:
        return kernels.sum_chunks(all_gather_invariant(y_D[None], axis, dim=0, size=n).unbind())
    return kernels.sum_chunks(all_to_all(y_D[None], axis, split_dim=y_D.ndim - 1, concat_dim=0, size=n).unbind())


@functools.cache
def _make_product(chunks: int) -> Product:
    def forward(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        y = kernels.row_linear(x, kernels.pack_rows(w), w.shape[0], chunks=chunks)
        return y if bias is None else y + bias

    return Product(forward, make_operand_gradients(chunks))


def _apply_linear(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, BatchInvariantWeight):
        raise TypeError(
            f"linear of {type(input).__name__}: a BatchInvariantWeight is the weight, not the input or the bias."
        )
    alone = all(size == 1 for size in current_mesh().shape.values())
    if weight.source is not None and not alone:  # the function mode for following values has seen no weight
        raise TypeError(
            "linear of a BatchInvariantWeight with derivatives, on several ranks: call nn.linear in place of torch's."
        )
    return weight.linear(input, bias)


def _apply_embedding(input: Any, weight: Any, *options: Any, norm_type: float = 2.0, **named: Any) -> Tensor:
    del norm_type  # of no effect without max_norm
    if any(x is not None and x is not False for x in (*options, *named.values())) or not isinstance(
        weight, BatchInvariantWeight
    ):
        raise TypeError("embedding of a BatchInvariantWeight expected only the indices and the weight.")
    return weight.rows(input)


_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {F.linear: _apply_linear, F.embedding: _apply_embedding}


@functools.cache
def make_operand_gradients(chunks: int) -> tuple[OperandGrad, OperandGrad]:
    """Returns the gradients of the input and of the weight of a batch-invariant layer, both differentiable again.

    Args:
        chunks: chunks of the layer's inputs.
    """
    # t(x, w, y) = sum over rows of (x w^T) . y
    form: Trilinear = (
        lambda w, y: kernels.grouped_product(y, w[None], _count_rows(y)),
        lambda x, y: kernels.grouped_outer(y, x, _count_rows(y))[0],
        lambda x, w: kernels.row_linear(x, kernels.pack_rows(w), w.shape[0], chunks=chunks),
    )

    def input_gradient(dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        if dy.device.type != "cpu":
            return linear_input(dy, weight, shape)
        return derivative(form, 0, weight, dy.reshape(-1, dy.shape[-1])).reshape(shape)

    def weight_gradient(dy: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
        if dy.device.type != "cpu":
            return linear_weight(dy, x, shape)
        return derivative(form, 1, x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))

    return input_gradient, weight_gradient


def _count_rows(rows: Tensor) -> Tensor:
    return torch.full((1,), rows.shape[0], device=rows.device)
