"""`Learnt`: the memory of a plan, which its steps fill. The plan itself is a layout, and never changes.

A fact is written once by the first step that finds it, except for orders of use, which grow and are forgotten. Only
the methods below write.

The order of use: which units a step gathers, in which order, agreed by all ranks and learnt while running.

A step has phases (a forward, a backward, for each microbatch). Within a phase the agreed order is a list of units. The
first time it is empty. A rank that needs a unit which is not ahead in the list asks for it aloud, all ranks serve it,
and it joins the list. So a branch that only some ranks take neither hangs nor goes unnoticed by the others.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from shardfn.optim import GradientTransformation


class Turn(NamedTuple):
    """The actions at one position: units to drop, units to gather."""

    drop: list[int]
    issue: list[int]

    @staticmethod
    def between(held: Collection[int], ahead: Collection[int]) -> "Turn":
        """Returns the turn that leads from the units held now to those wanted."""
        return Turn([u for u in held if u not in ahead], [u for u in ahead if u not in held])


@dataclasses.dataclass
class UseOrder:
    """The agreed order, phase by phase."""

    phases: list[list[int]] = dataclasses.field(default_factory=list)
    # The result of `schedule` for the sizes and the limit of its first call since the last `extend`. A plan has but one
    # of each.
    _moves: "list[list[Turn]]" = dataclasses.field(default_factory=list)

    def phase(self, index: int) -> list[int]:
        """Returns the units of one phase (created empty)."""
        while len(self.phases) <= index:
            self.phases.append([])
        return self.phases[index]

    def extend(self, phase: int, units: list[int]) -> None:
        """Adds the units that a phase used beyond the agreed order; earlier results of `schedule` are dropped."""
        self.phase(phase).extend(units)
        self._moves = []

    def schedule(self, sizes: list[int], limit: int) -> "list[list[Turn]]":
        """Returns the units that a step drops and gathers there for each position of each phase."""
        if not self._moves:
            held: dict[int, None] = {}
            for phase, units in enumerate(self.phases):
                moves = []
                for pos in range(len(units)):
                    # As `Gatherer` would work it out: at one position it holds the units that were ahead at the one
                    # before.
                    ahead = self.window(phase, pos, sizes, limit)
                    moves.append(Turn.between(held, ahead))
                    held = ahead
                self._moves.append(moves)
        return self._moves

    def find(self, phase: int, start: int, unit: int) -> int | None:
        """Returns the next position of `unit` in a phase, from `start` on."""
        try:
            return self.phase(phase).index(unit, start)
        except ValueError:
            return None

    def window(self, phase: int, start: int, sizes: list[int], limit: int) -> dict[int, None]:
        """Returns the distinct units used from a position on, across phases, while they fit `limit` bytes.

        At least one.
        """
        out: dict[int, None] = {}
        total = 0
        for p in range(phase, len(self.phases)):
            units = self.phases[p]
            for pos in range(start if p == phase else 0, len(units)):
                unit = units[pos]
                if unit in out:
                    continue
                total += sizes[unit]
                if out and total > limit:
                    return out
                out[unit] = None
        return out


class ActivationShapes(NamedTuple):
    """The values sent between stages, as a tree of tensors without data.

    Attributes:
        treedef: the structure.
        leaves: the tensors.
        paths: names.
        axes: the axes besides the batch's along which ranks hold different values by leaf.
    """

    treedef: Any
    leaves: list[Tensor]
    paths: list[str]
    axes: list[tuple[str, ...]]


@dataclasses.dataclass
class _StagesSeen:
    """The facts that a plan's steps have learnt, empty until one has run.

    Attributes:
        ends: the kinds of values that the last stage returns.
        between: by the shapes of a batch, the tensors that travel between stages.
    """

    ends: Any = None
    between: dict[Any, ActivationShapes] = dataclasses.field(default_factory=dict)

    def take_ends(self, ends: Any) -> Any:
        """Keeps the kinds of values that the last stage returns, equal on all stages, and returns them."""
        self.ends = ends
        return ends

    def shapes(self, key: Hashable, find: Callable[[], ActivationShapes]) -> ActivationShapes:
        """Returns the tensors that travel between stages for batches of a shape: found by `find` the first time."""
        if key not in self.between:
            self.between[key] = find()
        return self.between[key]


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
    stages: _StagesSeen = dataclasses.field(default_factory=_StagesSeen)
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
