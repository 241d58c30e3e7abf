"""The state of the schedule: sequences, their line, and the pool; equal on all ranks."""

import dataclasses
import hashlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice

from ._cache_use import CacheUse
from ._drafters import Context, Drafter
from ._guesses import Guesses, Trust
from ._limits import Limits
from ._pool import Content, Pool, Scope
from ._requests import Request
from ._trees import NO_DRAFTS, Tree


@dataclass(slots=True)
class Chunk:
    """A chunk of a sequence in the plan in flight: tokens from `start` on, and the positions whose logits it wants.

    Its last tokens are the drafts.
    """

    serial: int
    start: int
    count: int
    positions: Seq[int]
    drafts: Tree = NO_DRAFTS

    def own(self, drawn: Seq[int], first: int) -> Seq[int]:
        """Returns the tokens of its rows among those of all rows of the plan, from the number of its first row on."""
        return drawn[first : first + len(self.positions)]

    def valid(self, drawn: Seq[int]) -> list[tuple[int, int]]:
        """Rows whose results are those of known tokens alone, and their positions: drafts are valid if they are drawn.

        Args:
            drawn: for each of `positions`.
        """
        known = len(self.positions) - len(self.drafts)
        accepted = self.drafts.path(drawn[known - 1 :]) if len(self.drafts) else []
        return [(row, self.positions[row]) for row in [*range(known), *(known + draft for draft in accepted)]]

    def moves(self, accepted: int, drawn: Seq[int], slot: Callable[[int], int]) -> list[tuple[int, int]]:
        """Returns the slots of accepted drafts that others come before, and those of their positions.

        Args:
            accepted: the number of drafts, from the first on.
            drawn: for each of `positions`.
            slot: slot of a place in the sequence's blocks.
        """
        path = self.drafts.path(drawn)[:accepted] if self.drafts.branches else []
        begin = self.start + self.count - len(self.drafts)
        return [(slot(begin + draft), slot(begin + at)) for at, draft in enumerate(path) if at != draft]


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. Its blocks are a field, so that they leave with it."""

    serial: int  # in order of arrival
    name: str
    choice: int
    request: Request
    arrived: int  # step
    key: int  # of its draws
    prompt: int  # tokens of the prompt
    scored: int  # the first position whose row of logits is still wanted
    tokens: array  # prompt, then drawn ones
    computed: int = 0  # tokens whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)  # empty while it waits
    contents: list[Content] = field(default_factory=list)  # of its first full blocks, those asked for so far
    recorded: int = 0  # blocks whose content the pool was given
    begun: bool = False
    preempted: int = -1  # the last step in which it lost its blocks
    trust: Trust = field(default_factory=Trust)  # in its drafts

    @property
    def reusable(self) -> int:
        """Tokens that may come from cached blocks: not the last, whose logits are needed, nor those to score."""
        return len(self.tokens) - 1 if self.scored >= self.prompt - 1 else self.scored

    @property
    def context(self) -> Context:
        """Returns the sequence as a drafter sees it."""
        request = self.request
        salt = request.salt + request.adapter and repr((request.salt, request.adapter)).encode()
        return Context(self.serial, self.name, self.choice, self.tokens, self.prompt, salt, self.key, request.sampling)

    def copy(self) -> "Sequence":
        """Returns a sequence of its own, equal to this one."""
        return dataclasses.replace(self, tokens=self.tokens[:], blocks=self.blocks[:], contents=self.contents[:])


@dataclass(slots=True)
class State:
    """All that decides the next plan. Made by `start`, consumed by `advance`. `copy` keeps one.

    Attributes:
        limits: the sizes.
        pool: the blocks.
        tokenizer: a digest of the one by which texts stop, or empty.
        drafter: proposes tokens, or None.
        step: plans so far, empty ones counted.
        number: events so far; the number of the next one.
        version: version of the parameters.
        pending: a version that waits until sequences that have begun are done, or None.
        time: the last reading of the clock, in milliseconds.
        draining: whether new requests are refused.
        arrivals: sequences so far.
        sequences: those in progress, by serial number.
        names: serial numbers of a request's choices in progress.
        running: sequences that hold blocks, first in order first.
        waiting: serial numbers of the others, ascending, by priority.
        flight: the chunks of the plan in flight.
        moves: slots whose content the next plan moves first, and their new ones.
        guesses: counts of drafts so far.
        use: counts of the cache's use so far.
        chain: eight bytes of all inputs and plans so far: equal on two ranks if these were equal.
        consumed: whether `advance` has taken this state.
    """

    limits: Limits
    pool: Pool
    tokenizer: bytes = b""
    drafter: Drafter | None = None
    step: int = 0
    number: int = 0
    version: int = 0
    pending: int | None = None
    time: int = 0
    draining: bool = False
    arrivals: int = 0
    sequences: dict[int, Sequence] = field(default_factory=dict)
    names: dict[str, list[int]] = field(default_factory=dict)
    running: list[Sequence] = field(default_factory=list)
    waiting: dict[int, list[int]] = field(default_factory=dict)
    flight: list[Chunk] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)
    guesses: Guesses = field(default_factory=Guesses)
    use: CacheUse = field(default_factory=CacheUse)
    chain: bytes = bytes(8)
    consumed: bool = False

    @property
    def idle(self) -> bool:
        """Returns whether no request is in progress."""
        return not self.sequences

    def counts(self) -> dict[str, int]:
        """Numbers of sequences and blocks, for metrics."""
        running = len(self.running)
        return {"running": running, "waiting": len(self.sequences) - running, **self.pool.counts()}

    def copy(self) -> "State":
        """Returns a state of its own, equal to this one. It may be advanced even where this one was."""
        sequences = {serial: sequence.copy() for serial, sequence in self.sequences.items()}
        return dataclasses.replace(
            self,
            pool=self.pool.copy(),
            drafter=None if self.drafter is None else self.drafter.copy(),
            sequences=sequences,
            names={name: serials[:] for name, serials in self.names.items()},
            running=[sequences[s.serial] for s in self.running],
            waiting={priority: lane[:] for priority, lane in self.waiting.items()},
            flight=[dataclasses.replace(chunk) for chunk in self.flight],
            moves=self.moves[:],
            consumed=False,
        )

    def rows_in_flight(self) -> Iterator[tuple[Chunk, Sequence, int]]:
        """Yields the chunks of the plan in flight, their sequences, and the numbers of their first wanted rows."""
        first = 0
        for chunk in self.flight:
            yield chunk, self.sequences[chunk.serial], first
            first += len(chunk.positions)

    def rank(self, sequence: Sequence) -> tuple[int, int, int]:
        """Returns a sequence's place in order: old ones by arrival, then the others by priority and arrival."""
        if self.step - sequence.arrived >= self.limits.age:
            return 0, 0, sequence.serial
        return 1, -sequence.request.priority, sequence.serial

    def scope(self, sequence: Sequence) -> Scope:
        """Returns the part of a block's key that is not tokens."""
        request = sequence.request
        return Scope(self.version, request.adapter, self.limits.cache_dtype, request.salt)

    def line(self) -> list[Sequence]:
        """Returns the first waiting sequences in order, no more than can run. The rest cannot begin in this step."""
        heads = (islice(self._find_eligible(lane), self.limits.running) for lane in self.waiting.values())
        return sorted((sequence for head in heads for sequence in head), key=self.rank)

    def _find_eligible(self, lane: list[int]) -> Iterator[Sequence]:
        for serial in lane:
            sequence = self.sequences[serial]
            if (self.pending is None or sequence.begun) and not self._waits_for_first(sequence):
                yield sequence

    def _waits_for_first(self, sequence: Sequence) -> bool:
        """Returns whether the first choice is about to fill blocks of the prompt that this choice will share."""
        if sequence.choice == 0 or sequence.begun or sequence.prompt <= self.limits.block:
            return False
        first = self.sequences.get(sequence.serial - sequence.choice)
        return first is not None and first.computed < first.prompt

    def add(self, name: str, request: Request) -> None:
        """Puts a request's choices in line."""
        n = request.sampling.n
        self.names[name] = list(range(self.arrivals, self.arrivals + n))
        prompt = len(request.prompt)
        for choice in range(n):
            wants = request.sampling.prompt_logprobs and choice == 0
            new = Sequence(
                *(self.arrivals, name, choice, request, self.step, draw_key(request.sampling.seed, choice), prompt),
                scored=0 if wants else prompt - 1,
                tokens=array("q", request.prompt),
            )
            self.sequences[new.serial] = new
            self.wait(new)
            self.arrivals += 1

    def wait(self, sequence: Sequence) -> None:
        """Puts a sequence in line, at the place of its arrival."""
        insort(self.waiting.setdefault(sequence.request.priority, []), sequence.serial)

    def leave_line(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out of the line."""
        priority = sequence.request.priority
        lane = self.waiting[priority]
        del lane[bisect_left(lane, sequence.serial)]
        if not lane:
            del self.waiting[priority]

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks. It waits, with its drawn tokens, and is computed anew."""
        self.running.remove(sequence)
        self._take_blocks(sequence)
        sequence.preempted = self.step
        self.use = self.use.preempted()
        self.wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence in any phase."""
        if sequence.blocks:
            self.running.remove(sequence)
            self._take_blocks(sequence)
        else:
            self.leave_line(sequence)
        if self.drafter is not None:
            self.drafter.end(sequence.context)
        del self.sequences[sequence.serial]
        serials = self.names[sequence.name]
        serials.remove(sequence.serial)
        if not serials:
            del self.names[sequence.name]

    def _take_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.recorded = 0


def start(limits: Limits, tokenizer: bytes = b"", drafter: Drafter | None = None) -> State:
    """Returns the state before the first event.

    Args:
        limits: the sizes.
        tokenizer: a digest of the one by which texts stop, so that ranks find theirs to be equal.
        drafter: proposes tokens. The state takes a copy of it.

    Example:
        >>> start(Limits(vocab=100, context=64, blocks=9)).counts()
        {'running': 0, 'waiting': 0, 'free': 8, 'held': 0, 'cached': 0}
    """
    drafter = None if drafter is None else drafter.copy()
    data = tokenizer + (b"" if drafter is None else drafter.digest())
    chain = hashlib.blake2b(data, digest_size=8).digest() if data else bytes(8)
    return State(limits, Pool(limits.blocks), tokenizer, drafter, chain=chain)


def draw_key(seed: int, choice: int) -> int:
    """Returns the key of a choice's draws; with a token's position it gives the one uniform number of that draw.

    Example:
        >>> draw_key(7, 0) == draw_key(7, 0), draw_key(7, 0) == draw_key(7, 1)
        (True, False)
    """
    data = seed.to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
