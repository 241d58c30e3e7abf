"""`average_params`: a moving average of the parameters, in addition to the rule that trains the parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from shardfn.core import PyTree, tree_flatten, tree_map, tree_unflatten

from ._adam import bias_corrections
from ._base import GradientTransformation, Needs
from ._checks import check_decay_rate
from ._hyper import map_leaves, vary_number
from ._inplace import apply_updates, inplace
from ._leaves import check_params, check_state, leaves_like, wide, zero_count, zeros_like
from ._needs import join_needs
from ._pair import as_transformation
from ._types import Number, OptState, Pair, Params, Specs, Updates

Decay = Number | Callable[[Tensor], Any]


class AverageParamsState(NamedTuple):
    """Average, and the state of the rule that trains.

    Attributes:
        count: int32, 0-d: steps taken.
        average: tree like params, float32 at least.
        inner: the state of the rule.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # as in all states
    average: PyTree
    inner: OptState


def average_params(
    inner: GradientTransformation | Pair, decay: Decay = 0.999, *, debias: bool = False
) -> GradientTransformation:
    """Trains by `inner` and averages the parameters: `a = decay a + (1 - decay) p`, with `a` = the first parameters.

    With `debias` the first parameters have no weight: `a = m / (1 - decay^t)`, where `m = decay m + (1 - decay) p`
    begins at zero, as optax's `ema` averages updates. The state holds `a`, computed as `a = r a + (1 - r) p` with the
    rate `r = decay (1 - decay^(t-1)) / (1 - decay^t)`.

    The average is a part of the optimizer's state: sharded, offloaded, saved and restored with the state. With master
    copies, the copies are averaged. `sf.eval_state(state)` is the state to evaluate and export. Put the rule outermost,
    so that the average uses the parameters after the whole step.

    Args:
        inner: the rule.
        decay: a number in [0, 1), or a function of the number of steps taken before: `lambda t: t / (t + 1)` gives the
            mean of the parameters after each step.
        debias: whether the weight of the first parameters is removed. `decay` must then be a number.

    Returns:
        A rule with an `AverageParamsState`.

    Raises:
        ValueError: `decay` is outside [0, 1), or a function although `debias` is set.

    Example:
        >>> from shardfn.optim import sgd
        >>> tx, w = average_params(sgd(1.0), decay=0.5), [torch.zeros(1)]
        >>> w, state = tx.apply([torch.ones(1)], tx.init(w), w)
        >>> w, state.average
        ([tensor([-1.])], [tensor([-0.5000])])

    References:
        Polyak & Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992;
        Izmailov et al., Averaging Weights Leads to Wider Optima, 2018, https://arxiv.org/abs/1803.05407
    """
    if not callable(decay):
        check_decay_rate("average_params", decay=decay)
        return _AverageParams(as_transformation(inner), _debiased_rates(decay) if debias else decay).rule()
    if debias:
        raise ValueError(
            "average_params(debias=True) takes a number as decay, and this is a function: let it return 0 for t = 0, so"
            " that the first parameters have no weight, or leave debias out."
        )
    return _AverageParams(as_transformation(inner), decay).rule()


def _debiased_rates(decay: Number) -> Decay:
    """Returns the rates of an average without the first value. The first rate is 0."""

    def rate_at(count: Tensor) -> Tensor:
        before, after = (bias_corrections(t, decay, decay)[0] for t in (count, count + 1))
        return decay * before / after

    return rate_at


@dataclass(frozen=True, eq=False)
class _AverageParams:
    tx: GradientTransformation
    decay: Decay

    def rule(self) -> GradientTransformation:
        """Returns the rule as a `GradientTransformation`."""
        needs = join_needs([self.tx], lambda tx: _AverageParams(tx, self.decay).rule(), states=lambda s: (s.inner,))
        return GradientTransformation(self.init, self.update, self.apply, needs._replace(ascends=self.tx.needs.ascends))

    def init(self, params: Params) -> AverageParamsState:
        # Copies: the average must not share the memory of parameters that are written.
        average = tree_map(lambda p: p.detach().to(wide(p).dtype, copy=True), params)
        return AverageParamsState(zero_count(params), average, self.tx.init(params))

    def update(
        self, updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        check_params("average_params", params)
        old = self._leaf_columns(state, params)[0]
        updates, inner = self.tx.update(updates, state.inner, params, specs=specs)
        new, treedef = tree_flatten(apply_updates(params, updates))
        rows = zip(old, new, self._leaf_rates(state, params, specs), strict=True)
        average = [(d * a + (1 - d) * p.to(a.dtype)).to(a.dtype) for a, p, d in rows]
        return updates, AverageParamsState(state.count + 1, tree_unflatten(treedef, average), inner)

    @torch.no_grad()
    def apply(self, grads: Updates, state: OptState, params: Params, *, specs: Specs = None) -> tuple[Params, OptState]:
        old, treedef = self._leaf_columns(state, params)
        rates = self._leaf_rates(state, params, specs)
        params, inner = inplace(self.tx)(grads, state.inner, params, specs=specs)
        for a, p, d in zip(old, leaves_like(params, treedef, "params", "params"), rates, strict=True):
            a.mul_(d).add_((1 - d) * p.to(a.dtype))
        return params, AverageParamsState(state.count.add_(1), state.average, inner)

    def _leaf_columns(self, state: OptState, params: Params) -> tuple[list[Tensor], Any]:
        check_state("average_params", state, AverageParamsState)
        treedef = tree_flatten(params)[1]
        return leaves_like(state.average, treedef, "state.average", "params"), treedef

    def _leaf_rates(self, state: AverageParamsState, params: Params, specs: Specs) -> list[Any]:
        """Returns the decay for each leaf."""
        decay = self.decay(state.count.clone()) if callable(self.decay) else self.decay
        return vary_number(tree_flatten(params)[0], decay, params, specs)


class EmaState(NamedTuple):
    """Average.

    Attributes:
        count: int32, 0-d: steps taken.
        ema: tree like params.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    ema: PyTree


def ema(decay: Number, debias: bool = True) -> GradientTransformation:
    """Averages updates: `m = decay m + (1 - decay) u`, `u = m / (1 - decay^t)`. For parameters see `average_params`.

    Args:
        decay: decay in [0, 1).
        debias: whether to divide by `1 - decay^t`.

    Returns:
        A rule with an `EmaState`.

    Raises:
        ValueError: `decay` is out of range.

    Example:
        >>> import torch
        >>> tx = ema(0.5)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))[0]
        [tensor([1.])]
    """
    check_decay_rate("ema", decay=decay)

    def average_leaf(u: Tensor, ema: Tensor, decay: Number, by: Tensor) -> tuple[Tensor, Tensor]:
        m = decay * wide(ema) + (1 - decay) * wide(u)
        return (m / by if debias else m).to(ema.dtype), m.to(ema.dtype)

    def init_fn(params: Params) -> EmaState:
        return EmaState(zero_count(params), zeros_like(params))

    def update_fn(
        updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        del params
        check_state("ema", state, EmaState)
        count = state.count + 1
        by = bias_corrections(count, decay, decay)[0]
        us, new = map_leaves(average_leaf, 2, updates, of={"ema": state.ema}, specs=specs, decay=decay, by=by)
        return us, EmaState(count, new)

    return GradientTransformation(init_fn, update_fn, needs=Needs("element", ascends=True))
