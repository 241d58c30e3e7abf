"""Requests, and the table of their options, from which admission, rows, kernels and the server follow."""

import dataclasses
import functools
import hashlib
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardfn.core import explains_fields

from ._grammar import Grammar
from ._image_rows import RequestImages
from ._limits import Limits
from ._options import (
    BadWords,
    Encode,
    Names,
    Range,
    ReasoningBudget,
    Rule,
    TokenNumbers,
    check_allowed,
    check_budget,
    check_flag,
    check_tokens,
    encode_budget,
    encode_words,
    forbid_bad_words,
    forbid_ends,
    forbid_others,
    force_end_of_reasoning,
    list_options,
    option,
)
from ._speech import SourceFeatures

MOST_STOPS, LONGEST_STOP = 16, 256
MOST_MATCHERS, MOST_TEXT = 16, 4 << 16
MOST_BIASES, MOST_TOP, MOST_WORDS = 1024, 20, 256

# Keywords of vLLM, transformers and TRL, and their counterparts here.
_GRAMMAR = "grammar=, an inference.Grammar"
_MEANT = {
    "max_new_tokens": "max_tokens={value!r}",
    "max_completion_length": "max_tokens={value!r}",
    "max_completion_tokens": "max_tokens={value!r}",
    "max_length": "max_tokens=, the number of new tokens, without the prompt",
    "do_sample": "temperature=1.0 to draw, or temperature=0.0 for the most probable tokens",
    "greedy": "temperature=0.0",
    "num_return_sequences": "n={value!r}",
    "num_generations": "n={value!r}",
    "best_of": "n={value!r}, and take the best of the choices",
    "num_beams": "Engine.beam_search or LLM.beam_search with BeamSearch(num_beams={value!r})",
    "beam_width": "Engine.beam_search or LLM.beam_search with BeamSearch(num_beams={value!r})",
    "stop_token_ids": "stop_tokens={value!r}",
    "eos_token_id": "stop_tokens=({value!r},)",
    "stop_strings": "stop={value!r}",
    "ignore_eos": "stop_tokens=(), the default",
    "include_stop_str_in_output": "include_stop={value!r}",
    "logprobs": "top_logprobs={value!r}; the log probability of each drawn token is there without it",
    "repeat_penalty": "repetition_penalty={value!r}",
    "guided_json": _GRAMMAR,
    "guided_regex": _GRAMMAR,
    "structured_outputs": _GRAMMAR,
    "response_format": _GRAMMAR,
    "pad_token_id": "nothing: prompts have their own lengths",
    "min_new_tokens": "min_tokens={value!r}",
    "bad_words_ids": "bad_words={value!r}, a tuple of tuples",
    "logits_processor": "logits_processors=, names of Engine(logits_processors=)",
}


def _clamp_top_k(value: int, limits: Limits) -> int:
    """Returns 0, which is all tokens, for a number that the vocabulary does not exceed."""
    return value if value < limits.vocab else 0


def check_grammar(name: str, value: Any, limits: Limits) -> None:
    """Refuses a value that is neither None nor a `Grammar`."""
    del limits
    if not isinstance(value, Grammar | None):
        raise ValueError(f"{name} is {value!r:.80}. Make one by Grammar.json_schema(...) or .regex.")


