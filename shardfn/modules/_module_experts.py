"""Experts of models of transformers by an exchange of `nn.moe`.

transformers looks up the function of a layer's experts in a table, by a name in the model's config. While a module runs
for `from_module`, the configs have the name registered here, and afterwards the old name. So no model is changed.
`from_module` refuses a model with experts outside of the table.

S tokens of this rank, k choices of each, D model.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shardfn.core import Ambient, P, named_modules, named_parameters, raise_all
from shardfn.nn import moe

from ._expert_table import FIELD, apply_experts, experts_in, leaves_of
from ._module_attention import named

NAME = "shardfn"
# Names of classes of experts, and of layers that hold experts.
_EXPERTS = re.compile(r"^(?!.*Shared)(.*Experts|.*MoE$|.*MoE(MLP|Layer|Block)$|.*SparseMLP$)")


class ExpertsRoute:
    """Exchange by which one module's tokens meet experts.

    Args:
        module: module with models of transformers inside.
        exchange: exchange of `nn.moe`.
        batch_invariant: whether rows have the bits of `kernels.row_linear`.

    Attributes:
        specs: compute specs of all parameters by name, cut for experts as the exchange needs.

    Raises:
        ValueError: there are no experts, or experts that cannot be routed. The message lists all with reasons.
    """

    def __init__(self, module: nn.Module, exchange: moe.Exchange, *, batch_invariant: bool = False) -> None:
        self.exchange, self.product = exchange, functools.partial(moe.grouped, batch_invariant=batch_invariant)
        found = experts_in(module)
        raise_all(
            ValueError,
            f"from_module(experts={exchange}) of this {type(module).__name__}:",
            _find_problems(module, found),
        )
        self._paths = {id(m): path for path, m in found.items()}
        self._configs = {id(m.config): m.config for m in found.values()}.values()
        of_experts = {f"{path}.{leaf}" if path else leaf for path, m in found.items() for leaf in leaves_of(m)}
        self.specs = {name: exchange.spec if name in of_experts else P() for name, _ in named_parameters(module)}
        _register_experts()

    def path_of(self, module: Any) -> str:
        """Returns the path of experts in the module."""
        return self._paths.get(id(module), type(module).__name__)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Computes experts by the exchange while open."""
        with named(self._configs, NAME, FIELD), _ROUTE.bound(self):
            yield


_ROUTE = Ambient[ExpertsRoute]("experts of a module's call", by_thread=True)


def routed_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes experts for transformers, [S, D], [S, k], [S, k] -> [S, D].

    `nn.moe.apply` by the module's exchange.

    Raises:
        RuntimeError: no module of `from_module(experts=)` runs.
        ValueError: the router's weights are not finite. The message names the layer.
    """
    route = _ROUTE.innermost()
    if route is None:
        raise RuntimeError(f"experts {NAME!r} are for modules that run by from_module(experts=).")
    choices, name = (top_k_index, top_k_weights), route.path_of(module)
    moe.check_finite(top_k_weights, name)
    how: dict[str, Any] = {"exchange": route.exchange, "product": route.product, "name": name}
    return apply_experts(module, hidden_states, *choices, **how)


def _register_experts() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, routed_experts)


def _find_problems(module: nn.Module, found: Mapping[str, Any]) -> list[str]:
    out = [f"{path} {problem}" for path, m in found.items() for problem in _problems_of(m)]
    known = {id(sub) for m in found.values() for sub in m.modules()}
    others = {
        path: type(m).__name__
        for path, m in named_modules(module)
        if _EXPERTS.search(type(m).__name__) and not any(id(sub) in known for sub in m.modules())
    }
    out += [
        f"{path} is a {kind}, which computes its experts without transformers' ExpertsInterface; leave out experts="
        for path, kind in others.items()
        if not any(path.startswith(f"{above}.") for above in others)
    ]
    if not out and not found:
        return ["there are no experts of a model of transformers in it; leave out experts=, or call nn.moe in it"]
    return out


def _problems_of(module: Any) -> list[str]:
    own = dict(module.named_parameters(recurse=False))
    out = [f"has no parameter {name}; its experts cannot be routed" for name in leaves_of(module) if name not in own]
    out += [
        f"has {name} of shape {tuple(own[name].shape)} for {module.num_experts} experts; dim 0 must be the experts"
        for name in leaves_of(module)
        if name in own and own[name].shape[:1] != (module.num_experts,)
    ]
    out += [
        f"has {name} of {own[name].dtype}. Convert the experts to a floating-point dtype of 16 bits or more"
        for name in leaves_of(module)
        if name in own and (own[name].itemsize < 2 or not own[name].is_floating_point())
    ]
    if module._is_expert_parallel:
        out.append("is cut by transformers itself; load the model without its expert parallelism")
    return out
