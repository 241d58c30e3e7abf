"""Rules that step every element separately, from the mathematics of a single leaf.

Hyperparameters may be tensors, for leaves that are cut over the mesh and for in-place kernels.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn import collectives, core

from . import _base as base
from ._leaves import check_shapes, check_state, leaves_like, spec_leaves, zero_count, zeros_like


def select_tree(flag: Tensor, new: core.PyTree, old: core.PyTree) -> core.PyTree:
    """Returns `new` where a 0-d flag is true, else `old`: for example the state of a step that is made or skipped."""
    return core.tree_map(lambda x, y: torch.where(flag.to(x.device), x, y), new, old)


def vary_number(leaves: list[Tensor], value: Any, tree: core.PyTree, specs: base.Specs) -> list[Any]:
    """Returns `value` for each leaf, varying over the axes that cut the leaf.

    A number is the same on all ranks (I), a block is not (V). The cast between them is the identity, and the transpose
    of the cast is the sum over blocks. Without the sum, the derivative with respect to a hyperparameter would be only
    one rank's share.

    Args:
        leaves: the leaves of `tree`, flattened.
        value: a number, or a tensor equal on all ranks.
        tree: tree of local blocks.
        specs: tree (or prefix) of `P`: specs of the blocks. None: leaves are whole.

    Returns:
        One entry a leaf. Tensors are on the leaf's device.
    """
    if not isinstance(value, Tensor):
        return [value] * len(leaves)
    if specs is None or not (collectives.transforming() or value.requires_grad):
        return [value.to(x.device) for x in leaves]
    cuts = [collectives.current_mesh().axes(spec.axes) for spec in spec_leaves(specs, tree)]
    varying = {axes: collectives.pvary(value, axes) for axes in dict.fromkeys(cuts)}
    return [varying[axes].to(x.device) for x, axes in zip(leaves, cuts, strict=True)]


def map_leaves(
    f: Callable[..., tuple[Tensor, ...]],
    num: int,
    updates: base.Updates,
    *,
    of: dict[str, core.PyTree],
    specs: base.Specs,
    **numbers: Any,
) -> tuple[core.PyTree, ...]:
    """Applies `f` to each leaf: `f(g, mu=..., b1=...)`, with leaves of the trees `of` and numbers by name.

    Args:
        f: the mathematics of a single leaf.
        num: number of tensors that `f` returns.
        updates: tree of gradients.
        of: trees of a state, by name. Each must match `updates`.
        specs: specs of the blocks. None: leaves are whole.
        **numbers: hyperparameters, each given `vary_number` the leaf.

    Returns:
        A tree for each result of `f`.

    Raises:
        ValueError: a tree does not match. The message lists the leaves.

    Example:
        >>> g, mu = torch.ones(1), torch.full((1,), 2.0)
        >>> map_leaves(lambda g, mu, b1: (b1 * mu + g,), 1, [g], of={"mu": [mu]}, specs=None, b1=0.5)
        ([tensor([2.])],)
    """
    gs, treedef = core.tree_flatten(updates)
    columns = {name: leaves_like(tree, treedef, f"state.{name}", "updates") for name, tree in of.items()}
    check_shapes(treedef, gs, **columns)
    columns |= {name: vary_number(gs, x, updates, specs) for name, x in numbers.items()}
    rows = [f(g, **{name: column[i] for name, column in columns.items()}) for i, g in enumerate(gs)]
    return tuple(core.tree_unflatten(treedef, [row[k] for row in rows]) for k in range(num))


def as_number(value: base.Number) -> float:
    """Returns a hyperparameter as a float on the host, for kernels.

    Example:
        >>> as_number(2)
        2.0
    """
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def is_zero(value: base.Number | None) -> bool:
    """Returns whether a hyperparameter is known to be 0 (or None). The value of a tensor is not read.

    Example:
        >>> is_zero(0.0), is_zero(0.1)
        (True, False)
    """
    return not isinstance(value, Tensor) and not value


def safe_root(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Returns the square root, with derivative 0 at 0.

    So a weight without any gradient so far does not get an infinite gradient.

    Example:
        >>> safe_root(torch.tensor([0.0, 4.0]))
        tensor([0., 2.])
    """
    if not collectives.transforming():
        return x.sqrt()
    # `where` twice: the derivative of the unused branch is infinite at 0, and infinity times 0 is NaN.
    return torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0 * x)


def rounded_root(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Returns the square root, correctly rounded in float32.

    torch's root on a CPU is MKL's. On some processors the last bit is wrong for one number in six.

    Example:
        >>> rounded_root(torch.tensor([0.25]))
        tensor([0.5000])
    """
    return x.double().sqrt().to(x.dtype)


def elementwise(
    who: str,
    kind: type,
    step: Callable[..., tuple[Tensor, ...]],
    init_fns: Mapping[str, Callable[[Tensor], Tensor]],
    numbers: Callable[[Any], dict[str, Any]],
    counts: bool = True,
) -> base.GradientTransformation:
    """Returns the rule `u, *new = step(g, **old, **numbers(count))`, with updates along the gradient.

    Args:
        who: name of the rule, for errors.
        kind: the named tuple of the state, with a field for each key of `init_fns`, and `count` if the rule counts.
        step: returns the update of a single leaf, then its new trees in the order of `init_fns`.
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

    def init_fn(params: base.Params) -> base.OptState:
        # Each tree has separate memory.
        trees = {name: core.tree_map(first, zeros_like(params)) for name, first in init_fns.items()}
        return kind(**trees, **({"count": zero_count(params)} if counts else {}))

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        del params
        check_state(who, state, kind)
        count = state.count + 1 if counts else None
        old = {name: getattr(state, name) for name in init_fns}
        us, *new = map_leaves(step, 1 + len(init_fns), updates, of=old, specs=specs, **numbers(count))
        return us, kind(**dict(zip(init_fns, new, strict=True)), **({"count": count} if counts else {}))

    return base.GradientTransformation(init_fn, update_fn, needs=base.Needs("element", ascends=True))


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
