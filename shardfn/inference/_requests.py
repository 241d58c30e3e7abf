"""Requests, and the one table of ranges for admission."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardfn.core import explains_fields

from ._grammar import Grammar
from ._limits import Limits

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
    "num_beams": "n={value!r}, and take the best of the choices: beams are not searched",
    "beam_width": "n={value!r}, and take the best of the choices: beams are not searched",
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
}


@explains_fields(**_MEANT)
@dataclass(frozen=True)
class Sampling:
    """Rule of drawing a request's tokens. A draw sees these values, its logits, and (seed, choice, position).

    Args:
        max_tokens: most tokens that are drawn.
        temperature: divisor of logits. 0 draws the most probable token.
        top_k: number of most probable tokens that are drawn from. 0 is all.
        top_p: probability of the fewest tokens that are drawn from.
        min_p: least probability of a token, as a part of the most probable token's.
        presence_penalty: number subtracted from logits of tokens drawn before.
        frequency_penalty: number subtracted from logits once for each time that a token was drawn before.
        repetition_penalty: divisor of positive logits of tokens in prompt or output, and factor of negative logits.
        seed: seed of draws. Equal seeds draw equal tokens: give several requests of one prompt different seeds, or ask
            for n choices.
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
        logit_bias: pairs of a token and a number from -100 to 100, added to the token's logit after the penalties,
            before temperature and filters. Each token once, at most 1024.
        top_logprobs: number of most probable tokens that are wanted at each position, at most 20, under the raw logits.

    Example:
        >>> Sampling(max_tokens=4, temperature=0.0)
        Sampling(max_tokens=4, temperature=0.0)
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    n: int = 1
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    grammar: Grammar | None = None
    prompt_logprobs: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0

    @property
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


class _Range(NamedTuple):
    low: float
    high: float
    integer: bool = False
    above: bool = False  # `low` itself is out of range

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.integer else int | float):
            return False
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a number"
        if math.isinf(self.high):
            return f"{kind} of at least {self.low}"
        return (
            f"{kind} {'above' if self.above else 'from'} {self.low} {'and at most' if self.above else 'to'} {self.high}"
        )


MOST_STOPS, LONGEST_STOP = 16, 256
MOST_MATCHERS, MOST_TEXT = 16, 4 << 16
MOST_BIASES, MOST_TOP = 1024, 20
_BIAS = _Range(-100, 100)
RANGES = {
    "max_tokens": _Range(1, 2**24, integer=True),
    "temperature": _Range(0, 100),
    "top_k": _Range(0, 2**24, integer=True),
    "top_p": _Range(0, 1, above=True),
    "min_p": _Range(0, 1),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "repetition_penalty": _Range(0.01, 100),
    "seed": _Range(0, 2**64 - 1, integer=True),
    "n": _Range(1, 128, integer=True),
    "top_logprobs": _Range(0, MOST_TOP, integer=True),
    "priority": _Range(-100, 100, integer=True),
}


def ids_of(prompt: Sequence[int]) -> tuple[int, ...]:
    """Returns the ids of a prompt.

    Raises:
        TypeError: the prompt is no sequence of integers.

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
    for name, allowed in RANGES.items():
        value = getattr(request if name == "priority" else request.sampling, name)
        if value not in allowed:
            raise ValueError(f"{name} must be {allowed}, got {value!r}.")
    _check_tokens("prompt", request.prompt, limits)
    _check_tokens("stop_tokens", request.sampling.stop_tokens, limits)
    for name in ("adapter", "salt"):
        if not isinstance(getattr(request, name), bytes):
            raise ValueError(f"{name} must be bytes, got {getattr(request, name)!r}.")
    if request.deadline is not None and type(request.deadline) is not int:
        raise ValueError(f"deadline must be an integer, in milliseconds, or None, got {request.deadline!r}.")
    for name in ("prompt_logprobs", "include_stop"):
        if type(getattr(request.sampling, name)) is not bool:
            raise ValueError(f"{name} must be True or False, got {getattr(request.sampling, name)!r}.")
    _check_biases(request.sampling.logit_bias, limits)
    _check_stop(request.sampling.stop)
    _check_grammar(request.sampling.grammar, request.sampling.n)
    _check_size(len(request.prompt), request.sampling.max_tokens, limits)


def _check_tokens(name: str, tokens: tuple[int, ...], limits: Limits) -> None:
    if not isinstance(tokens, tuple):
        raise ValueError(f"{name} must be a tuple of token ids, got a {type(tokens).__name__}.")
    for i, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < limits.vocab:
            raise ValueError(f"{name}[{i}] must be an integer from 0 to {limits.vocab - 1}, got {token!r}.")


def _check_biases(biases: tuple[tuple[int, float], ...], limits: Limits) -> None:
    pairs = isinstance(biases, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in biases)
    if not pairs:
        raise ValueError(f"logit_bias must be a tuple of pairs, such as ((5, -100.0),), got {biases!r:.80}.")
    if len(biases) > MOST_BIASES:
        raise ValueError(f"logit_bias must have at most {MOST_BIASES} tokens, got {len(biases)}.")
    seen = set[int]()
    for token, bias in biases:
        if type(token) is not int or not 0 <= token < limits.vocab:
            raise ValueError(f"logit_bias must have tokens from 0 to {limits.vocab - 1}, integers, got {token!r:.60}.")
        if token in seen:
            raise ValueError(f"logit_bias has token {token} twice. Give each token one bias.")
        if bias not in _BIAS:
            raise ValueError(f"logit_bias of token {token} must be {_BIAS}, got {bias!r:.60}.")
        seen.add(token)


def _check_stop(stop: tuple[str, ...]) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
        raise ValueError(f"stop must be a tuple of strings, such as ({str(stop)[:20]!r},), got {stop!r}.")
    if len(stop) > MOST_STOPS:
        raise ValueError(f"stop must have at most {MOST_STOPS} strings, got {len(stop)}.")
    for i, text in enumerate(stop):
        if not 1 <= len(text) <= LONGEST_STOP:
            raise ValueError(f"stop[{i}] must have from 1 to {LONGEST_STOP} characters, got {len(text)}.")


def _check_grammar(grammar: Grammar | None, n: int) -> None:
    if not isinstance(grammar, Grammar | None):
        raise ValueError(f"grammar is {grammar!r:.80}. Make one by Grammar.json_schema(...) or .regex.")
    if grammar is not None and (n > MOST_MATCHERS or n * len(grammar.text) > MOST_TEXT):
        raise ValueError(
            f"n is {n}, and the grammar has {len(grammar.text)} characters: each choice compiles it, so n must be at"
            f" most {MOST_MATCHERS}, and n times the characters at most {MOST_TEXT}. Send several requests."
        )


def _check_size(prompt: int, drawn: int, limits: Limits) -> None:
    if not 1 <= prompt < limits.context:
        raise ValueError(
            f"prompt must have from 1 to {limits.context - 1} tokens, got {prompt}: the context has {limits.context},"
            " and one is drawn at least."
        )
    if prompt + drawn > limits.context:
        raise ValueError(
            f"prompt and max_tokens must be at most {limits.context} together, the context, got {prompt} + {drawn} ="
            f" {prompt + drawn}."
        )
    need = limits.blocks_of(prompt + drawn - 1)  # the last drawn token is never fed
    if need > limits.usable:
        raise ValueError(
            f"prompt and max_tokens must need at most {limits.usable} blocks of {limits.block} tokens, all blocks of"
            f" the pool, got {need} for {prompt} + {drawn} tokens."
        )
