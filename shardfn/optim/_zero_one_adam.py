"""0/1 Adam: a variance that is learnt at increasingly rare steps, then steps without communication."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import core
from shardfn.collectives import Compressor, local

from . import _base as base
from ._adam import bias_corrections, moments_like
from ._checks import MEANT, check_num_steps
from ._compressed import (
    CompressedSplit,
    add_rounded_,
    blend_momentum,
    make_averaging,
    split_leaves,
    split_rows,
    update_by_apply,
    write_over,
)
from ._leaves import wide, zero_count, zeros_like
from ._onebit_adam import SIGN, StepNumbers
from ._pair import inplace
from ._phased import PROBE, SWITCH, WARMUP, FreezeState, FreezeStep, Phased, freeze_rule


class Interval(NamedTuple):
    """Number of steps that doubles after a number of counts: 0-d int32 tensors.

    Attributes:
        steps: the interval.
        counted: number of counts since the last growth.
    """

    steps: Int[Tensor, ""]
    counted: Int[Tensor, ""]


class ZeroOneAdamState(NamedTuple):
    """State of `zero_one_adam`.

    Attributes:
        freeze: counters, and the step of the freeze.
        num_var: int32, 0-d: steps that the variance has averaged.
        var_interval: steps between two updates of the variance.
        local_interval: steps between two rounds, after the freeze.
        rates: float32, 0-d: sum of the rates since the last round, the divisor of `drift`.
        decays: float32, 0-d: sum of the learning rates since the last round.
        adam: state of the warm-up's rule. After the freeze, `mu` differs between ranks between rounds.
        start: tree like params: the parameters after the last round, or None at exact leaves.
        drift: tree like params, float32: `sum_t rate_t m_t` since the last round, or None at exact leaves.
        residual: tree like params: a `Residual` for each leaf, or None at exact leaves.
    """

    freeze: FreezeState
    num_var: Int[Tensor, ""]
    var_interval: Interval
    local_interval: Interval
    rates: Float[Tensor, ""]
    decays: Float[Tensor, ""]
    adam: base.OptState
    start: core.PyTree
    drift: core.PyTree
    residual: core.PyTree


@core.explains_keywords(**MEANT)
def zero_one_adam(
    learning_rate: base.LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: base.Mask = None,
    *,
    var_freeze_step: FreezeStep,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32768,
    local_step_clipper: int = 16,
    axis: core.Axes = "dp",
    outer: core.Axes = None,
    compressor: Compressor = SIGN,
    feedback: bool = True,
    bias_correction: bool = True,
    exact: base.Mask = None,
) -> base.GradientTransformation:
    """Adam with a variance that is learnt at increasingly rare steps, and then with increasingly rare communication.

    With `g_i` the gradient of rank i along `axis`, and t counted from 1, up to `t = var_freeze_step + 1`:

        t % K == 0:  g = mean_i(g_i);             m = b1 m + (1 - b1) g;   nu = b2 nu + (1 - b2) g^2
        else:        g = compressed_mean_i(g_i);  m = b1 m + (1 - b1) g
        p = p - lr (m / (sqrt(nu) + eps) + weight_decay p)

    K is 1 at first and doubles after each `var_update_scaler` steps of the first kind. While K is 1, the steps are
    bitwise identical to `adamw`. After the freeze nu is constant, errors start again at zero, and with `d = sqrt(nu) +
    eps` every rank steps separately,

        m_i = b1 m_i + (1 - b1) g_i;   s_i = s_i + lr m_i;   p_i = p_i - lr m_i / d

    except for a round at each `t % H == 0`, H doubling from 1 to at most `local_step_clipper` each `local_step_scaler`
    steps: from the parameters p of the last round,

        s = compressed_mean_i(s_i);   m = s / sum(lr);   p = p - s / d - weight_decay sum(lr) p;   s_i = 0

    So decay is applied in rounds, outside the momentum, and after a round all ranks have the same bits. Between rounds
    the ranks have different parameters, in copies of the same tensor of the state: evaluate and save right after a
    round (`is_in_round(opt_state)`), and do not use ZeRO along `axis`.

    Args:
        learning_rate: a number >= 0, or a schedule.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.
        weight_decay: factor of the decoupled decay, >= 0.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.
        var_freeze_step: steps after which (and one more) the variance is frozen, or "auto", a `VarianceStability()`.
        var_update_scaler: steps with a full mean after which K doubles.
        local_step_scaler: steps after which H doubles.
        local_step_clipper: the largest H.
        axis: mesh axes over which the rule averages gradients. Axes that cut a leaf as experts are left out for the
            leaf.
        outer: slow axes among several axes. Along fast axes means are exact. See `compressed_pmean`.
        compressor: compressor of gradients and sums.
        feedback: whether to use error feedback.
        bias_correction: whether each moment is corrected, by the number of averaged steps.
        exact: leaves that are averaged at each step without compression, as in `adamw`. See `onebit_adam`.

    Returns:
        The corresponding `GradientTransformation`, with a `ZeroOneAdamState` as state and the phases "warmup", "full",
        "onebit" (these three also with ", probe"), "switch" (the first round), "local" and "round".

    Raises:
        ValueError: a number is out of range, or (on use) trees do not match, or ZeRO cuts a leaf along `axis`.
        TypeError: `compressor` is not a `Compressor`.

    Elements with zero variance do not move once K is 2, and a gradient that is not finite spoils the errors: see
    `onebit_adam`.

    Example:
        >>> tx = zero_one_adam(0.1, var_freeze_step=1, var_update_scaler=1)
        >>> params, state, names = [torch.zeros(2)], tx.init([torch.zeros(2)]), []
        >>> for _ in range(4):
        ...     names.append(tx.needs.phases.next(state).name)
        ...     params, state = tx.apply([torch.tensor([1.0, -1.0])], state, params)
        >>> names
        ['warmup', 'full', 'switch', 'round']

    References:
        Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, 2022,
        https://arxiv.org/abs/2202.06009
    """
    who = "zero_one_adam"
    freeze = freeze_rule(who, var_freeze_step, b2)
    # One step more has the variance's gradients.
    freeze = replace(freeze, step=freeze.step + 1) if isinstance(freeze.step, int) else freeze
    return _ZeroOneAdam(
        who=who, learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask,
        freeze=freeze, averaging=make_averaging(who, axis, compressor, outer, feedback), exact=exact,
        corrected=bias_correction, var_scaler=var_update_scaler, local_scaler=local_step_scaler,
        local_clipper=local_step_clipper,
    ).rule()  # fmt: skip


def is_in_round(opt_state: ZeroOneAdamState) -> bool:
    """Returns whether the last step of `zero_one_adam` left all ranks with the same parameters.

    Reads the state on the host.

    Example:
        >>> is_in_round(zero_one_adam(0.1, var_freeze_step=1).init([torch.zeros(2)]))
        True
    """
    return not bool(local(opt_state.rates))


@dataclass(frozen=True, kw_only=True)
class _ZeroOneAdam(Phased):
    """The rule."""

    state, last = ZeroOneAdamState, True
    var_scaler: int
    local_scaler: int
    local_clipper: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_num_steps(self.who, var_update_scaler=self.var_scaler, local_step_scaler=self.local_scaler)
        check_num_steps(self.who, local_step_clipper=self.local_clipper)

    def next_phase(self, state: ZeroOneAdamState) -> base.Phase:
        # Computed only from counters, equal on all ranks: so all ranks are in the same phase.
        now, t = self.freeze.phase(state.freeze, switches=True), int(state.freeze.count) + 1
        if now == SWITCH:
            return now
        if now.local:
            return base.Phase("local" if t % int(state.local_interval.steps) else "round", True)
        every = int(state.var_interval.steps)
        kind = "warmup" if every == 1 else "onebit" if t % every else "full"
        return base.Phase(kind + (", probe" if now == PROBE else ""), kind == "onebit")

    def init(self, params: base.Params) -> ZeroOneAdamState:
        leaves = self._split_leaves(params, params, None)
        one = zero_count(params) + 1
        interval = Interval(one, one - 1)
        rate = torch.zeros((), device=one.device)
        compressed = leaves.merged([None] * sum(leaves.exact), leaves.pick(leaves.ps))
        return ZeroOneAdamState(
            self.freeze.init(params), one - 1, interval, core.tree_map(torch.clone, interval), rate, rate.clone(),
            self.adam.init(params), zeros_like(compressed),
            core.tree_map(lambda p: torch.zeros_like(p, dtype=torch.float32), compressed), leaves.init()[0],
        )  # fmt: skip

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        state, now = self.begin(state, params)
        if now.name.startswith("warmup"):
            us, adam = self.adam.update(updates, state.adam, params, specs=specs)
            return us, self._advance_state(state, adam, specs, now)
        return update_by_apply(
            self.who, self.learning_rate, replace(self, now=now).apply, updates, state, params, specs
        )

    @torch.no_grad()
    def apply(
        self, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        state, now = self.begin(state, params)
        if now.name.startswith("warmup"):
            params, adam = inplace(self.adam)(grads, state.adam, params, specs=specs)
            return params, self._advance_state(state, adam, specs, now)
        leaves = self._split_leaves(grads, params, specs)
        mus, nus = moments_like(state.adam[0], leaves.ps, leaves.treedef, "params")
        # Before `exactly`, which advances the counters of the chain.
        step = self._step_numbers(state, leaves, params, now)
        _, adam = leaves.exactly(inplace(self.adam), state.adam, mus, nus, averaged=not now.local)
        state = state._replace(adam=leaves.join_states(adam, leaves.pick(mus), leaves.pick(nus)))
        rows = _LocalRows(*map(leaves.pick, (leaves.ps, leaves.gs, mus, nus, step.decays)))
        if now.name.startswith(("full", "onebit")):
            return params, self._warmup_step(leaves, rows, step, state, specs, now)
        return params, self._local_step(leaves, rows, step, state, now)

    def _split_leaves(self, grads: base.Updates, params: base.Params, specs: base.Specs) -> CompressedSplit:
        leaves = split_leaves(self.averaging, grads, params, specs, self.whole, self.exact)
        if any(share.cut for share in leaves.shares):
            paths = zip(core.tree_paths(params, "params"), leaves.shares, strict=True)
            core.raise_all(
                ValueError,
                f"zero_one_adam steps every rank along {self.averaging.axis!r} alone between rounds, so that each needs"
                " whole leaves; cut states over another axis, Zero(axis=...), or use onebit_adam. Cut are:",
                [path for path, share in paths if share.cut],
            )
        return leaves

    def _step_numbers(
        self, state: ZeroOneAdamState, leaves: CompressedSplit, params: base.Params, now: base.Phase
    ) -> StepNumbers:
        """Returns the numbers of the step. Counters are read here, before anything is written."""
        full = int(now.name.startswith("full"))
        c1 = bias_corrections(state.freeze.count + 1, self.b1, self.b2)[0].float() if self.corrected else None
        c2 = bias_corrections(state.num_var + full, self.b1, self.b2)[1].float() if self.corrected else None
        return StepNumbers(self.rate(state.adam), c1, c2, self.eps, self.weight_decay, self.decays(leaves, params))

    def _advance_state(
        self, state: ZeroOneAdamState, adam: base.OptState, specs: base.Specs, now: base.Phase
    ) -> ZeroOneAdamState:
        """Returns the state after a step of the warm-up, with or without an update of the variance."""
        num_var = state.num_var + int(not now.local)
        phase = PROBE if "probe" in now.name else WARMUP
        freeze = self.freeze.learning(state.freeze, adam[0].nu, specs, phase, num_var)
        if now.local:
            return state._replace(adam=adam, freeze=freeze)
        grown = _count_interval(state.var_interval, self.var_scaler, None)
        return state._replace(adam=adam, freeze=freeze, num_var=num_var, var_interval=grown)

    def _warmup_step(
        self,
        leaves: CompressedSplit,
        rows: "_LocalRows",
        step: StepNumbers,
        state: ZeroOneAdamState,
        specs: base.Specs,
        now: base.Phase,
    ) -> ZeroOneAdamState:
        gs, residual = [g.float() for g in rows.gs], state.residual
        if now.local:
            gs, residual, _ = leaves.mean(gs, residual, donate=False)
        for p, g, mu, nu, decays in split_rows(rows.ps, gs, rows.mus, rows.nus, rows.decays):
            m = write_over(mu, blend_momentum(mu, g, self.b1, donate=True))
            if not now.local:
                write_over(nu, self.b2 * wide(nu) + (1 - self.b2) * g.square())
            step.descend(p, m, nu, decays)
        return self._advance_state(state._replace(residual=residual), state.adam, specs, now)

    def _local_step(
        self, leaves: CompressedSplit, rows: "_LocalRows", step: StepNumbers, state: ZeroOneAdamState, now: base.Phase
    ) -> ZeroOneAdamState:
        # Here ranks still have the same parameters: the start of the local steps.
        state = self._begin_local_steps(rows, leaves, state) if now == SWITCH else state
        rate = step.lr if step.c1 is None else step.lr / step.c1
        state = state._replace(rates=state.rates + rate, decays=state.decays + step.lr)
        starts, drifts = (leaves.pick(leaves.treedef.flatten_up_to(x)) for x in (state.start, state.drift))
        for p, g, mu, nu, drift in split_rows(rows.ps, rows.gs, rows.mus, rows.nus, drifts):
            m = rate * wide(write_over(mu, blend_momentum(mu, g, self.b1, donate=True)))
            # Linear in the gradients with constant nu: so the mean of drifts, preconditioned, is the mean of ranks'
            # steps.
            drift.add_(m)
            if now.name == "local":
                add_rounded_(p, m.div_(step.root(nu)).neg_())
        if now.name != "local":
            state = self._sync_step(leaves, rows, step, state, starts, drifts)
        interval = _count_interval(state.local_interval, self.local_scaler, self.local_clipper)
        return state._replace(freeze=self.freeze.frozen(state.freeze), local_interval=interval)

    def _sync_step(
        self,
        leaves: CompressedSplit,
        rows: "_LocalRows",
        step: StepNumbers,
        state: ZeroOneAdamState,
        starts: list[Any],
        drifts: list[Any],
    ) -> ZeroOneAdamState:
        sums, residual, _ = leaves.mean(drifts, state.residual, donate=False)
        shrink = 1 - self.weight_decay * state.decays
        table = rows.ps, rows.mus, rows.nus, starts, drifts, sums, rows.decays
        for p, mu, nu, start, drift, total, decays in split_rows(*table):
            # If all rates were 0, the sum has no trace of the momentum.
            mu.copy_(torch.where(state.rates > 0, total / state.rates, wide(mu)))
            p.copy_(wide(start) * (shrink if decays else 1.0) - total / step.root(nu))
            # All ranks compute from the same mean, so the parameters are bitwise equal again.
            start.copy_(p)
            drift.zero_()
        return state._replace(
            residual=residual, rates=torch.zeros_like(state.rates), decays=torch.zeros_like(state.decays)
        )

    def _begin_local_steps(
        self, rows: "_LocalRows", leaves: CompressedSplit, state: ZeroOneAdamState
    ) -> ZeroOneAdamState:
        """Returns the state at the first local step.

        The residuals of error feedback are reset, because from here sums of local updates are sent, not gradients.
        """
        for p, start in zip(rows.ps, leaves.pick(leaves.treedef.flatten_up_to(state.start)), strict=True):
            start.copy_(p)
        one = torch.ones_like(state.local_interval.steps)
        return state._replace(
            residual=core.tree_map(torch.zeros_like, state.residual),
            drift=core.tree_map(torch.zeros_like, state.drift),
            rates=torch.zeros_like(state.rates),
            decays=torch.zeros_like(state.decays),
            local_interval=Interval(one, torch.zeros_like(one)),
        )


class _LocalRows(NamedTuple):
    """Columns of the compressed leaves."""

    ps: list[Tensor]
    gs: list[Tensor]
    mus: list[Tensor]
    nus: list[Tensor]
    decays: list[bool]


def _count_interval(interval: Interval, often: int, most: int | None) -> Interval:
    """Returns the interval after a further count."""
    counted = interval.counted + 1
    grown = 2 * interval.steps if most is None else (2 * interval.steps).clamp(max=most)
    full = counted == often
    return Interval(torch.where(full, grown, interval.steps), torch.where(full, 0, counted))
