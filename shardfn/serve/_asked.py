"""From the body of a request to requests of the engine."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shardfn.inference import Compiler, Detokenizer, Grammar, Limits, Request, Sampling, check_request

from ._errors import ApiError
from ._fields import (
    CHAT,
    COMPLETIONS,
    FORMAT,
    MESSAGE,
    NUMBER,
    OPTIONS,
    PART,
    SAMPLING,
    SCHEMA,
    check_text,
    read_fields,
)

_COMPLETION = 16  # OpenAI's default for max_tokens of the older route
_OLDER_TOP = 5  # its most probable tokens
_ROLES = ("system", "user", "assistant")


class Text(NamedTuple):
    """A tokenizer as a server uses it.

    Attributes:
        encode: from a text to the ids of a prompt.
        tokenizer: as `shardfn.inference.detokenizer` takes.
        chat: from messages to the ids of a prompt; None without a chat template. A `ValueError` refuses messages.
    """

    encode: Callable[[str], list[int]]
    tokenizer: Any
    chat: Callable[[list[dict[str, str]]], list[int]] | None = None


class Model(NamedTuple):
    """The model that bodies are read for.

    Attributes:
        name: as clients name it.
        text: the tokenizer.
        spelling: the texts of tokens one by one, also of special ones.
        limits: of the engine.
        ends: tokens that end a completion.
        max_choices: of one call.
        compiler: of grammars; None if they are not served.
        texts: the texts of choices.
        adapters: names that clients may give in place of the model's.
        width: of embeddings; 0 if they are not served.
    """

    name: str
    text: Text
    spelling: Detokenizer
    limits: Limits
    ends: frozenset[int]
    max_choices: int
    compiler: Compiler | None
    texts: Detokenizer
    adapters: tuple[str, ...] = ()
    width: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may give."""
        return (self.name, *self.adapters)


class Asked(NamedTuple):
    """A body, checked.

    Attributes:
        model: as the client has named it.
        requests: one for each prompt; all have the same sampling but for the seed. In place of an adapter's digest
            they have its name, which the ranks look up.
        stream: whether the answer comes in pieces.
        usage: whether the last piece has the usage.
        logprobs: the number of most probable tokens that the answer has beside each drawn one; None for an answer
            without log probabilities.
    """

    model: str
    requests: list[Request]
    stream: bool
    usage: bool
    logprobs: int | None


def asked_completions(body: Mapping[str, Any], model: Model) -> Asked:
    """The meaning of a body of `/v1/completions`.

    Raises:
        ApiError: names the field that is wrong.
    """
    given = read_fields(body, COMPLETIONS)
    adapter = adapter_of(given, model)
    top = given.get("logprobs")
    if top is not None and not 0 <= top <= _OLDER_TOP:
        raise ApiError(400, f"logprobs is {top}; it must be an integer from 0 to {_OLDER_TOP}.", "logprobs")
    prompts = prompts_of(given, model, "prompt")
    return _asked(given, prompts, model, adapter, given.get("max_tokens", _COMPLETION), top)


def asked_chat(body: Mapping[str, Any], model: Model) -> Asked:
    """The meaning of a body of `/v1/chat/completions`.

    Raises:
        ApiError: names the field that is wrong, or the tokenizer has no chat template.
    """
    given = read_fields(body, CHAT)
    adapter = adapter_of(given, model)
    top = given.get("top_logprobs", 0) if given.get("logprobs") else None
    if top is None and given.get("top_logprobs", 0) != 0:
        raise ApiError(400, "top_logprobs has no effect without logprobs: true; leave it out.", "top_logprobs")
    if "max_completion_tokens" in given and "max_tokens" in given:
        raise ApiError(400, "max_tokens is given beside max_completion_tokens; give one of them.", "max_tokens")
    prompt = _templated(_messages(given), model)
    rest = max(1, model.limits.context - len(prompt))
    most = given.get("max_completion_tokens", given.get("max_tokens", rest))
    return _asked(given, [prompt], model, adapter, most, top)


