"""Mixture of experts, as pure pieces: routers, balance, capacity, experts, and exchanges of tokens."""

from ._routing import Routing as Routing
from ._route import gshard_top2 as gshard_top2, switch_top1 as switch_top1, top_k as top_k
from ._route import sigmoid_groups as sigmoid_groups
from ._capacity import expert_choice as expert_choice, sinkhorn as sinkhorn
from ._routing import check_chosen as check_chosen, check_finite as check_finite
from ._route import jitter as jitter, token_numbers as token_numbers
from ._capacity import capacity as capacity, apply_capacity as apply_capacity
from . import balance as balance
from ._route import bias_update as bias_update
from ._metrics import load as load, other_choices as other_choices
from ._permute import Permutation as Permutation, combine as combine, dispatch as dispatch, permutation as permutation
from ._experts import grouped as grouped
from ._experts import FUNCTIONS_OF_OPS as FUNCTIONS_OF_OPS
from ._experts import ClampedGate as ClampedGate
from ._experts import ExpertFunction as ExpertFunction, gelu_experts as gelu_experts, swiglu_experts as swiglu_experts
from ._exchange import (
    Exchange as Exchange,
    Local as Local,
    AllReduce as AllReduce,
    GatherExperts as GatherExperts,
)
from ._all_to_all import AllToAll as AllToAll
from ._exchange import apply as apply
from ._exchange import residual as residual
from ._exchange_cost import ExchangeBytes as ExchangeBytes, cheapest as cheapest, exchange_bytes as exchange_bytes
