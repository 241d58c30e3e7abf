"""Experts of a model of transformers while it is served: each row by the weights of its expert.

transformers looks up the function of a layer's experts in a table, by a name in the model's config. The model's own
router chooses, and its own gate and activation run. Here rows are put in the order of their experts, in shapes that do
not depend on the choices, and each token's results are added in the order of its choices.

S tokens, k choices of each, M rows, E experts, D model, F ffn.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.core import Ambient, named_modules
from shardfn.nn import moe

from ._module_rows import grouped_rows

FIELD = "_experts_implementation_internal"
CALL = Ambient[moe.Exchange]("experts of a decoder's call", by_thread=True)


def experts_in(module: nn.Module) -> dict[str, Any]:
    """The experts that transformers looks up in its table, by path."""
    found = named_modules(module)
    return {p: m for p, m in found if hasattr(m, "_is_expert_parallel") and hasattr(m, "is_transposed")}


def leaves_of(module: Any) -> list[str]:
    """The names of the parameters of experts, which have the experts along dim 0."""
    names = _projections(module)
    return [*names, *(f"{n}_bias" for n in names)] if module.has_bias else [*names]


def served_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that transformers calls, [S, D], [S, k], [S, k] -> [S, D].

    Raises:
        RuntimeError: no function of `decoding` runs.
    """
    exchange = CALL.innermost()
    if exchange is None:
        raise RuntimeError("experts 'shardfn_decoding' are for modules that run by decoding(module).")
    E, chosen = module.num_experts, top_k_index.long()
    # transformers marks a choice without an expert by the number E.
    chosen = torch.where((chosen >= 0) & (chosen < E), chosen, -1)
    none_SE = top_k_weights.new_zeros(()).expand(len(chosen), E)  # an exchange needs the number of experts, no scores
    routing = moe.Routing(chosen, torch.where(chosen >= 0, top_k_weights, 0), none_SE, none_SE)
    params = {name: getattr(module, name) for name in leaves_of(module)}
    run = functools.partial(_experts, module)
    return moe.apply(run, params, hidden_states, routing, exchange=exchange).to(hidden_states.dtype)


def _experts(module: Any, params: Mapping[str, Tensor], x_MD: Tensor, counts_E: Tensor) -> Tensor:
    up, down = _projections(module)
    h_MF = _affine(module, params, up, x_MD, counts_E)
    h_MF = module._apply_gate(h_MF) if module.has_gate else module.act_fn(h_MF)
    y_MD = _affine(module, params, down, h_MF, counts_E)
    return module.post_expert_norm(y_MD) if getattr(module, "has_post_expert_norm", False) else y_MD


def _affine(module: Any, params: Mapping[str, Tensor], name: str, x_MD: Tensor, counts_E: Tensor) -> Tensor:
    y_MF = grouped_rows(x_MD, params[name], counts_E, not module.is_transposed)
    bias_EF = params.get(f"{name}_bias")
    if bias_EF is None:
        return y_MF
    return y_MF + grouped_rows(x_MD.new_ones(len(x_MD), 1), bias_EF[:, None], counts_E, False)


def _projections(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