def _asked(
    given: Mapping[str, Any], prompts: list[list[int]], model: Model, adapter: bytes, most: int, top: int | None
) -> Asked:
    ends = frozenset() if given.get("ignore_eos") else model.ends
    stops = given.get("stop", [])
    numbers: dict[str, Any] = {name: given[name] for name in SAMPLING if name in given}
    numbers |= {"seed": given.get("seed", secrets.randbits(63)), "max_tokens": most}
    stop_tokens = tuple(dict.fromkeys([*given.get("stop_token_ids", ()), *sorted(ends)]))
    sampling = Sampling(
        **numbers,
        stop_tokens=stop_tokens,
        logit_bias=_biases(given.get("logit_bias", {})),
        top_logprobs=top or 0,
        stop=(stops,) if isinstance(stops, str) else tuple(stops),
    )
    salt = given.get("cache_salt", "").encode()
    requests = [Request(tuple(prompt), sampling, salt=salt, adapter=adapter) for prompt in prompts]
    check_fields(requests, model.limits, given)
    if (grammar := _grammar(given, model, stop_tokens)) is not None:
        sampling = replace(sampling, grammar=grammar)
        requests = [replace(request, sampling=sampling) for request in requests]
        check_fields(requests, model.limits, given)
    if (choices := len(requests) * sampling.n) > model.max_choices:
        raise ApiError(400, f"n is {sampling.n}: {choices} choices; they must be at most {model.max_choices}.", "n")
    if "seed" not in given:  # equal prompts of one request are drawn apart
        requests = [replace(r, sampling=replace(r.sampling, seed=secrets.randbits(63))) for r in requests]
    stream, options = given.get("stream", False), given.get("stream_options")
    if options is not None and not stream:
        raise ApiError(400, "stream_options has no effect without stream: true; leave it out.", "stream_options")
    usage = read_fields(options or {}, OPTIONS, "stream_options").get("include_usage", False)
    return Asked(given["model"], requests, stream, usage, top)


def adapter_of(given: Mapping[str, Any], model: Model) -> bytes:
    """The name of the adapter that a body asks for by its model; empty for the model without one.

    Raises:
        ApiError: the model is missing or unknown.
    """
    if "model" not in given:
        text = f"model is missing; this server has {names_of(model)}."
        raise ApiError(400, text, "model", "missing_parameter")
    check_model(given["model"], model)
    return b"" if given["model"] == model.name else given["model"].encode()


def check_model(name: str, model: Model) -> None:
    """Refuses a name that this server does not have.

    Raises:
        ApiError: has the names that it has.
    """
    if name not in model.names:
        text = f"model {name[:60]!r} does not exist; this server has {names_of(model)}."
        raise ApiError(404, text, "model", "model_not_found")


def names_of(model: Model) -> str:
    """The names that clients may give, in words."""
    return ", ".join(map(repr, model.names))


def _biases(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 20):
            text = f"logit_bias has a field {token[:60]!r}; each must be the id of a token, such as '50256'."
            raise ApiError(400, text, "logit_bias")
        if not NUMBER.has(bias):
            text = f"logit_bias of token {token} must be a number from -100 to 100."
            raise ApiError(400, text, "logit_bias")
    return tuple((int(token), bias) for token, bias in given.items())


def check_fields(requests: Sequence[Request], limits: Limits, given: Mapping[str, Any]) -> None:
    """Refuses values out of range.

    Raises:
        ApiError: names the field, and the prompt if there are several.
    """
    for i, request in enumerate(requests):
        _check(request, limits, f"prompt {i} of {len(requests)}: " if len(requests) > 1 else "", given)


def _check(request: Request, limits: Limits, where: str, given: Mapping[str, Any]) -> None:
    try:
        check_request(request, limits)
    except ValueError as error:
        name = str(error).split()[0].partition("[")[0]
        field = {"stop_tokens": "stop_token_ids"}.get(name, name)
        if field == "prompt":
            field = next(name for name in ("messages", "input", "prompt") if name in given)
        if field == "max_tokens" and "max_completion_tokens" in given:
            field = "max_completion_tokens"
        code = "context_length_exceeded" if request.prompt and "context" in str(error) else None
        raise ApiError(400, where + str(error).replace(name, field, 1), field, code) from error


