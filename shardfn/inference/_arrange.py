"""Which sequences run in a step, and how many tokens of each: decodes first, then chunks of prompts, in order."""

from heapq import merge

from ._plan import wanted
from ._pool import extend_contents
from ._state import Sequence, State

Chunks = list[tuple[Sequence, int]]


def arrange(state: State) -> Chunks:
    """Returns the chunks of the next plan, decodes first.

    Every running sequence that decodes has its token in the plan; prompts share the rest of the budget in order. The
    first sequence in order always has a token: victims are taken from the end of the order, and a request that fits the
    pool alone fits when all others have left.
    """
    state.running.sort(key=state.rank)
    decodes = _grow_decodes(state)
    prompts = _share_tokens(state, decodes)
    return [(sequence, 1) for sequence in decodes] + _trim_padding(state, len(decodes), prompts)


def _is_decoding(sequence: Sequence) -> bool:
    return sequence.computed == len(sequence.tokens) - 1


def _grow_decodes(state: State) -> list[Sequence]:
    """Gives each decoding sequence the block of its next token, and preempts from the end of the order for it."""
    pool, block, decodes = state.pool, state.limits.block, []
    for sequence in state.running[:]:
        if not sequence.blocks or sequence.computed != len(sequence.tokens) - 1:
            continue
        if len(sequence.blocks) * block <= sequence.computed:
            while not pool.available and sequence.blocks:
                state.preempt(state.running[-1])  # the asker itself, if it is last
            if not sequence.blocks:
                continue
            sequence.blocks.append(pool.take())
        decodes.append(sequence)
    return decodes


def _share_tokens(state: State, decodes: list[Sequence]) -> Chunks:
    """Chunks of prompts, of running and of waiting sequences, in order; victims leave `decodes`."""
    prefills = [sequence for sequence in state.running if not _is_decoding(sequence)]
    chunks: Chunks = []
    used = extra = 0  # tokens in chunks; rows wanted beyond one for each running sequence
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
        count = min(left, len(sequence.tokens) - sequence.computed)
        count = _row_bound(sequence, count, state.limits.running - len(state.running) - extra)
        chunks.append((sequence, count))
        used += count
        extra += max(0, len(wanted(sequence, count)) - 1)
    return chunks


def _row_bound(sequence: Sequence, count: int, spare: int) -> int:
    """Bounds a chunk of a prompt that is scored, so that it wants at most its own row of logits and `spare` others."""
    if sequence.scored >= sequence.prompt - 1:
        return count
    return min(count, max(0, sequence.scored - sequence.computed) + 1 + spare)


def _admit_waiting(state: State, sequence: Sequence, extra: int) -> bool:
    """Gives a waiting sequence blocks for all its tokens, or none; takes them from those behind it if it must."""
    pool, limits, tokens = state.pool, state.limits, sequence.tokens
    num_shared = sequence.reusable // limits.block
    extend_contents(sequence.contents, tokens, limits.block, num_shared, state.scope(sequence))
    shared = pool.find(sequence.contents[:num_shared])
    pool.hold(shared)
    need = limits.blocks_of(len(tokens)) - len(shared)
    leavers = _choose_victims(state, sequence, need, len(state.running) + extra >= limits.running)
    if leavers is None:
        pool.release(shared)
        return False
    for victim in leavers:
        state.preempt(victim)
    sequence.blocks = shared + [pool.take() for _ in range(need)]
    sequence.recorded = len(shared)
    sequence.computed = len(shared) * limits.block
    if not sequence.begun:
        state.use = state.use.begun(len(tokens), sequence.computed)
    sequence.begun = True
    state.leave_line(sequence)
    state.running.append(sequence)
    state.running.sort(key=state.rank)
    return True


def _choose_victims(state: State, sequence: Sequence, need: int, full: bool) -> list[Sequence] | None:
    """Returns the fewest sequences from the end of the order that make room, all behind the asker.

    None if not enough.
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


def _trim_padding(state: State, num_decodes: int, prompts: Chunks) -> Chunks:
    """Puts the end of the prompts off to the next step where that saves more padding than it defers tokens."""
    excess = state.limits.excess(num_decodes + sum(count for _, count in prompts), least=num_decodes + 1)
    kept = prompts[:]
    while excess:
        sequence, count = kept.pop()
        if count > excess:
            kept.append((sequence, count - excess))
        excess = max(0, excess - count)
    return kept
