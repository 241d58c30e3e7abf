"""A model that is a pure function of the tokens that it sees, read through a plan's slots and block tables."""

import hashlib
from dataclasses import dataclass, field

from shardfn.inference import Limits, Request, StepPlan, check_request


def draw(history: tuple[int, ...], key: int, version: int, vocab: int) -> int:
    """The next token: a function of all tokens before it, the key of the draw, and the weights."""
    data = repr((history, key, version)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % vocab


@dataclass
class Model:
    """Runs plans over a cache that remembers which token, at which position, under which weights, is in a slot."""

    limits: Limits
    cache: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    ancestors: dict[int, list[int]] = field(default_factory=dict)  # of drafts that branch, by row

    def run(self, plan: StepPlan) -> list[int]:
        limits, block = self.limits, self.limits.block
        assert plan.bucket in limits.buckets and plan.num_tokens <= plan.bucket
        most = min(plan.bucket, limits.running)
        for a in (plan.tokens, plan.positions, plan.sequences, plan.slots):
            assert len(a) == plan.bucket
        for a in (plan.rows, plan.keys, plan.places, plan.targets):
            assert len(a) == limits.wanted(plan.bucket)
        assert len(plan.lengths) == most + 1 and len(plan.tables) == (most + 1) * limits.width
        before = dict(self.cache)
        self.cache |= {new: before[old] for old, new in plan.moves}
        self.ancestors = {
            first + i: self.branch(first, parents, i) for first, parents in plan.branches for i in range(len(parents))
        }
        real = range(plan.num_tokens)
        written = {plan.slots[i] for i in real}
        assert len(written) == plan.num_tokens, "two tokens write one slot"
        assert all(slot >= block for slot in written), "block 0 is for padding"
        for i in range(plan.num_tokens, plan.bucket):
            assert (plan.slots[i], plan.sequences[i], plan.positions[i]) == (0, most, 0)
        for i in real:
            self.cache[plan.slots[i]] = (plan.tokens[i], plan.positions[i], plan.version)
        drawn = []
        for r in range(plan.num_rows):
            i = plan.rows[r]
            history = self.visible(plan, i)
            assert plan.places[r] == len(history)
            drawn.append(draw(history, plan.keys[r], plan.version, limits.vocab) if plan.targets[r] < 0 else 0)
        return drawn

    def branch(self, first: int, parents: tuple[int, ...], i: int) -> list[int]:
        """The rows of a draft's ancestors and its own."""
        return [*(self.branch(first, parents, parents[i]) if parents[i] >= 0 else []), first + i]

    def visible(self, plan: StepPlan, i: int) -> tuple[int, ...]:
        """The tokens that token i sees; each must have its position and this version."""
        s, position, width, block = plan.sequences[i], plan.positions[i], self.limits.width, self.limits.block
        assert position < plan.lengths[s]
        seen = []
        own = self.ancestors.get(i, [])
        for q in range(position + 1):
            table = plan.tables[s * width + q // block]
            assert table > 0, "a read of block 0"
            guess = q - (position + 1 - len(own))
            token, where, version = self.cache[plan.slots[own[guess]] if guess >= 0 else table * block + q % block]
            assert (where, version) == (q, plan.version), (where, q, version, plan.version)
            seen.append(token)
        return tuple(seen)


def alone(request: Request, key: int, version: int, limits: Limits) -> list[int]:
    """The tokens that one full forward of this request alone draws, under one version."""
    check_request(request, limits)
    history = list(request.prompt)
    for _ in range(request.sampling.max_tokens):
        history.append(draw(tuple(history), key, version, limits.vocab))
        if history[-1] in request.sampling.stop_tokens:
            break
    return history[len(request.prompt) :]
