"""Bodies of requests: JSON, read strictly, and one table of the fields that are served or refused.

A field that is not served is refused by its name, and so is one that is unknown, doubled or of another type. Ranges
are those of `check_request`, the same for Python and HTTP.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardfn.core import did_you_mean

from ._errors import ApiError


class Kind(NamedTuple):
    """A type of a field.

    Attributes:
        name: in words.
        has: whether a value is of it.
    """

    name: str
    has: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _each(has: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(has, value))


INTEGER = Kind("an integer", _is_integer)
NUMBER = Kind("a number", lambda value: type(value) in (int, float))
FLAG = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("a string", _is_text)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
INTEGERS = Kind("a list of integers", _each(_is_integer))
TEXTS = Kind("a string or a list of strings", lambda value: _is_text(value) or _each(_is_text)(value))
ANY = Kind("a value", lambda value: True)

# Fields of both routes.
SAMPLING: Mapping[str, Kind] = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "seed": INTEGER,
    "n": INTEGER,
    "max_tokens": INTEGER,
}
COMMON: Mapping[str, Kind] = {
    **SAMPLING,
    "model": TEXT,
    "stream": FLAG,
    "stream_options": OBJECT,
    "stop": TEXTS,
    "stop_token_ids": INTEGERS,
    "ignore_eos": FLAG,
    "cache_salt": TEXT,
    "logit_bias": OBJECT,
    "regex": TEXT,
    "response_format": OBJECT,
    "user": TEXT,
}
COMPLETIONS: Mapping[str, Kind] = {**COMMON, "prompt": ANY, "logprobs": INTEGER}
CHAT: Mapping[str, Kind] = {
    **COMMON,
    "messages": LIST,
    "max_completion_tokens": INTEGER,
    "logprobs": FLAG,
    "top_logprobs": INTEGER,
}
EMBEDDINGS: Mapping[str, Kind] = {
    "model": TEXT,
    "input": ANY,
    "encoding_format": TEXT,
    "dimensions": INTEGER,
    "user": TEXT,
}
OPTIONS: Mapping[str, Kind] = {"include_usage": FLAG}
FORMAT: Mapping[str, Kind] = {"type": TEXT, "json_schema": OBJECT}
SCHEMA: Mapping[str, Kind] = {"name": TEXT, "description": TEXT, "strict": FLAG, "schema": OBJECT}
MESSAGE: Mapping[str, Kind] = {"role": TEXT, "content": ANY}
PART: Mapping[str, Kind] = {"type": TEXT, "text": TEXT}

# Fields of OpenAI's interface that are not served.
REFUSED = frozenset(
    "audio best_of echo function_call functions metadata modalities moderation parallel_tool_calls"
    " prediction prompt_cache_key prompt_cache_retention reasoning_effort safety_identifier"
    " service_tier store suffix tool_choice tools verbosity web_search_options"
    " annotations name refusal tool_call_id tool_calls image_url input_audio file".split()  # of messages and parts
)


def read_json(data: bytes) -> dict[str, Any]:
    """The object of a body.

    Raises:
        ApiError: it is not JSON as RFC 8259 has it, not an object, or an object in it has a field twice.

    Example:
        >>> read_json(b'{"n": 1}')
        {'n': 1}
    """
    try:
        body = json.loads(data.decode(), object_pairs_hook=_single, parse_constant=_no_constant)
    except RecursionError as error:
        raise ApiError(400, "The body is JSON that is nested too deeply.") from error
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"The body is {_named(body)}; it must be an object.")
    return body


def read_fields(body: Mapping[str, Any], known: Mapping[str, Kind], at: str = "") -> dict[str, Any]:
    """The fields of an object that are given and not null.

    Args:
        body: the object.
        known: the fields that are served.
        at: the object's place in the body; empty for the body itself.

    Raises:
        ApiError: a field is not served, unknown, or of another type.

    Example:
        >>> read_fields({"n": 1, "seed": None}, SAMPLING)
        {'n': 1}
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        full = f"{at}.{name}" if at else name
        if name in known:
            if not known[name].has(value):
                raise ApiError(400, f"{full} is {_named(value)}; it must be {known[name].name}.", full)
            check_text(value, full)
        elif name in REFUSED:
            raise ApiError(400, f"{full} is not served; leave it out.", full, "unsupported_parameter")
        else:
            near = did_you_mean(name, known)
            raise ApiError(400, f"{_shown(full)} is not known.{near}", _shown(full), "unknown_parameter")
    return given


def check_text(value: Any, at: str) -> None:
    """Refuses a text that is no Unicode: half of a surrogate pair, which JSON can write.

    Raises:
        ApiError: names the field.
    """
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ApiError(400, f"{at} has half of a surrogate pair at {error.start}.", at) from error


def _named(value: Any) -> str:
    """The type of a value as JSON has it, and the value if it is short."""
    if isinstance(value, bool | int | float | str):
        return _shown(json.dumps(value))
    return "null" if value is None else "a list" if isinstance(value, list) else "an object"


def _shown(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def _single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set[str]()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ApiError(400, f"{_shown(name)} is given twice.", _shown(name))
    return made


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")
