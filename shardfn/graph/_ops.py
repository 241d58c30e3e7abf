"""Op table. A row adds to an op's schema: costs, memory, transfers, types and sharding.

Only formulas. The op table (`_ops.py`) says which op has which formula.

A row holds for all overloads, except where the row names overloads. An op without a row computes on each rank
separately, costs the bytes of operands and results, and stays in place. All code of this room that depends on a node's
op uses this table.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

import shardfn.collectives
import shardfn.memory  # noqa: F401  # both of them define ops
from shardfn._torch import compute_elementwise_output_strides, make_contiguous_strides_for, suggest_memory_format
from shardfn.kernels import KERNELS, KernelOp

from . import _formulas as formulas
from . import _ops as strides
from ._op import Crossing, Op, by_identity, with_schema
from ._sharding import POINTWISE, RULES


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the result for every dtype that the kernels accept, with rows padded to 16 bytes.

    Torch accepts only bf16.
    """
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


def _restride(out: Tensor, stride: Sequence[int]) -> Tensor:
    """Returns `out`, new memory, in other strides."""
    if out.stride() == tuple(stride):
        return out
    return torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device)


def lay_out_elementwise(out: Tensor, args: Sequence[Any]) -> Tensor:
    """Returns the strides of an elementwise kernel's result. Earlier operands count first."""
    operands = torch.broadcast_tensors(*(x for x in args if isinstance(x, Tensor)))
    return _restride(out, compute_elementwise_output_strides(*operands))


def lay_out_contiguous(out: Tensor, args: Sequence[Any]) -> Tensor:
    del args
    return _restride(out, make_contiguous_strides_for(out.shape))


def keep_format_of(position: int) -> Callable[[Tensor, Sequence[Any]], Tensor]:
    """Returns strides for channels last if the argument at `position` is channels last, else contiguous strides."""

    def lay_out(out: Tensor, args: Sequence[Any]) -> Tensor:
        return _restride(out, torch.empty_like(out, memory_format=suggest_memory_format(args[position])).stride())

    return lay_out


_ATEN, _C10D = torch.ops.aten, torch.ops._c10d_functional
_WIRE, _MEMORY = torch.ops.shardfn, torch.ops.shardfn_memory

# Ops that passes write.
ALL_GATHER, PSUM_SCATTER = _WIRE.all_gather_start.default, _WIRE.psum_scatter_start.default
ALL_GATHER_INTO, PSUM = _WIRE.all_gather_into_start.default, _WIRE.psum_start.default
TO_DEVICE, READ, TO_HOST = (getattr(_MEMORY, f"{name}_start").default for name in ("to_device", "read", "to_host"))
ROWS_TO_DEVICE, ROWS_TO_HOST = _MEMORY.rows_to_device_start.default, _MEMORY.rows_to_host_start.default
WAIT, SENT = _WIRE.wait.default, _WIRE.sent.default
MOVE_WAIT = _MEMORY.wait.default


def op_of(node: Node) -> Op:
    """Returns the facts about the op that `node` calls.

    Example:
        >>> graph = torch.fx.Graph()
        >>> x = graph.placeholder("x")
        >>> op_of(x) == Op(), op_of(graph.call_function(torch.ops.aten.relu_.default, (x,))).writes
        (True, ((0, 'self'),))
    """
    return find_op(node.target) if node.op == "call_function" else _NONE


@by_identity
def find_op(target: Any) -> Op:
    """Returns the facts about an op, or about another function.

    Example:
        >>> find_op(torch.ops.aten.mm.default).flops is formulas.product, find_op(torch.ops.aten.t.default).views
        (True, 0)
    """
    packet = getattr(target, "overloadpacket", target)
    op = with_schema(OPS.get(packet, _NONE), target)
    rule = None if op.writes else RULES.get(packet, POINTWISE if op.pointwise and not op.draws else None)
    return op if rule is None else dataclasses.replace(op, sharding=rule)


