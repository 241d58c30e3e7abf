"""Experts of a served model of transformers: each row by the weights of the row's expert, without derivatives.

Rows are put in the order of experts, in shapes independent of the choices, and each token's results are added in the
order of the token's choices.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardfn.core import Ambient
from shardfn.nn import moe

from ._expert_table import apply_experts
from ._module_rows import grouped_rows


@dataclass(frozen=True)
class ServedExperts:
    """Exchange of a call's tokens with experts, and the choices.

    Attributes:
        exchange: exchange of `nn.moe`.
        choices: choices [T, k] of each module of experts that has run, by identity.
    """

    exchange: moe.Exchange
    choices: dict[int, Tensor] = field(default_factory=dict)


CALL = Ambient[ServedExperts]("experts of a decoder's call", by_thread=True)


def served_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes experts for transformers, [S, D], [S, k], [S, k] -> [S, D].

    Raises:
        RuntimeError: no function of `decoding` runs.
    """
    call = CALL.innermost()
    if call is None:
        raise RuntimeError("experts 'shardfn_decoding' are for modules that run by decoding(module).")
    call.choices[id(module)] = top_k_index
    choices = top_k_index, top_k_weights
    return apply_experts(module, hidden_states, *choices, exchange=call.exchange, product=grouped_rows)
