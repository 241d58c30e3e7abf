"""Options of a request's draws: each is one entry of `Sampling`, from which every other place follows.

    min_p: float = option(0.0, Range(0, 1), draw="min_p", http="number")
    min_tokens: int = option(0, Range(0, 1 << 24, integer=True), rule=forbid_ends, http="integer")

The entry has the default, the check at admission with the type, the argument of a kernel with a value for each row, the
rule of tokens that a row may not draw, and the kind of the HTTP field, which has the option's name.
"""

import contextlib
import dataclasses
import functools
import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int

from ._limits import Limits

JsonKind = Literal["integer", "number", "flag", "string", "integers", "strings", "object"]
Encode = Callable[[str], Sequence[int]]
CheckValue = Callable[[str, Any, Limits], None]  # of a name and a value; raises a ValueError
# Function from a request's sampling, the tokens drawn so far and the size of the vocabulary to forbidden tokens.
Rule = Callable[[Any, Sequence[int], int], Sequence[int] | Int[np.ndarray, " n"]]


class Option(NamedTuple):
    """An option of a request's draws.

    Attributes:
        name: field of `Sampling`.
        check: check of the value at admission.
        draw: argument of `kernels.draw` with a value for each row, or empty.
        penalise: argument of `kernels.penalise` with a value for each row, or empty.
        dtype: dtype of the argument.
        padding: value of rows that are padding.
        convert: function from a value and limits to the value of the argument, for example a large `top_k` to 0.
        rule: tokens that a row may not draw, such as stop tokens, or None.
        encode: function from a value and the tokenizer to a value of token ids, or None.
        http: kind of the HTTP field, or None for an option that HTTP does not have under this name.
    """

    name: str
    check: CheckValue
    draw: str
    penalise: str
    dtype: torch.dtype
    padding: Any
    convert: Callable[[Any, Limits], Any]
    rule: Rule | None
    encode: Callable[[Any, Encode], Any] | None
    http: JsonKind | None

    def column(self, rows: Sequence[Any], num: int, limits: Limits) -> array:
        """Returns the values of rows, and padding up to `num` rows."""
        values = [self.convert(getattr(row, self.name), limits) for row in rows]
        code = "q" if self.dtype == torch.int64 else "d"
        return array(code, values + [self.padding] * (num - len(values)))


class Range(NamedTuple):
    """Check of a number.

    Attributes:
        low: least number.
        high: largest number.
        integer: whether the number must be an integer.
        above: whether `low` itself is out of range.

    Example:
        >>> Range(0, 1, above=True)("top_p", 0.0, None)
        Traceback (most recent call last):
        ValueError: top_p must be a number above 0 and at most 1, got 0.0.
    """

    low: float
    high: float
    integer: bool = False
    above: bool = False

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

    def __call__(self, name: str, value: Any, limits: Any) -> None:
        """Refuses a value that is not a number in the range."""
        del limits
        if value not in self:
            raise ValueError(f"{name} must be {self}, got {value!r:.60}.")


def option(
    default: Any,
    check: CheckValue,
    *,
    draw: str = "",
    penalise: str = "",
    padding: Any = None,
    convert: Callable[[Any, Limits], Any] = lambda value, limits: value,
    rule: Rule | None = None,
    encode: Callable[[Any, Encode], Any] | None = None,
    http: JsonKind | None = None,
) -> Any:
    """Returns a field of `Sampling` with the option's entry. `Option` documents the arguments.

    Args:
        default: value of a request that does not choose. It has no effect, if the option has a rule.
        check: see `Option`.
        draw: see `Option`.
        penalise: see `Option`.
        padding: see `Option`. None is the default.
        convert: see `Option`.
        rule: see `Option`.
        encode: see `Option`.
        http: see `Option`.
    """
    dtype = torch.int64 if isinstance(check, Range) and check.integer else torch.float64
    padding = default if padding is None else padding
    made = Option("", check, draw, penalise, dtype, padding, convert, rule, encode, http)
    return dataclasses.field(default=default, metadata={"option": made})


def list_options(cls: Any) -> tuple[Option, ...]:
    """Returns the options of a dataclass, in the order of its fields."""
    return tuple(f.metadata["option"]._replace(name=f.name) for f in dataclasses.fields(cls) if "option" in f.metadata)


# Checks.


def check_flag(name: str, value: Any, limits: Limits) -> None:
    """Refuses a value that is not True or False."""
    del limits
    if type(value) is not bool:
        raise ValueError(f"{name} must be True or False, got {value!r:.60}.")


def check_tokens(name: str, value: Any, limits: Limits) -> None:
    """Refuses a value that is not a tuple of token ids."""
    if not isinstance(value, tuple):
        raise ValueError(f"{name} must be a tuple of token ids, got a {type(value).__name__}.")
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < limits.vocab:
            raise ValueError(f"{name}[{i}] must be an integer from 0 to {limits.vocab - 1}, got {token!r:.60}.")


