"""The lanes of one channel, in Python, for machines without a compiler: what `_lanes.h` does, over the same memory.

A rank may use either; the others cannot tell. Only the thread of `_python_engine.py` calls what is here.
"""

import collections
import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ._bell import ring
from ._python_blocks import (
    BLOCK,
    LINE,
    PIECE,
    TAGGED,
    In,
    Op,
    Out,
    Peer,
    Source,
    Sum,
    add_rows,
    fence,
    lines,
    place,
    segment_bytes,
)


class Channel:
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
        self.sources = [Source(p, to_all) for p in range(size) for to_all in (False, True)]
        self.all = range(size)
        self.others = [p for p in self.all if p != me]
        self.active: set[Op] = set()
        self.error = ""

    def begin(self, op: Op, outs: Sequence[tuple[int, Out]], ins: Sequence[tuple[int, In]]) -> None:
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

    def ask(self, op: Op, peer: int, tag: int, block: In) -> None:
        """Takes up a message that comes."""
        source = self.sources[2 * peer]
        self.begin(op, (), ())
        if self.error:
            return
        for i, (there, buffer) in enumerate(source.early):
            if there == tag:
                del source.early[i]
                return self._take(block, buffer)
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

    def drive(self) -> bool:
        """Once over all lanes; whether something has moved."""
        moved = False
        for lane in range(self.size):
            moved |= self._push(lane)
        for source in self.sources:
            if source.peer != self.me:
                moved |= self._pull(source)
        return moved

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
            lost = any(x.waits() and self._there(x) <= 0 for x in mine)
            if lost or any(out.message == TAGGED for out in self.queues[p]):
                how = "died" if self.peers[p].died else "closed it"
                return self.fail(f"rank {p} of the channel {how} before it had sent or taken everything")
            dropped, self.queues[p] = self.queues[p], collections.deque()
            for out in dropped:
                self._gone_out(out.op)

    def waited_for(self) -> list[int]:
        """The ranks of which something is still wanted."""
        asks = (p for p in self.others if self.sources[2 * p].waits() or self.sources[2 * p + 1].waits())
        return sorted({*asks, *(p for p in self.others if self.queues[p])})

    def _peer(self, base: int, bell: int, pidfd: int) -> Peer:
        whole = place(base, segment_bytes(self.size, self.ring))
        return Peer(base, bell, pidfd, whole.numpy().view(np.uint64).data, whole)

    # Counters, by their place among the words of a segment.
    def _written_at(self, lane: int) -> int:
        return 8 * lane

    def _read_at(self, writer: int, to_all: bool) -> int:
        return 8 * (self.size + 2 * writer + to_all)

    def _rings_at(self, peer: int) -> int:
        return 8 * (3 * self.size + peer)

    def _closed_at(self) -> int:
        return 8 * 4 * self.size

    def _tell(self, p: int) -> None:
        fence()
        if self.peers[p].words[self._rings_at(self.me)]:
            ring(self.peers[p].bell)

    def _gone_out(self, op: Op) -> None:
        op.out_left -= 1
        self._counted(op, op.out_left)

    def _come_in(self, op: Op) -> None:
        op.in_left -= 1
        self._counted(op, op.in_left)

    def _counted(self, op: Op, left: int) -> None:
        if not (op.in_left or op.out_left):
            self.active.discard(op)
        if not left:
            op.wake()

    def _room(self, lane: int) -> int:
        least, at = self.ring, self._read_at(self.me, lane == self.me)
        for p in self.others if lane == self.me else (lane,):
            if not self.peers[p].gone:
                unread = self.written[lane] - self.peers[p].words[at]
                if not 0 <= unread <= self.ring:
                    return -1
                least = min(least, self.ring - unread)
        return least

    def _push(self, lane: int) -> bool:
        queue = self.queues[lane]
        if not queue or (lane != self.me and self.peers[lane].gone):
            return False
        out, space, at = queue[0], self._room(lane), self.written[lane] % self.ring
        if space < 0:
            self.fail("a reader of this rank's memory has counted what cannot be")
            return True
        if space < LINE:
            return False
        start = self.head + lane * self.ring + at
        if not out.begun:
            for i, word in enumerate((out.message, out.tag, out.length)):
                self.words[start // 8 + i] = word
            self.written[lane] += LINE
            out.begun = True
        else:
            ready = (out.summed.pos if out.summed else out.length) - out.pos
            n = min(ready, space, PIECE, self.ring - at)
            if n <= 0:
                return False
            ctypes.memmove(self.base + start, out.at + out.pos, n)
            out.pos += n
            self.written[lane] += lines(n)
        self.words[self._written_at(lane)] = self.written[lane]
        for p in self.others if lane == self.me else (lane,):
            if not self.peers[p].gone:
                self._tell(p)
        if out.pos == out.length:
            queue.popleft()
            self._gone_out(out.op)
        return True

    def _from(self, s: Source) -> int:
        """Where the next of its bytes is in the segment."""
        return self.head + (s.peer if s.to_all else self.me) * self.ring + s.read % self.ring

    def _there(self, s: Source) -> int:
        n = self.peers[s.peer].words[self._written_at(s.peer if s.to_all else self.me)] - s.read
        return n if 0 <= n <= self.ring and n % LINE == 0 else -1

    def _advance(self, s: Source, n: int) -> None:
        s.read += lines(n)
        self.words[self._read_at(s.peer, s.to_all)] = s.read
        if not self.peers[s.peer].gone and 0 <= self._there(s) <= self.ring // 2:
            self._tell(s.peer)

    def _pull(self, s: Source) -> bool:
        if not s.waits():
            return False
        there = self._there(s)
        if there < 0:
            self.fail(f"rank {s.peer} has counted what cannot be")
            return True
        if not s.begun:
            return there >= LINE and self._begin(s)
        block = s.tagged if s.message == TAGGED else s.queue[0]
        assert block is not None
        if block.total is not None:
            return self._sum(block.total)
        n = min(there, block.length - block.pos, PIECE, self.ring - s.read % self.ring)
        if n <= 0:
            return False
        ctypes.memmove(block.into + block.pos, self.peers[s.peer].base + self._from(s), n)
        block.pos += n
        self._advance(s, n)
        if block.pos == block.length:
            s.begun = False
            if s.message == TAGGED:
                self._deliver(s)
            else:
                s.queue.popleft()
                assert block.op is not None
                self._come_in(block.op)
        return True

    def _begin(self, s: Source) -> bool:
        at = self._from(s) // 8
        message, tag, length = self.peers[s.peer].words[at : at + 3]
        if message == TAGGED:
            if not self._expect(s, tag, length):
                return True
            assert s.tagged is not None
            wanted = s.tagged.length
        elif s.queue:
            wanted = s.queue[0].length
        else:
            return False
        if (message != TAGGED and (message != BLOCK or not length)) or length != wanted:
            self.fail(
                f"rank {s.peer} of the channel sent {length} bytes where this one, rank {self.me}, takes {wanted}: they"
                " do not call the same"
            )
            return True
        s.message, s.tag, s.begun = message, tag, True
        self._advance(s, LINE)
        if length == 0:
            s.begun = False
            self._deliver(s)
        return True

    def _expect(self, s: Source, tag: int, length: int) -> bool:
        """Decides where a tagged message goes."""
        for i, (asked, block) in enumerate(s.asked):
            if asked == tag:
                s.tagged = block
                del s.asked[i]
                return True
        try:
            s.buffer = ctypes.create_string_buffer(length)
        except (MemoryError, OverflowError, ValueError):
            self.fail(f"no memory for a message of {length} bytes")
            return False
        s.tagged = In(None, ctypes.addressof(s.buffer), length)
        return True

    def _deliver(self, s: Source) -> None:
        """A tagged message is there: to whom it belongs."""
        assert s.tagged is not None
        if s.tagged.op is not None:
            return self._come_in(s.tagged.op)
        buffer, s.buffer = s.buffer, None
        for i, (asked, block) in enumerate(s.asked):
            if asked == s.tag:
                del s.asked[i]
                return self._take(block, buffer)
        s.early.append((s.tag, buffer))

    def _take(self, block: In, buffer: Any) -> None:
        n = ctypes.sizeof(buffer)
        if n != block.length:
            return self.fail(
                f"a message of {n} bytes came where {block.length} were expected: ranks do not call the same"
            )
        ctypes.memmove(block.into, buffer, n)
        assert block.op is not None
        self._come_in(block.op)

    def _sum(self, total: Sum) -> bool:
        """Adds up what has come from all ranks, in their order."""
        n = min(len(total.out) - total.pos, PIECE)
        sources = [self.sources[2 * p] for p in self.others]
        for s in sources:
            if not s.begun or not s.queue or s.queue[0].total is not total:
                return False
            n = min(n, self._there(s), self.ring - s.read % self.ring)
        if n <= 0:
            return False
        rows = [total.own[total.pos :][:n] if p == self.me else self._row(self.sources[2 * p], n) for p in self.all]
        add_rows(total.kind, rows, total.out[total.pos :][:n])
        total.pos += n
        for s in sources:
            self._advance(s, n)
            if total.pos == len(total.out):
                s.queue.popleft()
                s.begun = False
        if total.pos == len(total.out):
            self._come_in(total.op)
        return True

    def _row(self, s: Source, n: int) -> Tensor:
        return self.peers[s.peer].bytes[self._from(s) :][:n]