def _grammar(given: Mapping[str, Any], model: Model, stop_tokens: Sequence[int]) -> Grammar | None:
    """The language of the text; it is compiled here, so that a wrong one never reaches the engine."""
    schema = _schema(given["response_format"]) if "response_format" in given else None
    if schema is None and "regex" not in given:
        return None
    if schema is not None and "regex" in given:
        raise ApiError(400, "regex is given beside response_format; give one of them.", "regex")
    field = "response_format" if schema is not None else "regex"
    if model.compiler is None:
        text = "needs llguidance (pip install 'shardfn[text]'), and a tokenizer whose tokens have bytes of their own."
        raise ApiError(400, f"{field} is not served: it {text}", field, "unsupported_parameter")
    try:
        made = Grammar.regex(given["regex"]) if schema is None else Grammar.json_schema(schema)
        model.compiler.compile(made, stop_tokens)  # as the engine will: it refuses a text that no token can begin
    except ValueError as error:
        raise ApiError(400, f"{field}: {str(error).removeprefix('grammar: ')}", field) from error
    return made


def _schema(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema that a format asks for; None for any text."""
    found = read_fields(given, FORMAT, "response_format")
    kind = _needed(found, "type", "response_format")
    if kind not in ("text", "json_object", "json_schema"):
        text = f"response_format.type is {kind!r:.60}; it must be 'text', 'json_object' or 'json_schema'."
        raise ApiError(400, text, "response_format.type")
    if kind != "json_schema":
        if "json_schema" in found:
            at = "response_format.json_schema"
            raise ApiError(400, f"{at} has no effect with type {kind!r}; take type 'json_schema'.", at)
        return {"type": "object"} if kind == "json_object" else None
    inner = read_fields(found.get("json_schema", {}), SCHEMA, "response_format.json_schema")
    return _needed(inner, "schema", "response_format.json_schema")


def _needed(given: Mapping[str, Any], name: str, at: str = "") -> Any:
    """The value of a field that must be there."""
    full = f"{at}.{name}" if at else name
    if given.get(name) is None:
        raise ApiError(400, f"{full} is missing.", full, "missing_parameter")
    return given[name]


def prompts_of(given: Mapping[str, Any], model: Model, field: str) -> list[list[int]]:
    """The ids of the prompts of a field, which has texts or lists of ids.

    Raises:
        ApiError: it is missing, or of another form.
    """
    prompt = _needed(given, field)
    check_text(prompt, field)
    if isinstance(prompt, str) or _ids(prompt):
        prompt = [prompt]
    if not (isinstance(prompt, list) and prompt and all(isinstance(x, str) or _ids(x) for x in prompt)):
        text = f"{field} must be a string, a list of token ids, or a list of these that is not empty."
        raise ApiError(400, text, field)
    return [model.text.encode(x) if isinstance(x, str) else x for x in prompt]


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _messages(given: Mapping[str, Any]) -> list[dict[str, str]]:
    if not given.get("messages"):
        how = "is empty" if "messages" in given else "is missing"
        raise ApiError(400, f"messages {how}; give one message at least.", "messages", "missing_parameter")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given["messages"])]


def _message(message: Any, at: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(400, f"{at} must be an object with role and content.", at)
    given = read_fields(message, MESSAGE, at)
    role, content = (_needed(given, name, at) for name in ("role", "content"))
    if role not in _ROLES:
        text = f"{at}.role is {role[:60]!r}; it must be one of {', '.join(_ROLES)}."
        raise ApiError(400, text, f"{at}.role")
    return {"role": role, "content": _content(content, f"{at}.content")}


def _content(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{at} must be a string, or a list of parts.", at)
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise ApiError(400, f"{at}[{i}] must be an object with type and text.", f"{at}[{i}]")
        kind = _needed(part, "type", f"{at}[{i}]")
        if kind != "text":
            text = f"{at}[{i}].type is {kind!r:.60}; only parts of type 'text' are served."
            raise ApiError(400, text, f"{at}[{i}].type", "unsupported_parameter")
        texts.append(_needed(read_fields(part, PART, f"{at}[{i}]"), "text", f"{at}[{i}]"))
    return "".join(texts)


def _templated(messages: list[dict[str, str]], model: Model) -> list[int]:
    if model.text.chat is None:
        text = f"the tokenizer of {model.name!r} has no chat template; use /v1/completions."
        raise ApiError(400, text, "messages", "no_chat_template")
    try:
        return model.text.chat(messages)
    except ValueError as error:
        raise ApiError(400, str(error).removeprefix("--chat: "), "messages") from error
