"""The sums over the microbatches of a step, before the update."""

import dataclasses

from torch import Tensor

from shardfn.core import PyTree
from shardfn.engine.agreement import Comms
from shardfn.engine.loss import Value, WeightedMean, totals
from shardfn.engine.plan import Plan

from ._reduce import Reducer

# How the outcome of a plan begins where gradients must be divided by the weight of the whole batch.
WEIGHTED = "a WeightedMean"


@dataclasses.dataclass
class BackwardResult:
    """The sums over this rank's microbatches, the gradients summed over ranks, and the last model state."""

    total: Tensor
    weight: Tensor | None
    aux: dict[str, WeightedMean]
    num_microbatches: int
    reducer: Reducer
    model_state: PyTree
    values: list[Value]


def outcome_of(values: list[Value], num: int, reducer: Reducer, model_state: PyTree) -> BackwardResult:
    """Returns the outcome of the values of `num` microbatches, whose gradients `reducer` has summed."""
    total, weight = totals(values)
    aux: dict[str, WeightedMean] = {}
    for name in sorted(values[0].aux):
        pairs = [v.aux[name] for v in values]
        aux[name] = WeightedMean(sum(p.total for p in pairs), sum(p.weight for p in pairs))  # pyright: ignore[reportArgumentType]
    return BackwardResult(total, weight, aux, num, reducer, model_state, values)


def agree_on_outcome(plan: Plan, comms: Comms, out: BackwardResult) -> None:
    """Compares the kinds of values that the losses of the ranks return, in the first step of a plan."""
    if plan.learnt.outcome is None:
        outcome = f"{'a mean' if out.weight is None else WEIGHTED} and aux {sorted(out.aux)}"
        plan.learnt.take_outcome(outcome)
        comms.control.agree("the result of the loss", outcome)
