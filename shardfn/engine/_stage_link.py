"""What goes from stage to stage: activations, and their gradients the other way. A send never waits."""

import collections

import torch
from torch import Tensor

from shardfn.collectives import Channel
from shardfn.core import Pending
from shardfn.schedules import Action, PipelineSchedule, StageAction

# How many receives a rank has asked for ahead of their use.
AHEAD = 2


class StageLink:
    """What goes to and comes from other stages. Each message has a tag of its own within a step."""

    def __init__(
        self, channel: Channel, like: list[Tensor], table: PipelineSchedule, rank: int, device: torch.device
    ) -> None:
        self._channel, self._like, self._table, self._rank, self._device = channel, like, table, rank, device
        self._floats = [x for x in like if x.is_floating_point()]
        # Receives are asked for in the order of the list, and those that were are in `_coming` until they are used.
        comes = [a for a in table.ranks[rank] if self._source(a) is not None]
        self._next = collections.deque(comes)
        self._coming: dict[Action, list[Pending[Tensor] | Tensor]] = {}
        # Under way, the oldest first; held until they have left.
        self._sent: collections.deque[Pending[Tensor]] = collections.deque()
        # What a stage sends to itself, where two of a rank's lie side by side.
        self._here: dict[StageAction, list[Tensor]] = {}

    def receive(self, action: Action) -> list[Tensor]:
        """What an action waits for; nothing if that is nothing."""
        source = self._source(action)
        if source is None:
            return []
        if source[0] == self._rank:
            return self._here.pop(source[1])
        self._ask(AHEAD + 1)
        got = [x.result() if isinstance(x, Pending) else x for x in self._coming.pop(action)]
        self._ask(AHEAD)
        return [x.to(self._device) for x in got]

    def send(self, action: Action, tensors: list[Tensor]) -> None:
        """Hands on what an action has made. They must not be written any more."""
        step = 1 if action.kind == "forward" else -1
        mine = self._table.place(self._rank, action)
        to = mine._replace(stage=mine.stage + step)
        rank, _ = self._table.home[to.stage]
        if rank == self._rank:
            self._here[to] = [x.detach() for x in tensors]
            return
        while self._sent and self._sent[0].done():
            self._sent.popleft().result()
        for i, x in enumerate(tensors):
            if x.numel():
                self._sent.append(self._channel.send(x.detach().cpu().contiguous(), rank, self._tag(to, i)))

    def close(self) -> None:
        while self._sent:
            self._sent.popleft().result()

    def _ask(self, ahead: int) -> None:
        """Lets so many receives be under way, in the order in which they are needed."""
        while self._next and len(self._coming) < ahead:
            action = self._next.popleft()
            source = self._source(action)
            assert source is not None
            if source[0] == self._rank:
                continue
            like = self._like if action.kind == "forward" else self._floats
            self._coming[action] = [self._start(x, source[0], self._tag(source[1], i)) for i, x in enumerate(like)]

    def _start(self, like: Tensor, source: int, tag: int) -> Pending[Tensor] | Tensor:
        into = torch.empty(like.shape, dtype=like.dtype)
        if not into.numel():
            return into
        return self._channel.receive(into, source, tag)

    def _source(self, action: Action) -> tuple[int, StageAction] | None:
        """From which rank comes what an action waits for, under the name of its own place."""
        place = self._table.place(self._rank, action)
        before = place.stage + (-1 if action.kind == "forward" else 1)
        if action.kind == "weights" or not 0 <= before < self._table.num_stages:
            return None
        return self._table.home[before][0], place

    def _tag(self, to: StageAction, i: int) -> int:
        number = (to.microbatch * self._table.num_stages + to.stage) * 2 + (to.kind == "forward")
        return number * len(self._like) + i
