"""Experts of models of transformers by an exchange of `nn.moe`.

transformers looks up the function of a layer's experts in a table, by a name in the model's config. While a module runs
for `from_module`, the configs have the name registered here, and afterwards the old name. So no model is changed.
`from_module` refuses a model with experts outside of the table.

The module's router chooses the experts and weights of each token. The function of the experts is the module's, too,
with the gate, the activation and the layout of the weights. A caller has the exchange, such as an all-to-all, and the
product of rows in groups.

S tokens of this rank, k choices of each, M rows, E experts, D model, F ffn.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardfn import core
from shardfn.nn import moe

from ._attention import name_functions
from ._call import ModuleRun, Replacement

NAME = "shardfn"
FIELD = "_experts_implementation_internal"
# From rows, weights, counts, and whether the weights are [E, F, D], to rows.
Product = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
# Names of classes of experts, and of layers that hold experts.
_EXPERTS = re.compile(r"^(?!.*Shared)(.*Experts|.*MoE$|.*MoE(MLP|Layer|Block)$|.*SparseMLP$)")


class ExpertsRoute(Replacement):
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

    order = 70

    def __init__(self, module: nn.Module, exchange: moe.Exchange, *, batch_invariant: bool = False) -> None:
        self.exchange, self.product = exchange, functools.partial(moe.grouped, batch_invariant=batch_invariant)
        found = experts_in(module)
        core.raise_all(
            ValueError,
            f"from_module(experts={exchange}) of this {type(module).__name__}:",
            _find_problems(module, found),
        )
        self._paths = {id(m): path for path, m in found.items()}
        self._configs = {id(m.config): m.config for m in found.values()}.values()
        of_experts = {f"{path}.{leaf}" if path else leaf for path, m in found.items() for leaf in leaves_of(m)}
        self.specs = {
            name: exchange.spec if name in of_experts else core.P() for name, _ in core.named_parameters(module)
        }
        _register_experts()

    def path_of(self, module: Any) -> str:
        """Returns the path of experts in the module."""
        return self._paths.get(id(module), type(module).__name__)

    @contextlib.contextmanager
    def running(self, run: ModuleRun) -> Iterator[None]:
        """Computes experts by the exchange while open."""
        del run
        with name_functions(self._configs, NAME, FIELD), _ROUTE.bound(self):
            yield


_ROUTE = core.Ambient[ExpertsRoute]("experts of a module's call", by_thread=True)


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
        for path, m in core.named_modules(module)
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
        out.append("is cut by transformers itself. Load the model without its expert parallelism")
    return out


def experts_in(module: nn.Module) -> dict[str, Any]:
    """Returns the experts looked up by transformers in the table, by path."""
    found = core.named_modules(module)
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
