"""From texts, lists of ids and messages to the ids of prompts. A text that can never fit is refused by its bytes."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardfn.inference import EncodedImage, RequestImages, make_embedded_prompt

from ._errors import ApiError
from ._fields import IMAGE, IMAGE_PART, MESSAGE, PART, check_text, get_required, read_fields
from ._model import Model
from ._prompt_embeds import read_embeddings
from ._tools import read_calls

_ROLES = ("system", "developer", "user", "assistant", "tool")
# Arguments of a chat function that are not variables of its template.
_OPTIONS = frozenset(
    "conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize padding"
    " truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
_SYNONYMS = {"developer": "system"}  # OpenAI's newer name, which few templates know


Prompt = str | list[int]


def read_prompts(
    given: Mapping[str, Any], model: Model, field: str, check_number: Callable[[int], None]
) -> list[list[int]]:
    """Returns the ids of the prompts of a field. See `list_prompts`."""
    prompts = list_prompts(given, model, field, check_number)
    return [model.text.encode(x) if isinstance(x, str) else x for x in prompts]


def list_prompts(
    given: Mapping[str, Any], model: Model, field: str, check_number: Callable[[int], None]
) -> list[Prompt]:
    """Returns the prompts of a field, which has texts or lists of ids.

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
            check_bytes(x, model, field, f"prompt {i} of {len(prompt)}: " if len(prompt) > 1 else "")
    return prompt


