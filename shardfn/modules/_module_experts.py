"""Experts of models of transformers by an exchange of `nn.moe`.

transformers looks up the function of a layer's experts in a table, by a name in the model's config. While a module runs
for `from_module`, its configs have the name registered here, and afterwards the one they had before. So no model is
changed; a model whose experts do not use that table is refused by `from_module`.

The module's own router chooses: its experts and weights of each token are the routing. The function of the experts is
the module's own, too, with its gate, its activation and the layout of its weights.

S tokens of this rank, k choices of each, M rows, E experts, D model, F ffn.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.core import Ambient, P, named_modules, named_parameters, raise_all
from shardfn.nn import moe

from ._module_attention import named

NAME = "shardfn"
_FIELD = "_experts_implementation_internal"
# Names of classes of experts, and of layers that hold experts.
_EXPERTS = re.compile(r"^(?!.*Shared)(.*Experts|.*MoE$|.*MoE(MLP|Layer|Block)$|.*SparseMLP$)")


class ExpertsRoute:
    """The exchange by which one module's tokens meet their experts.

    Args:
        module: with models of transformers in it.
        exchange: of `nn.moe`.

    Attributes:
        specs: by name, the compute specs of all parameters: those of experts are cut as the exchange needs them.

    Raises:
        ValueError: there are no experts, or some that cannot be routed; lists all of them with reasons.
    """

    def __init__(self, module: nn.Module, exchange: moe.Exchange) -> None:
        self.exchange = exchange
        found = {path: m for path, m in named_modules(module) if _asks(m)}
        raise_all(
            ValueError,
            f"from_module(experts={exchange}) of this {type(module).__name__}:",
            _problems(module, found),
        )
        self._paths = {id(m): path for path, m in found.items()}
        self._configs = {id(m.config): m.config for m in found.values()}.values()
        of_experts = {f"{path}.{leaf}" if path else leaf for path, m in found.items() for leaf in _leaves(m)}
        self.specs = {name: exchange.spec if name in of_experts else P() for name, _ in named_parameters(module)}
        _register()

    def path_of(self, module: Any) -> str:
        """The path of experts in the module."""
        return self._paths.get(id(module), type(module).__name__)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While it is open, experts are computed by the exchange."""
        with named(self._configs, NAME, _FIELD), _ROUTE.bound(self):
            yield


_ROUTE = Ambient[ExpertsRoute]("experts of a module's call", by_thread=True)


def routed_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that transformers calls, [S, D], [S, k], [S, k] -> [S, D]: `nn.moe.apply` by the module's exchange.

    Raises:
        RuntimeError: no module of `from_module(experts=)` runs.
    """
    route = _ROUTE.innermost()
    if route is None:
        raise RuntimeError(f"experts {NAME!r} are for modules that run by from_module(experts=).")
    S, E = len(hidden_states), module.num_experts
    # transformers marks a choice without an expert by the number E.
    chosen = top_k_index.long()
    chosen = torch.where((chosen >= 0) & (chosen < E), chosen, -1)
    # An exchange needs the number of experts, and no scores.
    none_SE = top_k_weights.detach().new_zeros(()).expand(S, E)
    routing = moe.Routing(chosen, torch.where(chosen >= 0, top_k_weights, 0), none_SE, none_SE)
    params = {name: getattr(module, name) for name in _leaves(module)}
    y_SD = moe.apply(
        _experts_of(module), params, hidden_states, routing, exchange=route.exchange, name=route.path_of(module)
    )
    return y_SD.to(hidden_states.dtype)


def _experts_of(module: Any) -> moe.Experts:
    """The module's own experts, of rows in groups."""
    up, down = _projections(module)

    def experts(params: Mapping[str, Tensor], x_MD: Tensor, counts_E: Tensor) -> Tensor:
        h_MF = _affine(module, params, up, x_MD, counts_E)
        h_MF = module._apply_gate(h_MF) if module.has_gate else module.act_fn(h_MF)
        y_MD = _affine(module, params, down, h_MF, counts_E)
        return module.post_expert_norm(y_MD) if _has_norm(module) else y_MD

    return experts


def _affine(module: Any, params: Mapping[str, Tensor], name: str, x_MD: Tensor, counts_E: Tensor) -> Tensor:
    y_MF = moe.grouped(x_MD, params[name], counts_E, transposed=not module.is_transposed)
    bias_EF = params.get(f"{name}_bias")
    if bias_EF is None:
        return y_MF
    # The bias of each row's expert: a product with ones, whose transpose sums in a fixed order.
    return y_MF + moe.grouped(x_MD.new_ones(len(x_MD), 1), bias_EF[:, None], counts_E)


def _asks(module: Any) -> bool:
    """Whether the experts are looked up in transformers' table."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed")


def _has_norm(module: Any) -> bool:
    return getattr(module, "has_post_expert_norm", False)


def _projections(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _leaves(module: Any) -> list[str]:
    names = _projections(module)
    return [*names, *(f"{n}_bias" for n in names)] if module.has_bias else [*names]


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, routed_experts)


def _problems(module: nn.Module, found: Mapping[str, Any]) -> list[str]:
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
    out = [f"has no parameter {name}; its experts cannot be routed" for name in _leaves(module) if name not in own]
    out += [
        f"has {name} of shape {tuple(own[name].shape)} for {module.num_experts} experts; dim 0 must be the experts"
        for name in _leaves(module)
        if name in own and own[name].shape[:1] != (module.num_experts,)
    ]
    out += [
        f"has {name} of {own[name].dtype}; convert the experts to a floating-point dtype of 16 bits or more"
        for name in _leaves(module)
        if name in own and (own[name].itemsize < 2 or not own[name].is_floating_point())
    ]
    if module._is_expert_parallel:
        out.append("is cut by transformers itself; load the model without its expert parallelism")
    return out
