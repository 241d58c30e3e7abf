"""`apply`: a mixture of experts, as the sum over each token's choices."""

from jaxtyping import Float
from torch import Tensor

from shardfn.core import PyTree, check_recompute

from ._exchange import Exchange, Local
from ._experts import ExpertFunction
from ._routing import Routing

_LOCAL = Local()


def apply(
    experts: ExpertFunction,
    params: PyTree,
    x_SD: Float[Tensor, "s d"],
    routing: Routing,
    *,
    exchange: Exchange = _LOCAL,
    name: str = "moe",
) -> Float[Tensor, "s d"]:
    """Sums, over choices i, `routing.weights[s, i]` times the result of expert `routing.experts[s, i]` for `x_SD[s]`.

    Differentiable in `x_SD`, the routing's weights, and `params`. The value does not depend on the exchange beyond
    rounding, and without capacity not on the other tokens.

    Args:
        experts: the function of a group of rows, as `swiglu_experts`.
        params: leaves with experts along dim 0, cut by `exchange.spec`.
        x_SD: tokens of the rank.
        routing: routing of the tokens, from a router such as `top_k`.
        exchange: exchange that brings tokens and experts together.
        name: name of the layer, for errors.

    Raises:
        ValueError: leaves with another number of experts, by path. A routing of other tokens, or more rows than the
            exchange has room for, on all ranks.
        RuntimeError: (in the backward, under `remat` or torch's checkpoint) the tokens have other experts than in the
            forward.

    Example:
        >>> import torch
        >>> from shardfn.nn import moe
        >>> logits, x = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2, 3)
        >>> params = {"w_up": torch.ones(2, 4, 3), "w_down": torch.ones(2, 3, 4)}
        >>> apply(moe.gelu_experts, params, x, moe.top_k(logits, 1)).shape
        torch.Size([2, 3])
    """
    if len(routing.experts) != len(x_SD):
        raise ValueError(
            f"{name}: the routing must be of the {len(x_SD)} tokens of x, got {len(routing.experts)}."
            " Route the same tokens."
        )
    check_recompute(routing.experts, f"{name}: the experts of tokens")
    return exchange.run(experts, params, x_SD, routing, name=name)
