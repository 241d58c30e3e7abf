"""Messages between stages: activations, and their gradients in the other direction. A send never waits."""

import collections
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import AnyChannel
from shardfn.core import Pending
from shardfn.schedules import Action, PipelineSchedule, StageAction

# How many receives a rank has started ahead of use, for example of the next two actions.
AHEAD = 2


class _Unanswered(NamedTuple):
    """Message that may still be sent: the receiving rank, and the index of the action in that rank's list."""

    rank: int
    position: int
    pending: Pending[Tensor]


class StageLink:
    """Sends and receives between stages. Each message has a separate tag within a step.

    A send ends when the receiver has answered. An answer is a message that the receiver sends after taking the message.
    Then the sent tensors are dropped, without a wait. Sends without an answer end with the step.
    """

    def __init__(
        self, channel: AnyChannel, like: list[Tensor], table: PipelineSchedule, rank: int, device: torch.device
    ) -> None:
        self._channel, self._like, self._rank, self._device = channel, like, rank, device
        self._of, self._num_stages = table.neighbours(rank), table.num_stages
        self._floats = [x for x in like if x.is_floating_point()]
        # Receives start in the order of the list. Started receives are in `_coming` until used.
        self._next = collections.deque(a for a in table.ranks[rank] if self._is_remote(a))
        self._coming: dict[Action, list[Pending[Tensor] | Tensor]] = {}
        self._sent: list[_Unanswered] = []
        # Messages from a stage to the next where both are on this rank.
        self._here: dict[StageAction, list[Tensor]] = {}

    def receive(self, action: Action) -> list[Tensor]:
        """Returns the message that an action waits for, empty if the action waits for none."""
        place, before, _ = self._of[action]
        if before is None:
            return []
        if before.rank == self._rank:
            return self._here.pop(place)
        self._ask_ahead(AHEAD + 1)
        got = [x.result() if isinstance(x, Pending) else x for x in self._coming.pop(action)]
        if self._sent:
            self._end_sends(lambda x: x.rank == before.rank and x.position <= before.position)
        self._ask_ahead(AHEAD)
        return got

    def send(self, action: Action, tensors: list[Tensor]) -> None:
        """Sends the tensors that an action has made. Sent tensors must not be written afterwards."""
        place, _, after = self._of[action]
        assert after is not None
        to = StageAction(place.kind, place.microbatch, place.stage + (1 if place.kind == "forward" else -1))
        if after.rank == self._rank:
            self._here[to] = [x.detach() for x in tensors]
            return
        if self._sent:
            self._end_sends(lambda x: x.pending.done())
        tag = self._first_tag(to)
        for i, x in enumerate(tensors):
            if x.numel():
                self._sent.append(_Unanswered(*after, self._channel.send(x.detach(), after.rank, tag + i)))

    def close(self) -> None:
        """Waits until all messages have left."""
        self._end_sends(lambda _: True)

    def _end_sends(self, which: Callable[[_Unanswered], bool]) -> None:
        kept = list[_Unanswered]()
        for x in self._sent:
            if which(x):
                x.pending.result()
            else:
                kept.append(x)
        self._sent = kept

    def _is_remote(self, action: Action) -> bool:
        """Returns whether an action waits for another rank."""
        before = self._of[action].before
        return before is not None and before.rank != self._rank

    def _ask_ahead(self, ahead: int) -> None:
        """Starts receives in the order of need, up to `ahead` at a time."""
        while self._next and len(self._coming) < ahead:
            action = self._next.popleft()
            place, before, _ = self._of[action]
            assert before is not None
            like, tag = self._like if action.kind == "forward" else self._floats, self._first_tag(place)
            self._coming[action] = [self._start_receive(x, before.rank, tag + i) for i, x in enumerate(like)]

    def _start_receive(self, like: Tensor, source: int, tag: int) -> Pending[Tensor] | Tensor:
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype, device=self._device)
        return self._channel.arrival(like, source, tag)

    def _first_tag(self, to: StageAction) -> int:
        """Returns the first of the tags of the tensors that go to an action."""
        number = (to.microbatch * self._num_stages + to.stage) * 2 + (to.kind == "forward")
        return number * len(self._like)