def _run_as_in_training(op: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a kernel with gradients enabled.

    Without gradients the kernel would leave out results that are read later.
    """

    def run_training(*args: Any) -> Any:
        with torch.enable_grad():
            return op(*args)

    return run_training


# Families.


def _keep_layout(*overloads: str, lay_out: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    return dict.fromkeys(overloads or ("default",), lay_out)


def _make_rows(names: str, row: Op) -> dict[Any, Op]:
    return {getattr(_ATEN, name): row for name in names.split()}


def _read_record(kernel: KernelOp) -> Op:
    """Returns the row of a kernel."""

    def count_flops(*args: Any, out_val: Any) -> int:
        del out_val
        return 0 if kernel.flops is None else kernel.flops(*args)

    return Op(
        flops=None if kernel.flops is None else count_flops,
        scratch=None if kernel.scratch is None else formulas.kernel_bytes,
        rows=kernel.rows,
        in_place=KERNELS[kernel.in_place].op.default if kernel.in_place else None,
        written_from=kernel.written_from,
    )


_NONE = Op()
_FUSED = Op(fuses=True)
# Ops that only use the operand's shape, and constants. Neither is worth a kernel.
_LIGHT = Op(fuses=True, weight=0, types="filled", rows="first")
_CONSTANT = Op(fuses=True, weight=0, constant=True)
_CAST = Op(casts=True, copies=True, carries=True, scales=True, fuses=True, weight=0, rows="first")
_JOINED = Op(copies=True, carries=True)
_CARRIES = Op(carries=True)
_FOREIGN = Op(channel="loss", transfer=formulas.foreign, types="foreign")
_SCALES = Op(scales=True)
_LOOKUP = Op(lookup=True)
_ATTENTION = Op(flops=formulas.attention)
_ATTENTION_BACKWARD = Op(flops=formulas.attention_backward)
_DENSE = _keep_layout(lay_out=strides.lay_out_contiguous)
_IN_FORMAT, _IN_FORMAT_OF_INPUT = (_keep_layout(lay_out=strides.keep_format_of(i)) for i in (0, 1))
_ELEMENTWISE = _keep_layout(lay_out=strides.lay_out_elementwise)

OPS: dict[Any, Op] = {
    operator.getitem: Op(scales=True, rows="first", calls={"": operator.getitem}),
    **{kernel.op: _read_record(kernel) for kernel in KERNELS.values()},
    # products
    _ATEN.mm: Op(flops=formulas.product, calls={"default": torch.mm}),
    _ATEN.bmm: Op(flops=formulas.product, calls={"default": torch.bmm}),
    _ATEN.addmm: Op(flops=formulas.added_product, calls={"default": torch.addmm}),
    _ATEN.baddbmm: Op(flops=formulas.added_product),
    _ATEN.mv: Op(flops=formulas.matrix_vector),
    _ATEN.dot: Op(flops=formulas.matrix_vector),
    _ATEN.addmv: Op(flops=formulas.added_matrix_vector),
    _ATEN._grouped_mm: Op(formulas.grouped_mm, abstract={"default": strides.grouped_mm}),
    # attention
    _ATEN._scaled_dot_product_flash_attention_for_cpu: Op(formulas.attention, formulas.flash_forward),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: Op(
        formulas.attention_backward, formulas.flash_backward
    ),
    _ATEN._scaled_dot_product_fused_attention_overrideable: _ATTENTION,
    _ATEN._scaled_dot_product_fused_attention_overrideable_backward: _ATTENTION_BACKWARD,
    _ATEN.mkldnn_rnn_layer: Op(calls={"default": _run_as_in_training(_ATEN.mkldnn_rnn_layer.default)}),
    # lookups
    **_make_rows("embedding index_select gather index nll_loss2d_forward", _LOOKUP),
    _ATEN.nll_loss_forward: Op(lookup=True, fuses=True),
    # reductions
    **_make_rows("sum amax amin prod any all argmax argmin var var_mean", _FUSED),
    **_make_rows("_softmax_backward_data nll_loss_backward native_layer_norm", _FUSED),
    **_make_rows("_fused_rms_norm _fused_rms_norm_backward", _FUSED),
    _ATEN.mean: Op(scratch=formulas.cast_bytes, fuses=True),
    _ATEN.logsumexp: Op(scratch=formulas.copy_bytes, fuses=True),
    _ATEN._softmax: Op(scratch=formulas.copy_bytes_if_strided, fuses=True),
    _ATEN._log_softmax: Op(scratch=formulas.copy_bytes_if_strided, fuses=True),
    _ATEN._log_softmax_backward_data: Op(fuses=True, strides=_DENSE),
    _ATEN.native_layer_norm_backward: Op(fuses=True, strides=_DENSE),
    # pointwise, without the tag or with further facts
    **_make_rows("silu_backward tanh_backward sigmoid_backward threshold_backward where", Op(fuses=True, rows="each")),
    **_make_rows("slice_backward select_backward", _FUSED),
    # cheaper compiled than in eager mode
    **_make_rows("gelu gelu_backward", Op(fuses=True, weight=2, rows="each")),
    _ATEN.add: Op(calls={"Tensor": torch.add}),
    _ATEN.mul: Op(scales=True, types="product", calls={"Tensor": torch.mul}),
    _ATEN.div: Op(scales=True, strides=_keep_layout("Tensor_mode", lay_out=strides.lay_out_elementwise)),
    **_make_rows("mul_ div_", _SCALES),
    # constants
    **_make_rows("empty eye", Op(constant=True)),
    **_make_rows("zeros ones full arange scalar_tensor", _CONSTANT),
    **_make_rows("zeros_like ones_like full_like", _LIGHT),
    **_make_rows("new_zeros new_ones new_full", Op(fuses=True, types="filled")),
    **_make_rows("empty_like new_empty new_empty_strided zero_ fill_", Op(types="filled")),
    # copies
    **_make_rows("_to_copy clone", _CAST),
    _ATEN.cat: dataclasses.replace(_JOINED, rows="each"),
    _ATEN.constant_pad_nd: _JOINED,
    _ATEN.copy: Op(copies=True, carries=True, types="copied"),
    **_make_rows("stack contiguous", _CARRIES),
    **_make_rows("copy_ _foreach_copy_", Op(carries=True, types="copied")),
    # views
    _ATEN.view: Op(calls={"default": torch.Tensor.view}),
    _ATEN.t: Op(calls={"default": torch.t}),
    _ATEN.transpose: Op(calls={"int": torch.transpose}),
    **_make_rows("alias slice unsqueeze", Op(rows="first")),
    _ATEN.permute: Op(rows="first", calls={"default": torch.permute}),
    _ATEN.expand: Op(calls={"default": torch.Tensor.expand}),
    _ATEN.detach: Op(rows="first", calls={"default": torch.detach}),
    _ATEN._unsafe_view: Op(scales=True, views=0),  # a copy by the schema
    _ATEN.reshape: _SCALES,
    **_make_rows(
        "split split_with_sizes", Op(scales=True, rows="first")
    ),  # with several results, or sometimes new results
    # Ops whose results have other strides than torch's formulas give, found by a search over torch's operations: the
    # formulas take operands in another order, or keep strides that the kernels do not. Grouped by the kernels' strides.
    _ATEN.copysign: Op(strides=_keep_layout("Tensor", lay_out=strides.lay_out_elementwise)),
    _ATEN.xlogy: Op(strides=_keep_layout("Tensor", lay_out=strides.lay_out_elementwise)),
    **_make_rows("floor_divide hardswish_backward hardtanh_backward logit_backward", Op(strides=_ELEMENTWISE)),
    **_make_rows("native_dropout_backward softplus_backward special_xlog1py", Op(strides=_ELEMENTWISE)),
    **_make_rows(
        "huber_loss_backward log_sigmoid_forward mse_loss_backward smooth_l1_loss_backward", Op(strides=_DENSE)
    ),
    _ATEN.normal: Op(strides=_keep_layout("Tensor_Tensor", lay_out=strides.lay_out_contiguous)),
    _ATEN.pow: Op(strides=_keep_layout("Scalar", lay_out=strides.lay_out_contiguous)),
    **_make_rows("channel_shuffle max_unpool2d native_batch_norm", Op(strides=_IN_FORMAT)),
    **_make_rows("batch_norm_backward native_batch_norm_backward", Op(strides=_IN_FORMAT_OF_INPUT)),
    _ATEN.replication_pad2d_backward: Op(strides=_IN_FORMAT_OF_INPUT),
    # transfers of the step
    _WIRE.all_gather_start: Op(channel="gather", transfer=formulas.all_gather, carries=True, types="gather"),
    _WIRE.all_gather_into_start: Op(channel="gather", transfer=formulas.all_gather_into, types="gather"),
    _WIRE.psum_scatter_start: Op(channel="reduce", transfer=formulas.psum_scatter, types="scatter"),
    _WIRE.all_to_all_start: Op(channel="reduce", transfer=formulas.all_to_all, scales=True, types="exchange"),
    _WIRE.psum_start: Op(channel="reduce", transfer=formulas.psum, types="sum"),
    # messages of a pipeline
    _WIRE.send_start: Op(channel="between", transfer=formulas.send),
    _WIRE.receive_start: Op(channel="between", transfer=formulas.receive, types="receive"),
    _WIRE.sent: Op(waits=True),
    _WIRE.wait: Op(waits=True, carries=True),
    _WIRE.pvary: Op(identity=True, types="declare", calls={"default": lambda x, axes: x}),
    _WIRE.encode: Op(copies=True, carries=True, scratch=formulas.encoded_bytes),
    _WIRE.decode: Op(carries=True, scratch=formulas.code_bytes),
    _WIRE.decode_sum: Op(copies=True, scales=True, scratch=formulas.code_bytes),
    _WIRE.decode_sum_encode: Op(copies=True, scales=True, scratch=formulas.code_bytes),
    # collectives of the loss and of the metrics
    _WIRE.loss_psum_start: Op(channel="loss", transfer=formulas.loss_psum, types="collective"),
    _WIRE.loss_pmax_start: Op(channel="loss", transfer=formulas.loss_pmax, types="collective"),
    _WIRE.loss_all_gather_start: Op(channel="loss", transfer=formulas.loss_all_gather, types="collective"),
    _WIRE.loss_psum_scatter_start: Op(channel="loss", transfer=formulas.loss_psum_scatter, types="collective"),
    _WIRE.loss_exchange_start: Op(channel="loss", transfer=formulas.loss_exchange, types="collective"),
    _WIRE.ragged_places_start: Op(channel="loss", transfer=formulas.ragged_places, types="collective"),
    _WIRE.ragged_all_to_all_start: Op(
        channel="loss", transfer=formulas.ragged_all_to_all, types="collective", rows="sent"
    ),
    _WIRE.arrived_rows: Op(identity=True, rows="first", calls={"default": lambda x, sizes: x}),
    _WIRE.rows_as: Op(rows="like"),
    # torch's collectives, written into a loss
    **{getattr(_C10D, name): _FOREIGN for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")},
    _C10D.all_to_all_single: _FOREIGN,
    _C10D.wait_tensor: Op(waits=True, carries=True),
    # moves between memories
    _MEMORY.to_host_start: Op(move=Crossing("device", "host", 0), makes_in="host"),
    _MEMORY.to_host_into_start: Op(move=Crossing("device", "host", 1)),
    _MEMORY.to_device_start: Op(move=Crossing("host", "device", 0), makes_in="device", fetches=True),
    _MEMORY.to_device_into_start: Op(move=Crossing("host", "device", 1)),
    _MEMORY.rows_to_device_start: Op(move=Crossing("host", "device", None), makes_in="device", fetches=True),
    _MEMORY.rows_to_host_start: Op(move=Crossing("device", "host", 1)),
    _MEMORY.read_start: Op(move=Crossing("disk", "host", None), makes_in="host", fetches=True),
    _MEMORY.read_into_start: Op(move=Crossing("disk", "host", 0)),
    _MEMORY.write_start: Op(move=Crossing("host", "disk", 2)),
    _MEMORY.host_empty: Op(makes_in="host"),
    _MEMORY.flat: Op(makes_in="host"),
    _MEMORY.writer: Op(makes_in="disk"),
    _MEMORY.wait: Op(waits=True, carries=True),
}
