"""What drives the lanes of all channels of this process, in Python: what `_memory.cpp` does, for want of a compiler.

One thread does all of it. In C++ those who start and await transfers move bytes as well; here an interrupt from the
keyboard might come in the middle of that. So they hand over what is to be done (one append, which nothing interrupts),
ring, and wait for what they want.
"""

import atexit
import collections
import contextlib
import ctypes
import functools
import itertools
import os
import platform
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ._bell import bell, ring, silence
from ._python_blocks import TAGGED, In, Moving, Out, Sum, fence, place, segment_bytes
from ._python_lanes import OwnLanes
from ._python_moves import drive
from ._segment import NotSharedError

_IN, _OUT = 1, 2
# Seconds that its thread may take to end with the program.
_PATIENCE = 5.0
# Processors that keep the order of stores, and that of loads, without being asked.
_ORDERED = ("x86_64", "AMD64")
_ALL: list["PythonEngine"] = []


class PythonEngine:
    """The functions of `_memory.cpp`, by their names, and what drives all lanes of this process. Never ended.

    Attributes:
        bell: the number of the pipe into which others write to wake it.

    Raises:
        NotSharedError: the processor may change the order of what is written, no more files may be open, or there is
            no thread to be had.
    """

    def __init__(self) -> None:
        if platform.machine() not in _ORDERED:
            raise NotSharedError(f"Python cannot keep memory in order on {platform.machine()}")
        self._todo: collections.deque[Callable[[], object]] = collections.deque()
        self._closings: collections.deque[Callable[[], object]] = collections.deque()
        self._channels: list[OwnLanes] = []
        # What has been given out, by number.
        self._made: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._poll: Any = None
        self._closes = self._stops = False
        self._bell, self.bell = bell()
        self._thread = threading.Thread(target=self._run, name="shardfn lanes", daemon=True)
        before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # signals are the main thread's
        try:
            self._thread.start()
        except RuntimeError as error:
            for end in (self._bell, self.bell):
                os.close(end)
            raise NotSharedError(
                "this process cannot start a thread: its limit on processes or memory is reached"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _ALL.append(self)

    def call(self, name: str, *args: Any) -> Any:
        """Calls a function on the engine."""
        return getattr(self, f"_{name}")(*args)

    def plain(self, name: str, *args: Any) -> Any:
        """Calls a function that takes no engine."""
        return getattr(self, f"_{name}")(*args)

    def defers(self, closing: Callable[[], object]) -> bool:
        """Whether `closing` comes later: the collector runs it in this engine's thread, which may be amid a lane."""
        if self._closes or not self._is_here():
            return False
        self._closings.append(closing)
        ring(self.bell)
        return True

    def stop(self) -> None:
        """Ends the thread, with the program: an interpreter that ends aborts a thread that is amid a sum of torch's."""
        self._stops = True
        ring(self.bell)
        self._thread.join(_PATIENCE)

    def _segment_bytes(self, size: int, ring_bytes: int) -> int:
        return segment_bytes(size, ring_bytes)

    def _channel_new(self, size: int, me: int, ring_bytes: int, *each: Any) -> int:
        channel = OwnLanes(size, me, ring_bytes, *([x or 0 for x in ranks] for ranks in each))
        self._hand(functools.partial(self._add, channel))
        return self._keep(channel)

    def _channel_close(self, number: int) -> None:
        """After it nothing touches the memory of any transfer."""
        channel = self._made.pop(number)
        if self._is_here() or not self._thread.is_alive():
            return self._remove(channel)
        done = threading.Event()
        self._hand(lambda: (self._remove(channel), done.set()))
        done.wait()

    def _start(self, number: int, fields: Any) -> int | None:
        """The fields are those of `Transfer`."""
        channel: OwnLanes = self._made[number]
        if channel.error:
            return None
        size, me = channel.size, channel.me
        kind, to_all, to_all_bytes, sum_into, sum_bytes = (fields[i] for i in (0, 3, 4, 9, 10))
        out_bytes, froms, in_bytes, intos, all_bytes, alls = (_array(fields[i], size) for i in (1, 2, 5, 6, 7, 8))
        op, total = Moving(), None
        if kind >= 0 and sum_bytes:
            total = Sum(op, kind, place(froms[me], sum_bytes), place(sum_into, sum_bytes))
        outs = [(p, Out(op, froms[p], out_bytes[p])) for p in channel.others if out_bytes[p]]
        ins = [(2 * p + 1, In(op, alls[p], all_bytes[p])) for p in channel.others if all_bytes[p]]
        if total is None:
            ins += [(2 * p, In(op, intos[p], in_bytes[p])) for p in channel.others if in_bytes[p]]
        op.in_left = len(ins) + (total is not None)
        if total is not None:
            ins += [(2 * p, In(op, 0, sum_bytes, total)) for p in channel.others]
        if to_all_bytes:
            outs.append((me, Out(op, to_all, to_all_bytes, summed=total)))
        op.out_left = len(outs)
        self._hand(functools.partial(channel.begin, op, outs, ins))
        return self._keep(op)

    def _message(self, number: int, sends: int, peer: int, tag: int, at: int, nbytes: int) -> int | None:
        channel: OwnLanes = self._made[number]
        if channel.error:
            return None
        if sends:
            op = Moving(out_left=1)
            self._hand(functools.partial(channel.begin, op, [(peer, Out(op, at, nbytes, TAGGED, tag))], ()))
        else:
            op = Moving(in_left=1)
            self._hand(functools.partial(channel.ask, op, peer, tag, In(op, at, nbytes)))
        return self._keep(op)

    def _op_state(self, number: int, asked: int) -> int:
        return _state(self._made[number], asked)

    def _op_wait(self, number: int, asked: int, milliseconds: int) -> int:
        if self._is_here():
            raise RuntimeError("a finalizer waits for a transfer in the thread that moves its bytes")
        op: Moving = self._made[number]
        if not _state(op, asked):
            waiter = threading.Lock()
            waiter.acquire()
            op.waiters.append(waiter)
            # It may have ended before it knew of the waiter.
            if not _state(op, asked) and not waiter.acquire(timeout=milliseconds / 1000):
                with contextlib.suppress(ValueError):  # it was woken meanwhile
                    op.waiters.remove(waiter)
        return _state(op, asked)

    def _op_free(self, number: int) -> None:
        """Of a transfer that nothing touches any more."""
        del self._made[number]

    def _why(self, number: int, text: Any, nbytes: int) -> int:
        """What went wrong, or for whom is waited."""
        channel: OwnLanes = self._made[number]
        said = (channel.error or ", ".join(map(str, channel.waited_for()))).encode()[:nbytes]
        ctypes.memmove(text, said, len(said))
        return len(said)

    def _keep(self, made: Any) -> int:
        number = next(self._numbers)
        self._made[number] = made
        return number

    def _hand(self, what: Callable[[], object]) -> None:
        self._todo.append(what)
        ring(self.bell)

    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    # What follows runs in the thread alone.
    def _add(self, channel: OwnLanes) -> None:
        self._channels.append(channel)
        self._poll = None

    def _remove(self, channel: OwnLanes) -> None:
        self._channels.remove(channel)
        self._poll = None
        channel.close()

    def _run(self) -> None:
        while not self._stops:
            try:
                self._turn()
            except Exception as error:  # a defect, or no memory: who waits is told
                for channel in self._channels:
                    channel.fail(f"the thread that moves its bytes failed: {error!r}")
                time.sleep(0.1)

    def _turn(self) -> None:
        """Does what can be done, and sleeps."""
        silence(self._bell)
        for channel in self._channels:
            channel.say(False)  # nobody need ring as long as this looks
        self._obey()
        self._settle()
        if self._stops:
            return
        poll = self._poll = self._poll or self._watched()
        ended = {fd for fd, _ in poll.poll()} - {self._bell}
        for channel in self._channels if ended else ():
            for p in channel.others:
                channel.peers[p].died |= channel.peers[p].pidfd in ended
        if ended:
            self._poll = None

    def _watched(self) -> Any:  # `select.poll` is no type
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        for channel in self._channels:
            for p in channel.others:
                if not channel.peers[p].died:
                    poll.register(channel.peers[p].pidfd, select.POLLIN)
        return poll

    def _obey(self) -> None:
        while self._todo:
            self._todo.popleft()()
        self._closes = True
        while self._closings:
            self._closings.popleft()()
        self._closes = False

    def _drive(self) -> bool:
        return any([drive(channel) for channel in self._channels])

    def _settle(self) -> None:
        """Drives until nothing moves; what moves after that, a peer rings for."""
        while True:
            while self._drive() and not self._stops:
                self._obey()
            for channel in self._channels:
                channel.say(True)
            fence()
            for channel in self._channels:
                channel.look()
            if self._stops:
                return
            if not self._drive():
                break
        for channel in self._channels:
            channel.judge()


# Registered when this is imported, so that it runs after all that waits for transfers at the end.
@atexit.register
def _stop_all() -> None:
    for engine in _ALL:
        engine.stop()


def _state(op: Moving, asked: int) -> int:
    """1: what is asked for (all has come, all has left) is so, 0: not yet, -1: it failed."""
    if op.failed:
        return -1
    return int(not (asked & _IN and op.in_left) and not (asked & _OUT and op.out_left))


def _array(address: int, size: int) -> Sequence[int]:
    """The numbers there; of no array, zeros."""
    return (ctypes.c_int64 * size).from_address(address)[:] if address else [0] * size
