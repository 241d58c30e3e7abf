"""What moves bytes in and out of lanes, in Python: `push`, `pull` and `sum` of `_lanes.h`, where the comments are."""

import ctypes

from torch import Tensor

from ._python_blocks import BLOCK, LINE, PIECE, TAGGED, In, ReadLane, Sum, add_rows, lines
from ._python_lanes import OwnLanes


def drive(lanes: OwnLanes) -> bool:
    """Once over all lanes; whether something has moved."""
    moved = False
    for lane in range(lanes.size):
        moved |= _push(lanes, lane)
    for source in lanes.sources:
        if source.peer != lanes.me:
            moved |= _pull(lanes, source)
    return moved


def _push(lanes: OwnLanes, lane: int) -> bool:
    queue = lanes.queues[lane]
    if not queue or (lane != lanes.me and lanes.peers[lane].gone):
        return False
    out, space, at = queue[0], lanes.room(lane), lanes.written[lane] % lanes.ring
    if space < 0:
        lanes.fail("a reader of this rank's memory has counted what cannot be")
        return True
    if space < LINE:
        return False
    start = lanes.head + lane * lanes.ring + at
    if not out.begun:
        for i, word in enumerate((out.message, out.tag, out.length)):
            lanes.words[start // 8 + i] = word
        lanes.written[lane] += LINE
        out.begun = True
    else:
        ready = (out.summed.pos if out.summed else out.length) - out.pos
        n = min(ready, space, PIECE, lanes.ring - at)
        if n <= 0:
            return False
        ctypes.memmove(lanes.base + start, out.at + out.pos, n)
        out.pos += n
        lanes.written[lane] += lines(n)
    lanes.words[lanes.written_at(lane)] = lanes.written[lane]
    for p in lanes.others if lane == lanes.me else (lane,):
        if not lanes.peers[p].gone:
            lanes.tell(p)
    if out.pos == out.length:
        queue.popleft()
        lanes.gone_out(out.op)
    return True


def _pull(lanes: OwnLanes, s: ReadLane) -> bool:
    if not s.waits():
        return False
    there = lanes.there(s)
    if there < 0:
        lanes.fail(f"rank {s.peer} has counted what cannot be")
        return True
    if not s.begun:
        return there >= LINE and _begin(lanes, s)
    block = s.tagged if s.message == TAGGED else s.queue[0]
    assert block is not None
    if block.total is not None:
        return _sum(lanes, block.total)
    n = min(there, block.length - block.pos, PIECE, lanes.ring - s.read % lanes.ring)
    if n <= 0:
        return False
    ctypes.memmove(block.into + block.pos, lanes.peers[s.peer].base + lanes.place_of(s), n)
    block.pos += n
    lanes.advance(s, n)
    if block.pos == block.length:
        s.begun = False
        if s.message == TAGGED:
            _deliver(lanes, s)
        else:
            s.queue.popleft()
            assert block.op is not None
            lanes.come_in(block.op)
    return True


def _begin(lanes: OwnLanes, s: ReadLane) -> bool:
    at = lanes.place_of(s) // 8
    message, tag, length = lanes.peers[s.peer].words[at : at + 3]
    if message == TAGGED:
        if not _expect(lanes, s, tag, length):
            return True
        assert s.tagged is not None
        wanted = s.tagged.length
    elif s.queue:
        wanted = s.queue[0].length
    else:
        return False
    if (message != TAGGED and (message != BLOCK or not length)) or length != wanted:
        lanes.fail(
            f"rank {s.peer} of the channel sent {length} bytes where this one, rank {lanes.me}, takes {wanted}: they"
            " do not call the same"
        )
        return True
    s.message, s.tag, s.begun = message, tag, True
    lanes.advance(s, LINE)
    if length == 0:
        s.begun = False
        _deliver(lanes, s)
    return True


def _expect(lanes: OwnLanes, s: ReadLane, tag: int, length: int) -> bool:
    """Decides where a tagged message goes."""
    for i, (asked, block) in enumerate(s.asked):
        if asked == tag:
            s.tagged = block
            del s.asked[i]
            return True
    try:
        s.buffer = ctypes.create_string_buffer(length)
    except (MemoryError, OverflowError, ValueError):
        lanes.fail(f"no memory for a message of {length} bytes")
        return False
    s.tagged = In(None, ctypes.addressof(s.buffer), length)
    return True


def _deliver(lanes: OwnLanes, s: ReadLane) -> None:
    """A tagged message is there: to whom it belongs."""
    assert s.tagged is not None
    if s.tagged.op is not None:
        return lanes.come_in(s.tagged.op)
    buffer, s.buffer = s.buffer, None
    for i, (asked, block) in enumerate(s.asked):
        if asked == s.tag:
            del s.asked[i]
            return lanes.take(block, buffer)
    s.early.append((s.tag, buffer))


def _sum(lanes: OwnLanes, total: Sum) -> bool:
    """Adds up what has come from all ranks, in their order."""
    n = min(len(total.out) - total.pos, PIECE)
    sources = [lanes.sources[2 * p] for p in lanes.others]
    for s in sources:
        if not s.begun or not s.queue or s.queue[0].total is not total:
            return False
        n = min(n, lanes.there(s), lanes.ring - s.read % lanes.ring)
    if n <= 0:
        return False
    rows = [total.own[total.pos :][:n] if p == lanes.me else _row(lanes, lanes.sources[2 * p], n) for p in lanes.all]
    add_rows(total.kind, rows, total.out[total.pos :][:n], lanes.scratch)
    total.pos += n
    for s in sources:
        lanes.advance(s, n)
        if total.pos == len(total.out):
            s.queue.popleft()
            s.begun = False
    if total.pos == len(total.out):
        lanes.come_in(total.op)
    return True


def _row(lanes: OwnLanes, s: ReadLane, n: int) -> Tensor:
    return lanes.peers[s.peer].bytes[lanes.place_of(s) :][:n]
