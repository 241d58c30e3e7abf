"""Mixture of experts: routers, balance losses, capacity and metrics, as functions of a router's logits."""

from ._routing import Routing as Routing
from ._route import top_k as top_k
from . import balance as balance
from ._experts import Experts as Experts, gelu_experts as gelu_experts, swiglu_experts as swiglu_experts
from ._exchange import Exchange as Exchange, Local as Local, Sum as Sum, Tokens as Tokens, Weights as Weights
from ._apply import apply as apply
