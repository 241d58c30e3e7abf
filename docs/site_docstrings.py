"""Adapts our docstrings for the reference: `Example:` is griffe's section `Examples:`."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section while docstrings are read."""

    def on_object(self, *, obj: griffe.Object, **rest: Any) -> None:
        del rest
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
