"""Sharding rules of ops: a column of the op table. A pointwise op without a row has the rule of broadcasting."""

from collections.abc import Callable
from typing import Any

import torch

from shardfn import collectives
from shardfn.kernels import KERNELS

from . import _einsum_rules as einsum
from . import _group_rules as groups
from . import _shape_rules as shapes
from . import _sum_rules as sums
from ._einsum_rules import rule_of_labels
from ._forms import OpUse, Rule
from ._shape_rules import shard_view

_ATEN = torch.ops.aten


def _rules_for(names: str, rule: Rule) -> dict[Any, Rule]:
    return {getattr(_ATEN, name): rule for name in names.split()}


def _dim_argument(at: int, name: str = "dim") -> Callable[[OpUse], list[int]]:
    return lambda use: [use.arg(at, name, 0)]


POINTWISE = rule_of_labels(einsum.label_broadcast)

RULES: dict[Any, Rule] = {
    _ATEN.mm: rule_of_labels(einsum.label_product("mk", "kn", "mn")),
    _ATEN.bmm: rule_of_labels(einsum.label_product("bmk", "bkn", "bmn")),
    _ATEN.mv: rule_of_labels(einsum.label_product("mk", "k", "m")),
    _ATEN.dot: rule_of_labels(einsum.label_product("k", "k", "")),
    _ATEN._grouped_mm: groups.shard_grouped_mm,
    **{kernel.op: groups.kernel_rule(kernel) for kernel in KERNELS.values() if kernel.sharding is not None},
    **_rules_for("add sub", groups.clear_rows(rule_of_labels(einsum.label_sum), groups.has_all_rows)),
    **_rules_for(
        "neg clone alias lift_fresh_copy",
        groups.keep_rows(rule_of_labels(einsum.label_unary), groups.is_single_operand),
    ),
    **_rules_for("silu gelu relu tanh", groups.keep_rows(POINTWISE, groups.is_single_operand)),
    **_rules_for("sigmoid clamp clamp_min clamp_max", groups.clear_rows(POINTWISE)),
    _ATEN.mul: groups.keep_rows(rule_of_labels(einsum.label_product_of_elements), groups.has_any_rows),
    _ATEN.div: rule_of_labels(einsum.label_quotient),
    **_rules_for("_to_copy detach", groups.keep_rows(POINTWISE, groups.is_single_operand)),
    **_rules_for("where masked_fill fill zero", POINTWISE),
    **_rules_for("t transpose permute", rule_of_labels(shapes.label_transpose)),
    _ATEN.unsqueeze: rule_of_labels(shapes.label_unsqueeze),
    _ATEN.squeeze: rule_of_labels(shapes.label_squeeze),
    _ATEN.expand: rule_of_labels(shapes.label_expand),
    _ATEN.repeat: rule_of_labels(shapes.label_repeat),
    **_rules_for("view _unsafe_view reshape", shard_view),
    **_rules_for("unbind select", rule_of_labels(shapes.label_other_dims(1))),
    _ATEN.slice: groups.keep_rows(shapes.shard_split(1), groups.is_along_columns),
    **_rules_for("slice_scatter select_scatter", rule_of_labels(shapes.label_scatter)),
    **_rules_for("split split_with_sizes", groups.keep_rows(shapes.shard_split(2), groups.is_along_columns)),
    _ATEN.cat: shapes.shard_cat,
    _ATEN.stack: rule_of_labels(shapes.label_stack),
    _ATEN.constant_pad_nd: rule_of_labels(shapes.label_pad),
    _ATEN.cumsum: rule_of_labels(einsum.label_all_but(_dim_argument(1))),
    _ATEN.embedding: shapes.shard_embedding,
    _ATEN.index_select: rule_of_labels(shapes.label_index_select),
    _ATEN.gather: rule_of_labels(shapes.label_gather),
    _ATEN.index: rule_of_labels(shapes.label_index),
    _ATEN.sum: rule_of_labels(sums.label_reduced_sum),
    _ATEN.mean: rule_of_labels(sums.label_mean),
    **_rules_for("amax amin any all argmax argmin prod logsumexp var var_mean", rule_of_labels(sums.label_reduction)),
    **_rules_for("native_layer_norm _fused_rms_norm", rule_of_labels(sums.label_norm)),
    **_rules_for("_softmax _log_softmax", sums.shard_softmax),
    _ATEN.nll_loss_forward: sums.shard_nll,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: sums.shard_attention,
    einsum.convert_form: rule_of_labels(einsum.label_sent),
    **dict.fromkeys((collectives.psum, collectives.pvary), rule_of_labels(einsum.label_unary)),  # those of another axis
    collectives.pmax: POINTWISE,
    **_rules_for(
        "zeros ones full arange scalar_tensor empty eye new_zeros new_ones new_full new_empty", shapes.shard_constant
    ),
    **_rules_for("zeros_like ones_like full_like empty_like", shapes.shard_constant_like(POINTWISE)),
}