def read_prompt_embeds(
    given: Mapping[str, Any], model: Model, check_number: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Returns the fields of requests whose prompts are embeddings, for each tensor of `prompt_embeds`.

    Args:
        given: fields of the body.
        model: model of the server.
        check_number: function that refuses a number of prompts, before a tensor is read.

    Raises:
        ApiError: embeddings are not served, or a tensor is not of the model's width, or a text is not a tensor.
    """
    field = "prompt_embeds"
    if not model.embed_size:
        text = f"{field} is not served: start the server with --enable-prompt-embeds, for a decoder."
        raise ApiError(400, text, field, "unsupported_parameter")
    if given.get("echo"):
        text = "echo has no text for prompt_embeds. Leave one of them out."
        raise ApiError(400, text, "echo", "unsupported_parameter")
    texts = [given[field]] if isinstance(given[field], str) else given[field]
    if not texts:
        raise ApiError(400, f"{field} must have at least one tensor, got none.", field)
    check_number(len(texts))
    made = list[dict[str, Any]]()
    for i, text in enumerate(texts):
        at = field if isinstance(given[field], str) else f"{field}[{i}]"
        try:
            embeddings = read_embeddings(text)
        except ValueError as error:
            raise ApiError(400, f"{at} {error}. Send the base64 text of torch.save(tensor, file).", at) from error
        try:
            prompt, images = make_embedded_prompt(embeddings, model.embed_size)
        except ValueError as error:
            raise ApiError(400, str(error).replace(field, at, 1), at) from error
        made.append({"prompt": prompt, "images": images})
    return made


class ChatPrompt(NamedTuple):
    """Prompt of a chat.

    Attributes:
        ids: token ids.
        inside: whether the prompt ends with the marker of reasoning, so that the answer begins with reasoning.
        images: images of the prompt, or None.
    """

    ids: list[int]
    inside: bool
    images: RequestImages | None = None


def read_chat(given: Mapping[str, Any], model: Model, tools: Sequence[Mapping[str, Any]] = ()) -> ChatPrompt:
    """Returns the prompt that a chat template makes of messages.

    Args:
        given: fields of the body.
        model: model of the server.
        tools: definitions of tools that the template shows.

    Raises:
        ApiError: a message is wrong, the tokenizer has no template, or the text can never fit.
    """
    messages = _read_messages(given, model)
    if model.text.chat is None:
        text = f"the tokenizer of {model.name!r} has no chat template; use /v1/completions."
        raise ApiError(400, text, "messages", "no_chat_template")
    options = _read_options(given, model, messages)
    messages, images = _read_images(messages, model)
    if tools:
        check_text(json.dumps(tools, ensure_ascii=False), "tools")
        options["tools"] = list(tools)
    try:
        text = model.text.chat(messages, **options)
    except ValueError as error:
        raise ApiError(400, str(error).removeprefix("--chat: "), "messages") from error
    check_text(text, "messages")
    check_bytes(text, model, "messages", "")
    inside, encode = _is_inside(text, options, messages, model), model.text.plain or model.text.encode
    if model.text.images is None:
        return ChatPrompt(encode(text), inside)
    try:
        prompt = model.text.images.expand(text, images, encode)
        return ChatPrompt(prompt.ids, inside, model.text.images.place(prompt))
    except ValueError as error:
        raise ApiError(400, f"messages: {error}", "messages", "invalid_image") from error


def _read_images(messages: list[dict[str, Any]], model: Model) -> tuple[list[dict[str, Any]], list[EncodedImage]]:
    """Returns messages as the chat template takes them, and the images in order."""
    if model.text.images is None:
        return messages, []
    try:
        return model.text.images.read_messages(messages, model.text.template, model.limits.context)
    except ImportError as error:
        raise ApiError(501, str(error)) from error
    except ValueError as error:
        raise ApiError(400, str(error), str(error).partition(": ")[0], "invalid_image") from error


def _read_options(given: Mapping[str, Any], model: Model, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the variables of the chat template, except messages and tools."""
    options = dict[str, Any]()
    for name, value in given.get("chat_template_kwargs", {}).items():
        full = f"chat_template_kwargs.{name[:60]}"
        if name in _OPTIONS or not model.names_variable(name):
            text = f"{full} has no effect: the chat template has no such variable. Leave it out."
            raise ApiError(400, text, full, "unsupported_parameter")
        check_text(json.dumps(value, ensure_ascii=False), full)
        options[name] = value
    effort = given.get("reasoning_effort", "none")
    if model.names_variable("reasoning_effort") and "reasoning_effort" in given:
        options.setdefault("reasoning_effort", effort)
    elif effort != "none":
        text = f"reasoning_effort {effort[:60]!r} is not served: the chat template has no such variable. Leave it out."
        raise ApiError(400, text, "reasoning_effort", "unsupported_parameter")
    elif "reasoning_effort" in given and model.names_variable("enable_thinking"):
        options.setdefault("enable_thinking", False)
    continues = given.get("continue_final_message", False)
    if continues:
        if given.get("add_generation_prompt"):
            text = "add_generation_prompt cannot be combined with continue_final_message. Give one of them."
            raise ApiError(400, text, "add_generation_prompt")
        if messages[-1]["role"] != "assistant":
            text = "continue_final_message needs a last message of role assistant, got"
            raise ApiError(400, f"{text} {messages[-1]['role']!r}.", "continue_final_message")
        options["continue_final_message"] = True
    if not given.get("add_generation_prompt", not continues):
        options["add_generation_prompt"] = False
    return options


def _is_inside(text: str, options: Mapping[str, Any], messages: list[dict[str, Any]], model: Model) -> bool:
    if model.reasoning is None:
        return False
    begin, end = model.reasoning.begin, model.reasoning.end
    if options.get("continue_final_message"):
        content = messages[-1]["content"]
        last = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        return last.rfind(begin) > last.rfind(end)
    return text.rstrip().endswith(begin)


def check_bytes(text: str, model: Model, field: str, where: str) -> None:
    """Refuses a text of more bytes than the tokens of a context can have, before the slow work of the tokenizer.

    Raises:
        ApiError: names the field.
    """
    context = model.longest_prompt
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


def _read_messages(given: Mapping[str, Any], model: Model) -> list[dict[str, Any]]:
    if not given.get("messages"):
        how = "is empty" if "messages" in given else "is missing"
        raise ApiError(400, f"messages {how}. Give one message at least.", "messages", "missing_parameter")
    return [_read_message(message, f"messages[{i}]", model) for i, message in enumerate(given["messages"])]


def _read_message(message: Any, at: str, model: Model) -> dict[str, Any]:
    """Returns a message as templates read it."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{at} must be an object with role and content.", at)
    given = read_fields(message, MESSAGE, at)
    role = get_required(given, "role", at)
    if role not in _ROLES:
        text = f"{at}.role must be one of {', '.join(_ROLES)}, got {role[:60]!r}."
        raise ApiError(400, text, f"{at}.role")
    # Clients send back an answer without a text as null.
    can_be_null = role in ("assistant", "tool")
    content = given.get("content", "") if can_be_null else get_required(given, "content", at)
    more = {name: given[name] for name in ("name", "reasoning", "reasoning_content", "tool_call_id") if name in given}
    thought = given.get("reasoning_content", given.get("reasoning"))
    if thought and model.reasoning is not None and model.reasoning.channels:
        more["thinking"] = thought  # the name in gpt-oss's template
    if calls := given.get("tool_calls"):
        if role != "assistant":
            text = f"{at}.tool_calls is a field of role assistant, got {role!r}."
            raise ApiError(400, text, f"{at}.tool_calls")
        more["tool_calls"] = read_calls(calls, f"{at}.tool_calls")
    return {"role": _SYNONYMS.get(role, role), "content": _read_content(content, f"{at}.content", model), **more}


def _read_content(content: Any, at: str, model: Model) -> str | list[dict[str, Any]]:
    """Returns the content of a message: a text, or the checked parts for a model of images and text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{at} must be a string, or a list of parts.", at)
    parts = list[dict[str, Any]]()
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise ApiError(400, f"{at}[{i}] must be an object with type and text.", f"{at}[{i}]")
        kind = get_required(part, "type", f"{at}[{i}]")
        if kind == "image_url" and model.text.images is not None:
            inner = get_required(read_fields(part, IMAGE_PART, f"{at}[{i}]"), "image_url", f"{at}[{i}]")
            url = get_required(read_fields(inner, IMAGE, f"{at}[{i}].image_url"), "url", f"{at}[{i}].image_url")
            parts.append({"type": kind, "image_url": {"url": url}})
            continue
        if kind != "text":
            known = "'text'" if model.text.images is None else "'text' and 'image_url'"
            text = f"{at}[{i}].type is {kind!r:.60}; only parts of type {known} are served."
            raise ApiError(400, text, f"{at}[{i}].type", "unsupported_parameter")
        text = get_required(read_fields(part, PART, f"{at}[{i}]"), "text", f"{at}[{i}]")
        parts.append({"type": kind, "text": text})
    return parts if any(part["type"] != "text" for part in parts) else "".join(part["text"] for part in parts)
