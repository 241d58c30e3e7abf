"""Pipeline schedules as data: for each rank a list of forwards and backwards of microbatches.

F is a forward. B is a backward. Where the list has a W of the same microbatch and chunk, B only gives the gradient of
the activations, and W gives the gradient of the weights. A chunk is a piece of the model. A rank may have several
chunks.

`balance` assigns layers to stages where layers, embedding and head cost unequally.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "weights"]
_LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "weights": "W"}


class Action(NamedTuple):
    """Entry of a list: the forward or the backward of a microbatch, through a chunk of the rank's layers.

    Example:
        >>> print(Action("forward", 3), Action("weights", 0, 1))
        F3 W0.1
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{_LETTERS[self.kind]}{self.microbatch}{f'.{self.chunk}' if self.chunk else ''}"


Actions = tuple[Action, ...]


class StageAction(NamedTuple):
    """Action by stage, counted from the model's first stage, independent of the rank that performs the action."""

    kind: Kind
    microbatch: int
    stage: int


class ListedAction(NamedTuple):
    """Action by rank and position in the rank's list."""

    rank: int
    position: int


class Neighbours(NamedTuple):
    """Actions with which an action exchanges activations or gradients of activations.

    Attributes:
        place: kind, microbatch and stage.
        before: action that sends the input, or None if no rank does.
        after: action that receives the output, or None if no rank does.
    """

    place: StageAction
    before: ListedAction | None
    after: ListedAction | None


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """Lists of the actions of all ranks.

    Attributes:
        name: name of the schedule.
        num_microbatches: number of microbatches.
        stages: stage by rank and chunk, counted along the model. For example ((0, 3), (1, 2)) for a V of 2 ranks.
        ranks: actions by rank, in order.

    Example:
        >>> PipelineSchedule("by hand", 1, ((0,), (1,)), (parse("F0 B0"), parse("F0 B0"))).num_stages
        2
    """

    name: str
    num_microbatches: int
    stages: tuple[tuple[int, ...], ...]
    ranks: tuple[Actions, ...]

    @property
    def num_ranks(self) -> int:
        """Returns the number of ranks."""
        return len(self.ranks)

    @property
    def num_chunks(self) -> int:
        """Returns the number of pieces of the model on each rank."""
        return len(self.stages[0])

    @property
    def turns(self) -> bool:
        """Returns whether the stages go down the ranks and up again."""
        return self.num_chunks > 1 and self.num_ranks > 1 and self.stages[0][1] > self.stages[1][1]

    @functools.cached_property
    def num_stages(self) -> int:
        """Returns the number of pieces of the model."""
        return self.num_ranks * self.num_chunks

    @functools.cached_property
    def home(self) -> dict[int, tuple[int, int]]:
        """Returns the rank and the chunk of each stage."""
        return {stage: (r, c) for r, row in enumerate(self.stages) for c, stage in enumerate(row)}

    @functools.cached_property
    def splits(self) -> bool:
        """Returns whether any backward is split."""
        return any(split_backwards(row) for row in self.ranks)

    def place(self, rank: int, action: Action) -> StageAction:
        """Returns the place of a rank's action in the model."""
        return StageAction(action.kind, action.microbatch, self.stages[rank][action.chunk])

    def at(self, place: StageAction) -> tuple[int, Action]:
        """Returns the rank and the action of a place in the model."""
        rank, chunk = self.home[place.stage]
        return rank, Action(place.kind, place.microbatch, chunk)

    def position(self, rank: int, action: Action) -> int:
        """Returns the place of an action in a rank's list."""
        return self._list_positions[rank][action]

    @functools.cached_property
    def _list_positions(self) -> list[dict[Action, int]]:
        return [{action: i for i, action in enumerate(row)} for row in self.ranks]

    def neighbours(self, rank: int) -> dict[Action, Neighbours]:
        """Returns the neighbours of each action of a rank. The result is computed once per rank.

        Example:
            >>> by_hand = PipelineSchedule("by hand", 1, ((0,), (1,)), (parse("F0 B0"), parse("F0 B0")))
            >>> by_hand.neighbours(1)[Action("backward", 0)].after
            ListedAction(rank=0, position=1)
        """
        if rank not in self._neighbour_cache:
            self._neighbour_cache[rank] = {action: self._find_neighbours(rank, action) for action in self.ranks[rank]}
        return self._neighbour_cache[rank]

    @functools.cached_property
    def _neighbour_cache(self) -> dict[int, dict[Action, Neighbours]]:
        """Returns the cache of `neighbours`, by rank."""
        return {}

    def _find_neighbours(self, rank: int, action: Action) -> Neighbours:
        place, step = self.place(rank, action), 1 if action.kind == "forward" else -1

        def find_entry(stage: int) -> ListedAction | None:
            if action.kind == "weights" or not 0 <= stage < self.num_stages:
                return None
            where, its = self.at(place._replace(stage=stage))
            return ListedAction(where, self.position(where, its))

        return Neighbours(place, find_entry(place.stage - step), find_entry(place.stage + step))

    def needs(self, place: StageAction) -> Iterator[StageAction]:
        """Yields the actions that must run before.

        An action of the same rank, and the action of the neighbour that sends.
        """
        kind, k, stage = place
        if kind == "forward":
            if stage:
                yield StageAction("forward", k, stage - 1)
            return
        # A W needs only the B of the same rank: no rank sends to a W.
        yield StageAction("forward" if kind == "backward" else "backward", k, stage)
        if kind == "backward" and stage + 1 < self.num_stages:
            yield StageAction("backward", k, stage + 1)

    def find_late(self, kind: Kind) -> tuple[int, Action] | None:
        """Returns an action that runs after the action of a later microbatch, with the rank, or None.

        Example:
            >>> by_hand = PipelineSchedule("by hand", 2, ((0,),), (parse("F0 F1 B1 B0"),))
            >>> print(by_hand.find_late("forward"), by_hand.find_late("backward"))
            None (0, Action(kind='backward', microbatch=0, chunk=0))
        """
        for rank, actions in enumerate(self.ranks):
            seen: dict[int, int] = {}
            for action in (a for a in actions if a.kind == kind):
                if action.microbatch < seen.get(action.chunk, 0):
                    return rank, action
                seen[action.chunk] = action.microbatch
        return None

    def as_text(self) -> str:
        """Returns the schedule as text, a line a rank. Equal schedules have equal text."""
        rows = (f"rank {r}, stages {self.stages[r]}: {as_text(row)}" for r, row in enumerate(self.ranks))
        return "\n".join([f"{self.name}, {self.num_microbatches} microbatches", *rows])


