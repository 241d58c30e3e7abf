"""The experts of a transformer's layers, as a setting of the transformer's `Config`.

E experts, k choices of a token, F ffn of an expert.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from shardfn.core import Axes, raise_all
from shardfn.nn import moe

_LOCAL = moe.Local()


@dataclasses.dataclass(frozen=True)
class Experts:
    """Rule of the layers with experts: how tokens choose their experts, and where tokens and experts meet.

    Attributes:
        num: E, or a pyramid: E of each layer with experts, in order, for example (32, 32, 64). Each layer's experts
            are cut over the ranks separately.
        top_k: k.
        d_ff: F. None is the F of the dense layers.
        every: distance of layers with experts. Layer i has experts where `i >= first` and `(i - first + 1) % every ==
            0`: 1 is all, 2 every second.
        first: number of dense layers at the beginning.
        layers: numbers of the layers with experts, ascending, in place of `every` and `first`, for example (1, 3, 4).
        route: function `route(logits, k=, name=)` to a `moe.Routing`, such as `moe.top_k`, with settings by
            `functools.partial`. `route` also gets `bias=` where `bias_rate` is above 0, `batch_invariant=True` in a
            batch-invariant model, `mask=` where the batch has a mask, and `chosen=` where choices are replayed.
        balance: weight in the loss of the mean of `balance_loss` over layers.
        balance_loss: function of `moe.balance`. The function gets `axes=`, and `mask=` as `route` does.
        z: weight in the loss of the mean of `moe.balance.z`.
        axes: axes of the batch, over which balance and capacity are taken. None takes only each rank's tokens.
        capacity: factor of `moe.capacity`: how many times its mean number of choices an expert takes. Later choices are
            dropped. Padding counts in neither number. None drops none.
        shared: whether the layer's dense MLP is added to the experts', for all tokens, as in DeepSeek.
        shared_d_ff: F of the dense MLP next to the experts. None is the F of the dense layers.
        residual: whether a token's result is a learnt mean of the experts' and the layer's dense MLP's, as in PR-MoE:
            `c[0] experts + c[1] mlp`, c = softmax(mix x + mix_b). With `top_k=1` a token has the computation of two
            experts and the exchange of a single expert.
        gate: gate of experts with `mlp="swiglu"` in place of silu, such as `moe.ClampedGate()` of gpt-oss.
        biases: whether the router and experts with `mlp="swiglu"` have biases, as in gpt-oss. Experts without a gate
            have biases by `Config.bias`.
        bias_rate: step of a bias of each expert, used only in the choice, and moved once a step against the expert's
            load, in place of a balance loss. The loss then has a state (`models.moe.loss`).
        exchange: place where tokens meet their experts: `moe.Local()`, `moe.AllToAll("ep")`, `moe.GatherExperts("ep")`,
            `moe.AllReduce("tp")`.

    Raises:
        ValueError: lists every field out of range, and the arguments that `route` does not take.

    Example:
        >>> [Experts(num=8, every=2).in_layer(i) for i in range(4)]
        [False, True, False, True]

    References:
        Fedus et al., Switch Transformers, 2021, https://arxiv.org/abs/2101.03961
        Rajbhandari et al., DeepSpeed-MoE, 2022, https://arxiv.org/abs/2201.05596 (PR-MoE)
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437
    """

    num: int | tuple[int, ...]
    top_k: int = 2
    d_ff: int | None = None
    every: int = 1
    first: int = 0
    layers: tuple[int, ...] | None = None
    route: Callable[..., moe.Routing] = moe.top_k
    balance: float = 0.01
    balance_loss: Callable[..., Tensor] = moe.balance.switch
    z: float = 0.0
    axes: Axes = None
    capacity: float | None = None
    shared: bool = False
    shared_d_ff: int | None = None
    residual: bool = False
    gate: moe.ClampedGate | None = None
    biases: bool = False
    bias_rate: float = 0.0
    exchange: moe.Exchange = _LOCAL

    def __post_init__(self) -> None:
        problems = [f"{n}={getattr(self, n)} must be at least 1." for n in ("top_k", "every") if getattr(self, n) < 1]
        problems += [
            f"{n}={getattr(self, n)} must be 0 or more." for n in ("first", "bias_rate") if getattr(self, n) < 0
        ]
        if not self._nums or min(self._nums) < 1:
            problems.append(f"num={self.num} must be at least 1, or a tuple of such numbers.")
        elif self.top_k > min(self._nums):
            problems.append(f"top_k={self.top_k} choices of num={self.num} experts. Choose at most all of them.")
        if self.capacity is not None and not self.capacity > 0:
            problems.append(f"capacity={self.capacity} must be above 0. None drops nothing.")
        if self.residual and self.shared:
            problems.append(
                "residual=True and shared=True both use the layer's dense MLP. Use residual=True for a learnt mean, or"
                " shared=True for a sum."
            )
        if self.layers is not None:
            problems += self._problems_of_layers(self.layers)
        for n in ("d_ff", "shared_d_ff"):
            if (size := getattr(self, n)) is not None and size < 1:
                problems.append(f"{n}={size} must be at least 1.")
        if self.shared_d_ff is not None and not (self.shared or self.residual):
            problems.append(f"shared_d_ff={self.shared_d_ff} needs shared=True or residual=True.")
        problems += [
            f"route={self._route_name} takes no {n}=. Wrap it in a function of logits, k and name."
            for n in self._not_taken(("k", "name"))
        ]
        if self.bias_rate > 0 and self._not_taken(("bias",)):
            problems.append(
                f"bias_rate={self.bias_rate} moves a bias in the choice, and route={self._route_name} takes no bias=."
                " Use moe.sigmoid_groups or another router that does, or bias_rate=0."
            )
        raise_all(ValueError, "Experts:", problems)

    def in_layer(self, i: int) -> bool:
        """Returns whether layer `i` has experts."""
        if self.layers is not None:
            return i in self.layers
        return i >= self.first and (i - self.first + 1) % self.every == 0

    def num_of(self, i: int) -> int:
        """Returns the number of experts of the i-th layer with experts."""
        return self.num if isinstance(self.num, int) else self.num[i]

    def routing(self, logits_SE: Tensor, name: str, **options: Any) -> moe.Routing:
        """Returns the experts of tokens, by `route`.

        Args:
            logits_SE: logits of the router.
            name: name of the layer.
            options: options of `route`. Options that are None are left out.

        Raises:
            ValueError: `route` does not take an option of the call or of its `functools.partial`.
        """
        given = {n: x for n, x in options.items() if x is not None}
        raise_all(
            ValueError,
            f"{name}: route={self._route_name}",
            [f"takes no {n}=, which the model passes on here. Use a router that does." for n in self._not_taken(given)],
        )
        return self.route(logits_SE, k=self.top_k, name=name, **given)

    def list_variant_parts(self) -> list[str]:
        """Returns the reasons for which a token's results depend on the other tokens, or on the ranks."""
        out = list[str]()
        if self.capacity is not None:
            out.append(f"capacity={self.capacity} drops a token's choices for those of other tokens. Leave it out.")
        if self._not_taken(("batch_invariant",)):
            out.append(
                f"route={self._route_name} takes no batch_invariant=True. Use moe.top_k or a router of single tokens."
            )
        if isinstance(self.exchange, moe.AllReduce) and not self.exchange.in_order:
            fixed = dataclasses.replace(self.exchange, in_order=True)
            out.append(f"{self.exchange} adds results in the order of ranks. Use {fixed}.")
        if isinstance(self.exchange, moe.AllToAll) and self.exchange.overflow == "drop":
            out.append(f'{self.exchange} drops choices. Use overflow="error".')
        return out

    def _problems_of_layers(self, layers: tuple[int, ...]) -> list[str]:
        out = []
        if not layers or min(layers) < 0 or list(layers) != sorted(set(layers)):
            out.append(f"layers={layers} must be numbers of layers, ascending, for example (1, 3, 4).")
        if self.every != 1 or self.first != 0:
            out.append(f"layers={layers} is in place of every={self.every} and first={self.first}. Leave them out.")
        return out

    @property
    def _nums(self) -> tuple[int, ...]:
        return (self.num,) if isinstance(self.num, int) else self.num

    @property
    def _route_name(self) -> str:
        return getattr(self.route, "__name__", str(self.route))

    def _not_taken(self, names: Iterable[str]) -> list[str]:
        """Returns the keyword arguments that `route` does not take."""
        return [] if self._route_options is None else [n for n in names if n not in self._route_options]

    @functools.cached_property
    def _route_options(self) -> frozenset[str] | None:
        """Returns the arguments that `route` takes.

        None is any keyword. Every layer of every forward calls this function.
        """
        taken = inspect.signature(self.route).parameters
        return None if any(p.kind is p.VAR_KEYWORD for p in taken.values()) else frozenset(taken)
