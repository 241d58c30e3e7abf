"""Rewrites the printed output in pages: the block of text below a block of Python is its output.

    python docs/make_printed.py docs/jit.md

The tests compare the two. Each page runs from its top on one rank.
"""

import contextlib
import io
import pathlib
import re
import sys

BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?P<shown>\n\n```text\n(?P<text>.*?)^```$)?", re.M | re.S)


def printed(code: str, name: str, names: dict[str, object]) -> str:
    """Runs a block with the names of those above it, and returns its output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, name, "exec"), names)
    return out.getvalue()


def rewritten(page: pathlib.Path) -> str:
    """The page with its blocks of text made anew."""
    names: dict[str, object] = {"__name__": "page"}

    def again(block: re.Match[str]) -> str:
        out = printed(block["code"], str(page), names)
        head = f"```python\n{block['code']}```"
        return f"{head}\n\n```text\n{out}```" if block["shown"] else head

    return BLOCK.sub(again, page.read_text())


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = pathlib.Path(argument)
        path.write_text(rewritten(path))