@explains_fields(**_MEANT)
@dataclass(frozen=True)
class Sampling:
    """Rule of drawing a request's tokens. A draw sees these values, its logits, and (seed, choice, position).

    Args:
        max_tokens: most tokens that are drawn. With 0 the request only computes its prompt, for example to score the
            prompt or to fill the prefix cache.
        temperature: divisor of logits. 0 draws the most probable token.
        top_k: number of most probable tokens that are drawn from. 0 is all.
        top_p: probability of the fewest tokens that are drawn from.
        min_p: least probability of a token, as a part of the most probable token's.
        presence_penalty: number subtracted from logits of tokens drawn before.
        frequency_penalty: number subtracted from logits once for each time that a token was drawn before.
        repetition_penalty: divisor of positive logits of tokens in prompt or output, and factor of negative logits.
        seed: seed of draws. Equal seeds draw equal tokens: give several requests of a single prompt different seeds, or
            ask for n choices.
        n: number of choices, each drawn with a separate key. Choices share the blocks of their prompt.
        stop_tokens: tokens that end a choice, for the reason "stop". A stop token has no text.
        stop: strings. The token that completes a string ends a choice, for the reason "stop", and the text ends before
            the string. At most 16 strings of at most 256 characters. The engine needs a tokenizer.
        include_stop: whether the text ends after the stop string, or the stop token's text, instead.
        grammar: language of the text. The choice ends as "stop" where nothing can follow, and stop tokens are drawn
            only where the text may end. A text that `max_tokens` or a stop string ends may be incomplete. The engine
            needs a tokenizer.
        prompt_logprobs: whether the log probability of each token of the prompt is wanted. Its positions are then
            computed, even where a prefix is cached.
        prompt_logprobs_start: first position of the prompt whose log probability is wanted. The positions before may
            come from a cached prefix.
        logit_bias: pairs of a token and a number from -100 to 100, added to the token's logit after the penalties,
            before temperature and filters. Each token once, at most 1024.
        top_logprobs: number of most probable tokens that are wanted at each position, at most 20, under the raw logits.
        min_tokens: number of tokens before which neither stop tokens are drawn, nor stop strings end a choice. At most
            `max_tokens`. A grammar may end a text before.
        bad_words: words that are never completed: of each word's tokens the last is not drawn after the other tokens,
            where these are drawn tokens too. A word is a string, which needs the engine's tokenizer and is also
            forbidden after a space, or a tuple of token ids. For example ("fool", (17, 4)).
        allowed_token_ids: tokens that may be drawn, or None for all. A stop token is drawn only if it is among them.
        reasoning_budget: most tokens of reasoning, and its markers, or None.
        logits_processors: names of functions of `Engine(logits_processors=)`, applied in this order to the raw logits
            of each draw, before penalties.
        skip_special_tokens: whether special tokens have no text. A stop token has a text only with `include_stop`.

    Example:
        >>> Sampling(max_tokens=4, temperature=0.0)
        Sampling(max_tokens=4, temperature=0.0)
    """

    max_tokens: int = option(16, Range(0, 1 << 24, integer=True))
    temperature: float = option(1.0, Range(0, 100), draw="temperature", padding=0.0, http="number")
    top_k: int = option(0, Range(0, 1 << 24, integer=True), draw="top_k", convert=_clamp_top_k, http="integer")
    top_p: float = option(1.0, Range(0, 1, above=True), draw="top_p", http="number")
    min_p: float = option(0.0, Range(0, 1), draw="min_p", http="number")
    presence_penalty: float = option(0.0, Range(-2, 2), penalise="presence", http="number")
    frequency_penalty: float = option(0.0, Range(-2, 2), penalise="frequency", http="number")
    repetition_penalty: float = option(1.0, Range(0.01, 100), penalise="repetition", http="number")
    seed: int = option(0, Range(0, (1 << 64) - 1, integer=True), http="integer")
    n: int = option(1, Range(1, 128, integer=True), http="integer")
    stop_tokens: tuple[int, ...] = option((), check_tokens)
    stop: tuple[str, ...] = option((), Names(MOST_STOPS, LONGEST_STOP))
    include_stop: bool = option(False, check_flag)
    grammar: Grammar | None = option(None, check_grammar)  # noqa: RUF009 - a field of a dataclass, as all of these
    prompt_logprobs: bool = option(False, check_flag)
    prompt_logprobs_start: int = option(0, Range(0, 1 << 24, integer=True))
    logit_bias: tuple[tuple[int, float], ...] = option((), TokenNumbers(MOST_BIASES, Range(-100, 100)))
    top_logprobs: int = option(0, Range(0, MOST_TOP, integer=True))
    min_tokens: int = option(0, Range(0, 1 << 24, integer=True), rule=forbid_ends, http="integer")
    bad_words: tuple[str | tuple[int, ...], ...] = option(
        (), BadWords(MOST_WORDS, 256), rule=forbid_bad_words, encode=encode_words, http="strings"
    )
    allowed_token_ids: tuple[int, ...] | None = option(None, check_allowed, rule=forbid_others, http="integers")
    reasoning_budget: ReasoningBudget | None = option(  # noqa: RUF009 - a field of a dataclass, as all of these
        None, check_budget, rule=force_end_of_reasoning, encode=encode_budget
    )
    logits_processors: tuple[str, ...] = option((), Names(16, 256), http="strings")
    skip_special_tokens: bool = option(True, check_flag, http="flag")

    @functools.cached_property
    def extended(self) -> bool:
        """Returns whether the request needs the graph with penalties, biases and the most probable tokens."""
        return self.penalised or bool(self.logit_bias) or self.top_logprobs > 0

    @property
    def penalised(self) -> bool:
        """Returns whether draws depend on earlier tokens otherwise than through the model."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def __repr__(self) -> str:
        fields = ((name, getattr(self, name), f.default) for name, f in self.__dataclass_fields__.items())
        return f"Sampling({', '.join(f'{name}={value!r}' for name, value, default in fields if value != default)})"


@dataclass(frozen=True)
class Request:
    """A prompt and the rule of its continuation.

    Args:
        prompt: token ids.
        sampling: rule of drawing tokens.
        priority: number by which larger come first, until `Limits.starvation_steps` steps have passed.
        deadline: reading of the engine's clock, in milliseconds, at which the request ends as "deadline".
        adapter: digest of the adapter's content, or empty: part of the key of a block's content.
        salt: caller's bytes. Requests share blocks only with requests of the same salt.
        source: token ids that the encoder of an encoder-decoder model reads. The prompt is then of the decoder.
        images: images of the prompt, or None. The keys of blocks have them in place of image tokens.
        features: features of the source, whose token ids are then 0, once for each of the encoder's states.

    Example:
        >>> Request((5, 6, 7), Sampling(max_tokens=2)).priority
        0
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    deadline: int | None = None
    adapter: bytes = b""
    salt: bytes = b""
    source: tuple[int, ...] = ()
    images: RequestImages | None = None
    features: SourceFeatures | None = None

    @property
    def spelled(self) -> tuple[int, ...]:
        """Returns the tokens before the text of the answer: none for a prompt of embeddings."""
        return () if self.images is not None and self.images.is_text else self.prompt

    @property
    def given(self) -> tuple[int, ...]:
        """Returns the tokens that a caller has given: a source of token ids, or the prompt."""
        return self.prompt if self.features is not None else self.source or self.prompt

    @functools.cached_property
    def scope_salt(self) -> bytes:
        """Returns the salt with a digest of the source. All keys and values depend on both."""
        if not self.source:
            return self.salt
        content = array("q", self.source).tobytes() if self.features is None else self.features.digest
        return self.salt + hashlib.blake2b(content, digest_size=16).digest()


