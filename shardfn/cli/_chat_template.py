"""Chat templates from files, in jinja's sandbox, for tokenizers without one."""

import datetime
import json
from collections.abc import Callable
from typing import Any

from ._generate_text import reason_of
from ._template_time import check_template, rendered


def load_template(
    source: str, option: str = "--chat-template", **variables: Any
) -> Callable[[list[dict[str, str]]], str]:
    """Returns a function from messages to the text of a prompt.

    The template sees the names of transformers: `messages`, `add_generation_prompt` (true), `raise_exception(message)`,
    `strftime_now(format)`, the filter `tojson`, and the variables.

    Args:
        source: template of jinja.
        option: option of the command line that errors name.
        **variables: texts, for example `bos_token`.

    Raises:
        ValueError: the source is not a template, or has a power.
    """
    import jinja2
    import jinja2.sandbox

    def refuse_messages(message: str) -> Any:
        raise jinja2.TemplateError(message)

    def write_json(x: Any, **how: Any) -> str:  # jinja's own filter escapes characters of HTML
        return json.dumps(x, **{"ensure_ascii": False, **how})

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = write_json
    try:
        check_template(source)
        made = environment.from_string(source)
    except (jinja2.TemplateError, ValueError) as error:
        raise ValueError(f"{option}: {error}") from error

    def render_chat(messages: list[dict[str, str]]) -> str:
        try:
            given = {"messages": messages, "add_generation_prompt": True, "raise_exception": refuse_messages}
            given |= {"tools": None, "documents": None, "strftime_now": _format_now}
            return rendered(lambda: made.render(variables | given))
        except Exception as error:  # a template is a program and may, for example, divide by zero
            raise ValueError(f"the chat template refuses these messages: {reason_of(error)}") from error

    return render_chat


def _format_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
