"""`ema`: an exponential moving average of updates."""

from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from shardfn.core import PyTree

from ._adam import bias_corrections
from ._base import GradientTransformation, Needs
from ._checks import decay_rate
from ._hyper import leafwise
from ._leaves import check_state, wide, zero_count, zeros_like
from ._types import Number, OptState, Params, Specs, Updates


class EmaState(NamedTuple):
    """The average.

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
    decay_rate("ema", decay=decay)

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
        us, new = leafwise(average_leaf, 2, updates, of={"ema": state.ema}, specs=specs, decay=decay, by=by)
        return us, EmaState(count, new)

    return GradientTransformation(init_fn, update_fn, needs=Needs("element", ascends=True))