SAMPLING_OPTIONS = list_options(Sampling)
DRAW, PENALTIES = ({getattr(x, of): x for x in SAMPLING_OPTIONS if getattr(x, of)} for of in ("draw", "penalise"))
_RULED = tuple(x for x in SAMPLING_OPTIONS if x.rule is not None)
_ENCODED = tuple(x for x in SAMPLING_OPTIONS if x.encode is not None)
_PRIORITY = Range(-100, 100, integer=True)


def list_rules(sampling: Sampling) -> list[Rule]:
    """Returns the rules of the options that a sampling sets.

    Example:
        >>> len(list_rules(Sampling())), len(list_rules(Sampling(min_tokens=2, bad_words=((5,),))))
        (0, 2)
    """
    fields = Sampling.__dataclass_fields__
    return [x.rule for x in _RULED if x.rule is not None and getattr(sampling, x.name) != fields[x.name].default]


def ids_of(prompt: Sequence[int]) -> tuple[int, ...]:
    """Returns the ids of a prompt.

    Raises:
        TypeError: the prompt is not a sequence of integers.

    Example:
        >>> ids_of([5, 6])
        (5, 6)
    """
    try:
        return tuple(map(operator.index, prompt))
    except TypeError as error:
        raise TypeError(f"prompt must be a sequence of integers, got a {type(prompt).__name__}.") from error


