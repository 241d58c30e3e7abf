"""Results of requests, and statistics of an engine."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Int16
from torch import Tensor


class CacheStats(NamedTuple):
    """Counts of an engine so far.

    Attributes:
        queries: tokens of new sequences, looked up in the KV cache.
        hits: looked up tokens with keys and values in the cache.
        preemptions: number of preemptions, after which a sequence is recomputed.

    Example:
        >>> CacheStats().begun(40, 32)
        CacheStats(queries=40, hits=32, preemptions=0)
    """

    queries: int = 0
    hits: int = 0
    preemptions: int = 0

    def begun(self, tokens: int, found: int) -> "CacheStats":
        """Returns the counts after a sequence has begun."""
        return self._replace(queries=self.queries + tokens, hits=self.hits + found)

    def preempted(self) -> "CacheStats":
        """Returns the counts after a sequence has lost its blocks."""
        return self._replace(preemptions=self.preemptions + 1)


class SpeculationStats(NamedTuple):
    """Counts of an engine's drafts so far.

    Attributes:
        steps: steps of sequences that had drafts.
        drafted: tokens.
        accepted: drafted tokens that became tokens of a sequence.

    Example:
        >>> SpeculationStats().add(4, 3).add(2, 0)
        SpeculationStats(steps=2, drafted=6, accepted=3)
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> "SpeculationStats":
        """Returns the counts after another step of a sequence."""
        return SpeculationStats(self.steps + 1, self.drafted + drafted, self.accepted + accepted)


class EngineStats(NamedTuple):
    """Counts of an engine.

    Attributes:
        counts: numbers of sequences and blocks now: "running", "waiting", "free", "held" and "cached".
        padding: part of all rows so far that was padding.
        speculation: drafts so far.
        cache: prefix caching and preemptions so far.

    Example:
        >>> EngineStats({"running": 1}, 0.25).cache.hits
        0
    """

    counts: Mapping[str, int]
    padding: float = 0.0
    speculation: SpeculationStats = SpeculationStats()
    cache: CacheStats = CacheStats()


class Token(NamedTuple):
    """A token of a request, or its end, or both.

    Attributes:
        name: name of the request.
        choice: choice of the request.
        position: position of the token in its sequence, below the prompt's length for a scored token.
        token: id, or None for an end without a token.
        logprob: log probability under the softmax of the raw logits, or None without a token.
        version: version of the weights that computed the token.
        finish_reason: "stop", "length", "cancelled", "deadline", "error" or "refused" with the last token of a choice.
        text: text that is certain with the token, after the text of the tokens before, empty in an engine without a
            tokenizer. A part of a character, and text that may begin a stop string, come with a later token.
        expert_ids: experts of all tokens before the last token of a choice, in an engine with `record_experts=True`.
        top: most probable tokens at the position, as many as the request wants, and their log probabilities.
        is_greedy: whether a scored token is the most probable token at its position. True for a drawn token.
    """

    name: str
    choice: int
    position: int
    token: int | None
    logprob: float | None
    version: int
    finish_reason: str | None
    text: str = ""
    top: tuple[tuple[int, float], ...] = ()
    expert_ids: Int16[Tensor, "t m k"] | None = None
    is_greedy: bool = True


class Completion(NamedTuple):
    """One choice of a request.

    Attributes:
        tokens: tokens drawn after the prompt.
        logprobs: log probabilities of `tokens`, under the softmax of the raw logits.
        finish_reason: "stop", "length", "cancelled", "deadline", "error" or "refused".
        versions: versions of the weights that computed each token.
        prompt_logprobs: log probabilities of the prompt's tokens but the first, empty unless the request wants them.
        prompt_versions: versions of the weights that computed each of `prompt_logprobs`.
        text: text after the prompt's, up to a stop string, empty in an engine without a tokenizer.
        expert_ids: experts of each token of prompt and answer but the last token, which was never computed, in an
            engine with `record_experts=True`: [tokens, layers with experts, choices]. None if the choice did not end by
            a token.
        top_logprobs: most probable tokens at each of `tokens`, and their log probabilities, empty unless the request
            wants them.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None
    versions: list[int]
    prompt_logprobs: list[float]
    prompt_versions: list[int]
    text: str = ""
    top_logprobs: Sequence[tuple[tuple[int, float], ...]] = ()
    expert_ids: Int16[Tensor, "t m k"] | None = None


def append_token(made: list[Completion], token: Token, prompt: int) -> bool:
    """Adds a token to its choice, and returns whether the choice ends."""
    one = made[token.choice] = made[token.choice]._replace(text=made[token.choice].text + token.text)
    if token.token is not None and token.logprob is not None:
        if token.position < prompt:
            one.prompt_logprobs.append(token.logprob)
            one.prompt_versions.append(token.version)
        else:
            one.tokens.append(token.token)
            one.logprobs.append(token.logprob)
            one.versions.append(token.version)
            if token.top:
                one = made[token.choice] = one._replace(top_logprobs=one.top_logprobs or [])
                assert isinstance(one.top_logprobs, list)
                one.top_logprobs.append(token.top)
    if token.finish_reason is not None:
        made[token.choice] = one._replace(finish_reason=token.finish_reason, expert_ids=token.expert_ids)
    return token.finish_reason is not None


class MemoryPlan(NamedTuple):
    """Bytes of an engine on one rank.

    Attributes:
        weights: bytes of one version in the served form, without weights on disk. From `update_weights` on two versions
            are held, until the next step has changed to the new version, or with `recompute=False`, until requests that
            have begun are done.
        cache: bytes of keys and values.
        step: bytes of all else that is alive at the peak of the largest step, with the weights and the layers of a
            cache on the host that are brought ahead.
        host: bytes among all these that are in the memory of the host.
    """

    weights: int
    cache: int
    step: int
    host: int

    @property
    def total(self) -> int:
        """Returns all bytes, on the device and on the host."""
        return self.weights + self.cache + self.step

    @property
    def device(self) -> int:
        """Returns the bytes on the device."""
        return self.total - self.host

    def __str__(self) -> str:
        sizes = {name: f"{name} {size / 2**20:.1f} MiB" for name, size in self._asdict().items()}
        there = f"; of all these, on the {sizes['host']}" if self.host else ""
        parts = ", ".join(sizes[name] for name in ("weights", "cache", "step") if self.step or name != "step")
        return f"{self.total / 2**20:.1f} MiB a rank: {parts}{there}"