def check_allowed(name: str, value: Any, limits: Limits) -> None:
    """Refuses a value that is neither None nor a tuple of at least one token id."""
    if value is not None:
        check_tokens(name, value, limits)
        if not value:
            raise ValueError(f"{name} must have at least one token id, got (). Leave it out to allow all tokens.")


class Names(NamedTuple):
    """Check of a tuple of strings.

    Attributes:
        most: most strings.
        longest: most characters of a string.
    """

    most: int
    longest: int

    def __call__(self, name: str, value: Any, limits: Limits) -> None:
        """Refuses a value that is not a tuple of few short strings, none of them empty."""
        del limits
        if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
            raise ValueError(f"{name} must be a tuple of strings, such as ({str(value)[:20]!r},), got {value!r:.60}.")
        if len(value) > self.most:
            raise ValueError(f"{name} must have at most {self.most} strings, got {len(value)}.")
        for i, text in enumerate(value):
            if not 1 <= len(text) <= self.longest:
                raise ValueError(f"{name}[{i}] must have from 1 to {self.longest} characters, got {len(text)}.")


class TokenNumbers(NamedTuple):
    """Check of pairs of a token and a number.

    Attributes:
        most: most pairs.
        numbers: range of the numbers.
    """

    most: int
    numbers: Range

    def __call__(self, name: str, value: Any, limits: Limits) -> None:
        """Refuses a value that is not a tuple of pairs, each of another token."""
        if not isinstance(value, tuple) or not all(isinstance(x, tuple) and len(x) == 2 for x in value):
            raise ValueError(f"{name} must be a tuple of pairs, such as ((5, -100.0),), got {value!r:.80}.")
        if len(value) > self.most:
            raise ValueError(f"{name} must have at most {self.most} tokens, got {len(value)}.")
        seen = set[int]()
        for token, bias in value:
            if type(token) is not int or not 0 <= token < limits.vocab:
                text = f"{name} must have tokens from 0 to {limits.vocab - 1}, integers, got {token!r:.60}."
                raise ValueError(text)
            if token in seen:
                raise ValueError(f"{name} has token {token} twice. Give each token one bias.")
            if bias not in self.numbers:
                raise ValueError(f"{name} of token {token} must be {self.numbers}, got {bias!r:.60}.")
            seen.add(token)


class BadWords(NamedTuple):
    """Check of words, each a string or a tuple of token ids.

    Attributes:
        most: most words, counted after `encode_words`, which may make two of a string.
        longest: most characters or tokens of a word.
    """

    most: int
    longest: int

    def __call__(self, name: str, value: Any, limits: Limits) -> None:
        """Refuses a value that is not a tuple of few short words, none of them empty."""
        if not isinstance(value, tuple):
            raise ValueError(f"{name} must be a tuple of strings or of tuples of token ids, got {value!r:.60}.")
        if len(value) > self.most:
            raise ValueError(f"{name} must have at most {self.most} words, got {len(value)}.")
        for i, word in enumerate(value):
            if not isinstance(word, str):
                check_tokens(f"{name}[{i}]", word, limits)
            if not 1 <= len(word) <= self.longest:
                unit = "characters" if isinstance(word, str) else "tokens"
                raise ValueError(f"{name}[{i}] must have from 1 to {self.longest} {unit}, got {len(word)}.")


class ReasoningBudget(NamedTuple):
    """Most tokens of reasoning. Then the text of its end is forced, token after token.

    A text between the markers counts, also where a text has several. So tokens are a function of the seed, as without a
    budget.

    Attributes:
        tokens: most tokens of reasoning. 0 is none.
        begin: token ids, or text, at the beginning of reasoning.
        end: token ids, or text, at its end.
        inside: whether the prompt ends with the beginning.
        forced: token ids, or text, that is forced. None is `end`.

    Example:
        >>> budget = ReasoningBudget(2, (5,), (6, 7))
        >>> budget.find_next([5, 9]), budget.find_next([5, 9, 9]), budget.find_next([5, 9, 9, 6])
        (None, 6, 7)
    """

    tokens: int
    begin: str | tuple[int, ...]
    end: str | tuple[int, ...]
    inside: bool = False
    forced: str | tuple[int, ...] | None = None

    def find_next(self, output: Sequence[int]) -> int | None:
        """Returns the token that is forced after the drawn tokens, or None if any may be drawn."""
        begin, end, forced = self.begin, self.end, self.forced or self.end
        assert not (isinstance(begin, str) or isinstance(end, str) or isinstance(forced, str)), "they were encoded"
        at, left, inside = 0, self.tokens, self.inside
        while inside or (at := _find_end(output, begin, at)) >= 0:
            inside, border, stop = False, at + left, _find_end(output, end, at)
            if 0 <= stop < border + len(end):  # reasoning that has ended by itself
                at, left = stop, border - stop + len(end)
                continue
            if len(output) < border:
                return None
            begun = range(min(len(end) - 1, left), 0, -1)  # tokens of the end at the border
            border -= next((n for n in begun if tuple(output[border - n : border]) == end[:n]), 0)
            if len(output) < border + len(forced):
                return forced[len(output) - border]
            at, left = border + len(forced), 0
        return None


