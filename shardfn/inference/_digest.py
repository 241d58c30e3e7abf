"""A digest of the whole state, and the name of the first field in which two ranks differ."""

import functools
import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping

from ._pool import BlockContent, BlockPool, PrefixScope
from ._state import Sequence, State


def digest(state: State) -> bytes:
    """Returns eight bytes of all fields of a state, in one canonical encoding.

    Equal states have equal digests on all ranks. `state.chain` is cheaper, and covers only inputs and plans. The digest
    also sees a field that was altered and has not yet changed a plan.

    Example:
        >>> from shardfn.inference import Limits, digest, start
        >>> limits = Limits(vocab=100, context=64, blocks=9)
        >>> digest(start(limits)) == digest(start(limits))
        True
    """
    whole = hashlib.blake2b(digest_size=8)
    for name, data in _list_fields(state):
        whole.update(f"{name} {len(data)} ".encode())
        whole.update(data)
    return whole.digest()


def field_digests(state: State) -> dict[str, bytes]:
    """Returns a digest of each field, by name. Ranks exchange field digests when their states differ.

    Example:
        >>> from shardfn.inference import Limits, field_digests, start
        >>> list(field_digests(start(Limits(vocab=100, context=64, blocks=9))))[:3]
        ['limits', 'tokenizer', 'step']
    """
    return {name: hashlib.blake2b(data, digest_size=8).digest() for name, data in _list_fields(state)}


def first_difference(mine: Mapping[str, bytes], theirs: Mapping[str, bytes]) -> str | None:
    """Returns the name of the first field that differs or is missing on one side, or None if all are equal.

    Example:
        >>> first_difference({"step": b"1", "time": b"2"}, {"step": b"1", "time": b"3"})
        'time'
    """
    return next((name for name in [*mine, *theirs] if mine.get(name) != theirs.get(name)), None)


def _list_fields(state: State) -> Iterator[tuple[str, bytes]]:
    """Yields names and bytes of all fields: plain fields, then sequences, then the pool. Integers have eight bytes."""
    plain = "limits tokenizer step number version pending time draining arrivals"
    for name in plain.split():
        yield name, repr(getattr(state, name)).encode()
    yield "drafter", b"" if state.drafter is None else state.drafter.digest()
    yield "speculation", _encode_ints(state.speculation)
    yield "cache_stats", _encode_ints(state.cache_stats)
    yield "names", repr(sorted(state.names.items())).encode()
    yield "running", _encode_ints(s.serial for s in state.running)
    for priority in sorted(state.waiting):
        yield f"waiting[{priority}]", _encode_ints(state.waiting[priority])
    yield (
        "flight",
        _encode_ints(
            n
            for c in state.flight
            for n in (c.sequence.serial, c.num, len(c.positions), len(c.drafts), *c.drafts.tokens, *c.drafts.parents)
        ),
    )
    yield "moves", _encode_ints(n for move in state.moves for n in move)
    for serial in sorted(state.sequences):
        yield from _encode_sequence(state.sequences[serial])
    yield from _encode_pool("pool", state.pool)
    yield from _encode_pool("sources", state.sources)
    yield "fills", repr(state.fills).encode()
    yield "chain", state.chain


def _encode_pool(of: str, pool: BlockPool) -> Iterator[tuple[str, bytes]]:
    yield f"{of}.free", pool.free.tobytes()
    yield f"{of}.references", pool.references.tobytes()
    yield f"{of}.cached", _encode_ints(pool.cached)
    blocks = sorted(pool.contents)
    yield f"{of}.contents", _encode_ints(blocks) + b"".join([_encode_content(pool.contents[b]) for b in blocks])
    yield f"{of}.index", b"".join(key + _encode_ints([pool.index[key]]) for key in sorted(pool.index))


def _encode_sequence(sequence: Sequence) -> Iterator[tuple[str, bytes]]:
    of = f"sequences[{sequence.name}.{sequence.choice}]"
    r = sequence.request
    source = r.source if r.features is None else r.features
    yield (
        f"{of}.request",
        _encode_ints(r.prompt) + repr((r.sampling, r.priority, r.deadline, r.adapter, r.salt, source)).encode(),
    )
    for name in ("arrived", "key", "scored", "computed", "recorded", "begun", "preempted", "draft_length"):
        yield f"{of}.{name}", repr(getattr(sequence, name)).encode()
    yield f"{of}.tokens", sequence.tokens.tobytes()
    yield f"{of}.states", b"".join([x.cpu().numpy().tobytes() for x in sequence.states])
    yield f"{of}.blocks", _encode_ints(sequence.blocks)
    yield f"{of}.source_blocks", _encode_ints(sequence.source_blocks)
    yield f"{of}.contents", b"".join(map(_encode_content, sequence.contents))


def _encode_content(content: BlockContent) -> bytes:
    return content.key + content.parent + content.tokens + _encode_scope(content.scope)


@functools.lru_cache(maxsize=64)
def _encode_scope(scope: PrefixScope) -> bytes:
    return repr(scope).encode()


def _encode_ints(values: Iterable[int]) -> bytes:
    return array("q", values).tobytes()
