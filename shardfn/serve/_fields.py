"""Bodies of requests: JSON, read strictly, and one table of the fields that are served or refused.

A field that is not served is refused by name, and so is a field that is unknown, doubled or of another type. Clients
send many fields of OpenAI's and vLLM's interfaces with values that ask for nothing, for example `tools: []`. The tables
list such values, which have no effect. Ranges are the ranges of `check_request`, the same for Python and HTTP.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardfn.core import did_you_mean
from shardfn.inference import SAMPLING_OPTIONS, JsonKind

from ._errors import ApiError


class FieldKind(NamedTuple):
    """Type of a field.

    Attributes:
        name: type in words.
        has: function that tells whether a value is of the type.
        served: whether the field has an effect. False for a field that is read and ignored.
    """

    name: str
    has: Callable[[Any], bool]
    served: bool = True


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _has_each(has: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(has, value))


INTEGER = FieldKind("an integer", _is_integer)
NUMBER = FieldKind("a number", lambda value: type(value) in (int, float))
FLAG = FieldKind("true or false", lambda value: type(value) is bool)
TEXT = FieldKind("a string", _is_text)
OBJECT = FieldKind("an object", lambda value: isinstance(value, dict))
LIST = FieldKind("a list", lambda value: isinstance(value, list))
INTEGERS = FieldKind("a list of integers", _has_each(_is_integer))
STRINGS = FieldKind("a list of strings", _has_each(_is_text))
TEXTS = FieldKind("a string or a list of strings", lambda value: _is_text(value) or _has_each(_is_text)(value))
ANY = FieldKind("a value", lambda value: True)


def neutral_kind(*values: Any) -> FieldKind:
    """Returns the type of a field that is not served, with the values that ask for nothing.

    Example:
        >>> neutral_kind(False).has(False), neutral_kind(False).has(True), neutral_kind(False).has(0)
        (True, False, False)
    """
    texts = [json.dumps(value) for value in values]
    return FieldKind(" or ".join(texts), lambda value: json.dumps(value) in texts, served=False)


def ignored_kind(kind: FieldKind) -> FieldKind:
    """Returns the type of a field that has no effect on an answer."""
    return kind._replace(served=False)


_KINDS: dict[JsonKind, FieldKind] = {
    "integer": INTEGER,
    "number": NUMBER,
    "flag": FLAG,
    "string": TEXT,
    "integers": INTEGERS,
    "strings": STRINGS,
    "object": OBJECT,
}
# Fields of both routes: options of `Sampling` that HTTP has under the same names.
SAMPLING: Mapping[str, FieldKind] = {option.name: _KINDS[option.http] for option in SAMPLING_OPTIONS if option.http}
COMMON: Mapping[str, FieldKind] = {
    **SAMPLING,
    "max_tokens": INTEGER,
    "model": TEXT,
    "stream": FLAG,
    "stream_options": OBJECT,
    "stop": TEXTS,
    "stop_token_ids": INTEGERS,
    "include_stop_str_in_output": FLAG,
    "ignore_eos": FLAG,
    "cache_salt": TEXT,
    "logit_bias": OBJECT,
    "regex": TEXT,
    "response_format": OBJECT,
    "use_beam_search": FLAG,
    "length_penalty": NUMBER,
}
# Fields of other servers, with the values that ask for nothing.
_NEUTRAL: Mapping[str, FieldKind] = {
    # OpenAI's.
    "functions": neutral_kind([]),
    "function_call": neutral_kind("none", "auto"),
    "store": neutral_kind(False),
    "metadata": ignored_kind(OBJECT),  # of stored answers
    "service_tier": neutral_kind("auto", "default"),
    "modalities": neutral_kind(["text"]),
    "verbosity": neutral_kind("medium"),
    "prompt_cache_key": ignored_kind(TEXT),
    "prompt_cache_retention": ignored_kind(TEXT),
    "safety_identifier": ignored_kind(TEXT),
    "user": ignored_kind(TEXT),
    # vLLM's.
    "spaces_between_special_tokens": neutral_kind(True),
    "return_tokens_as_token_ids": neutral_kind(False),
    "return_token_ids": neutral_kind(False),
    "priority": neutral_kind(0),
    "request_id": ignored_kind(TEXT),
    "kv_transfer_params": neutral_kind({}),
    "vllm_xargs": neutral_kind({}),
}
COMPLETIONS: Mapping[str, FieldKind] = {
    **_NEUTRAL,
    **COMMON,
    "prompt": ANY,
    "prompt_embeds": TEXTS,
    "logprobs": INTEGER,
    "echo": FLAG,
    "best_of": INTEGER,
    "suffix": neutral_kind(""),
    "add_special_tokens": neutral_kind(True),
    "tools": neutral_kind([]),
    "tool_choice": neutral_kind("none", "auto"),  # among no tools
    "parallel_tool_calls": ignored_kind(FLAG),
    "reasoning_effort": neutral_kind("none"),
}
# Fields of a form with a sound, except the sound.
TRANSCRIPTIONS: Mapping[str, FieldKind] = {
    "model": TEXT,
    "language": TEXT,
    "response_format": TEXT,
    "temperature": NUMBER,
    "seed": INTEGER,
    "max_completion_tokens": INTEGER,
}
# Fields that a chat template sees.
TEMPLATE: Mapping[str, FieldKind] = {
    "tools": LIST,
    "reasoning_effort": TEXT,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "chat_template_kwargs": OBJECT,
}
CHAT: Mapping[str, FieldKind] = {
    **_NEUTRAL,
    **COMMON,
    "messages": LIST,
    "max_completion_tokens": INTEGER,
    "logprobs": FLAG,
    "top_logprobs": INTEGER,
    "echo": neutral_kind(False),
    "add_special_tokens": neutral_kind(False),
    "mm_processor_kwargs": neutral_kind({}),
    "documents": neutral_kind([]),
    **TEMPLATE,
    "tool_choice": ANY,
    "parallel_tool_calls": FLAG,
    "include_reasoning": FLAG,
    "thinking_token_budget": INTEGER,
}
# Fields of routes whose answers have no tokens.
_POOLED: Mapping[str, FieldKind] = {
    "model": TEXT,
    "user": ignored_kind(TEXT),
    "add_special_tokens": neutral_kind(True),
    "priority": neutral_kind(0),
    "request_id": ignored_kind(TEXT),
}
EMBEDDINGS: Mapping[str, FieldKind] = {**_POOLED, "input": ANY, "encoding_format": TEXT, "dimensions": INTEGER}
_CLASSIFIED: Mapping[str, FieldKind] = {**_POOLED, "use_activation": FLAG, "cache_salt": TEXT}
SCORE: Mapping[str, FieldKind] = {
    **_CLASSIFIED,
    "text_1": ANY,
    "text_2": ANY,
    "queries": ANY,
    "documents": ANY,
    "choices": ANY,
}
RERANK: Mapping[str, FieldKind] = {
    **_CLASSIFIED,
    "query": ANY,
    "documents": ANY,
    "top_n": INTEGER,
    "return_documents": FLAG,
}
CLASSIFY: Mapping[str, FieldKind] = {
    **_CLASSIFIED,
    "input": ANY,
    "messages": LIST,
    "add_generation_prompt": FLAG,
    "chat_template_kwargs": OBJECT,
}
OPTIONS: Mapping[str, FieldKind] = {
    "include_usage": FLAG,
    "include_obfuscation": neutral_kind(False),
    "continuous_usage_stats": neutral_kind(False),
}
FORMAT: Mapping[str, FieldKind] = {"type": TEXT, "json_schema": OBJECT}
SCHEMA: Mapping[str, FieldKind] = {"name": TEXT, "description": TEXT, "strict": FLAG, "schema": OBJECT}
MESSAGE: Mapping[str, FieldKind] = {
    "role": TEXT,
    "content": ANY,
    "name": TEXT,
    "reasoning": TEXT,
    "reasoning_content": TEXT,
    "refusal": neutral_kind(""),
    "tool_calls": LIST,
    "tool_call_id": TEXT,
    "annotations": neutral_kind([]),
}
TOOL: Mapping[str, FieldKind] = {"type": TEXT, "function": OBJECT}
FUNCTION: Mapping[str, FieldKind] = {"name": TEXT, "description": TEXT, "parameters": OBJECT, "strict": FLAG}
CHOICE: Mapping[str, FieldKind] = {"type": TEXT, "function": OBJECT}
CHOSEN: Mapping[str, FieldKind] = {"name": TEXT}
CALL: Mapping[str, FieldKind] = {"id": TEXT, "type": TEXT, "function": OBJECT, "index": ignored_kind(INTEGER)}
CALLED: Mapping[str, FieldKind] = {"name": TEXT, "arguments": TEXT}
PART: Mapping[str, FieldKind] = {"type": TEXT, "text": TEXT}
IMAGE_PART: Mapping[str, FieldKind] = {"type": TEXT, "image_url": OBJECT}
IMAGE: Mapping[str, FieldKind] = {"url": TEXT, "detail": ignored_kind(TEXT)}

# Fields of OpenAI's interface that are not served, except with the values of the tables.
REFUSED = frozenset(
    "audio best_of echo function_call functions metadata modalities moderation parallel_tool_calls"
    " prediction previous_response_id conversation prompt_cache_key prompt_cache_retention reasoning_effort"
    " safety_identifier service_tier store suffix tool_choice tools verbosity web_search_options"
    " annotations name refusal tool_call_id tool_calls image_url input_audio file".split()  # of messages and parts
)


def read_json(data: bytes) -> dict[str, Any]:
    """Returns the object of a body.

    Raises:
        ApiError: the body is not JSON as RFC 8259 has it, or not an object. Or an object in the body has a field twice,
            or a name that is not valid Unicode.

    Example:
        >>> read_json(b'{"n": 1}')
        {'n': 1}
    """
    try:
        body = json.loads(data.decode(), object_pairs_hook=_refuse_repeated, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ApiError(400, "The body is JSON that is nested too deeply.") from error
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"The body must be an object, got {_describe_value(body)}.")
    return body


def read_fields(body: Mapping[str, Any], known: Mapping[str, FieldKind], at: str = "") -> dict[str, Any]:
    """Returns the fields of an object that are served, given and not null.

    Args:
        body: object.
        known: fields that may be given.
        at: place of the object in the body, which is empty for the body itself.

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
            _check_value(value, known[name], full)
        elif name in REFUSED:
            raise ApiError(400, f"{full} is not served. Leave it out.", full, "unsupported_parameter")
        else:
            near = did_you_mean(name, known)
            raise ApiError(400, f"{_shorten_text(full)} is not known.{near}", _shorten_text(full), "unknown_parameter")
    return {name: value for name, value in given.items() if known[name].served}


