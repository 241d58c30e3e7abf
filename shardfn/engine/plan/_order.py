"""The order of use: which units a step gathers, in which order, agreed by all ranks and learnt while running.

A step has phases (a forward, a backward, for each microbatch). Within a phase the agreed order is a list of units. The
first time it is empty. A rank that needs a unit which is not ahead in the list asks for it aloud, all ranks serve it,
and it joins the list. So a branch that only some ranks take neither hangs nor goes unnoticed by the others.
"""

import dataclasses
from collections.abc import Collection
from typing import NamedTuple


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
