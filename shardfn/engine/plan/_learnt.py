"""`Learnt`: the memory of a plan, which its steps fill. The plan itself is a layout, and never changes.

A fact is written once by the first step that finds it, except for orders of use, which grow and are forgotten. Only
the methods below write.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from shardfn.optim import GradientTransformation

from ._order import UseOrder
from ._stages_seen import StagesSeen

if TYPE_CHECKING:
    from ._plan import Plan


@dataclasses.dataclass
class Learnt:
    """Facts that the steps of one plan have learnt, empty before the first step."""

    # By kind of call, the order in which leaves are gathered. A `Gatherer` extends it at the end of each phase by the
    # units that ranks of one ZeRO group have agreed on, so it is equal on them. A call that some rank has forgotten is
    # forgotten by all before it runs.
    use_orders: dict[Any, UseOrder] = dataclasses.field(default_factory=dict)
    # The order in which gradients become ready. Written at the end of the first step, with that of the first rank of
    # each group that shares leaves, empty before, and where no gradient is sent.
    reduce_order: list[int] = dataclasses.field(default_factory=list)
    # The kinds of values that the loss returns. Written at the end of the first step, before all ranks of the mesh
    # compare it: where it differs, all of them raise. A capture writes its own.
    outcome: str | None = None
    # Whether losses, model states and rows have been compared between ranks. Written after the first step that was not
    # skipped, which is the same on all ranks of the mesh.
    compared: bool = False
    # Whether the model states after the end of a step have been compared, where `update` makes them.
    compared_end: bool = False
    # By optimizer, the same decided on this layout's leaves. A function of the layout alone, so ranks need not agree;
    # shared by all plans of a single layout.
    rules: dict[GradientTransformation, GradientTransformation] = dataclasses.field(default_factory=dict)
    # The facts of the stages of a pipeline. Each rank finds the shapes for itself. The last stage's kinds of values are
    # sent to the others in the first step.
    stages: StagesSeen = dataclasses.field(default_factory=StagesSeen)
    # By axes that an optimizer reduces, the plan of its steps, which learns for itself. A function of the layout.
    unreduced: "dict[tuple[str, ...], Plan]" = dataclasses.field(default_factory=dict)

    def use_order(self, key: Hashable) -> UseOrder:
        """Returns the order of use of a kind of call; created empty."""
        return self.use_orders.setdefault(key, UseOrder())

    def forget_order(self, key: Hashable) -> None:
        """Drops the order of a kind of call, if there is one."""
        self.use_orders.pop(key, None)

    def forget_orders(self, keep: int) -> None:
        """Drops all but the `keep` newest orders of use, besides the step's own."""
        applied = [key for key in self.use_orders if key != "step"]
        for key in applied[: max(0, len(applied) - keep)]:
            del self.use_orders[key]

    def take_reduce_order(self, order: list[int]) -> None:
        """Keeps the order in which gradients became ready, equal on all ranks that send them."""
        self.reduce_order = order

    def take_outcome(self, outcome: str) -> None:
        """Keeps the kinds of values that the loss returns, which all ranks then compare."""
        self.outcome = outcome

    def take_compared(self, done: bool) -> None:
        """Keeps whether values that must be equal on ranks have been compared."""
        self.compared = done

    def take_compared_end(self) -> None:
        """Keeps that the model states after the end of a step have been compared."""
        self.compared_end = True

    def rule(
        self, optimizer: GradientTransformation, decide: Callable[[], GradientTransformation]
    ) -> GradientTransformation:
        """Returns the optimizer decided on this layout: by `decide` the first time."""
        if optimizer not in self.rules:
            self.rules[optimizer] = decide()
        return self.rules[optimizer]

    def find_unreduced(self, axes: tuple[str, ...], make: "Callable[[], Plan]") -> "Plan":
        """Returns the plan with gradients that stay summands along `axes`: made by `make` the first time."""
        if axes not in self.unreduced:
            self.unreduced[axes] = make()
        return self.unreduced[axes]