def _find_end(output: Sequence[int], part: Sequence[int], start: int) -> int:
    """Returns the place after the first occurrence of some tokens, or -1."""
    at, part = start, tuple(part)
    with contextlib.suppress(ValueError):  # of `index`, after the last place
        while True:
            at = output.index(part[0], at) + 1
            if tuple(output[at - 1 : at - 1 + len(part)]) == part:
                return at - 1 + len(part)
    return -1


def check_budget(name: str, value: Any, limits: Limits) -> None:
    """Refuses a value that is neither None nor a `ReasoningBudget` of a number and two markers."""
    if value is None:
        return
    if not isinstance(value, ReasoningBudget):
        raise ValueError(f"{name} must be None or a ReasoningBudget(tokens, begin, end), got {value!r:.60}.")
    Range(0, 1 << 24, integer=True)(f"{name}.tokens", value.tokens, limits)
    for field in ("begin", "end", "forced"):
        marker = getattr(value, field)
        if not isinstance(marker, str) and not (field == "forced" and marker is None):
            check_tokens(f"{name}.{field}", marker, limits)
        if marker is not None and not 1 <= len(marker) <= _LONGEST_MARKER:
            raise ValueError(f"{name}.{field} must have from 1 to {_LONGEST_MARKER} tokens, got {len(marker)}.")


_LONGEST_MARKER = 256


def encode_budget(budget: ReasoningBudget, encode: Encode) -> ReasoningBudget:
    """Returns a budget with the token ids of its markers."""

    def find_ids(marker: str | tuple[int, ...]) -> tuple[int, ...]:
        return tuple(encode(marker)) if isinstance(marker, str) else marker

    forced = None if budget.forced is None else find_ids(budget.forced)
    return budget._replace(begin=find_ids(budget.begin), end=find_ids(budget.end), forced=forced)


# Rules: the tokens that a row may not draw.


def force_end_of_reasoning(sampling: Any, output: Sequence[int], vocab: int) -> Sequence[int] | Int[np.ndarray, " n"]:
    """Returns all tokens but the next token of the end of reasoning, after the budget."""
    found = sampling.reasoning_budget.find_next(output)
    return () if found is None else _complement((found,), vocab)


def forbid_ends(sampling: Any, output: Sequence[int], vocab: int) -> Sequence[int]:
    """Returns the stop tokens until `min_tokens` tokens are drawn."""
    del vocab
    return sampling.stop_tokens if len(output) < sampling.min_tokens else ()


def forbid_bad_words(sampling: Any, output: Sequence[int], vocab: int) -> Sequence[int]:
    """Returns the last token of each bad word whose other tokens are the last drawn tokens.

    Example:
        >>> class Sampling: bad_words = ((5,), (6, 7), (8, 6, 7))
        >>> forbid_bad_words(Sampling, [6], 100), forbid_bad_words(Sampling, [8, 6], 100)
        ([5, 7], [5, 7, 7])
    """
    del vocab
    found, num = list[int](), len(output)
    for *start, last in sampling.bad_words:
        if len(start) <= num and list(output[num - len(start) :]) == start:
            found.append(last)
    return found


def forbid_others(sampling: Any, output: Sequence[int], vocab: int) -> Int[np.ndarray, " n"]:
    """Returns all tokens but `allowed_token_ids`."""
    del output
    return _complement(sampling.allowed_token_ids, vocab)


@functools.lru_cache(maxsize=64)
def _complement(tokens: tuple[int, ...], vocab: int) -> Int[np.ndarray, " n"]:
    left = np.ones(vocab, bool)
    left[list(tokens)] = False
    return np.flatnonzero(left)


def encode_words(words: tuple[str | tuple[int, ...], ...], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of words: of each string at the beginning of a text, and after a space.

    The second spelling is left out where the space is a token of its own, as vLLM does.

    Example:
        >>> encode_words(("ab", (7, 8)), lambda text: list(text.encode()))
        ((97, 98), (7, 8))
    """
    found = list[tuple[int, ...]]()
    for word in words:
        if not isinstance(word, str):
            found.append(word)
            continue
        plain, spaced = (tuple(encode(start + word.lstrip())) for start in ("", " "))
        found.append(plain)
        if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return tuple(found)
