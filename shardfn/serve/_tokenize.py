"""Tokens of texts and of chats, and texts of tokens, as vLLM's routes have them."""

from collections.abc import Mapping
from typing import Any

from ._errors import ApiError
from ._fields import ANY, FLAG, INTEGERS, LIST, TEMPLATE, TEXT, FieldKind, get_required, read_fields
from ._model import Model, adapter_of
from ._prompts import check_bytes, read_chat
from ._tools import read_tools

TOKENIZE: Mapping[str, FieldKind] = {
    **TEMPLATE,
    "model": TEXT,
    "prompt": TEXT,
    "messages": LIST,
    "tool_choice": ANY,
    "add_special_tokens": FLAG,
    "return_token_strs": FLAG,
}
DETOKENIZE: Mapping[str, FieldKind] = {"model": TEXT, "tokens": INTEGERS}


def tokenize(body: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Returns the answer to a body of `/tokenize`: the ids of a text, or of the prompt of a chat.

    Raises:
        ApiError: names the field that is wrong.
    """
    given = read_fields(body, TOKENIZE)
    adapter_of({"model": model.name, **given}, model)
    if ("prompt" in given) == ("messages" in given):
        raise ApiError(400, "prompt or messages is needed. Give one of them.", "prompt", "missing_parameter")
    if "messages" in given:
        if given.get("add_special_tokens"):
            text = "add_special_tokens is true, and the chat template has the special tokens. Leave it out."
            raise ApiError(400, text, "add_special_tokens", "unsupported_parameter")
        tools = read_tools(given, model)
        ids = read_chat(given, model, () if tools is None else tools.listed).ids
    else:
        for name in (*TEMPLATE, "tool_choice"):
            if name in given:
                raise ApiError(400, f"{name} is a field of chats. Give messages, or leave it out.", name)
        check_bytes(given["prompt"], model, "prompt", "")
        has_special = given.get("add_special_tokens", True)
        ids = (model.text.encode if has_special else model.text.plain or model.text.encode)(given["prompt"])
    made = {"count": len(ids), "max_model_len": model.limits.context, "tokens": ids}
    shows = given.get("return_token_strs", False)
    return made | ({"token_strs": [model.spelling.decode([token]) for token in ids]} if shows else {})


def detokenize(body: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Returns the answer to a body of `/detokenize`: the text of tokens, special tokens included.

    Raises:
        ApiError: names the field that is wrong.
    """
    given = read_fields(body, DETOKENIZE)
    adapter_of({"model": model.name, **given}, model)
    tokens, most = get_required(given, "tokens"), model.limits.vocab - 1
    for i, token in enumerate(tokens):
        if not 0 <= token <= most:
            text = f"tokens[{i}] must be an integer from 0 to {most}, got {str(token)[:60]}."
            raise ApiError(400, text, f"tokens[{i}]")
    return {"prompt": model.spelling.decode(tokens)}
