"""Continuous batching with chunked prefill: which sequences run in a step, and how many tokens of each.

Decodes come first, then chunks of prompts, in order. With a budget of 16 rows, for example, 4 decodes leave 12 rows for
prompts.
"""

from heapq import merge

from ._plan import find_wanted
from ._pool import extend_contents
from ._state import Rows, Sequence, State

Chunks = list[tuple[Sequence, int]]


def select_chunks(state: State) -> list[Rows]:
    """Returns the chunks of the next plan, decodes first.

    Every decoding sequence has its token in the plan. Prompts share the rest of the budget in order. The first sequence
    in order always has a token, because preemption takes victims from the end of the order, and because a request that
    fits the empty pool fits when all other sequences have left.
    """
    state.running.sort(key=state.rank)
    decodes = _reserve_decode_blocks(state)
    prompts = _select_prefill_chunks(state, decodes)
    chunks = [Rows(sequence, 1, (sequence.computed,)) for sequence in decodes]
    if not prompts:
        return chunks
    return chunks + [Rows(s, num, find_wanted(s, num)) for s, num in _trim_to_bucket(state, len(decodes), prompts)]


def _reserve_decode_blocks(state: State) -> list[Sequence]:
    """Gives each decoding sequence the block of its next token. Preemption from the end of the order makes room."""
    pool, block, decodes = state.pool, state.limits.block, []
    for sequence in state.running[:]:
        computed, blocks = sequence.computed, sequence.blocks
        if not blocks or computed != len(sequence.tokens) - 1:
            continue
        if len(blocks) * block <= computed:
            while not pool.available and sequence.blocks:
                state.preempt(state.running[-1])  # the asker, if last in order
            if not sequence.blocks:
                continue
            sequence.blocks.append(pool.take())
        decodes.append(sequence)
    return decodes


def _select_prefill_chunks(state: State, decodes: list[Sequence]) -> Chunks:
    """Returns the chunks of prompts of running and waiting sequences, in order. Victims leave `decodes`."""
    chunks: Chunks = []
    if len(decodes) == len(state.running) and not state.waiting:
        return chunks
    prefills = [sequence for sequence in state.running if sequence.computed != len(sequence.tokens) - 1]
    used = extra = 0  # tokens in chunks, and wanted rows beyond a single row for each running sequence
    blocked = False
    for sequence in merge(prefills, state.line(), key=state.rank):
        left = state.limits.budget - len(decodes) - used
        if left <= 0:
            break
        if not sequence.blocks:
            # Nothing overtakes a sequence that waits for blocks.
            blocked = blocked or sequence.preempted == state.step or not _admit_waiting(state, sequence, extra)
            if blocked:
                continue
            decodes[:] = [d for d in decodes if d.blocks]
            left = state.limits.budget - len(decodes) - used
        count = min(left, sequence.goal - sequence.computed)
        count = _bound_rows(sequence, count, state.limits.running - len(state.running) - extra)
        count = _keep_images_whole(sequence, count)
        if not count:  # the next step begins with this image
            continue
        chunks.append((sequence, count))
        used += count
        extra += max(0, len(find_wanted(sequence, count)) - 1)
    return chunks


def _bound_rows(sequence: Sequence, count: int, spare: int) -> int:
    """Bounds the chunk of a scored prompt to its guaranteed row of logits and `spare` further rows."""
    if sequence.scored >= sequence.prompt - 1:
        return count
    return min(count, max(0, sequence.scored - sequence.computed) + 1 + spare)


def _keep_images_whole(sequence: Sequence, count: int) -> int:
    """Returns the number of tokens of a chunk that cuts no image whose tokens read one another."""
    images = sequence.request.images
    return count if images is None else images.bound_chunk(sequence.computed, count)


def _admit_waiting(state: State, sequence: Sequence, extra: int) -> bool:
    """Gives a waiting sequence blocks for all tokens, or none. Later sequences may be preempted."""
    pool, limits, tokens = state.pool, state.limits, sequence.tokens
    num_shared = sequence.reusable // limits.block
    extend_contents(sequence.contents, sequence.keyed, limits.block, num_shared, state.scope(sequence))
    shared = pool.find(sequence.contents[:num_shared])
    pool.hold(shared)
    need = limits.blocks_of(sequence.goal) - len(shared)
    leavers = _choose_preemption_victims(state, sequence, need, len(state.running) + extra >= limits.running)
    if leavers is None:
        pool.release(shared)
        return False
    for victim in leavers:
        state.preempt(victim)
    sequence.blocks = shared + [pool.take() for _ in range(need)]
    state.hold_source(sequence)
    sequence.recorded = len(shared)
    sequence.computed = len(shared) * limits.block
    if not sequence.begun:
        state.cache_stats = state.cache_stats.begun(len(tokens), sequence.computed)
    sequence.begun = True
    state.leave_line(sequence)
    state.running.append(sequence)
    state.running.sort(key=state.rank)
    return True


def _choose_preemption_victims(state: State, sequence: Sequence, need: int, full: bool) -> list[Sequence] | None:
    """Returns the fewest sequences from the end of the order that make room, all behind the asker.

    None if the room does not suffice.
    """
    pool, found, left = state.pool, [], dict[int, int]()
    room = pool.available
    place = state.rank(sequence)
    for victim in reversed(state.running):
        if (room >= need and not (full and not found)) or state.rank(victim) < place:
            break
        found.append(victim)
        for block in victim.blocks:
            left[block] = left.get(block, pool.references[block]) - 1
            room += not left[block]
    return found if room >= need and not (full and not found) else None


def _trim_to_bucket(state: State, num_decodes: int, prompts: Chunks) -> Chunks:
    """Defers the end of the prompts to the next step where fewer padding rows outweigh the deferred tokens."""
    excess = state.limits.excess(num_decodes + sum(count for _, count in prompts), least=num_decodes + 1)
    kept = prompts[:]
    while excess:
        sequence, count = kept.pop()
        if count > excess:
            kept.append((sequence, _keep_images_whole(sequence, count - excess) or count))
        excess = max(0, excess - count)
    return kept
