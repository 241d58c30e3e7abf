"""SAM: sharpness-aware minimization, by two steps for each batch."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from shardfn import core
from shardfn.collectives import local

from . import _base as base
from ._checks import MEANT, check_positive
from ._elementwise import select_tree, vary_number
from ._leaves import check_params, check_state, leaves_like, wide, zero_count
from ._needs import add_measure, bind_stats, join_needs, refuse_phases
from ._norm import block_squares, global_norm
from ._pair import as_transformation


class SamState(NamedTuple):
    """State of `sam`.

    Attributes:
        perturbed: int32, 0-d: 1 if the parameters are perturbed, so that the next step is the optimizer's. Else 0.
        opt_state: state of the optimizer.
        cache: tree like params: parameters before the perturbation.
    """

    perturbed: Int[Tensor, ""]
    opt_state: base.OptState
    cache: core.PyTree


@core.explains_keywords(**MEANT)
def sam(optimizer: base.GradientTransformation | base.Pair, rho: float = 0.05) -> base.GradientTransformation:
    """Takes two steps for each batch: to the worst nearby parameters, then the optimizer's by the gradient there.

        perturb:   c = p;   p = p + rho g / |g|
        descend:   p = c + u, where u is the optimizer's update at c, by the gradient at p

    |g| is the norm of the whole tree over all ranks, 0 moves nothing. The rule is `optax.contrib.sam(optimizer,
    chain(normalize(), sgd(rho)))`. Each call of the step computes one gradient, so a batch takes two calls, and no part
    of a step knows of SAM: `step = sf.switch_step(sharded_step(loss, sam(...)))` makes both.

    Between the two calls the parameters are the perturbed parameters: evaluate, export and save when
    `is_perturbed(state.opt_state)` is false. The cost in memory is a copy of the parameters. ZeRO cuts and
    offloads the copy like a moment. Put the rule outermost.

    Args:
        optimizer: rule that steps the parameters. Its schedules count batches.
        rho: radius of the neighbourhood, > 0.

    Returns:
        The corresponding `GradientTransformation`, with a `SamState` as state.

    Raises:
        ValueError: `rho` is out of range, or the optimizer averages gradients, or (on use) trees do not match.

    Example:
        >>> from shardfn.optim import apply_updates, sgd
        >>> tx, w = sam(sgd(0.1), rho=0.5), [torch.tensor([3.0])]
        >>> state = tx.init(w)
        >>> for _ in range(2):  # gradients of w^2 / 2: 3, and then 3.5
        ...     updates, state = tx.update([w[0].clone()], state, w)
        ...     w = apply_updates(w, updates)
        >>> w
        [tensor([2.6500])]

    References:
        Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, 2020,
        https://arxiv.org/abs/2010.01412
    """
    check_positive("sam", rho=rho)
    rule = as_transformation(optimizer)
    refuse_phases("sam", rule)
    return _Sam(rule, rho).rule()


def is_perturbed(opt_state: base.OptState) -> bool:
    """Returns whether the last step of `sam` has perturbed the parameters. Reads the state on the host.

    Raises:
        ValueError: the state is not the state of `sam`.

    Example:
        >>> from shardfn.optim import sgd
        >>> is_perturbed(sam(sgd(0.1)).init([torch.zeros(2)]))
        False
    """
    check_state("is_perturbed", opt_state, SamState)
    return bool(local(opt_state.perturbed))


@dataclass(frozen=True, eq=False)
class _Sam:
    """The rule, in a step where gradients have the norm `norm`. None: the norm is not known yet.

    Compared by identity, because tensors cannot be compared.
    """

    tx: base.GradientTransformation
    rho: float
    norm: Tensor | None = None

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        needs = join_needs([self.tx], lambda tx: replace(self, tx=tx).rule(), states=lambda s: (s.opt_state,))
        needs = add_measure(needs, self.tx.needs.measure, block_squares, self.bind)
        return base.GradientTransformation(self.init, self.update, needs=needs._replace(ascends=False))

    def bind(self, params: base.Params, stats: Tensor | None, phase: base.Phase | None) -> base.GradientTransformation:
        norm = None if stats is None else stats.sum().sqrt()
        return replace(self, tx=bind_stats(self.tx, params, stats, phase), norm=norm).rule()

    def init(self, params: base.Params) -> SamState:
        cache = core.tree_map(lambda p: p.detach().clone(), params)
        return SamState(zero_count(params), self.tx.init(params), cache)

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        check_params("sam", params)
        check_state("sam", state, SamState)
        ps, treedef = core.tree_flatten(params)
        gs, cs = (leaves_like(x, treedef, n, "params") for x, n in ((updates, "updates"), (state.cache, "state.cache")))
        descends = state.perturbed > 0
        norm = global_norm(updates, specs) if self.norm is None else self.norm
        by = torch.where(norm > 0, self.rho / torch.where(norm > 0, norm, 1.0), 0.0)
        us, inner = self.tx.update(updates, state.opt_state, state.cache, specs=specs)
        rows = zip(
            ps, gs, cs, leaves_like(us, treedef, "updates", "params"), vary_number(ps, by, params, specs),
            vary_number(ps, descends, params, specs), strict=True,
        )  # fmt: skip
        out = [torch.where(on, _step_from(c, p, u), (x * wide(g)).double()) for p, g, c, u, x, on in rows]
        cache = [
            torch.where(on, c, p) for p, c, on in zip(ps, cs, vary_number(ps, descends, params, specs), strict=True)
        ]
        kept = select_tree(descends, inner, state.opt_state)
        after = SamState(1 - state.perturbed, kept, core.tree_unflatten(treedef, cache))
        return core.tree_unflatten(treedef, out), after


def _step_from(c: Tensor, p: Tensor, u: Tensor) -> Tensor:
    """Returns the update from p to `c + u`, in a dtype without rounding."""
    return c.double() - p.double() + u.double()
