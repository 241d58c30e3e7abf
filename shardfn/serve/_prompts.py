"""From texts, lists of ids and messages to the ids of prompts. A text that can never fit is refused by its bytes."""

from collections.abc import Callable, Mapping
from typing import Any

from ._errors import ApiError
from ._fields import MESSAGE, PART, check_text, get_required, read_fields
from ._model import Model

_ROLES = ("system", "developer", "user", "assistant")
_SYNONYMS = {"developer": "system"}  # OpenAI's newer name, which few templates know


def read_prompts(
    given: Mapping[str, Any], model: Model, field: str, check_number: Callable[[int], None]
) -> list[list[int]]:
    """Returns the ids of the prompts of a field, which has texts or lists of ids.

    Args:
        given: fields of the body.
        model: model of the server.
        field: name of the field.
        check_number: function that refuses a number of prompts, before a prompt becomes tokens.

    Raises:
        ApiError: the field is missing, of another form, or has a text that can never fit.
    """
    prompt = get_required(given, field)
    check_text(prompt, field)
    if isinstance(prompt, str) or _is_ids(prompt):
        prompt = [prompt]
    if not (isinstance(prompt, list) and prompt and all(isinstance(x, str) or _is_ids(x) for x in prompt)):
        text = f"{field} must be a string, a list of token ids, or a list of these that is not empty."
        raise ApiError(400, text, field)
    check_number(len(prompt))
    for i, x in enumerate(prompt):
        if isinstance(x, str):
            _check_bytes(x, model, field, f"prompt {i} of {len(prompt)}: " if len(prompt) > 1 else "")
    return [model.text.encode(x) if isinstance(x, str) else x for x in prompt]


def read_chat(given: Mapping[str, Any], model: Model) -> list[int]:
    """Returns the ids of the prompt that a chat template makes of messages.

    Raises:
        ApiError: a message is wrong, the tokenizer has no template, or the text can never fit.
    """
    messages = _read_messages(given)
    if model.text.chat is None:
        text = f"the tokenizer of {model.name!r} has no chat template; use /v1/completions."
        raise ApiError(400, text, "messages", "no_chat_template")
    try:
        text = model.text.chat(messages)
    except ValueError as error:
        raise ApiError(400, str(error).removeprefix("--chat: "), "messages") from error
    _check_bytes(text, model, "messages", "")
    return (model.text.plain or model.text.encode)(text)


def _check_bytes(text: str, model: Model, field: str, where: str) -> None:
    """Refuses a text of more bytes than the tokens of a context can have, before the slow work of the tokenizer."""
    context = model.limits.context
    if model.longest and len(text) * 4 > context * model.longest:  # a character has at most four bytes
        size = len(text.encode())
        if size > context * model.longest:
            raise ApiError(
                400,
                f"{where}{field} must have at most {context * model.longest} bytes, got {size}: the context has"
                f" {context} tokens of at most {model.longest} bytes.",
                field,
                "context_length_exceeded",
            )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _read_messages(given: Mapping[str, Any]) -> list[dict[str, str]]:
    if not given.get("messages"):
        how = "is empty" if "messages" in given else "is missing"
        raise ApiError(400, f"messages {how}. Give one message at least.", "messages", "missing_parameter")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(given["messages"])]


def _read_message(message: Any, at: str) -> dict[str, str]:
    """Returns a message as templates read it."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{at} must be an object with role and content.", at)
    given = read_fields(message, MESSAGE, at)
    role = get_required(given, "role", at)
    if role not in _ROLES:
        text = f"{at}.role must be one of {', '.join(_ROLES)}, got {role[:60]!r}."
        raise ApiError(400, text, f"{at}.role")
    # Clients send back an answer without a text as null.
    content = given.get("content", "") if role == "assistant" else get_required(given, "content", at)
    more = {name: given[name] for name in ("name", "reasoning", "reasoning_content") if name in given}
    return {"role": _SYNONYMS.get(role, role), "content": _read_content(content, f"{at}.content"), **more}


def _read_content(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{at} must be a string, or a list of parts.", at)
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise ApiError(400, f"{at}[{i}] must be an object with type and text.", f"{at}[{i}]")
        kind = get_required(part, "type", f"{at}[{i}]")
        if kind != "text":
            text = f"{at}[{i}].type is {kind!r:.60}; only parts of type 'text' are served."
            raise ApiError(400, text, f"{at}[{i}].type", "unsupported_parameter")
        texts.append(get_required(read_fields(part, PART, f"{at}[{i}]"), "text", f"{at}[{i}]"))
    return "".join(texts)
