"""Experts looked up by transformers in a table, by a name in the model's config.

The module's router chooses the experts and weights of each token. The function of the experts is the module's, too,
with the gate, the activation and the layout of the weights. A caller has the exchange, such as an all-to-all, and the
product of rows in groups.

S tokens of this rank, k choices of each, M rows, E experts, D model, F ffn.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.core import named_modules
from shardfn.nn import moe

FIELD = "_experts_implementation_internal"
# From rows, weights, counts, and whether the weights are [E, F, D], to rows.
Product = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def experts_in(module: nn.Module) -> dict[str, Any]:
    """Returns the experts looked up by transformers in the table, by path."""
    found = named_modules(module)
    return {p: m for p, m in found if hasattr(m, "_is_expert_parallel") and hasattr(m, "is_transposed")}


def leaves_of(module: Any) -> list[str]:
    """Returns the names of the parameters with experts along dim 0."""
    names = _find_projections(module)
    return [*names, *(f"{n}_bias" for n in names)] if module.has_bias else [*names]


def apply_experts(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    exchange: moe.Exchange,
    product: Product,
    name: str = "moe",
) -> Tensor:
    """Applies a module's experts by `nn.moe.apply`, [S, D], [S, k], [S, k] -> [S, D]."""
    E, chosen = module.num_experts, top_k_index.long()
    # transformers marks a choice without an expert by the number E.
    chosen = torch.where((chosen >= 0) & (chosen < E), chosen, -1)
    # An exchange needs the number of experts, and no scores.
    none_SE = top_k_weights.detach().new_zeros(()).expand(len(hidden_states), E)
    routing = moe.Routing(chosen, torch.where(chosen >= 0, top_k_weights, 0), none_SE, none_SE)
    params = {leaf: getattr(module, leaf) for leaf in leaves_of(module)}
    up, down = _find_projections(module)

    def apply_affine(params: Mapping[str, Tensor], leaf: str, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        y_MF = product(x_MD, params[leaf], counts_E, not module.is_transposed)
        bias_EF = params.get(f"{leaf}_bias")
        if bias_EF is None:
            return y_MF
        # The bias of each row's expert: a product with ones, whose transpose sums in a fixed order.
        return y_MF + product(x_MD.new_ones(len(x_MD), 1), bias_EF[:, None], counts_E, False)

    def run_experts(params: Mapping[str, Tensor], x_MD: Tensor, counts_E: Tensor) -> Tensor:
        h_MF = apply_affine(params, up, x_MD, counts_E)
        h_MF = module._apply_gate(h_MF) if module.has_gate else module.act_fn(h_MF)
        y_MD = apply_affine(params, down, h_MF, counts_E)
        return module.post_expert_norm(y_MD) if getattr(module, "has_post_expert_norm", False) else y_MD

    y_SD = moe.apply(run_experts, params, hidden_states, routing, exchange=exchange, name=name)
    return y_SD.to(hidden_states.dtype)


def _find_projections(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
