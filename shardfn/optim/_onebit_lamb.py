"""1-bit LAMB: LAMB while variance and trust ratios are learnt, then momentum at one bit per element."""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn import collectives, core

from . import _base as base
from ._adam import moments_like
from ._chain import chain
from ._checks import MEANT, check_decay_rate, check_not_negative
from ._compressed import (
    CompressedSplit,
    Share,
    add_rounded_,
    blend_momentum,
    make_averaging,
    split_leaves,
    update_by_apply,
    write_over,
)
from ._elementwise import rounded_root
from ._lamb import bias_factor, lamb_in_place, scale_by_bias_correction, scale_by_moment_ratio
from ._learning_rate import add_decayed_weights, scale_by_learning_rate
from ._leaves import spec_leaves, wide, zeros_like
from ._norm import over_blocks, sum_squares
from ._onebit_adam import SIGN, StepNumbers
from ._phased import SWITCH, FreezeState, FreezeStep, Phased, freeze_rule
from ._trust_ratio import scale_by_trust_ratio, scaled, trust_ratios


class OneBitLambState(NamedTuple):
    """State of `onebit_lamb`. Vectors have one entry a leaf of params, float32, the same on all ranks.

    Attributes:
        freeze: counters, and the step of the freeze.
        lamb: state of the warm-up's rule, used also afterwards: `mu` is the averaged momentum, `nu` the variance.
        coeff: vector: the mean of the warm-up's trust ratios.
        weight: vector: sum of the weights of the mean `coeff`.
        factor: vector: the factor of `coeff` in the last step.
        scaling: vector: the factor of the momentum in messages, or 0 before the first compressed step.
        fresh: tree like params: the variance of the gradients that averaged momentum shows, or None at exact leaves.
        residual: a `Residual` for each message.
        codes: codes of each message with leaves that ZeRO keeps as rows, else `()`.
    """

    freeze: FreezeState
    lamb: base.OptState
    coeff: Any
    weight: Any
    factor: Any
    scaling: Any
    fresh: core.PyTree
    residual: core.PyTree
    codes: core.PyTree


