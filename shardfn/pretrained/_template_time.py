"""A limit on the time of chat templates, programs that come with models."""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

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
