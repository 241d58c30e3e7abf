"""Mixture of experts: routers, balance losses, capacity and metrics, as functions of a router's logits."""

from ._routing import Routing as Routing
from ._route import top_k as top_k
from . import balance as balance
