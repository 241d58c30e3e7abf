"""Chat templates from files, in jinja's sandbox, for tokenizers without one."""

import datetime
import json
from collections.abc import Callable
from typing import Any

from ._template_time import check_template, render_template
from ._text import describe_reason


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
        return _cut_after(text, messages[-1]["content"]) if continue_final_message else text

    return render_chat


def _cut_after(text: str, content: str) -> str:
    """Returns a text up to the end of its last message's content."""
    at = text.rfind(content.strip())
    if at < 0:
        raise ValueError("the chat template leaves out the last message, which continue_final_message continues.")
    return text[: at + len(content.strip())]


def _write_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
