"""Experts of a model of transformers while it is served: each row by the weights of its expert, without derivatives.

Rows are put in the order of their experts, in shapes that do not depend on the choices, and each token's results are
added in the order of its choices.
"""

from typing import Any

from torch import Tensor

from shardfn.core import Ambient
from shardfn.nn import moe

from ._expert_table import apply_experts
from ._module_rows import grouped_rows

CALL = Ambient[moe.Exchange]("experts of a decoder's call", by_thread=True)


def served_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that transformers calls, [S, D], [S, k], [S, k] -> [S, D].

    Raises:
        RuntimeError: no function of `decoding` runs.
    """
    exchange = CALL.innermost()
    if exchange is None:
        raise RuntimeError("experts 'shardfn_decoding' are for modules that run by decoding(module).")
    choices = top_k_index, top_k_weights
    return apply_experts(module, hidden_states, *choices, exchange=exchange, product=grouped_rows)
