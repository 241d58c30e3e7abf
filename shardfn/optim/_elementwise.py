"""`elementwise`: a rule from the mathematics of one leaf, for rules that step every element separately."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn.core import tree_map

from ._base import GradientTransformation, Needs
from ._hyper import map_leaves
from ._leaves import check_state, zero_count, zeros_like
from ._types import OptState, Params, Specs, Updates


def elementwise(
    who: str,
    kind: type,
    step: Callable[..., tuple[Tensor, ...]],
    init_fns: Mapping[str, Callable[[Tensor], Tensor]],
    numbers: Callable[[Any], dict[str, Any]],
    counts: bool = True,
) -> GradientTransformation:
    """Returns the rule `u, *new = step(g, **old, **numbers(count))`, with updates along the gradient.

    Args:
        who: name of the rule, for errors.
        kind: the named tuple of the state, with a field for each key of `init_fns`, and `count` if the rule counts.
        step: returns the update of one leaf, then its new trees in the order of `init_fns`.
        init_fns: field of the state -> function from a leaf of zeros to the leaf at the first step.
        numbers: function from the count of a step (1 at the first step) to hyperparameters. Without a count, the
            function gets `None`.
        counts: whether the state has a count.

    Example:
        >>> from shardfn.optim import TraceState
        >>> add = lambda g, trace, by: (g + by * trace,) * 2
        >>> tx = elementwise("heavy", TraceState, add, {"trace": torch.Tensor.clone}, lambda count: {"by": 0.5}, False)
        >>> tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))
        ([tensor([1.])], TraceState(trace=[tensor([1.])]))
    """

    def init_fn(params: Params) -> OptState:
        # Each tree has separate memory.
        trees = {name: tree_map(first, zeros_like(params)) for name, first in init_fns.items()}
        return kind(**trees, **({"count": zero_count(params)} if counts else {}))

    def update_fn(
        updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        del params
        check_state(who, state, kind)
        count = state.count + 1 if counts else None
        old = {name: getattr(state, name) for name in init_fns}
        us, *new = map_leaves(step, 1 + len(init_fns), updates, of=old, specs=specs, **numbers(count))
        return us, kind(**dict(zip(init_fns, new, strict=True)), **({"count": count} if counts else {}))

    return GradientTransformation(init_fn, update_fn, needs=Needs("element", ascends=True))


def keep_zeros(zeros: Tensor) -> Tensor:
    """Returns zeros of the parameter's dtype, for `init_fns`."""
    return zeros


def fill_zeros(value: Any) -> Callable[[Tensor], Tensor]:
    """Returns a function for `init_fns`: `value` everywhere.

    Example:
        >>> fill_zeros(0.5)(torch.zeros(1))
        tensor([0.5000])
    """
    return lambda zeros: zeros + value if isinstance(value, Tensor) else torch.full_like(zeros, value)
