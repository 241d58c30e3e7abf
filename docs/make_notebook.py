"""Makes docs/several_ranks.ipynb of docs/several_ranks.md: python docs/make_notebook.py

Prose becomes cells of text, a block of Python a cell of code, and the block of text below it the cell's output.
Run `python docs/make_printed.py docs/several_ranks.md` first where that has changed.
"""

import json
import pathlib
import re

PAGE = pathlib.Path(__file__).parent / "several_ranks.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.M | re.S)


def notebook(page: str) -> str:
    """The page as a notebook in format 4.5."""
    cells, last = list[dict[str, object]](), 0
    for block in _BLOCK.finditer(page):
        cells += [_text(page[last : block.start()]), _code(block[1], block[2] or "", len(cells))]
        last = block.end()
    cells.append(_text(page[last:]))
    kept = [cell | {"id": f"cell-{i}"} for i, cell in enumerate(c for c in cells if c["source"])]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": kept, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1) + "\n"


def _text(words: str) -> dict[str, object]:
    return {"cell_type": "markdown", "metadata": {}, "source": words.strip().splitlines(keepends=True)}


def _code(code: str, printed: str, count: int) -> dict[str, object]:
    output = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
    rest = {"execution_count": count // 2 + 1, "metadata": {}, "outputs": [output] if printed else []}
    return {"cell_type": "code", "source": code.strip().splitlines(keepends=True), **rest}


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(PAGE.read_text()))
