"""Common part of rules that learn a variance first, and then average gradients."""

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from shardfn.collectives import local
from shardfn.core import PyTree, tree_unflatten

from ._adam import adamw
from ._base import GradientTransformation, Needs, Phase, Phases
from ._chain import chain
from ._checks import check_decay_rate, check_not_negative
from ._compressed import Averaging
from ._compressed_split import CompressedSplit
from ._decay import add_decayed_weights, decay_flags
from ._decide import resolve_prefix
from ._freeze import Freeze
from ._lamb import scale_by_moment_ratio
from ._learning_rate import check_rate, evaluate_schedule, scale_by_learning_rate
from ._leaves import check_params, check_state
from ._types import LearningRate, Mask, OptState, Params, Specs, Updates


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
    learning_rate: LearningRate
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Mask
    freeze: Freeze
    averaging: Averaging
    exact: Mask
    corrected: bool
    whole: PyTree = None
    now: Phase | None = None

    def __post_init__(self) -> None:
        check_rate(self.who, self.learning_rate)
        check_decay_rate(self.who, b1=self.b1, b2=self.b2)
        check_not_negative(self.who, eps=self.eps, weight_decay=self.weight_decay)

    @abc.abstractmethod
    def init(self, params: Params) -> OptState: ...

    @abc.abstractmethod
    def update(
        self, updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]: ...

    @abc.abstractmethod
    def apply(
        self, grads: Updates, state: OptState, params: Params, *, specs: Specs = None
    ) -> tuple[Params, OptState]: ...

    @abc.abstractmethod
    def next_phase(self, state: Any) -> Phase:
        """Returns the phase of the next step."""

    @functools.cached_property
    def adam(self) -> GradientTransformation:
        """Returns Adam, for the warm-up and for exact leaves."""
        if self.corrected:
            return adamw(self.learning_rate, self.b1, self.b2, self.eps, self.weight_decay, self.mask)
        return chain(
            scale_by_moment_ratio(self.b1, self.b2, self.eps),
            add_decayed_weights(self.weight_decay, self.mask),
            scale_by_learning_rate(self.learning_rate),
        )

    def rule(self) -> GradientTransformation:
        phases = Phases(self.averaging.over, self.phase, self.last)
        needs = Needs(resolve_masks=self.decide, bind_stats=self.given, phases=phases)
        return GradientTransformation(self.init, self.update, self.apply, needs)

    def decide(self, params: Params) -> GradientTransformation:
        exact, mask = (resolve_prefix(x, params, bool, n) for x, n in ((self.exact, "exact"), (self.mask, "mask")))
        return replace(self, exact=exact, mask=mask).rule()

    def given(self, params: Params, stats: Tensor | None, phase: Phase | None) -> GradientTransformation:
        del stats
        return replace(self, whole=params, now=phase).rule()

    def phase(self, state: OptState) -> Phase:
        check_state(self.who, state, self.state)
        return self.next_phase(state)

    def begin(self, state: OptState, params: Params) -> tuple[Any, Phase]:
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

    def decays(self, leaves: CompressedSplit, params: Params) -> Sequence[bool]:
        """Returns for each leaf whether the leaf decays."""
        cuts = tree_unflatten(leaves.treedef, leaves.specs)
        return decay_flags(self.weight_decay, self.mask)(params, leaves.ps, leaves.treedef, cuts)