def check_request(request: Request, limits: Limits) -> None:
    """Refuses a request with a value out of range, or without an end.

    A request that passes ends in a bounded number of steps, also if other requests keep arriving.

    Raises:
        ValueError: names the field, the value, and the range.

    Example:
        >>> limits = Limits(vocab=100, context=64, blocks=9, block=16)
        >>> check_request(Request((1, 2)), limits)
        >>> check_request(Request((1, 2), Sampling(top_p=0.0)), limits)
        Traceback (most recent call last):
        ValueError: top_p must be a number above 0 and at most 1, got 0.0.
    """
    sampling = request.sampling
    for one in SAMPLING_OPTIONS:
        one.check(one.name, getattr(sampling, one.name), limits)
    _PRIORITY("priority", request.priority, limits)
    check_tokens("prompt", request.prompt, limits)
    _check_source(request.source, limits)
    for name in ("adapter", "salt"):
        if not isinstance(getattr(request, name), bytes):
            raise ValueError(f"{name} must be bytes, got {getattr(request, name)!r}.")
    if request.deadline is not None and type(request.deadline) is not int:
        raise ValueError(f"deadline must be an integer, in milliseconds, or None, got {request.deadline!r}.")
    _check_matchers(sampling.grammar, sampling.n)
    if sampling.min_tokens > sampling.max_tokens:
        raise ValueError(f"min_tokens must be at most max_tokens={sampling.max_tokens}, got {sampling.min_tokens}.")
    is_scored = sampling.prompt_logprobs and sampling.prompt_logprobs_start < len(request.prompt)
    _check_size(len(request.prompt), sampling.max_tokens, limits, is_scored)


def encode_sampling(sampling: Sampling, encode: Encode | None) -> Sampling:
    """Returns a sampling whose words are token ids.

    Args:
        sampling: sampling of a request.
        encode: function from a text to token ids, without special tokens, or None without a tokenizer.

    Raises:
        ValueError: there are words, and no tokenizer.

    Example:
        >>> encode_sampling(Sampling(bad_words=("ab",)), lambda text: list(text.encode())).bad_words
        ((97, 98),)
    """
    changes = dict[str, Any]()
    for one in _ENCODED:
        value = getattr(sampling, one.name)
        if not isinstance(value, tuple) or not any(isinstance(word, str) for word in value):
            continue
        if encode is None:
            text = f"{one.name} is {value!r:.60}, and there is no tokenizer that encodes text. Pass Engine(tokenizer=),"
            raise ValueError(f"{text} or token ids, such as ((5, 6),).")
        assert one.encode is not None
        changes[one.name] = one.encode(value, encode)
    return dataclasses.replace(sampling, **changes) if changes else sampling


def _check_source(source: tuple[int, ...], limits: Limits) -> None:
    check_tokens("source", source, limits)
    if not limits.source and source:
        raise ValueError(f"source must be empty for a model without an encoder, got {len(source)} tokens.")
    if limits.source and not 1 <= len(source) <= limits.source:
        raise ValueError(
            f"prompt of an encoder-decoder model is its source, and must have from 1 to {limits.source} tokens, got"
            f" {len(source)}. Shorten it, or raise limits_of(..., source=)."
        )


def _check_matchers(grammar: Grammar | None, n: int) -> None:
    if grammar is not None and (n > MOST_MATCHERS or n * len(grammar.text) > MOST_TEXT):
        raise ValueError(
            f"n is {n}, and the grammar has {len(grammar.text)} characters: each choice compiles it, so n must be at"
            f" most {MOST_MATCHERS}, and n times the characters at most {MOST_TEXT}. Send several requests."
        )


def _check_size(prompt: int, drawn: int, limits: Limits, is_scored: bool) -> None:
    unfed = is_scored and not drawn  # the last token of a prompt that is only scored is never fed
    most = limits.context - (drawn > 0) + unfed
    if not 1 <= prompt <= most:
        raise ValueError(
            f"prompt must have from 1 to {most} tokens, got {prompt}: the context has {limits.context}"
            + (", and one is drawn at least." if drawn else ", and the last token is only scored." if unfed else ".")
        )
    if prompt + drawn > limits.context + unfed:
        raise ValueError(
            f"prompt and max_tokens must fit together in the context of {limits.context} tokens, got {prompt} + {drawn}"
            f" = {prompt + drawn}."
        )
    need = limits.blocks_of(prompt - unfed + max(0, drawn - 1))  # the last drawn token is never fed
    if need > limits.usable:
        raise ValueError(
            f"prompt and max_tokens must need at most {limits.usable} blocks of {limits.block} tokens, all blocks of"
            f" the pool, got {need} for {prompt} + {drawn} tokens."
        )
