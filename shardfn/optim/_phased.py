"""Rules that learn a variance first, and then average compressed gradients.

The variance stops learning after a number of steps, or when the variance is stable.

With a frozen variance, Adam is momentum with a fixed preconditioner. This is linear in the momentum, so that errors of
compression cancel from step to step. The test of stability is from 1-bit Adam (https://arxiv.org/abs/2102.02888, 2021).
"""

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import core
from shardfn.collectives import local

from . import _base as base
from ._adam import adamw
from ._chain import chain
from ._checks import check_decay_rate, check_not_negative, check_num_steps
from ._compressed import Averaging, CompressedSplit
from ._decide import resolve_prefix
from ._lamb import scale_by_moment_ratio
from ._learning_rate import add_decayed_weights, check_rate, decay_flags, evaluate_schedule, scale_by_learning_rate
from ._leaves import check_params, check_state, spec_leaves, wide, zero_count
from ._norm import over_blocks

WARMUP = base.Phase("warmup", False)
PROBE = base.Phase("probe", False)
SWITCH = base.Phase("switch", True)
COMPRESSED = base.Phase("compressed", True)


class VarianceStability(NamedTuple):
    """Freezes the variance when the norm is stable: `|nu_t|_1 / |nu_(t - D)|_1 >= ratio`, `D = 1 / (1 - b2)`.

    The norms are over the whole tree and corrected for bias, because a variance that starts at zero would otherwise
    always seem to grow. Norms are computed only at multiples of D, for example every 1000 steps for `b2 = 0.999`.

    Attributes:
        ratio: ratio in (0, 1).
        after: first step at which the variance may freeze, for example after the warm-up of the learning rate.

    References:
        Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, 2021,
        https://arxiv.org/abs/2102.02888
    """

    ratio: float = 0.96
    after: int = 0


FreezeStep = int | Literal["auto"] | VarianceStability


