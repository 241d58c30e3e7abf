"""1-bit Adam and APMSqueeze: Adam while the variance is learnt, then compressed momentum."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn import core
from shardfn.collectives import Compressor, sign
from shardfn.kernels import preconditioned_step, preconditioned_step_

from . import _base as base
from ._adam import bias_corrections, moments_like
from ._checks import MEANT
from ._compressed import (
    CompressedSplit,
    add_rounded_,
    blend_momentum,
    is_differentiated,
    make_averaging,
    split_leaves,
    split_rows,
    write_over,
)
from ._elementwise import rounded_root
from ._leaves import wide
from ._pair import inplace
from ._phased import SWITCH, FreezeState, FreezeStep, Phased, freeze_rule

SIGN = sign()


class OneBitAdamState(NamedTuple):
    """State of `onebit_adam` and `apmsqueeze`.

    Attributes:
        freeze: counters, and the step of the freeze.
        adam: state of the warm-up's rule, used also afterwards: `mu` is the averaged momentum, `nu` the variance.
        residual: tree like params: a `Residual` for each leaf, the errors of compression, or None at exact leaves.
        codes: tree like params: the codes of the averaged momentum, where ZeRO keeps rows of the momentum, else `()`.
    """

    freeze: FreezeState
    adam: base.OptState
    residual: core.PyTree
    codes: core.PyTree


@core.explains_keywords(**MEANT)
def onebit_adam(
    learning_rate: base.LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: base.Mask = None,
    *,
    freeze_step: FreezeStep,
    axis: core.Axes = "dp",
    outer: core.Axes = None,
    compressor: Compressor = SIGN,
    feedback: bool = True,
    bias_correction: bool = True,
    exact: base.Mask = None,
) -> base.GradientTransformation:
    """`adamw` for `freeze_step` steps. Then the variance is frozen, and the momentum is sent at one bit per element.

    With `g_i` the gradient of rank i along `axis`, and F the step of the freeze:

        t <= F:  adamw, on the mean of g_i
        t > F:   m = compressed_mean_i(b1 m + (1 - b1) g_i);   nu = nu_F
                 p = p - lr (m / (1 - b1^t) / (sqrt(nu / (1 - b2^F)) + eps) + weight_decay p)

    The warm-up is bitwise identical to `adamw`. Elements whose variance is still zero at the freeze do not move
    afterwards, because one bit cannot represent zero. Each leaf is compressed separately, with error feedback: the
    error of a step is added in the next step. For example, a gradient of 0.3 that is sent as 1.0 leaves an error of
    -0.7.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.
        weight_decay: factor of the decoupled decay, >= 0.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.
        freeze_step: F: number of steps, usually 15 to 25 percent of all steps, or "auto", a `VarianceStability()`.
        axis: mesh axes over which the rule averages gradients. Axes that cut a leaf as experts are left out for the
            leaf.
        outer: slow axes among several axes. Along fast axes the mean is exact. See `compressed_pmean`.
        compressor: compressor of the momentum, such as `int4()`.
        feedback: whether to use error feedback. False is only for experiments: training then diverges.
        bias_correction: whether moments are corrected, as in the `adam` of this library. DeepSpeed does not correct
            moments.
        exact: leaves that are averaged without compression, as in the warm-up: a tree (or prefix) of bools, or a
            function from params to such a tree. Useful for small leaves, for example `lambda params: tree_map(lambda p:
            p.ndim < 2, params)`, or leaves without a stable variance.

    Returns:
        The corresponding `GradientTransformation`, with a `OneBitAdamState` as state. The engine reads the phase from
        the state: "warmup", "probe" (the warm-up's steps at which "auto" takes a norm), "switch" (the first compressed
        step, where ZeRO keeps rows), "compressed".

    Raises:
        ValueError: a number is out of range, or (on use) trees do not match.
        TypeError: `compressor` is not a `Compressor`.

    A gradient that is not finite spoils the errors permanently: let the step skip such gradients (`skip_nonfinite`, or
    a loss scale). Clipping by a norm before the rule is refused, because ranks have different norms.

    Example:
        >>> tx = onebit_adam(0.1, freeze_step=1)
        >>> params, state = [torch.zeros(2)], tx.init([torch.zeros(2)])
        >>> for grad in ([1.0, -1.0], [1.0, -0.5]):
        ...     params, state = tx.apply([torch.tensor(grad)], state, params)
        >>> params, int(state.freeze.frozen)
        ([tensor([-0.1439,  0.1439])], 1)

    References:
        Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, 2021,
        https://arxiv.org/abs/2102.02888
    """
    who = "onebit_adam"
    return _OneBitAdam(
        who=who, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask,
        freeze=freeze_rule(who, freeze_step, b2), averaging=make_averaging(who, axis, compressor, outer, feedback),
        exact=exact, corrected=bias_correction, unbiased=bias_correction,
    ).rule()  # fmt: skip


@core.explains_keywords(**MEANT)
def apmsqueeze(
    learning_rate: base.LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    freeze_step: FreezeStep,
    compressor: Compressor,
    axis: core.Axes = "dp",
    outer: core.Axes = None,
    feedback: bool = True,
    exact: base.Mask = None,
) -> base.GradientTransformation:
    """APMSqueeze: `adam` for `freeze_step` steps, then momentum preconditioned by the frozen variance.

        t > F:   m = compressed_mean_i(b1 m + (1 - b1) g_i);   p = p - lr m / (sqrt(nu_F / (1 - b2^F)) + eps)

    The predecessor of 1-bit Adam: with any compressor, without decay, and with the plain momentum, because no
    correction is needed after the warm-up.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.
        freeze_step: F. See `onebit_adam`, also for the arguments below.
        compressor: compressor of the momentum, such as `int4()` or `top_k(0.01)`.
        axis: mesh axes over which the rule averages gradients. Axes that cut a leaf as experts are left out for the
            leaf.
        outer: slow axes among several axes.
        feedback: whether to use error feedback.
        exact: leaves that are averaged as in the warm-up.

    Returns:
        The corresponding `GradientTransformation`, with a `OneBitAdamState` as state and the phases of `onebit_adam`.

    Raises:
        ValueError: a number is out of range, or (on use) trees do not match.
        TypeError: `compressor` is not a `Compressor`.

    Example:
        >>> from shardfn.collectives import int4
        >>> tx = apmsqueeze(0.1, freeze_step=1, compressor=int4())
        >>> tx.needs.phases.next(tx.init([torch.zeros(2)]))
        Phase(name='warmup', local=False)

    References:
        Tang et al., APMSqueeze: A Communication Efficient Adam-Preconditioned Momentum SGD Algorithm, 2020,
        https://arxiv.org/abs/2008.11343
    """
    who = "apmsqueeze"
    return _OneBitAdam(
        who=who, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=0.0, mask=None,
        freeze=freeze_rule(who, freeze_step, b2), averaging=make_averaging(who, axis, compressor, outer, feedback),
        exact=exact, corrected=True, unbiased=False,
    ).rule()  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _OneBitAdam(Phased):
    """The rule. `unbiased`: whether the momentum is also corrected after the freeze."""

    state = OneBitAdamState
    unbiased: bool

    def next_phase(self, state: OneBitAdamState) -> base.Phase:
        return self.freeze.phase(state.freeze, switches=bool(core.tree_leaves(state.codes)))

    def init(self, params: base.Params) -> OneBitAdamState:
        residual, codes = split_leaves(self.averaging, params, params, None, self.whole, self.exact).init()
        return OneBitAdamState(self.freeze.init(params), self.adam.init(params), residual, codes)

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        state, now = self.begin(state, params)
        if not now.local:
            us, adam = self.adam.update(updates, state.adam, params, specs=specs)
            return us, self._advance_state(state, adam, specs, now)
        leaves, mus, nus, step = self._local_step(updates, state, params, specs)
        exact, adam = leaves.exactly(self.adam.update, state.adam, mus, nus)
        ms, residual, codes = self._average_momentum(leaves, mus, state, now, donate=False)
        rows = zip(*map(leaves.pick, (leaves.ps, mus, nus, step.decays)), ms, strict=True)
        new = [(step.update(p, m, nu, on).to(p.dtype), m.to(mu.dtype)) for p, mu, nu, on, m in rows]
        adam = leaves.join_states(adam, [m for _, m in new], leaves.pick(nus))
        after = OneBitAdamState(self.freeze.frozen(state.freeze), adam, residual, codes)
        return leaves.merged(exact, [u for u, _ in new]), after

    @torch.no_grad()
    def apply(
        self, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        state, now = self.begin(state, params)
        if not now.local:
            params, adam = inplace(self.adam)(grads, state.adam, params, specs=specs)
            return params, self._advance_state(state, adam, specs, now)
        leaves, mus, nus, step = self._local_step(grads, state, params, specs)
        # Also advances the counters, so all numbers that depend on counters were read before.
        _, adam = leaves.exactly(inplace(self.adam), state.adam, mus, nus)
        ms, residual, codes = self._average_momentum(leaves, mus, state, now, donate=True)
        ms = [write_over(mu, m) for mu, m in zip(leaves.pick(mus), ms, strict=True)]
        for p, m, nu, decays in zip(leaves.pick(leaves.ps), ms, *map(leaves.pick, (nus, step.decays)), strict=True):
            step.descend(p, m, nu, decays)
        adam = leaves.join_states(adam, ms, leaves.pick(nus))
        return params, OneBitAdamState(self.freeze.frozen(state.freeze), adam, residual, codes)

    def _advance_state(
        self, state: OneBitAdamState, adam: base.OptState, specs: base.Specs, now: base.Phase
    ) -> OneBitAdamState:
        return state._replace(adam=adam, freeze=self.freeze.learning(state.freeze, adam[0].nu, specs, now))

    def _local_step(
        self, grads: base.Updates, state: OneBitAdamState, params: base.Params, specs: base.Specs
    ) -> tuple[CompressedSplit, list[Tensor], list[Tensor], "StepNumbers"]:
        """Returns the operands of a step on local gradients. Counters are read here, before anything is written."""
        leaves = split_leaves(self.averaging, grads, params, specs, self.whole, self.exact)
        mus, nus = moments_like(state.adam[0], leaves.ps, leaves.treedef, "params")
        at = self.freeze.frozen(state.freeze)
        c1 = bias_corrections(at.count, self.b1, self.b2)[0].float() if self.unbiased else None
        c2 = bias_corrections(at.frozen, self.b1, self.b2)[1].float() if self.corrected else None
        step = StepNumbers(self.rate(state.adam), c1, c2, self.eps, self.weight_decay, self.decays(leaves, params))
        return leaves, mus, nus, step

    def _average_momentum(
        self, leaves: CompressedSplit, mus: list[Tensor], state: OneBitAdamState, now: base.Phase, *, donate: bool
    ) -> tuple[list[Tensor], core.PyTree, core.PyTree]:
        """Returns this rank's rows of the averaged momentum of compressed leaves, and the new errors and codes."""
        rows = zip(*map(leaves.pick, (leaves.gs, leaves.shares)), strict=True)
        wholes = leaves.wholes(mus, state.codes, gather=now == SWITCH)
        # A gathered or decoded whole is not part of a state.
        xs = [
            blend_momentum(m, g, self.b1, donate=donate or bool(s.cut)) for m, (g, s) in zip(wholes, rows, strict=True)
        ]
        means, residual, codes = leaves.mean(xs, state.residual, donate=donate)
        return leaves.rows(means), residual, codes


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of a step. `None` for a correction that is not made."""

    lr: float | int | Tensor
    c1: Tensor | None
    c2: Tensor | None
    eps: float
    weight_decay: float
    decays: Sequence[bool]

    def root(self, nu: Tensor) -> Tensor:
        """Returns `sqrt(nu / c2) + eps`, infinite where nu is 0. Bitwise as in `preconditioned_step` in float32."""
        d = torch.nn.functional.threshold(wide(nu), 0.0, math.inf)
        d = d if self.c2 is None else d / self.c2
        return rounded_root(d) + self.eps

    def update(self, p: Tensor, m: Tensor, nu: Tensor, decays: bool) -> Tensor:
        """Returns `-lr (m / c1 / (sqrt(nu / c2) + eps) + weight_decay p)`. The first term is 0 where nu is 0."""
        p, m, nu = wide(p), wide(m), wide(nu)
        if _are_float([p, m, nu]) and not is_differentiated((p, m, nu, self.lr)):
            return preconditioned_step(
                p, m, nu, *self._kernel_numbers, eps=self.eps, weight_decay=self._decay_of(decays)
            )
        d = self.root(nu)
        u = (m if self.c1 is None else m / self.c1) / d
        return (u + self.weight_decay * p if decays else u) * -self.lr

    def descend(self, p: Tensor, m: Tensor, nu: Tensor, decays: bool) -> None:
        """Adds the update to p in place, rounded once."""
        if _are_float([p, m, nu]) and p.is_contiguous():
            preconditioned_step_(p, m, nu, *self._kernel_numbers, eps=self.eps, weight_decay=self._decay_of(decays))
            return
        for part, mean, square in split_rows([p], [m], [nu]):
            add_rounded_(part, self.update(part, mean, square, decays))

    @functools.cached_property
    def _kernel_numbers(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the rate and the corrections for the kernel."""
        return torch.as_tensor(self.lr).float(), self.c1, self.c2

    def _decay_of(self, decays: bool) -> float:
        return self.weight_decay if decays else 0.0


def _are_float(xs: list[Tensor]) -> bool:
    return all(x.dtype == torch.float32 for x in xs)
