"""Chat templates from files, in jinja's sandbox, for tokenizers without one."""

from collections.abc import Callable
from typing import Any

from ._generate_text import Text, reason_of
from ._template_time import check_template, rendered


def template(source: str, text: Text) -> Callable[[list[dict[str, str]]], list[int]]:
    """A function from messages to the ids of a prompt.

    The template sees `messages`, `add_generation_prompt` (true) and `raise_exception(message)`.

    Args:
        source: of jinja.
        text: the tokenizer of the result.

    Raises:
        ValueError: the source is not a template, or has a power.
    """
    import jinja2
    import jinja2.sandbox

    def refuse(message: str) -> Any:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        check_template(source)
        made = environment.from_string(source)
    except (jinja2.TemplateError, ValueError) as error:
        raise ValueError(f"--chat-template: {error}") from error

    def chat(messages: list[dict[str, str]]) -> list[int]:
        try:
            given = {"messages": messages, "add_generation_prompt": True, "raise_exception": refuse}
            shown = rendered(lambda: made.render(given))
        except Exception as error:  # a template is a program, which may divide by zero
            raise ValueError(f"the chat template refuses these messages: {reason_of(error)}") from error
        return text.encode(shown)

    return chat