def split_backwards(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Returns the (microbatch, chunk) pairs of a single rank's list whose weight gradient (W) is a separate action.

    Example:
        >>> split_backwards(parse("F0 F1 B0 B1 W1"))
        frozenset({(1, 0)})
    """
    return frozenset(a[1:] for a in actions if a.kind == "weights")


def as_text(actions: Sequence[Action]) -> str:
    """Returns a list in letters.

    Example:
        >>> as_text((Action("forward", 0), Action("backward", 0)))
        'F0 B0'
    """
    return " ".join(map(str, actions))


def parse(text: str) -> Actions:
    """Returns the list that `as_text` has written.

    Example:
        >>> parse("F0 W1.1")[1]
        Action(kind='weights', microbatch=1, chunk=1)
    """
    kinds: dict[str, Kind] = {letter: kind for kind, letter in _LETTERS.items()}
    words = ((word[0], *word[1:].partition(".")) for word in text.split())
    return tuple(Action(kinds[letter], int(k), int(chunk or 0)) for letter, k, _, chunk in words)


def loop_stages(num_ranks: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Returns stages in a loop: chunk c of rank r is stage c p + r. The last rank sends to the first.

    Example:
        >>> loop_stages(2, 2)
        ((0, 2), (1, 3))
    """
    return tuple(tuple(c * num_ranks + r for c in range(num_chunks)) for r in range(num_ranks))


def v_stages(num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns stages in a V: down the ranks, and up again. The first rank has the model's first and last stages.

    Example:
        >>> v_stages(2)
        ((0, 3), (1, 2))
    """
    return tuple((r, 2 * num_ranks - 1 - r) for r in range(num_ranks))


def balance(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Returns the number of layers of each stage, in order, such that the most expensive stage costs least.

    Ties are broken by the least sum of squares of the stages' costs, the most even cut, and then by fewer layers in
    earlier stages. Every stage has a layer.

    Args:
        costs: costs of the layers, for example the number of parameters, or the seconds of a forward and backward.
        num_stages: number of stages.
        first: extra cost of the first stage, for the embedding.
        last: extra cost of the last stage, for the head.

    Raises:
        ValueError: there are fewer layers than stages, or a cost is negative or not finite.

    Example:
        >>> balance([1.0] * 10, 4)
        (2, 2, 3, 3)
        >>> balance([1.0] * 10, 4, last=2.0)
        (3, 3, 3, 1)
        >>> balance([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2)
        (1, 5)
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut in {num_stages} stages, each with a layer.")
    wrong = [c for c in (*costs, first, last) if not 0 <= c < float("inf")]
    if wrong:
        raise ValueError(f"costs must be finite and not negative, got {wrong}.")
    sums = [0.0]
    for c in costs:
        sums.append(sums[-1] + c)

    def stage_cost(stage: int, start: int, stop: int) -> float:
        extra = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        return sums[stop] - sums[start] + extra

    worst = _find_least(len(costs), num_stages, stage_cost, max, float("inf"))[0]
    return _find_least(len(costs), num_stages, stage_cost, lambda a, b: a + b * b, worst)[1]


def _find_least(num: int, num_stages: int, cost, join, limit: float) -> tuple[float, tuple[int, ...]]:  # pyright: ignore
    """Returns the least cost, joined stage by stage, and the cut, among cuts whose stages each cost at most `limit`.

    Dynamic programming over stages: `best` maps the number of layers used so far to the least cost and the best cut.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        left = num_stages - stage - 1
        for start, (so_far, cut) in best.items():
            for stop in range(start + 1, num - left + 1):
                one = cost(stage, start, stop)
                if one > limit:
                    break
                made = join(so_far, one), (*cut, stop - start)
                after[stop] = min(after.get(stop, made), made)
        best = after
    return best[num]
