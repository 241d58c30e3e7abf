"""The lanes of one channel, in Python, for machines without a compiler: what `_lanes.h` has, over the same memory.

A rank may use either; the others cannot tell. Only the thread of `_python_engine.py` changes what is here. Comments are
in the C++.
"""

import collections
import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ._bell import ring
from ._python_blocks import (
    LINE,
    PIECE,
    TAGGED,
    In,
    Moving,
    Out,
    Peer,
    ReadLane,
    fence,
    lines,
    place,
    segment_bytes,
)


class OwnLanes:
    """One end; `bases`, `bells` and `pidfds` by rank, the own base being the one to write."""

    def __init__(
        self, size: int, me: int, ring_bytes: int, bases: Sequence[int], bells: Sequence[int], pidfds: Sequence[int]
    ) -> None:
        self.size, self.me, self.ring = size, me, ring_bytes
        self.head = lines(4 * size + 1) * LINE
        self.peers = [self._peer(*given) for given in zip(bases, bells, pidfds, strict=True)]
        self.words, self.base = self.peers[me].words, bases[me]
        self.written = [0] * size
        self.queues: list[collections.deque[Out]] = [collections.deque() for _ in range(size)]
        self.sources = [ReadLane(p, to_all) for p in range(size) for to_all in (False, True)]
        self.all = range(size)
        self.others = [p for p in self.all if p != me]
        self.scratch = torch.empty(2 * PIECE, dtype=torch.uint8)
        self.active: set[Moving] = set()
        self.error = ""

    def _peer(self, base: int, bell: int, pidfd: int) -> Peer:
        whole = place(base, segment_bytes(self.size, self.ring))
        return Peer(base, bell, pidfd, whole.numpy().view(np.uint64).data, whole)

    def begin(self, op: Moving, outs: Sequence[tuple[int, Out]], ins: Sequence[tuple[int, In]]) -> None:
        """Takes up a transfer: what goes to which lane, what comes from which source."""
        if self.error:
            op.failed = True
            return op.wake()
        if op.in_left or op.out_left:
            self.active.add(op)
        for lane, out in outs:
            self.queues[lane].append(out)
        for source, block in ins:
            self.sources[source].queue.append(block)

    def ask(self, op: Moving, peer: int, tag: int, block: In) -> None:
        """Takes up a message that comes."""
        source = self.sources[2 * peer]
        self.begin(op, (), ())
        if self.error:
            return
        for i, (there, buffer) in enumerate(source.early):
            if there == tag:
                del source.early[i]
                return self.take(block, buffer)
        source.asked.append((tag, block))

    def fail(self, why: str) -> None:
        """Ends all that is under way; the first reason stays."""
        self.error = self.error or why
        for queue in self.queues:
            queue.clear()
        for source in self.sources:
            source.queue.clear()
            source.asked.clear()
            source.begun = False
        for op in self.active:
            op.failed = True
            op.wake()
        self.active.clear()

    def close(self) -> None:
        """Tells the others that nothing more comes."""
        self.words[self._closed_at()] = 1
        for p in self.others:
            ring(self.peers[p].bell)
        self.fail("the channel has been closed")

    def say(self, waits: bool) -> None:
        """For which peers this rank waits; False takes it back."""
        to_all = bool(self.queues[self.me])
        for p in self.others:
            wanted = self.sources[2 * p].waits() or self.sources[2 * p + 1].waits() or self.queues[p] or to_all
            self.words[self._rings_at(p)] = int(bool(waits and wanted))

    def look(self) -> None:
        """Finds who has gone."""
        for p in self.others:
            peer = self.peers[p]
            peer.gone = peer.gone or peer.died or bool(peer.words[self._closed_at()])

    def judge(self) -> None:
        """After a drive that began when a peer had gone: what still waits for it waits in vain."""
        for p in self.others:
            if not self.peers[p].gone:
                continue
            mine = self.sources[2 * p : 2 * p + 2]
            lost = any(x.waits() and self.there(x) <= 0 for x in mine)
            if lost or any(out.message == TAGGED for out in self.queues[p]):
                how = "died" if self.peers[p].died else "closed it"
                return self.fail(f"rank {p} of the channel {how} before it had sent or taken everything")
            dropped, self.queues[p] = self.queues[p], collections.deque()
            for out in dropped:
                self.gone_out(out.op)

    def waited_for(self) -> list[int]:
        """The ranks of which something is still wanted."""
        asks = (p for p in self.others if self.sources[2 * p].waits() or self.sources[2 * p + 1].waits())
        return sorted({*asks, *(p for p in self.others if self.queues[p])})

    # Counters, by their place among the words of a segment.
    def written_at(self, lane: int) -> int:
        """Of what this rank, or another one, has written to a lane."""
        return 8 * lane

    def read_at(self, writer: int, to_all: bool) -> int:
        """Of what has been read of a writer's lane."""
        return 8 * (self.size + 2 * writer + to_all)

    def _rings_at(self, peer: int) -> int:
        return 8 * (3 * self.size + peer)

    def _closed_at(self) -> int:
        return 8 * 4 * self.size

    def tell(self, p: int) -> None:
        """Wakes a peer that waits, after something has been published."""
        fence()
        if self.peers[p].words[self._rings_at(self.me)]:
            ring(self.peers[p].bell)

    def gone_out(self, op: Moving) -> None:
        """One of its blocks has left."""
        op.out_left -= 1
        self._counted(op, op.out_left)

    def come_in(self, op: Moving) -> None:
        """One of its blocks, or its sum, has come."""
        op.in_left -= 1
        self._counted(op, op.in_left)

    def _counted(self, op: Moving, left: int) -> None:
        if not (op.in_left or op.out_left):
            self.active.discard(op)
        if not left:
            op.wake()

    def room(self, lane: int) -> int:
        """Bytes that may be written to a lane; -1 for a count that cannot be."""
        least, at = self.ring, self.read_at(self.me, lane == self.me)
        for p in self.others if lane == self.me else (lane,):
            if not self.peers[p].gone:
                unread = self.written[lane] - self.peers[p].words[at]
                if not 0 <= unread <= self.ring:
                    return -1
                least = min(least, self.ring - unread)
        return least

    def place_of(self, s: ReadLane) -> int:
        """Where the next of its bytes is in the segment."""
        return self.head + (s.peer if s.to_all else self.me) * self.ring + s.read % self.ring

    def there(self, s: ReadLane) -> int:
        """Bytes that wait to be read; -1 for a count that cannot be."""
        n = self.peers[s.peer].words[self.written_at(s.peer if s.to_all else self.me)] - s.read
        return n if 0 <= n <= self.ring and n % LINE == 0 else -1

    def advance(self, s: ReadLane, n: int) -> None:
        """Counts what has been read. A writer that waits for room is woken when half of the ring is free."""
        s.read += lines(n)
        self.words[self.read_at(s.peer, s.to_all)] = s.read
        if not self.peers[s.peer].gone and 0 <= self.there(s) <= self.ring // 2:
            self.tell(s.peer)

    def take(self, block: In, buffer: Any) -> None:
        """Copies a message that had come before it was asked for."""
        n = ctypes.sizeof(buffer)
        if n != block.length:
            return self.fail(
                f"a message of {n} bytes came where {block.length} were expected: ranks do not call the same"
            )
        ctypes.memmove(block.into, buffer, n)
        assert block.op is not None
        self.come_in(block.op)
