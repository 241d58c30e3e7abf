"""Tokenizers of models, with their chat templates and the tokens that end a text.

A chat template is a program that comes with a model, so it runs in jinja's sandbox and for a limited time.
"""

import datetime
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardfn.data import Tokenizer
from shardfn.inference import ImageEncoder, SpeechReader

TEMPLATE_SECONDS = 1.0  # of the thread's processor. Templates of real models take milliseconds


@functools.cache
def check_template(source: str) -> None:
    """Refuses a template with a power: no limit can bound the time of a single step of Python.

    Raises:
        ValueError: names the line.
    """
    import jinja2

    try:
        tokens = list(jinja2.Environment().lex(source))
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template cannot be read: {error}") from error
    lines = [line for line, kind, value in tokens if kind == "operator" and value == "**"]
    if lines:
        raise ValueError(
            f"the chat template has ** in line {lines[0]}, whose time has no limit. Write the number, or a product."
        )


def render_template(render: Callable[[], str]) -> str:
    """Returns the text of a template, if the template ends within `TEMPLATE_SECONDS`.

    Python watches the lines of the thread, so a loop ends anywhere. Time in which the thread waits for a processor does
    not count.

    Raises:
        TimeoutError: the template takes longer.
    """
    end = time.thread_time() + TEMPLATE_SECONDS

    def watch_frame(frame: Any, event: str, value: Any) -> Any:
        del frame, event, value
        if time.thread_time() > end:
            raise TimeoutError(f"it takes more than {TEMPLATE_SECONDS:g} s of a processor")
        return watch_frame

    before = sys.gettrace()
    sys.settrace(watch_frame)
    try:
        return render()
    finally:
        sys.settrace(before)


class ModelText(NamedTuple):
    """Tokenizer of a model.

    Attributes:
        size: number of ids, from 0 to `size - 1`.
        encode: function from a text to the ids of a prompt.
        plain: function as `encode`, without further special tokens.
        tokenizer: tokenizer in a form that an engine takes.
        token: function from a token's text to its id, or None if there is no such token.
        chat: function from messages to a text for `plain`, or None without a chat template, with variables of the
            template, `add_generation_prompt` and `continue_final_message`.
        ends: tokens that end a completion.
        template: source of the chat template.
        pair: function from two texts to the ids of a prompt with both, or None.
        images: tower and projector of the model, or None. Only where prompts are made.
        speech: reader of sounds, or None. Only where prompts are made.
    """

    size: int
    encode: Callable[[str], list[int]]
    plain: Callable[[str], list[int]]
    tokenizer: Any
    token: Callable[[str], int | None]
    chat: Callable[..., str] | None = None
    ends: frozenset[int] = frozenset()
    template: str = ""
    pair: Callable[[str, str], list[int]] | None = None
    images: ImageEncoder | None = None
    speech: SpeechReader | None = None


def wrap_transformers_tokenizer(tokenizer: Any, ends: frozenset[int] = frozenset()) -> ModelText:
    """Returns a tokenizer of transformers.

    Args:
        tokenizer: tokenizer from `AutoTokenizer`.
        ends: tokens that end a completion, by the model's files.
    """

    def render_chat(messages: list[dict[str, Any]], **options: Any) -> str:
        options = {"add_generation_prompt": not options.get("continue_final_message"), **options}
        try:
            check_template(tokenizer.get_chat_template(None, options.get("tools")))
            return render_template(lambda: tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # a template is a program and may, for example, divide by zero
            raise ValueError(f"--chat: the chat template refuses these messages: {describe_reason(error)}") from error

    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return ModelText(
        size=1 + max(vocabulary.values(), default=-1),
        encode=lambda text: list(tokenizer(text)["input_ids"]),
        plain=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        tokenizer=tokenizer,
        token=vocabulary.get,
        chat=render_chat if tokenizer.chat_template else None,
        ends=ends | {*own},
        template=_find_template(tokenizer),
        pair=lambda left, right: list(tokenizer(left, right)["input_ids"]),
    )


def _find_template(tokenizer: Any) -> str:
    """Returns the source of the chat template for requests with tools."""
    try:
        return tokenizer.get_chat_template(None, [{}]) if tokenizer.chat_template else ""
    except ValueError:  # several templates, none of them the default
        return ""


def describe_reason(error: Exception) -> str:
    """Returns the message of a template's error, or the type, where the message is empty."""
    return str(error) or type(error).__name__


def wrap_data_tokenizer(tokenizer: Tokenizer) -> ModelText:
    """Returns a tokenizer of `shardfn.data`."""

    def token_id(text: str) -> int | None:
        ids = tokenizer.encode(text).tolist()
        return ids[0] if len(ids) == 1 else None

    def encode_text(text: str) -> list[int]:
        return tokenizer.encode(text).tolist()

    return ModelText(tokenizer.vocab_size, encode_text, encode_text, tokenizer, token_id)


def compile_chat_template(source: str) -> Callable[..., str]:
    """Returns a function from messages to the text of a prompt.

    The template sees `messages`, `add_generation_prompt` (true), `raise_exception(message)`, `strftime_now(format)`,
    and the keyword arguments of the function, such as `tools`. The filter `tojson` escapes nothing, as in
    transformers. Called with `continue_final_message`, the function cuts the text after the last message's content.

    Args:
        source: template of jinja.

    Raises:
        ValueError: the source is not a template, or has a power.
    """
    import jinja2
    import jinja2.sandbox

    def refuse_messages(message: str) -> Any:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _write_json
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        check_template(source)
        made = environment.from_string(source)
    except (jinja2.TemplateError, ValueError) as error:
        raise ValueError(f"--chat-template: {error}") from error

    def render_chat(messages: list[dict[str, Any]], *, continue_final_message: bool = False, **options: Any) -> str:
        given = {"messages": messages, "add_generation_prompt": not continue_final_message, **options}
        try:
            text = render_template(lambda: made.render({**given, "raise_exception": refuse_messages}))
        except Exception as error:  # a template is a program and may, for example, divide by zero
            raise ValueError(f"the chat template refuses these messages: {describe_reason(error)}") from error
        return _cut_after(text, _join_texts(messages[-1]["content"])) if continue_final_message else text

    return render_chat


def _join_texts(content: Any) -> str:
    """Returns the text of a message, whose content is a text or a list of parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _cut_after(text: str, content: str) -> str:
    """Returns a text up to the end of its last message's content."""
    at = text.rfind(content.strip())
    if at < 0:
        raise ValueError("the chat template leaves out the last message, which continue_final_message continues.")
    return text[: at + len(content.strip())]


def _write_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