def get_required(given: Mapping[str, Any], name: str, at: str = "") -> Any:
    """Returns the value of a field that must be there.

    Raises:
        ApiError: the field is missing or null.
    """
    full = f"{at}.{name}" if at else name
    if given.get(name) is None:
        raise ApiError(400, f"{full} is missing.", full, "missing_parameter")
    return given[name]


def _check_value(value: Any, kind: FieldKind, at: str) -> None:
    if not kind.has(value) and kind.served:
        raise ApiError(400, f"{at} must be {kind.name}, got {_describe_value(value)}.", at)
    if not kind.has(value):
        text = f"{at} is {_describe_value(value)}, which is not served; leave it out, or give {kind.name}."
        raise ApiError(400, text, at, "unsupported_parameter")
    check_text(value, at)


def check_text(value: Any, at: str) -> None:
    """Checks that the texts of a value are Unicode, at any depth: JSON can write half of a surrogate pair.

    Raises:
        ApiError: names the field.
    """
    for text in value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]:
        if isinstance(text, list | dict):
            check_text(text, at)
        elif isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ApiError(400, f"{at} has half of a surrogate pair at {error.start}.", at) from error


def _describe_value(value: Any) -> str:
    """Returns the type of a value as JSON has it, and the value if it is short."""
    if isinstance(value, bool | int | float | str):
        return _shorten_text(json.dumps(value))
    return "null" if value is None else "a list" if isinstance(value, list) else "an object"


def _shorten_text(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    for name in made:
        check_text(name, ascii(_shorten_text(name)))
    if len(made) < len(pairs):
        seen = set[str]()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ApiError(400, f"{_shorten_text(name)} is given twice.", _shorten_text(name))
    return made


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")