@core.explains_keywords(**MEANT)
def onebit_lamb(
    learning_rate: base.LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: base.Mask = None,
    *,
    freeze_step: FreezeStep,
    min_coeff: float | int = 0.01,
    max_coeff: float | int = 10.0,
    coeff_beta: float = 0.9,
    factor_max: float | int = 4.0,
    factor_min: float | int = 0.5,
    factor_threshold: float = 0.1,
    axis: core.Axes = "dp",
    outer: core.Axes = None,
    compressor: collectives.Compressor = SIGN,
    feedback: bool = True,
    bias_correction: bool = True,
    exact: base.Mask = None,
) -> base.GradientTransformation:
    """`lamb` for `freeze_step` steps. Then the variance is frozen, and the momentum is sent at one bit per element.

    In the warm-up, bitwise identical to `lamb`, the trust ratios c of each leaf that are not 1 are averaged to `coeff`.
    Afterwards, with `g_i` the gradient of rank i and `d = sqrt(nu) + eps`, leaf by leaf:

        m' = compressed_mean_i(scaling (b1 m + (1 - b1) g_i)) / scaling
        fresh = b2 fresh + (1 - b2) ((m' - b1 m) / (1 - b1))^2          fresh = nu at first
        u = m' / d + weight_decay p;   r = min(1, |m' / d| / |u|)
        f = clamp(max(d / (sqrt(fresh) + eps)) r + 1 - r, factor_min, factor_max), within factor_threshold of the last
        p = p - lr sqrt(1 - b2^F) / (1 - b1^t) coeff f u

    All leaves are sent in a single message with a common scale, so `scaling` makes the momenta equally large. `scaling`
    is the mean over leaves of the root mean square at the freeze, divided by the leaf's root mean square. Leaves that
    are cut along different axes are sent in different messages. Norms and maxima are over whole leaves.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.
        weight_decay: factor of the decay inside u, >= 0.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.
        freeze_step: F. See `onebit_adam`.
        min_coeff: lower bound of the warm-up's trust ratio.
        max_coeff: upper bound of the warm-up's trust ratio.
        coeff_beta: rate of the mean of trust ratios, in [0, 1).
        factor_max: upper bound of f.
        factor_min: lower bound of f.
        factor_threshold: largest relative change of f in a step, for example 0.1 for 10 percent.
        axis: mesh axes over which the rule averages gradients. Axes that cut a leaf as experts are left out for the
            leaf.
        outer: slow axes among several axes. Along fast axes the mean is exact. See `compressed_pmean`.
        compressor: compressor of the momentum, such as `int4()`.
        feedback: whether to use error feedback.
        bias_correction: whether steps are corrected as in `lamb`, and `coeff` for the start at zero.
        exact: leaves that are averaged as in the warm-up. See `onebit_adam`.

    Returns:
        The corresponding `GradientTransformation`, with a `OneBitLambState` as state and the phases "warmup", "probe",
        "switch" (the first compressed step) and "compressed".

    Raises:
        ValueError: a number is out of range, or (on use) trees do not match.
        TypeError: `compressor` is not a `Compressor`.

    A gradient that is not finite spoils the errors, and elements with zero variance do not move: see `onebit_adam`.

    Example:
        >>> tx = onebit_lamb(0.1, freeze_step=1)
        >>> params, state = [torch.ones(2)], tx.init([torch.ones(2)])
        >>> for grad in ([1.0, -1.0], [1.0, -0.5]):
        ...     params, state = tx.apply([torch.tensor(grad)], state, params)
        >>> params
        [tensor([0.9545, 1.0455])]

    References:
        Li et al., 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence Speed,
        2021, https://arxiv.org/abs/2104.06069
    """
    who = "onebit_lamb"
    factors = (float(factor_min), float(factor_max), factor_threshold)
    return _OneBitLamb(
        who=who, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask,
        freeze=freeze_rule(who, freeze_step, b2), averaging=make_averaging(who, axis, compressor, outer, feedback),
        exact=exact, corrected=bias_correction, bounds=(min_coeff, max_coeff), coeff_beta=coeff_beta, factors=factors,
    ).rule()  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _OneBitLamb(Phased):
    """The rule."""

    state = OneBitLambState
    bounds: tuple[float | int, float | int]
    coeff_beta: float
    factors: tuple[float, float, float]

    def __post_init__(self) -> None:
        super().__post_init__()
        least, most, threshold = self.factors
        check_decay_rate(self.who, coeff_beta=self.coeff_beta)
        check_not_negative(self.who, factor_threshold=threshold, factor_min=least, factor_max=most)
        if most < least:
            raise ValueError(f"onebit_lamb: factor_max={most!r} is less than factor_min={least!r}.")
        scale_by_trust_ratio(*self.bounds)

    @functools.cached_property
    def before(self) -> base.GradientTransformation:
        """Returns the warm-up's rules before the trust ratio."""
        return chain(
            scale_by_moment_ratio(self.b1, self.b2, self.eps), add_decayed_weights(self.weight_decay, self.mask)
        )

    @functools.cached_property
    def after(self) -> base.GradientTransformation:
        """Returns the warm-up's rules after the trust ratio."""
        rate = scale_by_learning_rate(self.learning_rate)
        return chain(scale_by_bias_correction(self.b1, self.b2), rate) if self.corrected else chain(rate)

    def in_place(self, *args: Any, **kwargs: Any) -> tuple[base.Params, base.OptState, Tensor]:
        """Returns the warm-up's step in place, and its trust ratios."""
        step = lamb_in_place(
            self.learning_rate, self.b1, self.b2, self.eps, self.weight_decay, self.mask, *self.bounds, self.corrected
        )
        return step(*args, **kwargs)

    def next_phase(self, state: OneBitLambState) -> base.Phase:
        return self.freeze.phase(state.freeze, switches=True)

    def init(self, params: base.Params) -> OneBitLambState:
        leaves = split_leaves(self.averaging, params, params, None, self.whole, self.exact)
        freeze = self.freeze.init(params)
        zero = torch.zeros(len(leaves.ps), device=freeze.norm.device)
        coeff, weight, factor, scaling = (_replicated_tensor(x) for x in (zero, zero.clone(), zero + 1, zero.clone()))
        moments, trust = self.before.init(params), scale_by_trust_ratio().init(params)
        fresh = zeros_like(leaves.merged([None] * sum(leaves.exact), leaves.pick(leaves.ps)))
        made = [self.averaging.init(m.share, zero.device) for m in messages_of(leaves)]
        residual, codes = ([row[i] for row in made] for i in (0, 1))
        lamb = (*moments, trust, *self.after.init(params))
        return OneBitLambState(freeze, lamb, coeff, weight, factor, scaling, fresh, residual, codes)

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        state, now = self.begin(state, params)
        if now.local:
            return update_by_apply(
                self.who, self.learning_rate, replace(self, now=now).apply, updates, state, params, specs
            )
        us, before = self.before.update(updates, state.lamb[:2], params, specs=specs)
        leaves, treedef = core.tree_flatten(us)
        cuts = None if specs is None else spec_leaves(specs, params)
        ratios = trust_ratios(core.tree_leaves(params), leaves, cuts, *self.bounds) if leaves else torch.zeros(0)
        us = core.tree_unflatten(treedef, scaled(leaves, ratios, cuts))
        us, after = self.after.update(us, state.lamb[3:], params, specs=specs)
        return us, self._advance_state(state, (*before, state.lamb[2], *after), ratios, specs, now)

    @torch.no_grad()
    def apply(
        self, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        state, now = self.begin(state, params)
        if not now.local:
            params, lamb, ratios = self.in_place(grads, state.lamb, params, specs=specs)
            return params, self._advance_state(state, lamb, ratios, specs, now)
        leaves = split_leaves(self.averaging, grads, params, specs, self.whole, self.exact)
        mus, nus = moments_like(state.lamb[0], leaves.ps, leaves.treedef, "params")
        # Before `exactly`, which advances the counters.
        rate = self._corrected_rate(state)
        _, lamb = leaves.exactly(lambda *args, **kwargs: self.in_place(*args, **kwargs)[:2], state.lamb, mus, nus)
        mus, nus = leaves.pick(mus), leaves.pick(nus)
        state = self._switch_state(leaves, mus, nus, state) if now == SWITCH else state
        ms, residual, codes = self._average_momentum(leaves, mus, state, now)
        freshs = leaves.pick(leaves.treedef.flatten_up_to(state.fresh))
        for fresh, m, mu in zip(freshs, ms, mus, strict=True):
            g = (m - self.b1 * wide(mu)).div_(1 - self.b1)
            fresh.copy_(self.b2 * wide(fresh) + (1 - self.b2) * g.square_())
        ms = [write_over(mu, m) for mu, m in zip(mus, ms, strict=True)]
        factor = state.factor
        if ms:
            us, f = self._leaf_directions(leaves, ms, nus, freshs, params, specs)
            factor = self._descend_leaves(leaves, us, f, rate, state)
        state = state._replace(lamb=leaves.join_states(lamb, ms, nus), residual=residual, codes=codes, factor=factor)
        return params, state._replace(freeze=self.freeze.frozen(state.freeze))

    def _advance_state(
        self, state: OneBitLambState, lamb: base.OptState, ratios: Tensor, specs: base.Specs, now: base.Phase
    ) -> OneBitLambState:
        """Returns the state after a step of the warm-up. The state of compressed steps is reset."""
        beta, c = self.coeff_beta, ratios.to(state.coeff)
        # A ratio of 1 means that LAMB did not scale the leaf, and is not part of the mean.
        coeff, weight = (
            torch.where(c == 1, x, beta * x + (1 - beta) * y) for x, y in ((state.coeff, c), (state.weight, 1.0))
        )
        return state._replace(
            freeze=self.freeze.learning(state.freeze, lamb[0].nu, specs, now),
            lamb=lamb,
            coeff=coeff,
            weight=weight,
            factor=torch.ones_like(state.factor),
            scaling=torch.zeros_like(state.scaling),
        )

    def _corrected_rate(self, state: OneBitLambState) -> Any:
        """Returns the corrected learning rate. Counters are read here, before anything is written."""
        lr = self.rate(state.lamb)
        at = self.freeze.frozen(state.freeze)
        return lr * bias_factor(at.count, self.b1, self.b2, at.frozen).float() if self.corrected else lr

    def _switch_state(
        self, leaves: CompressedSplit, mus: list[Tensor], nus: list[Tensor], state: OneBitLambState
    ) -> OneBitLambState:
        """Returns the state at the first compressed step. Unchanged after earlier compressed steps with other ranks."""
        first, specs = (state.scaling == 0).all(), leaves.pick(leaves.specs)
        numel = torch.tensor([float(mu.numel()) for mu in mus], device=state.scaling.device)
        rms = (sum_squares(mus, specs) / over_blocks(numel, specs)).sqrt() if mus else numel
        even = torch.where(rms > 0, rms.mean() / torch.where(rms > 0, rms, 1.0), 1.0)
        scaling = self._merge_values(leaves, even, torch.ones_like(state.scaling))
        for fresh, nu in zip(leaves.pick(leaves.treedef.flatten_up_to(state.fresh)), nus, strict=True):
            fresh.copy_(torch.where(first, nu, fresh))
        # Errors from before a return to the warm-up belong to momenta with another scale.
        residual = core.tree_map(lambda e: torch.where(first, 0.0, e), state.residual)
        return state._replace(scaling=torch.where(first, scaling, state.scaling), residual=residual)

    def _average_momentum(
        self, leaves: CompressedSplit, mus: list[Tensor], state: OneBitLambState, now: base.Phase
    ) -> tuple[list[Tensor], core.PyTree, core.PyTree]:
        """Returns this rank's rows of the averaged momentum of compressed leaves, and the new errors and codes."""
        gs, specs, shares, scales = map(leaves.pick, (leaves.gs, leaves.specs, leaves.shares, state.scaling.unbind()))
        messages = messages_of(leaves)
        # Whole leaves with the bits that were sent: gathered at the switch, without codes so far, and decoded later.
        old: list[Any] = list(mus)
        for message, codes in zip(messages, state.codes, strict=True):
            like = [gs[i] for i in message.leaves]
            if now == SWITCH or not message.share.cut:
                for i, g in zip(message.leaves, like, strict=True):
                    old[i] = self.averaging.whole(mus[i], specs[i], shares[i], g) if shares[i].cut else mus[i]
            else:
                flat = torch.empty(sum(g.numel() for g in like), device=gs[message.leaves[0]].device)
                for i, m in zip(
                    message.leaves, split(self.averaging.decode(codes, message.share, flat), like), strict=True
                ):
                    old[i] = (m / scales[i]).to(mus[i].dtype) if shares[i].cut else mus[i]
        xs = [blend_momentum(m, g, self.b1, donate=False).mul_(s) for m, g, s in zip(old, gs, scales, strict=True)]
        flats = [torch.cat([xs[i].reshape(-1) for i in message.leaves]) for message in messages]
        # Wholes of all leaves: freed before the messages are allocated.
        del old
        means, residual, codes = self.averaging.mean(flats, state.residual, [m.share for m in messages], donate=True)
        for message, mean in zip(messages, means, strict=True):
            for i, m in zip(message.leaves, split(mean, [gs[i] for i in message.leaves]), strict=True):
                xs[i] = self.averaging.rows(m / scales[i], specs[i], shares[i])
        return xs, residual, codes

    def _leaf_directions(
        self,
        leaves: CompressedSplit,
        ms: list[Tensor],
        nus: list[Tensor],
        freshs: list[Tensor],
        params: base.Params,
        specs: base.Specs,
    ) -> tuple[list[Tensor], Tensor]:
        """Returns u for the compressed leaves, and f without bounds."""
        ps, decays = leaves.pick(leaves.ps), leaves.pick(self.decays(leaves, params))
        cuts = None if specs is None else leaves.pick(leaves.specs)
        step = StepNumbers(1.0, None, None, self.eps, 0.0, decays)
        ds = [step.root(nu) for nu in nus]
        # Roots of the same kind: where fresh is still nu, the ratio is 1.
        pairs = zip(ds, freshs, strict=True)
        ratios = torch.stack([_largest_ratio(d, rounded_root(wide(fresh)).add_(self.eps)) for d, fresh in pairs])
        f = ratios if cuts is None else over_blocks(ratios, cuts, collectives.pmax)
        us = [wide(m) / d for m, d in zip(ms, ds, strict=True)]
        if not any(decays):
            return us, f
        ws = us
        us = [w + self.weight_decay * wide(p) if on else w for w, p, on in zip(ws, ps, decays, strict=True)]
        squares = sum_squares([ws, us], None if cuts is None else [cuts, cuts]).to(f.device)
        w, u = squares[: len(ws)].sqrt(), squares[len(ws) :].sqrt()
        r = torch.where(u > 0, w / torch.where(u > 0, u, 1.0), 1.0).clamp(max=1.0)
        return us, f * r + (1 - r)

    def _descend_leaves(
        self, leaves: CompressedSplit, us: list[Tensor], f: Tensor, rate: float | Tensor, state: OneBitLambState
    ) -> Tensor:
        """Steps the compressed leaves along u, and returns the new factors."""
        least, most, threshold = self.factors
        last = torch.stack(leaves.pick(state.factor.unbind()))
        f = f.to(last.device).clamp(least, most).clamp(last * (1 - threshold), last * (1 + threshold))
        coeff = torch.stack(leaves.pick(self._mean_trust_ratios(state).unbind()))
        for p, u, c in zip(leaves.pick(leaves.ps), us, (rate * coeff * f).unbind(), strict=True):
            add_rounded_(p, u.mul_(-c.to(u.device)))
        return self._merge_values(leaves, f, state.factor)

    def _mean_trust_ratios(self, state: OneBitLambState) -> Tensor:
        """Returns the mean trust ratio, or 1 (as in LAMB) without a ratio so far."""
        if not self.corrected:
            return state.coeff
        some = state.weight > 0
        return torch.where(some, state.coeff / torch.where(some, state.weight, 1.0), 1.0)

    def _merge_values(self, leaves: CompressedSplit, values: Tensor, others: Tensor) -> Tensor:
        """Returns a vector over all leaves, with new values for the compressed leaves."""
        if not any(leaves.exact):
            return values.to(others.device)
        these = iter(values.to(others.device).unbind())
        return torch.stack([x if on else next(these) for x, on in zip(others.unbind(), leaves.exact, strict=True)])


def _largest_ratio(d: Tensor, fresh: Tensor) -> Float[Tensor, ""]:
    """Returns the largest `d / fresh` where d is finite, or 0 if d is nowhere finite."""
    ratio = torch.where(d.isinf(), 0.0, d / fresh)
    return ratio.amax() if ratio.numel() else ratio.new_zeros(())


def _replicated_tensor(x: Tensor) -> collectives.GlobalTensor:
    return collectives.GlobalTensor(x, x.shape, core.P(), collectives.current_mesh())


class LeafGroup(NamedTuple):
    """Leaves of a single message: indices among the compressed leaves, and the averaged part."""

    leaves: list[int]
    share: Share


def messages_of(leaves: CompressedSplit) -> list[LeafGroup]:
    """Returns a message for each group of leaves that are cut along the same axes.

    Leaves with other axes would not agree on the scale.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    shares = leaves.pick(leaves.shares)
    for i, share in enumerate(shares):
        groups.setdefault(share.own, []).append(i)
    return [
        LeafGroup(
            index,
            Share(sum(shares[i].n for i in index), own, tuple(dict.fromkeys(a for i in index for a in shares[i].cut))),
        )
        for own, index in groups.items()
    ]


def split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Returns the parts of a message for the leaves `like`, as views. A message may end in padding."""
    parts = flat[: sum(x.numel() for x in like)].split([x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]
