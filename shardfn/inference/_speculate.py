"""Speculative decoding in a step: rows of drafts next to the rows of known tokens, last in priority.

A drafter may want a [SPEC] token after each place: then a step has fewer drafts, and a further row for each.

Rows are nearly free until a step computes more than it reads. So drafts fill a step up to `Limits.drafts + 1` rows, and
beyond only padding rows. A drafter that computes is asked only where each sequence that draws can have a draft, for
example for up to 8 sequences with `Limits.drafts = 15`, as its proposals take time.
"""

import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import cast

from ._draft_tree import NO_DRAFTS, DraftTree
from ._drafters import BatchDrafter, Context, RejectionDrafter
from ._state import Rows, Sequence, State

Permit = Callable[[Context, DraftTree], DraftTree]  # function that keeps the drafts permitted by a sequence's grammar


def add_drafts(state: State, chunks: list[Rows], cut: Permit | None = None) -> list[Rows]:
    """Returns the chunks of a plan, with drafts for sequences that draw.

    Without `cut`, only sequences without a grammar have drafts.
    """
    spare = _count_spare(state, chunks) if state.drafter is not None and chunks else 0
    if spare <= 0:
        return chunks
    able = {
        i: most
        for i, chunk in enumerate(chunks)
        if (most := _bound_drafts(chunk, state.draft_block, grammars=cut is not None))
    }
    if state.spec_tokens:  # a draft needs three rows: the draft, and two [SPEC] tokens
        able = dict(itertools.islice(able.items(), spare // 3))
        spare = (spare - len(able)) // 2
    if state.drafts_at_once and spare < len(able):
        return chunks
    propose = _propose_at_once if state.drafts_at_once else _propose_in_turn
    found = propose(state, chunks, able, spare)
    found = found if cut is None else _cut_excluded(chunks, found, cut)
    if state.spec_tokens:
        found = {i: found.get(i, NO_DRAFTS).add_spec_tokens(state.limits.vocab) for i in able}
    else:
        _trim_drafts(state, sum(chunk.num for chunk in chunks), found)
    return [_add_drafts(state, chunk, found[i]) if i in found else chunk for i, chunk in enumerate(chunks)]


def take_drafts(state: State, sequence: Sequence, chunk: Rows, accepted: int, drawn: Seq[int]) -> None:
    """Counts the drafts of a step, keeps the accepted drafts, and returns the blocks of rejected drafts to the pool.

    The accepted drafts of a tree need not be its first drafts. The next step moves their keys and values to their
    positions.
    """
    drafted, block, blocks = chunk.drafts.num_drafts, state.limits.block, sequence.blocks
    state.moves += chunk.moves(accepted, drawn, lambda at: blocks[at // block] * block + at % block)
    num, height = len(sequence.tokens), chunk.drafts.height
    if drafted:
        state.speculation = state.speculation.add(drafted, accepted)
        sequence.draft_length = sequence.draft_length.after(drafted, accepted, num_tokens=num, height=height)
    if state.draft_block:
        cast("RejectionDrafter", state.drafter).take_rejected(sequence.context, chunk.drafts.find_rejected(drawn))
    needed = state.limits.blocks_of(num)
    state.pool.release(sequence.blocks[needed:])
    del sequence.blocks[needed:]


def _count_spare(state: State, chunks: list[Rows]) -> int:
    """Returns the number of draft tokens that still fit in the step."""
    limits = state.limits
    if not limits.drafts:
        return 0
    rows, wanted = sum(chunk.num for chunk in chunks), sum(len(chunk.positions) for chunk in chunks)
    padded = 0 if state.drafts_at_once else limits.bucket_of(rows)
    room = max(padded, limits.drafts + 1) - rows
    return min(room, limits.budget - rows, limits.wanted(limits.budget) - wanted)


def _bound_drafts(chunk: Rows, block: int, *, grammars: bool) -> int:
    """Returns the most drafts of a chunk: `block`, or with 0 the number that suits the sequence.

    0 unless the chunk is the last known token of a sequence that may have drafts.
    """
    sequence = chunk.sequence
    num, how, draft_length = len(sequence.tokens), sequence.request.sampling, sequence.draft_length
    draws = chunk.num == len(chunk.positions) == 1 and sequence.computed == num - 1
    if not draws or (how.grammar is not None and not grammars) or (not block and num < draft_length.resume):
        return 0
    return min(
        block or draft_length.width, max(0, sequence.prompt + how.max_tokens - num - 1)
    )  # the last drawn token is never fed


_Found = dict[int, DraftTree]  # by the number of a chunk


def _propose_in_turn(state: State, chunks: list[Rows], able: Mapping[int, int], spare: int) -> _Found:
    """Returns proposals, sequence by sequence, each within the rows that the sequences before have left."""
    assert state.drafter is not None
    found: _Found = {}
    for left, (i, most) in zip(range(len(able), 0, -1), able.items(), strict=True):
        most = min(most, -(-spare // left))
        if most > 0 and len(
            drafts := _check_proposal(state, state.drafter.propose(chunks[i].sequence.context, most), most)
        ):
            found[i] = drafts
            spare -= len(drafts)
    return found


def _propose_at_once(state: State, chunks: list[Rows], able: Mapping[int, int], spare: int) -> _Found:
    """Returns proposals of all sequences at once. Each may have an equal part of the rows, and unclaimed rows."""
    drafter = cast("BatchDrafter", state.drafter)
    mosts: dict[int, int] = {}
    for left, (i, most) in zip(range(len(able), 0, -1), sorted(able.items(), key=lambda one: one[1]), strict=True):
        mosts[i] = min(most, spare // left)
        spare -= mosts[i]
    asks = {i: (chunks[i].sequence.context, mosts[i]) for i in able if mosts[i]}
    proposals = drafter.propose_all(list(asks.values())) if asks else []
    found = {i: _check_proposal(state, one, mosts[i]) for i, one in zip(asks, proposals, strict=True)}
    return {i: drafts for i, drafts in found.items() if len(drafts)}


def _check_proposal(state: State, proposal: Seq[int] | DraftTree, most: int) -> DraftTree:
    drafts = proposal if isinstance(proposal, DraftTree) else DraftTree.chain(proposal)
    vocab = state.limits.vocab
    if len(drafts) > most or not all(0 <= token < vocab for token in drafts.tokens):
        raise ValueError(
            f"the drafter must propose at most {most} tokens here, each from 0 to {vocab - 1}, got {drafts.tokens}."
        )
    return drafts


def _cut_excluded(chunks: list[Rows], found: _Found, cut: Permit) -> _Found:
    """Drops drafts that grammars exclude. A proposal with only excluded drafts counts as rejected."""
    kept: _Found = {}
    for i, drafts in found.items():
        one = chunks[i].sequence
        tree = drafts if one.request.sampling.grammar is None else cut(one.context, drafts)
        if len(tree):
            kept[i] = tree
        else:
            one.draft_length = one.draft_length.after(len(drafts), 0, num_tokens=len(one.tokens))
    return kept


def _trim_drafts(state: State, rows: int, found: _Found) -> None:
    """Drops the last drafts where fewer padding rows outweigh the lost drafts."""
    excess = state.limits.excess(rows + sum(map(len, found.values())), least=rows)
    for i in reversed(list(found)):
        cut = min(excess, len(found[i]))
        found[i] = found[i].first(len(found[i]) - cut)
        excess -= cut


def _add_drafts(state: State, chunk: Rows, drafts: DraftTree) -> Rows:
    """Returns a chunk with the drafts for which there are free blocks. No sequence is preempted for drafts."""
    sequence, pool, block = chunk.sequence, state.pool, state.limits.block
    first = sequence.computed + 1  # the position of the first draft
    while len(sequence.blocks) * block < first + len(drafts) and pool.available:
        sequence.blocks.append(pool.take())
    drafts = drafts.first(len(sequence.blocks) * block - first)
    count = 1 + len(drafts)
    chain = range(first - 1, first - 1 + count)
    positions = [first - 1 + depth for depth in (0, *drafts.depths)] if drafts.branches else chain
    return Rows(sequence, count, positions, drafts)
