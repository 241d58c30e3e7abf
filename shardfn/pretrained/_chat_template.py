"""Chat templates from files, in jinja's sandbox, for tokenizers without one."""

from collections.abc import Callable
from typing import Any

from ._template_time import check_template, render_template
from ._text import describe_reason


def compile_chat_template(source: str) -> Callable[[list[dict[str, str]]], str]:
    """Returns a function from messages to the text of a prompt.

    The template sees `messages`, `add_generation_prompt` (true) and `raise_exception(message)`.

    Args:
        source: template of jinja.

    Raises:
        ValueError: the source is not a template, or has a power.
    """
    import jinja2
    import jinja2.sandbox

    def refuse_messages(message: str) -> Any:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        check_template(source)
        made = environment.from_string(source)
    except (jinja2.TemplateError, ValueError) as error:
        raise ValueError(f"--chat-template: {error}") from error

    def render_chat(messages: list[dict[str, str]]) -> str:
        try:
            given = {"messages": messages, "add_generation_prompt": True, "raise_exception": refuse_messages}
            return render_template(lambda: made.render(given))
        except Exception as error:  # a template is a program and may, for example, divide by zero
            raise ValueError(f"the chat template refuses these messages: {describe_reason(error)}") from error

    return render_chat
