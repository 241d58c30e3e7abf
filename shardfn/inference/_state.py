"""State of the schedule: sequences, their line, and the pool. Equal on all ranks."""

import dataclasses
import hashlib
import operator
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from ._draft_tree import NO_DRAFTS, DraftTree
from ._drafters import (
    BatchDrafter,
    Context,
    Drafter,
    RejectionDrafter,
    find_hidden_window,
    find_wanted_layers,
    wants_spec_token,
)
from ._limits import Limits
from ._pool import BlockContent, BlockPool, PrefixScope, extend_contents
from ._requests import Request
from ._results import CacheStats, SpeculationStats
from ._speech import SourceFeatures

_FIRST, _LONGEST_PAUSE = 4, 5


class DraftLength(NamedTuple):
    """Number of a sequence's next drafts, by the drafts that were accepted before.

    Attributes:
        width: most drafts of the next step. The width doubles when all drafts that could be accepted are, for example
            from 4 to 8. Otherwise it becomes the number of accepted drafts plus one, and in proportion for drafts that
            branch.
        strikes: number of last steps with only rejected drafts.
        resume: number of tokens from which the sequence has drafts again. Each strike doubles the pause.

    Example:
        >>> DraftLength().after(4, 4, num_tokens=20)
        DraftLength(width=8, strikes=0, resume=0)
        >>> DraftLength().after(4, 0, num_tokens=20).after(1, 0, num_tokens=22)
        DraftLength(width=1, strikes=2, resume=26)
        >>> DraftLength().after(12, 2, num_tokens=20, height=4)
        DraftLength(width=9, strikes=0, resume=0)
    """

    width: int = _FIRST
    strikes: int = 0
    resume: int = 0

    def after(self, drafted: int, accepted: int, *, num_tokens: int, height: int = 0) -> "DraftLength":
        """Returns the number after a step.

        Args:
            drafted: number of drafts.
            accepted: number of accepted drafts.
            num_tokens: number of tokens that the sequence has then.
            height: most drafts of a tree that could be accepted. 0 is all.
        """
        if accepted:
            height = height or drafted
            part = -(-drafted * (accepted + 1) // height)
            return DraftLength(max(self.width, 2 * drafted) if accepted == height else part, 0, 0)
        strikes = min(self.strikes + 1, _LONGEST_PAUSE)
        return DraftLength(1, strikes, num_tokens + (1 << strikes))


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. Blocks are a field, so that they leave with the sequence."""

    serial: int  # in order of arrival
    name: str
    choice: int
    request: Request
    arrived: int  # step
    key: int  # of its draws
    prompt: int  # tokens of the prompt
    scored: int  # the first position whose row of logits is still wanted
    tokens: array  # prompt, then drawn tokens
    draws: bool = True  # False for a prompt that is only scored: its last token is not computed
    computed: int = 0  # tokens whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)  # empty in a waiting sequence
    source_blocks: list[int] = field(default_factory=list)  # of its source's keys, as long as it has blocks
    contents: list[BlockContent] = field(default_factory=list)  # contents of the first full blocks, asked for so far
    recorded: int = 0  # blocks whose content the pool was given
    begun: bool = False
    preempted: int = -1  # last step of a preemption
    draft_length: DraftLength = field(default_factory=DraftLength)  # in its drafts
    # Behind the draws of the last tokens, for a drafter that wants states: the states of a step's rows, and a row.
    state_rows: tuple[tuple[Tensor, int], ...] = ()

    @property
    def reusable(self) -> int:
        """Returns the number of tokens that may come from cached blocks.

        Neither the last, whose logits are needed, nor scored tokens.
        """
        return len(self.tokens) - 1 if self.scored >= self.prompt - 1 else self.scored

    @property
    def goal(self) -> int:
        """Returns the number of known tokens to compute."""
        return len(self.tokens) - (not self.draws)

    @property
    def keyed(self) -> array:
        """Returns the tokens as the keys of blocks have them."""
        images = self.request.images
        return self.tokens if images is None else images.keys + self.tokens[self.prompt :]

    @property
    def context(self) -> Context:
        """Returns the sequence as a drafter sees it."""
        request = self.request
        salt = request.salt + request.adapter and repr((request.salt, request.adapter)).encode()
        own = self.serial, self.name, self.choice, self.tokens, self.prompt, salt, self.key
        return Context(*own, request.sampling, self.states)

    @property
    def states(self) -> tuple[Tensor, ...]:
        """Returns the hidden states behind the draws of the last tokens."""
        return tuple([hidden[row] for hidden, row in self.state_rows])

    def copy(self) -> "Sequence":
        """Returns a separate sequence, equal to this sequence."""
        return dataclasses.replace(
            self,
            tokens=self.tokens[:],
            blocks=self.blocks[:],
            contents=self.contents[:],
            source_blocks=self.source_blocks[:],
        )


class Rows(NamedTuple):
    """Rows of a sequence in a plan: the next tokens from `sequence.computed` on. The last rows have the drafts.

    Attributes:
        sequence: sequence whose next tokens the rows have.
        num: number of rows.
        positions: positions whose logits are wanted, of the last rows.
        drafts: tokens of the last rows, guessed to follow the known tokens.
    """

    sequence: Sequence
    num: int
    positions: Seq[int]
    drafts: DraftTree = NO_DRAFTS

    def before(self, wanted: int) -> array:
        """Returns the tokens before the place of a wanted row, drafts included."""
        known, draft = self.sequence.tokens, wanted - (len(self.positions) - len(self.drafts))
        return known[: self.positions[wanted] + 1] + array("q", self.drafts.branch(draft) if draft >= 0 else ())

    def read_rows(self, drawn: Seq[int], first: int) -> Iterable[tuple[int, int, int]]:
        """Returns the rows whose results follow only from known tokens: number, position and drawn token.

        A draft that was drawn is known.

        Args:
            drawn: drawn token for each row of the plan.
            first: number of the chunk's first row.
        """
        positions, drafts = self.positions, self.drafts
        if len(positions) == 1:  # a decode has no draft
            return ((first, positions[0], drawn[first]),)
        own = drawn[first : first + len(positions)]
        found = [*zip(range(first, first + len(own)), positions, own, strict=True)]
        known = len(own) - len(drafts)
        return (
            found[:known] + [found[known + draft] for draft in drafts.path(own[known - 1 :])]
            if drafts.tokens
            else found
        )

    def find_state_row(self, drawn: Seq[int], accepted: int) -> int | None:
        """Returns the row of the [SPEC] token after the last accepted draft, or None without such a row.

        Args:
            drawn: drawn token for each of `positions`.
            accepted: number of accepted drafts.
        """
        known = len(self.positions) - len(self.drafts)
        last = self.drafts.path(drawn[known - 1 :])[accepted - 1] if accepted else -1
        place = self.drafts.find_spec_token(last)
        return None if place is None else known + place

    def moves(self, accepted: int, drawn: Seq[int], slot: Callable[[int], int]) -> list[tuple[int, int]]:
        """Returns the slots of accepted drafts that other drafts come before, and the slots of their positions.

        Args:
            accepted: number of drafts, from the first on.
            drawn: drawn token for each of `positions`.
            slot: slot of a place in the sequence's blocks.
        """
        if not self.drafts.branches:
            return []
        path, begin = self.drafts.path(drawn)[:accepted], self.positions[0] + 1
        return [(slot(begin + draft), slot(begin + at)) for at, draft in enumerate(path) if at != draft]


class SourceFill(NamedTuple):
    """A source that a step encodes before its rows.

    Attributes:
        tokens: token ids of the source.
        slots: places in the cache of sources for the keys and values of each token.
        features: features in place of token ids, or None.
    """

    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    features: SourceFeatures | None = None


@dataclass(slots=True)
class State:
    """All that decides the next plan. Made by `start`, consumed by `advance`. `copy` keeps a state.

    Attributes:
        limits: sizes.
        pool: blocks.
        tokenizer: digest of the tokenizer by which texts stop, or empty.
        drafter: drafter for speculative decoding, or None.
        step: plans so far, empty plans counted.
        number: events so far, and the number of the next event.
        version: version of the parameters.
        pending: version that waits until sequences that have begun are done, or None.
        time: last reading of the clock, in milliseconds.
        draining: whether new requests are refused.
        arrivals: sequences so far.
        sequences: sequences in progress, by serial number.
        names: serial numbers of a request's choices in progress.
        running: sequences that hold blocks, first in order first.
        waiting: serial numbers of waiting sequences, ascending, by priority.
        flight: chunks of the plan in flight.
        moves: slots whose content the next plan moves first, and their new slots.
        sources: blocks of the cache of sources.
        fills: sources that the next plan encodes first.
        speculation: counts of drafts so far.
        cache_stats: counts of the cache's use so far.
        chain: eight bytes of all inputs and plans so far: equal on two ranks if these were equal.
        consumed: whether `advance` has taken this state.
        hidden_window: most hidden states of a sequence that are kept for the drafter.
        draft_block: number of drafts of each step for a drafter that sees rejected rows. 0: by `DraftLength`.
        spec_tokens: whether steps have [SPEC] tokens for the drafter.
        wanted_layers: layers that the drafter wants hidden states after.
        drafts_at_once: whether the drafter proposes for all sequences at once, not beyond `Limits.drafts`.
    """

    limits: Limits
    pool: BlockPool
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
    flight: list[Rows] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)
    sources: BlockPool = field(default_factory=lambda: BlockPool(1))
    fills: list[SourceFill] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    cache_stats: CacheStats = field(default_factory=CacheStats)
    chain: bytes = bytes(8)
    consumed: bool = False
    hidden_window: int = 1
    draft_block: int = 0
    spec_tokens: bool = False
    wanted_layers: tuple[int, ...] = ()
    drafts_at_once: bool = False

    @property
    def idle(self) -> bool:
        """Returns whether no request is in progress."""
        return not self.sequences

    def counts(self) -> dict[str, int]:
        """Returns numbers of sequences and blocks, for metrics."""
        running = len(self.running)
        return {"running": running, "waiting": len(self.sequences) - running, **self.pool.counts()}

    def succeed(self) -> "State":
        """Returns the state to change in place of this state, which is consumed."""
        successor = State(*_FIELDS(self))
        self.consumed = True
        return successor

    def copy(self) -> "State":
        """Returns a separate state, equal to this state. The copy may be advanced even where the original was."""
        sequences = {serial: sequence.copy() for serial, sequence in self.sequences.items()}
        return dataclasses.replace(
            self,
            pool=self.pool.copy(),
            drafter=None if self.drafter is None else self.drafter.copy(),
            sequences=sequences,
            names={name: serials[:] for name, serials in self.names.items()},
            running=[sequences[s.serial] for s in self.running],
            waiting={priority: lane[:] for priority, lane in self.waiting.items()},
            flight=[chunk._replace(sequence=sequences[chunk.sequence.serial]) for chunk in self.flight],
            moves=self.moves[:],
            sources=self.sources.copy(),
            fills=self.fills[:],
            consumed=False,
        )

    def rows_in_flight(self) -> Iterator[tuple[Rows, Sequence, int]]:
        """Yields the chunks of the plan in flight, their sequences, and the numbers of their first wanted rows."""
        first = 0
        for chunk in self.flight:
            yield chunk, chunk.sequence, first
            first += len(chunk.positions)

    def rank(self, sequence: Sequence) -> tuple[int, int, int]:
        """Returns a sequence's place in order: old sequences by arrival, then the rest by priority and arrival."""
        if self.step - sequence.arrived >= self.limits.starvation_steps:
            return 0, 0, sequence.serial
        return 1, -sequence.request.priority, sequence.serial

    def scope(self, sequence: Sequence) -> PrefixScope:
        """Returns the part of a block's key that is not tokens."""
        request = sequence.request
        return PrefixScope(self.version, request.adapter, self.limits.cache_dtype, request.scope_salt)

    def hold_source(self, sequence: Sequence) -> None:
        """Gives a sequence that gets blocks the blocks of its source: those of an equal source, or filled next.

        There is room, as each sequence that runs has room for the longest source.
        """
        source, block, pool = sequence.request.source, self.limits.block, self.sources
        num, contents = self.limits.blocks_of(len(source)), list[BlockContent]()
        extend_contents(contents, array("q", source), block, num, self.scope(sequence))
        blocks = pool.find(contents)
        pool.hold(blocks)
        missing = contents[len(blocks) :]
        for content in missing:
            blocks.append(pool.take())
            pool.record(blocks[-1], content)
        sequence.source_blocks = blocks
        if missing:
            slots = tuple(blocks[i // block] * block + i % block for i in range(len(source)))
            self.fills.append(SourceFill(source, slots, sequence.request.features))

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
            how = request.sampling
            wants = how.prompt_logprobs and choice == 0
            first = min(max(0, how.prompt_logprobs_start - 1), prompt - 1)
            new = Sequence(
                *(self.arrivals, name, choice, request, self.step, draw_key(request.sampling.seed, choice), prompt),
                scored=first if wants else prompt - 1,
                tokens=array("q", request.prompt),
                draws=bool(how.max_tokens) or not wants or first == prompt - 1,
            )
            self.sequences[new.serial] = new
            self.wait(new)
            self.arrivals += 1

    def wait(self, sequence: Sequence) -> None:
        """Puts a sequence in line, at the place of its arrival."""
        insort(self.waiting.setdefault(sequence.request.priority, []), sequence.serial)

    def leave_line(self, sequence: Sequence) -> None:
        """Removes a waiting sequence from the queue."""
        priority = sequence.request.priority
        lane = self.waiting[priority]
        del lane[bisect_left(lane, sequence.serial)]
        if not lane:
            del self.waiting[priority]

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks (preemption).

        The sequence waits, with its drawn tokens, and is recomputed.
        """
        self.running.remove(sequence)
        self._take_blocks(sequence)
        sequence.preempted = self.step
        self.cache_stats = self.cache_stats.preempted()
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
        self.sources.release(sequence.source_blocks)
        sequence.blocks, sequence.source_blocks = [], []
        sequence.computed = sequence.recorded = 0


# All fields of a state at once, in C.
_FIELDS = operator.attrgetter(*[x.name for x in dataclasses.fields(State)])


def start(limits: Limits, tokenizer: bytes = b"", drafter: Drafter | None = None) -> State:
    """Returns the state before the first event.

    Args:
        limits: sizes.
        tokenizer: digest of the tokenizer by which texts stop, so that ranks find their tokenizers to be equal.
        drafter: drafter for speculative decoding. The state takes a copy.

    Example:
        >>> start(Limits(vocab=100, context=64, blocks=9)).counts()
        {'running': 0, 'waiting': 0, 'free': 8, 'held': 0, 'cached': 0}
    """
    drafter = None if drafter is None else drafter.copy()
    data = tokenizer + (b"" if drafter is None else drafter.digest())
    chain = hashlib.blake2b(data, digest_size=8).digest() if data else bytes(8)
    window = find_hidden_window(drafter)
    block = drafter.block if isinstance(drafter, RejectionDrafter) else 0
    pool, sources = BlockPool(limits.blocks), BlockPool(max(limits.source_blocks, 1))
    how: Any = {"hidden_window": window, "draft_block": block, "sources": sources}
    # Here only once: Python compares all names of a protocol at each call of `isinstance`.
    how |= {"spec_tokens": wants_spec_token(drafter), "wanted_layers": find_wanted_layers(drafter)}
    how["drafts_at_once"] = isinstance(drafter, BatchDrafter)
    return State(limits, pool, tokenizer, drafter, chain=chain, **how)


def draw_key(seed: int, choice: int) -> int:
    """Returns the key of a choice's draws. The key and a token's position give the uniform number of the draw.

    Example:
        >>> draw_key(7, 0) == draw_key(7, 0), draw_key(7, 0) == draw_key(7, 1)
        (True, False)
    """
    data = seed.to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
