"""What goes from stage to stage: activations, and their gradients the other way. A send never waits."""

import collections
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import AnyChannel
from shardfn.core import Pending
from shardfn.schedules import Action, PipelineSchedule, StageAction

# How many receives a rank has asked for ahead of their use.
AHEAD = 2


class _Source(NamedTuple):
    """From which rank a message comes, and the place of the action that makes it in that rank's list."""

    rank: int
    position: int


class _Sent(NamedTuple):
    """A message that may not have left: for which action of which rank it is, by its place in that rank's list."""

    rank: int
    position: int
    pending: Pending[Tensor]


class StageLink:
    """What goes to and comes from other stages. Each message has a tag of its own within a step.

    A send is ended when its receiver has answered: when something has come from the same rank that this sends after it
    has taken the message. So what was sent may be let go then, and nobody waits for it; those without an answer are
    ended with the step.
    """

    def __init__(
        self, channel: AnyChannel, like: list[Tensor], table: PipelineSchedule, rank: int, device: torch.device
    ) -> None:
        self._channel, self._like, self._table, self._rank, self._device = channel, like, table, rank, device
        self._floats = [x for x in like if x.is_floating_point()]
        # Receives are asked for in the order of the list, and those that were are in `_coming` until they are used.
        comes = [a for a in table.ranks[rank] if self._source(a) is not None]
        self._next = collections.deque(comes)
        self._coming: dict[Action, list[Pending[Tensor] | Tensor]] = {}
        self._sent: list[_Sent] = []
        # What a stage sends to itself, where two of a rank's lie side by side.
        self._here: dict[StageAction, list[Tensor]] = {}

    def receive(self, action: Action) -> list[Tensor]:
        """What an action waits for; nothing if that is nothing."""
        source = self._source(action)
        if source is None:
            return []
        if source.rank == self._rank:
            return self._here.pop(self._table.place(self._rank, action))
        self._ask(AHEAD + 1)
        got = [x.result() if isinstance(x, Pending) else x for x in self._coming.pop(action)]
        self._end(lambda x: x.rank == source.rank and x.position <= source.position)
        self._ask(AHEAD)
        return got

    def send(self, action: Action, tensors: list[Tensor]) -> None:
        """Hands on what an action has made. They must not be written any more."""
        step = 1 if action.kind == "forward" else -1
        mine = self._table.place(self._rank, action)
        to = mine._replace(stage=mine.stage + step)
        rank, taker = self._table.at(to)
        if rank == self._rank:
            self._here[to] = [x.detach() for x in tensors]
            return
        self._end(lambda x: x.pending.done())
        position = self._table.position(rank, taker)
        for i, x in enumerate(tensors):
            if x.numel():
                self._sent.append(_Sent(rank, position, self._channel.send(x.detach(), rank, self._tag(to, i))))

    def close(self) -> None:
        """Waits until all that was sent has left."""
        self._end(lambda _: True)

    def _end(self, which: Callable[[_Sent], bool]) -> None:
        kept = list[_Sent]()
        for x in self._sent:
            if which(x):
                x.pending.result()
            else:
                kept.append(x)
        self._sent = kept

    def _ask(self, ahead: int) -> None:
        """Lets so many receives be under way, in the order in which they are needed."""
        while self._next and len(self._coming) < ahead:
            action = self._next.popleft()
            source, place = self._source(action), self._table.place(self._rank, action)
            assert source is not None
            if source.rank == self._rank:
                continue
            like = self._like if action.kind == "forward" else self._floats
            self._coming[action] = [self._start(x, source.rank, self._tag(place, i)) for i, x in enumerate(like)]

    def _start(self, like: Tensor, source: int, tag: int) -> Pending[Tensor] | Tensor:
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype, device=self._device)
        return self._channel.arrival(like, source, tag)

    def _source(self, action: Action) -> _Source | None:
        """Which action of which rank makes what an action waits for."""
        place = self._table.place(self._rank, action)
        before = place.stage + (-1 if action.kind == "forward" else 1)
        if action.kind == "weights" or not 0 <= before < self._table.num_stages:
            return None
        rank, maker = self._table.at(place._replace(stage=before))
        return _Source(rank, self._table.position(rank, maker))

    def _tag(self, to: StageAction, i: int) -> int:
        number = (to.microbatch * self._table.num_stages + to.stage) * 2 + (to.kind == "forward")
        return number * len(self._like) + i
