"""Sharding rules of ops: a column of the op table. A pointwise op without a row has the rule of broadcasting."""

from collections.abc import Callable
from typing import Any

import torch

from shardfn.collectives import pmax, psum, pvary
from shardfn.kernels import KERNELS

from ._einsum_rules import (
    label_all_but,
    label_broadcast,
    label_product,
    label_product_of_elements,
    label_quotient,
    label_sent,
    label_sum,
    label_unary,
    rule_of_labels,
    sent_along,
)
from ._forms import OpUse, Rule
from ._group_rules import (
    clear_rows,
    has_all_rows,
    has_any_rows,
    is_along_columns,
    is_single_operand,
    keep_rows,
    kernel_rule,
    shard_grouped_mm,
)
from ._shape_rules import (
    label_expand,
    label_gather,
    label_index,
    label_index_select,
    label_other_dims,
    label_pad,
    label_repeat,
    label_scatter,
    label_squeeze,
    label_stack,
    label_transpose,
    label_unsqueeze,
    shard_cat,
    shard_constant,
    shard_constant_like,
    shard_embedding,
    shard_split,
)
from ._sum_rules import (
    label_mean,
    label_norm,
    label_reduced_sum,
    label_reduction,
    shard_attention,
    shard_nll,
    shard_softmax,
)
from ._view_rules import shard_view

_ATEN = torch.ops.aten


def _rules_for(names: str, rule: Rule) -> dict[Any, Rule]:
    return {getattr(_ATEN, name): rule for name in names.split()}


def _dim_argument(at: int, name: str = "dim") -> Callable[[OpUse], list[int]]:
    return lambda use: [use.arg(at, name, 0)]


POINTWISE = rule_of_labels(label_broadcast)

RULES: dict[Any, Rule] = {
    _ATEN.mm: rule_of_labels(label_product("mk", "kn", "mn")),
    _ATEN.bmm: rule_of_labels(label_product("bmk", "bkn", "bmn")),
    _ATEN.mv: rule_of_labels(label_product("mk", "k", "m")),
    _ATEN.dot: rule_of_labels(label_product("k", "k", "")),
    _ATEN._grouped_mm: shard_grouped_mm,
    **{kernel.op: kernel_rule(kernel) for kernel in KERNELS.values() if kernel.sharding is not None},
    **_rules_for("add sub", clear_rows(rule_of_labels(label_sum), has_all_rows)),
    **_rules_for("neg clone alias lift_fresh_copy", keep_rows(rule_of_labels(label_unary), is_single_operand)),
    **_rules_for("silu gelu relu tanh", keep_rows(POINTWISE, is_single_operand)),
    **_rules_for("sigmoid clamp clamp_min clamp_max", clear_rows(POINTWISE)),
    _ATEN.mul: keep_rows(rule_of_labels(label_product_of_elements), has_any_rows),
    _ATEN.div: rule_of_labels(label_quotient),
    **_rules_for("_to_copy detach", keep_rows(POINTWISE, is_single_operand)),
    **_rules_for("where masked_fill fill zero", POINTWISE),
    **_rules_for("t transpose permute", rule_of_labels(label_transpose)),
    _ATEN.unsqueeze: rule_of_labels(label_unsqueeze),
    _ATEN.squeeze: rule_of_labels(label_squeeze),
    _ATEN.expand: rule_of_labels(label_expand),
    _ATEN.repeat: rule_of_labels(label_repeat),
    **_rules_for("view _unsafe_view reshape", shard_view),
    **_rules_for("unbind select", rule_of_labels(label_other_dims(1))),
    _ATEN.slice: keep_rows(shard_split(1), is_along_columns),
    **_rules_for("slice_scatter select_scatter", rule_of_labels(label_scatter)),
    **_rules_for("split split_with_sizes", keep_rows(shard_split(2), is_along_columns)),
    _ATEN.cat: shard_cat,
    _ATEN.stack: rule_of_labels(label_stack),
    _ATEN.constant_pad_nd: rule_of_labels(label_pad),
    _ATEN.cumsum: rule_of_labels(label_all_but(_dim_argument(1))),
    _ATEN.embedding: shard_embedding,
    _ATEN.index_select: rule_of_labels(label_index_select),
    _ATEN.gather: rule_of_labels(label_gather),
    _ATEN.index: rule_of_labels(label_index),
    _ATEN.sum: rule_of_labels(label_reduced_sum),
    _ATEN.mean: rule_of_labels(label_mean),
    **_rules_for("amax amin any all argmax argmin prod logsumexp var var_mean", rule_of_labels(label_reduction)),
    **_rules_for("native_layer_norm _fused_rms_norm", rule_of_labels(label_norm)),
    **_rules_for("_softmax _log_softmax", shard_softmax),
    _ATEN.nll_loss_forward: shard_nll,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: shard_attention,
    sent_along: rule_of_labels(label_sent),
    **dict.fromkeys((psum, pvary), rule_of_labels(label_unary)),  # those of another axis
    pmax: POINTWISE,
    **_rules_for(
        "zeros ones full arange scalar_tensor empty eye new_zeros new_ones new_full new_empty", shard_constant
    ),
    **_rules_for("zeros_like ones_like full_like empty_like", shard_constant_like(POINTWISE)),
}
