"""Sharding rules of ops: a column of the op table. A pointwise op without a row has the rule of broadcasting."""

from collections.abc import Callable
from typing import Any

import torch

from shardfn.collectives import pmax, psum, pvary
from shardfn.kernels import KERNELS

from ._forms import OpUse, Rule
from ._group_rules import grouped_mm, kernel_rule
from ._labelled import broadcast, divided, keeps_all_but, labelled, product, scaled, sum_of_operands, unary_linear
from ._part_rules import joined, taken_apart
from ._row_rules import clearing_rows, keeping_rows, of_all, of_any, of_columns, of_one
from ._sent_rules import sent, sent_along
from ._shape_rules import (
    closed,
    expanded,
    gathered,
    indexed,
    looked_up,
    made_like,
    made_of_nothing,
    padded,
    put_in,
    repeated,
    selected,
    squeezed,
    stacked,
    transposed,
    unsqueezed,
)
from ._sum_rules import attention, averaged, nll, normalised, reduced, softmax, summed
from ._view_rules import viewed

_ATEN = torch.ops.aten


def _rules_for(names: str, rule: Rule) -> dict[Any, Rule]:
    return {getattr(_ATEN, name): rule for name in names.split()}


def _dim_argument(at: int, name: str = "dim") -> Callable[[OpUse], list[int]]:
    return lambda use: [use.arg(at, name, 0)]


POINTWISE = labelled(broadcast)

RULES: dict[Any, Rule] = {
    _ATEN.mm: labelled(product("mk", "kn", "mn")),
    _ATEN.bmm: labelled(product("bmk", "bkn", "bmn")),
    _ATEN.mv: labelled(product("mk", "k", "m")),
    _ATEN.dot: labelled(product("k", "k", "")),
    _ATEN._grouped_mm: grouped_mm,
    **{kernel.op: kernel_rule(kernel) for kernel in KERNELS.values() if kernel.sharding is not None},
    **_rules_for("add sub", clearing_rows(labelled(sum_of_operands), of_all)),
    **_rules_for("neg clone alias lift_fresh_copy", keeping_rows(labelled(unary_linear), of_one)),
    **_rules_for("silu gelu relu tanh", keeping_rows(POINTWISE, of_one)),
    **_rules_for("sigmoid clamp clamp_min clamp_max", clearing_rows(POINTWISE)),
    _ATEN.mul: keeping_rows(labelled(scaled), of_any),
    _ATEN.div: labelled(divided),
    **_rules_for("_to_copy detach", keeping_rows(POINTWISE, of_one)),
    **_rules_for("where masked_fill fill zero", POINTWISE),
    **_rules_for("t transpose permute", labelled(transposed)),
    _ATEN.unsqueeze: labelled(unsqueezed),
    _ATEN.squeeze: labelled(squeezed),
    _ATEN.expand: labelled(expanded),
    _ATEN.repeat: labelled(repeated),
    **_rules_for("view _unsafe_view reshape", viewed),
    **_rules_for("unbind select", labelled(closed(1))),
    _ATEN.slice: keeping_rows(taken_apart(1), of_columns),
    **_rules_for("slice_scatter select_scatter", labelled(put_in)),
    **_rules_for("split split_with_sizes", keeping_rows(taken_apart(2), of_columns)),
    _ATEN.cat: joined,
    _ATEN.stack: labelled(stacked),
    _ATEN.constant_pad_nd: labelled(padded),
    _ATEN.cumsum: labelled(keeps_all_but(_dim_argument(1))),
    _ATEN.embedding: looked_up,
    _ATEN.index_select: labelled(selected),
    _ATEN.gather: labelled(gathered),
    _ATEN.index: labelled(indexed),
    _ATEN.sum: labelled(summed),
    _ATEN.mean: labelled(averaged),
    **_rules_for("amax amin any all argmax argmin prod logsumexp var var_mean", labelled(reduced)),
    **_rules_for("native_layer_norm _fused_rms_norm", labelled(normalised)),
    **_rules_for("_softmax _log_softmax", softmax),
    _ATEN.nll_loss_forward: nll,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: attention,
    sent_along: labelled(sent),
    **dict.fromkeys((psum, pvary), labelled(unary_linear)),  # those of another axis
    pmax: POINTWISE,
    **_rules_for(
        "zeros ones full arange scalar_tensor empty eye new_zeros new_ones new_full new_empty", made_of_nothing
    ),
    **_rules_for("zeros_like ones_like full_like empty_like", made_like(POINTWISE)),
}
