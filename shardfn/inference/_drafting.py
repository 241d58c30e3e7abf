"""Drafts of a step: rows that a plan has beside those of known tokens, last in priority.

Rows are nearly free until a step computes more than it reads. So drafts fill a step up to `Limits.drafts` and one, and
beyond that only rows that would be padding.
"""

from ._plan import Rows
from ._state import Sequence, State


def add_drafts(state: State, chunks: list[Rows]) -> list[Rows]:
    """The chunks of a plan, with drafts for sequences that draw."""
    drafter = state.drafter
    spare = _spare(state, chunks) if drafter is not None and chunks else 0
    if drafter is None or spare <= 0:
        return chunks
    able = {i: most for i, chunk in enumerate(chunks) if (most := _most(chunk))}
    found: dict[int, tuple[int, ...]] = {}
    for left, (i, most) in zip(range(len(able), 0, -1), able.items(), strict=True):
        most = min(most, -(-spare // left))  # a part of the rows that are left
        if most > 0 and (drafts := _proposed(state, chunks[i].sequence, most)):
            found[i] = drafts
            spare -= len(drafts)
    _trim(state, sum(chunk.num for chunk in chunks), found)
    return [_with(state, chunk, found[i]) if i in found else chunk for i, chunk in enumerate(chunks)]


def take_drafts(state: State, sequence: Sequence, drafted: int, accepted: int) -> None:
    """Counts the drafts of a step, and returns the blocks that only rejected ones had."""
    state.guesses = state.guesses.add(drafted, accepted)
    sequence.trust = sequence.trust.after(drafted, accepted, num_tokens=len(sequence.tokens))
    needed = state.limits.blocks_of(len(sequence.tokens))
    state.pool.release(sequence.blocks[needed:])
    del sequence.blocks[needed:]


def _spare(state: State, chunks: list[Rows]) -> int:
    """The number of drafts that the step may have."""
    limits = state.limits
    if not limits.drafts:
        return 0
    rows, wanted = sum(chunk.num for chunk in chunks), sum(len(chunk.positions) for chunk in chunks)
    room = max(limits.bucket_of(rows), limits.drafts + 1) - rows
    return min(room, limits.budget - rows, limits.wanted(limits.budget) - wanted)


def _most(chunk: Rows) -> int:
    """The most drafts of a chunk; 0 unless it is the last known token of a sequence that may have drafts."""
    sequence = chunk.sequence
    num, how, trust = len(sequence.tokens), sequence.request.sampling, sequence.trust
    draws = chunk.num == len(chunk.positions) == 1 and sequence.computed == num - 1
    if not draws or how.grammar is not None or num < trust.resume:
        return 0
    return min(trust.width, sequence.prompt + how.max_tokens - num - 1)  # the last drawn token is never fed


def _proposed(state: State, sequence: Sequence, most: int) -> tuple[int, ...]:
    assert state.drafter is not None
    drafts = tuple(state.drafter.propose(sequence.context, most))
    vocab = state.limits.vocab
    if len(drafts) > most or not all(0 <= token < vocab for token in drafts):
        raise ValueError(
            f"the drafter proposed {drafts}; it may propose at most {most} tokens here, each from 0 to {vocab - 1}."
        )
    return drafts


def _trim(state: State, rows: int, found: dict[int, tuple[int, ...]]) -> None:
    """Leaves the last drafts out where that saves more padding than it loses drafts."""
    limits = state.limits
    total = rows + sum(map(len, found.values()))
    lower = max((size for size in limits.buckets if size <= total), default=0)
    excess = total - lower
    if lower < rows or excess >= limits.bucket_of(total) - total:
        return
    for i in reversed(list(found)):
        cut = min(excess, len(found[i]))
        found[i] = found[i][: len(found[i]) - cut]
        excess -= cut


def _with(state: State, chunk: Rows, drafts: tuple[int, ...]) -> Rows:
    """A chunk with drafts for which there are blocks; no sequence loses its own for them."""
    sequence, pool, block = chunk.sequence, state.pool, state.limits.block
    first = sequence.computed + 1  # the position of the first draft
    while len(sequence.blocks) * block < first + len(drafts) and pool.available:
        sequence.blocks.append(pool.take())
    drafts = drafts[: len(sequence.blocks) * block - first]
    count = 1 + len(drafts)
    return Rows(sequence, count, range(first - 1, first - 1 + count), drafts)
