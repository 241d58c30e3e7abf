"""Blocks of the KV cache: free, held by sequences, or cached with known content for prefix caching.

    free + held + cached == usable

A block is cached when its last holder has left and its content is known. Room is made by forgetting the content that
was used least recently.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class PrefixScope(NamedTuple):
    """Everything except the tokens that a block's content depends on, such as the version of the weights."""

    version: int
    adapter: bytes
    dtype: str
    salt: bytes


class BlockContent(NamedTuple):
    """A full block: the keys of the block and of the block before, the tokens, and the scope."""

    key: bytes
    parent: bytes
    tokens: bytes
    scope: PrefixScope


def root_key(scope: PrefixScope) -> bytes:
    """Returns the parent of a sequence's first block.

    Example:
        >>> root_key(PrefixScope(0, b"a", "float32", b"")) == root_key(PrefixScope(0, b"", "float32", b"a"))
        False
    """
    fields = {"version": str(scope.version).encode(), "adapter": scope.adapter, "dtype": scope.dtype.encode()}
    return _make_key(fields | {"salt": scope.salt})


def _make_key(fields: dict[str, bytes]) -> bytes:
    """Returns a key of fields, each behind its name and length, so that different lists of fields differ."""
    parts = (name.encode() + len(data).to_bytes(8, "little") + data for name, data in fields.items())
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


class BlockPool:
    """Pool of the cache's blocks, numbered 1 to `blocks - 1`. Methods change the pool in place, except `copy`.

    Example:
        >>> pool = BlockPool(4)
        >>> a, b = pool.take(), pool.take()
        >>> a, b, pool.counts()
        (1, 2, {'free': 1, 'held': 2, 'cached': 0})
        >>> pool.release([a, b])
        >>> pool.counts()
        {'free': 3, 'held': 0, 'cached': 0}
    """

    def __init__(self, blocks: int) -> None:
        self.free = array("i", range(blocks - 1, 0, -1))  # a stack
        self.references = array("i", bytes(4 * blocks))  # by block
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.contents: dict[int, BlockContent] = {}  # by block, held or cached
        self.index: dict[bytes, int] = {}  # block by key

    @property
    def available(self) -> int:
        """Returns the number of blocks that can be taken."""
        return len(self.free) + len(self.cached)

    def counts(self) -> dict[str, int]:
        """Returns numbers of blocks, by state. A block is held once, however many sequences share the block."""
        usable = len(self.references) - 1
        return {"free": len(self.free), "held": usable - self.available, "cached": len(self.cached)}

    def take(self) -> int:
        """Returns a block without content, held once: the cached block used least recently if no block is free."""
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            del self.index[self.contents.pop(block).key]
        self.references[block] = 1
        return block

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each block, held or cached."""
        for block in blocks:
            self.references[block] += 1
            self.cached.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Takes a reference from each block of a sequence, the last first: prefixes are forgotten after their ends."""
        for block in reversed(blocks):
            assert self.references[block] > 0, block
            self.references[block] -= 1
            if self.references[block]:
                continue
            if block in self.contents:
                self.cached[block] = None
            else:
                self.free.append(block)

    def record(self, block: int, content: BlockContent) -> None:
        """Makes the content of a held block known, unless another block has that key."""
        assert block not in self.contents, block
        if content.key not in self.index:
            self.index[content.key] = block
            self.contents[block] = content

    def find(self, contents: Sequence[BlockContent]) -> list[int]:
        """Returns the blocks of the longest known prefix of contents.

        Tokens and scopes are compared, as keys do not suffice.
        """
        found = []
        for content in contents:
            block = self.index.get(content.key)
            if block is None or self.contents[block] != content:
                break
            found.append(block)
        return found

    def forget(self) -> None:
        """Frees all cached blocks, whose content is not found any more. Held blocks keep their content."""
        for block in self.cached:
            del self.index[self.contents.pop(block).key]
            self.free.append(block)
        self.cached.clear()

    def copy(self) -> "BlockPool":
        """Returns a separate pool, equal to this pool."""
        new = BlockPool(1)
        new.free, new.references, new.cached = self.free[:], self.references[:], self.cached.copy()
        new.contents, new.index = dict(self.contents), dict(self.index)
        return new


def list_prefix_keys(tokens: Sequence[int], block: int, scope: PrefixScope) -> list[bytes]:
    """Returns the keys of the full blocks of a prompt, the same as in the pool of an engine.

    Example:
        >>> scope = PrefixScope(0, b"", "float32", b"")
        >>> one, other = (list_prefix_keys(tokens, 2, scope) for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 5]))
        >>> len(one), one[0] == other[0], one[1] == other[1]
        (2, True, False)
    """
    contents = list[BlockContent]()
    extend_contents(contents, array("q", tokens), block, len(tokens) // block, scope)
    return [content.key for content in contents]


def extend_contents(contents: list[BlockContent], tokens: array, block: int, num: int, scope: PrefixScope) -> None:
    """Appends the contents of a sequence's further blocks, up to `num`. Keys are chained from the root on.

    Example:
        >>> contents = []
        >>> extend_contents(contents, array("q", range(8)), 2, 3, PrefixScope(0, b"", "float32", b""))
        >>> [list(array("q", c.tokens)) for c in contents], contents[1].parent == contents[0].key
        ([[0, 1], [2, 3], [4, 5]], True)
    """
    while len(contents) < num:
        start = len(contents) * block
        parent = contents[-1].key if contents else root_key(scope)
        own = tokens[start : start + block].tobytes()
        contents.append(BlockContent(_make_key({"parent": parent, "tokens": own}), parent, own, scope))