class FreezeState(NamedTuple):
    """State of the freeze: 0-d tensors.

    Attributes:
        count: int32: steps taken.
        frozen: int32: step after which the variance is constant. 0 while the variance learns.
        begun: int32: whether the next compressed step uses the codes of the last step. 0 before the first step, and
            after a change of the number of ranks.
        norm: float32: last computed norm of the variance, or 0.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    frozen: Int[Tensor, ""]
    begun: Int[Tensor, ""]
    norm: Float[Tensor, ""]


@dataclass(frozen=True)
class Freeze:
    """The rule: a number of steps, or a test."""

    step: int | VarianceStability
    b2: float

    @property
    def interval(self) -> int:
        """Returns the number of steps between two norms."""
        return max(1, round(1 / (1 - self.b2)))

    def init(self, params: base.Params) -> FreezeState:
        """Returns the first state."""
        count = zero_count(params)
        return FreezeState(count, count.clone(), count.clone(), torch.zeros((), device=count.device))

    def phase(self, state: FreezeState, *, switches: bool) -> base.Phase:
        """Returns the next step's phase.

        Reads the state on the host. `switches`: whether the first compressed step is a separate phase.
        """
        count, frozen = int(state.count), int(state.frozen)
        # By the current number, which may differ from the number before a resume.
        learned = count >= self.step if isinstance(self.step, int) else frozen > 0
        if not learned:
            probes = not isinstance(self.step, int) and (count + 1) % self.interval == 0
            return PROBE if probes else WARMUP
        return SWITCH if switches and not int(state.begun) else COMPRESSED

    def learning(
        self,
        state: FreezeState,
        nu: base.Params,
        specs: base.Specs,
        phase: base.Phase,
        learnt: Int[Tensor, ""] | None = None,
    ) -> FreezeState:
        """Returns the state after a step with averaged gradients.

        A frozen variance is updated again if the user raises `freeze_step` above the current step.

        `learnt`: number of gradients that `nu` has averaged. None: one gradient a step.
        """
        count, zero = state.count + 1, torch.zeros_like(state.frozen)
        if phase != PROBE:
            return FreezeState(count, zero, zero.clone(), state.norm)
        assert isinstance(self.step, VarianceStability)
        norm = (l1_norm(nu, specs).double() / (1 - self.b2 ** (count if learnt is None else learnt).double())).float()
        stable = (state.norm > 0) & (norm >= self.step.ratio * state.norm) & (count > self.step.after)
        return FreezeState(count, torch.where(stable, count, zero), zero, norm)

    @staticmethod
    def frozen(state: FreezeState) -> FreezeState:
        """Returns the state after a compressed step."""
        # Without a test, no step was noted: the first compressed step comes after the last step of learning.
        since = torch.where(state.frozen > 0, state.frozen, state.count)
        return FreezeState(state.count + 1, since, torch.ones_like(state.begun), state.norm)


def freeze_rule(who: str, step: Any, b2: float) -> Freeze:
    """Returns the rule for a user's `freeze_step`.

    Raises:
        ValueError: `step` is not such a rule, or the variance would freeze before the first step.
    """
    if step == "auto":
        step = VarianceStability()
    if isinstance(step, VarianceStability):
        if not 0 < step.ratio < 1 or step.after < 0:
            raise ValueError(f"{who}: {step!r} needs a ratio in (0, 1) and after >= 0.")
    elif isinstance(step, int) and not isinstance(step, bool) and step >= 1:
        check_num_steps(who, freeze_step=step)
    else:
        raise ValueError(
            f"{who}: freeze_step={step!r} must be an int >= 1, 'auto' or a VarianceStability: the number of steps after"
            " which the variance is constant. 15 to 25 percent of all steps is usual."
        )
    return Freeze(step, b2)


def l1_norm(nu: base.Params, specs: base.Specs) -> Float[Tensor, ""]:
    """Returns the sum of a tree of nonnegative leaves, over all blocks."""
    leaves, _ = core.tree_flatten(nu)
    if not leaves:
        return torch.zeros(())
    local = torch.stack([wide(x).sum(dtype=torch.float64).to(leaves[0].device, torch.float32) for x in leaves])
    return (local if specs is None else over_blocks(local, spec_leaves(specs, nu))).sum()


@dataclass(frozen=True, kw_only=True)
class Phased(abc.ABC):
    """Rule with a warm-up, for a tree `whole` and a step in the phase `now`.

    Attributes:
        state: type of the state.
        last: whether the rule must be the last of a chain.
    """

    state: ClassVar[type]
    last: ClassVar[bool] = False

    who: str
    learning_rate: base.LearningRate
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: base.Mask
    freeze: Freeze
    averaging: Averaging
    exact: base.Mask
    corrected: bool
    whole: core.PyTree = None
    now: base.Phase | None = None

    def __post_init__(self) -> None:
        check_rate(self.who, self.learning_rate)
        check_decay_rate(self.who, b1=self.b1, b2=self.b2)
        check_not_negative(self.who, eps=self.eps, weight_decay=self.weight_decay)

    @abc.abstractmethod
    def init(self, params: base.Params) -> base.OptState: ...

    @abc.abstractmethod
    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]: ...

    @abc.abstractmethod
    def apply(
        self, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]: ...

    @abc.abstractmethod
    def next_phase(self, state: Any) -> base.Phase:
        """Returns the phase of the next step."""

    @functools.cached_property
    def adam(self) -> base.GradientTransformation:
        """Returns Adam, for the warm-up and for exact leaves."""
        if self.corrected:
            return adamw(self.learning_rate, self.b1, self.b2, self.eps, self.weight_decay, self.mask)
        return chain(
            scale_by_moment_ratio(self.b1, self.b2, self.eps),
            add_decayed_weights(self.weight_decay, self.mask),
            scale_by_learning_rate(self.learning_rate),
        )

    def rule(self) -> base.GradientTransformation:
        phases = base.Phases(self.averaging.over, self.phase, self.last)
        needs = base.Needs(resolve_masks=self.decide, bind_stats=self.bind, phases=phases)
        return base.GradientTransformation(self.init, self.update, self.apply, needs)

    def decide(self, params: base.Params) -> base.GradientTransformation:
        exact, mask = (resolve_prefix(x, params, bool, n) for x, n in ((self.exact, "exact"), (self.mask, "mask")))
        return replace(self, exact=exact, mask=mask).rule()

    def bind(self, params: base.Params, stats: Tensor | None, phase: base.Phase | None) -> base.GradientTransformation:
        del stats
        return replace(self, whole=params, now=phase).rule()

    def phase(self, state: base.OptState) -> base.Phase:
        check_state(self.who, state, self.state)
        return self.next_phase(state)

    def begin(self, state: base.OptState, params: base.Params) -> tuple[Any, base.Phase]:
        """Returns this rank's blocks of the state, and the phase of the step."""
        check_state(self.who, state, self.state)
        check_params(self.who, params)
        state = local(state)
        return state, self.now or self.phase(state)

    def rate(self, chained: Any) -> float | int | Tensor:
        """Returns the learning rate, from a chain's state that ends in the rate's counter.

        Must be read before anything is written.
        """
        rate = self.learning_rate
        return evaluate_schedule(rate, chained[-1].count.clone()) if callable(rate) else rate

    def decays(self, leaves: CompressedSplit, params: base.Params) -> Sequence[bool]:
        """Returns for each leaf whether the leaf decays."""
        cuts = core.tree_unflatten(leaves.treedef, leaves.specs)
        return decay_flags(self.weight_decay, self.mask)(params, leaves.ps, leaves.treedef, cuts)
