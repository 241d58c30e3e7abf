"""Tensors without data, and what operations make of them where torch's own answer is not the kernel's.

What a capture writes down relies on shapes, dtypes and strides: a `view` of a result goes through only if the result
lies in memory as was said. So `Fakes` answers as the kernels do, for the operations where torch says otherwise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import (
    compute_elementwise_output_strides,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from torch._subclasses.fake_tensor import FakeTensorMode

_ATEN = torch.ops.aten


class Fakes(FakeTensorMode):
    """The mode of tensors without data in a capture; corrected ahead of torch's cache of answers."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What an operation makes."""
        kwargs = kwargs or {}
        if func in _MADE:
            with self:
                return _MADE[func](*args, **kwargs)
        out: Any = super().dispatch(func, types, args, kwargs)
        if func not in _LAID_OUT:
            return out
        with self:
            if isinstance(out, Tensor):
                return _LAID_OUT[func](out, args)
            return tuple(_LAID_OUT[func](x, args) if x is not None and x.ndim > 1 else x for x in out)


def fakes(inputs: Sequence[Any], device: torch.device | str = "meta") -> list[Tensor]:
    """Tensors without data, of the shapes, dtypes, strides and devices of `inputs`; "meta" is taken to be `device`."""
    with Fakes(allow_non_fake_inputs=True):
        return [fake(x, device) for x in inputs]


def fake(x: Any, device: torch.device | str) -> Tensor:
    """One of `fakes`, in the mode that is active."""
    where = device if x.device.type == "meta" else x.device
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=where)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Takes every dtype that the kernels take, and pads the rows of its result to 16 bytes; torch's says bf16 alone."""
    del bias
    num_groups = None if offs is None else offs.shape[0]
    if a.ndim == 2:
        shape = [num_groups, a.shape[0], b.shape[1]] if b.ndim == 2 else [a.shape[0], b.shape[-1]]
    else:
        shape = [a.shape[1], b.shape[1]] if b.ndim == 2 else [a.shape[0], a.shape[1], b.shape[-1]]
    dtype = out_dtype or a.dtype
    step = 16 // dtype.itemsize
    row = -(-shape[-1] // step) * step
    stride = [shape[1] * row, row, 1] if len(shape) == 3 else [row, 1]
    return torch.empty_strided(shape, stride, dtype=dtype, device=a.device)


def _restrided(out: Tensor, stride: Sequence[int]) -> Tensor:
    """`out`, which is new memory, in other strides."""
    if out.stride() == tuple(stride):
        return out
    return torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device)


def _as_elementwise(out: Tensor, args: Sequence[Any]) -> Tensor:
    """As an elementwise kernel lays its result out, which goes by its first operands first."""
    operands = torch.broadcast_tensors(*(x for x in args if isinstance(x, Tensor)))
    return _restrided(out, compute_elementwise_output_strides(*operands))


def _contiguous(out: Tensor, args: Sequence[Any]) -> Tensor:
    del args
    return _restrided(out, make_contiguous_strides_for(out.shape))


def _in_format_of(position: int) -> Callable[[Tensor, Sequence[Any]], Tensor]:
    """Channels last if that argument is, else contiguous."""

    def lay_out(out: Tensor, args: Sequence[Any]) -> Tensor:
        return _restrided(out, torch.empty_like(out, memory_format=suggest_memory_format(args[position])).stride())

    return lay_out


_MADE: dict[Any, Callable[..., Any]] = {_ATEN._grouped_mm.default: _grouped_mm}
# Where torch's answer has other strides than the kernel's results, as a search over its operations has found: its
# formulas end in operands of another order, or keep strides that the kernel does not. By what the kernels do instead:
_LAID_OUT: dict[Any, Callable[[Tensor, Sequence[Any]], Tensor]] = {
    _ATEN.copysign.Tensor: _as_elementwise,
    _ATEN.div.Tensor_mode: _as_elementwise,
    _ATEN.floor_divide.default: _as_elementwise,
    _ATEN.hardswish_backward.default: _as_elementwise,
    _ATEN.hardtanh_backward.default: _as_elementwise,
    _ATEN.logit_backward.default: _as_elementwise,
    _ATEN.native_dropout_backward.default: _as_elementwise,
    _ATEN.softplus_backward.default: _as_elementwise,
    _ATEN.special_xlog1py.default: _as_elementwise,
    _ATEN.xlogy.Tensor: _as_elementwise,
    _ATEN._log_softmax_backward_data.default: _contiguous,
    _ATEN.huber_loss_backward.default: _contiguous,
    _ATEN.log_sigmoid_forward.default: _contiguous,
    _ATEN.mse_loss_backward.default: _contiguous,
    _ATEN.native_layer_norm_backward.default: _contiguous,
    _ATEN.normal.Tensor_Tensor: _contiguous,
    _ATEN.pow.Scalar: _contiguous,
    _ATEN.smooth_l1_loss_backward.default: _contiguous,
    _ATEN.batch_norm_backward.default: _in_format_of(1),
    _ATEN.channel_shuffle.default: _in_format_of(0),
    _ATEN.max_unpool2d.default: _in_format_of(0),
    _ATEN.native_batch_norm.default: _in_format_of(0),
    _ATEN.native_batch_norm_backward.default: _in_format_of(1),
    _ATEN.replication_pad2d_backward.default: _in_format_of(1),
}
