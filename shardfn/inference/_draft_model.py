"""Speculative decoding with a small draft model, which has a separate KV cache.

The draft model draws each draft as the engine will draw the token of the same place: by the same key, position and
`Sampling`, so that both use the same uniform number. Where the models' probabilities are close, sampled drafts are
accepted nearly as often as greedy drafts.

All ranks compute the same proposals, each with the whole draft model, so its steps send nothing.

References:
    Leviathan et al.: Fast Inference from Transformers via Speculative Decoding, 2022, https://arxiv.org/abs/2211.17192
"""

import copy
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq

from shardfn.collectives import GlobalTensor
from shardfn.core import PyTree

from ._checks import limits_of
from ._decoder import Decoder
from ._draft_tree import DraftTree
from ._drafters import Context
from ._limits import Limits
from ._plan import find_wanted, make_plan
from ._pool import BlockPool, PrefixScope, extend_contents
from ._requests import Request
from ._results import MemoryPlan
from ._runner import Cache, Runner
from ._state import Rows, Sequence


class DraftModel:
    """Drafter that proposes the tokens that a smaller model draws.

    The draft model's KV cache grows with the sequences, and is kept while sequences wait. When blocks run out, the
    sequence that had drafts least recently loses its blocks. Prompts with an equal beginning share blocks. A draft
    model that is not batch-invariant may propose different tokens next to other sequences, which changes no token of a
    batch-invariant engine.

    Args:
        decoder: draft model, of the same vocabulary.
        params: parameters, whole and equal on all ranks.
        limits: sizes. Default: `limits_of(decoder)`. A sequence longer than the context has no drafts.

    Raises:
        ValueError: the limits do not fit the model.

    Example:
        >>> from shardfn import core
        >>> from shardfn.inference import Engine, Sampling, decoder
        >>> from shardfn.models import gpt
        >>> sizes = {"vocab_size": 64, "d_model": 32, "num_heads": 4, "max_len": 32, "batch_invariant": True}
        >>> large, small = (gpt.Config(num_layers=n, **sizes) for n in (2, 1))
        >>> drafter = DraftModel(decoder(small), gpt.init(small, core.key(1)))
        >>> params = gpt.init(large, core.key(0))
        >>> engine = Engine(decoder(large), params, drafter=drafter)
        >>> how = Sampling(max_tokens=8, temperature=0.0)
        >>> engine.generate([[5, 6, 7]], how) == Engine(decoder(large), params).generate([[5, 6, 7]], how)
        True
        >>> engine.stats.speculation.drafted > 0
        True
    """

    def __init__(self, decoder: Decoder, params: PyTree, *, limits: Limits | None = None) -> None:
        self.limits = limits_of(decoder) if limits is None else limits
        self._runner = Runner(decoder, self.limits)
        self._weights = self._runner.pack_weights(params)
        self._cache: Cache | None = None  # an engine takes a copy with a separate cache
        self._pool = BlockPool(self.limits.blocks)
        self._own: OrderedDict[int, Sequence] = OrderedDict()  # by serial number, those without drafts for long first

    def check(self, decoder: Decoder, limits: Limits) -> None:
        """Refuses an engine of another vocabulary.

        Raises:
            ValueError: the numbers of tokens differ.
        """
        del decoder
        if limits.vocab != self.limits.vocab:
            raise ValueError(
                f"drafter: its model has {self.limits.vocab} tokens, and the engine's has {limits.vocab}. Use a small"
                " model with the tokenizer of the large one."
            )

    def warm_up(self, *, extended: bool = False) -> None:
        """Captures the graphs of all buckets."""
        for bucket in self.limits.buckets:
            for kind in (False, True)[: 1 + extended]:
                self._runner.bind(bucket, self._weights, self._count_held(), extended=kind)

    def memory(self) -> MemoryPlan:
        """Returns the bytes that each rank needs in addition to the engine's."""
        cache = self._runner.empty_cache() if self._cache is None else self._cache
        return self._runner.memory(self._weights, cache)

    def propose(self, context: Context, most: int) -> DraftTree:
        """Returns the tokens that the draft model draws after the last token."""
        return self.propose_all([(context, most)])[0]

    def propose_all(self, asks: Seq[tuple[Context, int]]) -> list[DraftTree]:
        """Returns the proposals of `propose` for several sequences, whose rows share steps."""
        num = self.limits.running
        return [tree for i in range(0, len(asks), num) for tree in self._draft_tokens(asks[i : i + num])]

    def end(self, context: Context) -> None:
        """Forgets a sequence. Later sequences may use the blocks."""
        if (own := self._own.pop(context.serial, None)) is not None:
            self._pool.release(own.blocks)

    def copy(self) -> "DraftModel":
        """Returns a drafter with a separate cache. The weights and graphs are shared."""
        new = copy.copy(self)
        new._pool = self._pool.copy()
        new._own = OrderedDict((serial, own.copy()) for serial, own in self._own.items())
        if self._cache is not None:
            new._cache = [GlobalTensor(x.local.clone(), x.shape, x.spec, x.mesh) for x in self._cache]
        return new

    def digest(self) -> bytes:
        """Returns a hash of the sizes, and of the blocks that each sequence holds.

        Proposals are compared with the plans.
        """
        found = hashlib.blake2b(repr(self.limits).encode(), digest_size=8)
        for own in self._own.values():
            found.update(repr((own.serial, own.computed, own.blocks)).encode() + own.tokens.tobytes())
        found.update(self._pool.free.tobytes() + array("q", self._pool.cached).tobytes())
        return found.digest()

    def _draft_tokens(self, asks: Seq[tuple[Context, int]]) -> list[DraftTree]:
        busy = {context.serial for context, _ in asks}
        ends: dict[int, int] = {}  # the number of tokens that each sequence may reach
        for context, most in asks:
            ends[context.serial] = self._reserve_blocks(self._follow_context(context), most, busy)
        while chunks := self._list_chunks(ends):
            self._draw_drafts(chunks, ends)
        for context, _ in asks:
            self._record_blocks(self._own[context.serial], len(context.tokens), context.salt)
        return [DraftTree.chain(self._own[context.serial].tokens[len(context.tokens) :]) for context, _ in asks]

    def _follow_context(self, context: Context) -> Sequence:
        """Returns the sequence with the tokens of the engine.

        Tokens that were computed for rejected drafts are forgotten.
        """
        tokens, own = context.tokens, self._own.pop(context.serial, None)
        if own is None:
            request = Request((0,), context.sampling, salt=context.salt)
            place = context.serial, context.name, context.choice, request, 0, context.key
            own = Sequence(*place, prompt=context.prompt, scored=context.prompt - 1, tokens=array("q"))
        same = min(len(own.tokens), len(tokens) - 1)
        while own.tokens[:same] != tokens[:same]:
            same -= 1
        own.tokens, own.computed = tokens[:], min(own.computed, same)
        self._own[context.serial] = own
        return own

    def _reserve_blocks(self, own: Sequence, most: int, busy: set[int]) -> int:
        """Takes blocks for drafts, and returns the number of tokens that have blocks, at least the present tokens."""
        limits, num = self.limits, len(own.tokens)
        end = min(num + most, limits.context)
        if end <= num:
            return num
        if not own.blocks:
            self._share_prefix(own)
        while len(own.blocks) < limits.blocks_of(end - 1) and self._make_room(busy):
            own.blocks.append(self._pool.take())
        return max(num, min(end, len(own.blocks) * limits.block + 1))  # the last draft is never fed

    def _make_room(self, busy: set[int]) -> bool:
        """Returns whether a block can be taken, after sequences without drafts in this step have lost their blocks."""
        idle = (own for serial, own in self._own.items() if serial not in busy and own.blocks)
        while not self._pool.available and (own := next(idle, None)) is not None:
            self._pool.release(own.blocks)
            own.blocks, own.computed, own.recorded = [], 0, 0
        return bool(self._pool.available)

    def _share_prefix(self, own: Sequence) -> None:
        """Takes the blocks of other sequences with an equal beginning (prefix caching)."""
        num = (len(own.tokens) - 1) // self.limits.block
        extend_contents(own.contents, own.tokens, self.limits.block, num, self._make_scope(own.request.salt))
        own.blocks = self._pool.find(own.contents[:num])
        self._pool.hold(own.blocks)
        own.recorded = len(own.blocks)
        own.computed = own.recorded * self.limits.block

    def _record_blocks(self, own: Sequence, known: int, salt: bytes) -> None:
        """Records full blocks of known tokens for prefix caching.

        Blocks with drafts are not recorded, as drafts may change.
        """
        full = min(own.computed, known) // self.limits.block
        extend_contents(own.contents, own.tokens, self.limits.block, full, self._make_scope(salt))
        for i in range(own.recorded, full):
            self._pool.record(own.blocks[i], own.contents[i])
        own.recorded = max(own.recorded, full)

    def _make_scope(self, salt: bytes) -> PrefixScope:
        return PrefixScope(0, b"", self.limits.cache_dtype, salt)

    def _list_chunks(self, ends: dict[int, int]) -> list[Rows]:
        """Returns the rows of the next step: uncomputed tokens of sequences that want another draft."""
        left, chunks = self.limits.budget, list[Rows]()
        for own in (self._own[serial] for serial, end in ends.items() if len(self._own[serial].tokens) < end):
            if count := min(left, len(own.tokens) - own.computed):
                chunks.append(Rows(own, count, find_wanted(own, count)))
                left -= count
        return chunks

    def _draw_drafts(self, chunks: list[Rows], ends: dict[int, int]) -> None:
        """Runs a step, and appends its drafts."""
        plan = make_plan(chunks, self.limits, step=0, version=0)
        drawn, _, self._cache, *_ = self._runner.run(self._weights, self._count_held(), plan)
        tokens = iter(drawn)
        for own, count, positions, _ in chunks:
            own.computed += count
            for token in (next(tokens) for _ in positions):
                if token >= 0:
                    own.tokens.append(token)
                if token < 0 or token in own.request.sampling.stop_tokens:
                    ends[own.serial] = 0

    def _count_held(self) -> Cache:
        if self._cache is None:
            self._cache = self._runner.empty_cache()
        return self._cache
