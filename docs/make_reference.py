"""Makes the pages of the reference: a page for each public room, and a table of the names of `shardfn` itself.

`mkdocs build` adds the pages to the site (`site_hooks.py`). Their text is made of the docstrings
(`site_docstrings.py`).

    python docs/make_reference.py           writes the pages to docs/reference/, to read them without the site
    python docs/make_reference.py --names   writes docs/names.txt, the list of public names that a test compares
"""

import argparse
import importlib
import inspect
import itertools
import pathlib

import site_docstrings

import shardfn

OUT = pathlib.Path(__file__).parent / "reference"
NAMES = pathlib.Path(__file__).parent / "names.txt"
# Rooms that a user of the library imports from. engine, state, leaves, capture, activations and modules are its inside.
ROOMS = (
    "transforms",
    "core",
    "collectives",
    "optim",
    "nn",
    "nn.moe",
    "nn.moe.balance",
    "nn.recurrent",
    "models.gpt",
    "models.recurrent",
    "models.seq2seq",
    "sparse",
    "lora",
    "inference",
    "speculators",
    "serve",
    "rl",
    "distill",
    "data",
    "metrics",
    "checkpoint",
    "interop",
    "memory",
    "kernels",
    "graph",
    "schedules",
    "testing",
    "pretrained",
    "cli",
)


def named(module: object) -> dict[str, object]:
    """The public classes and functions of the package that a module names, in its order."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("shardfn.")
        and value.__doc__
    }


def page(room: str) -> str:
    """A room's page: its docstring's first paragraph, and an entry for each name, those of `shardfn` first."""
    module = importlib.import_module(f"shardfn.{room}")
    short = {id(value) for value in vars(shardfn).values()}
    first = (inspect.getdoc(module) or "").split("\n\n")[0]
    lines = {True: ["## Names of a training script"], False: ["## Further names"]}
    for name, value in _own(room, module).items():
        lines[id(value) in short].append(site_docstrings.entry(f"shardfn.{room}.{name}", value))
    sections = [section for section in lines.values() if len(section) > 1]
    if len(sections) == 1:
        sections[0][0] = "## Names"
    return "\n\n".join([f"# shardfn.{room}", first, *itertools.chain(*sections)]) + "\n"


def index() -> str:
    """The names of `shardfn` itself, each with the first line of its docstring and a link."""
    homes = {id(value): f"{room}.md#shardfn.{room}.{name}" for room, name, value in _everywhere()}
    rows = []
    for name, value in vars(shardfn).items():
        if id(value) in homes and not name.startswith("_"):
            said = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ").replace("|", "or")
            rows.append(f"| [`sf.{name}`]({homes[id(value)]}) | {said} |")
    rooms = [f"| [`shardfn.{room}`]({room}.md) | {_first_line(room)} |" for room in ROOMS]
    return "\n".join(
        [
            "# Reference",
            "",
            "Every page below is made of the docstrings. `import shardfn as sf` gives the names of a training script,",
            "and the rooms that they come from.",
            "",
            "## Names of a training script",
            "",
            "| name | what it is |",
            "|---|---|",
            *sorted(rows, key=str.lower),
            "",
            "## Rooms",
            "",
            "| room | what it holds |",
            "|---|---|",
            *rooms,
            "",
        ]
    )


def _first_line(room: str) -> str:
    return (inspect.getdoc(importlib.import_module(f"shardfn.{room}")) or "").splitlines()[0]


def _everywhere() -> list[tuple[str, str, object]]:
    found = []
    for room in reversed(ROOMS):  # if two rooms name an object, the first of them in ROOMS has it
        module = importlib.import_module(f"shardfn.{room}")
        found += [(room, name, value) for name, value in _own(room, module).items()]
    return found


def _own(room: str, module: object) -> dict[str, object]:
    """The names of a room that no room before it has: each object has one page."""
    before: set[int] = set()
    for other in ROOMS[: ROOMS.index(room)]:
        before |= {id(value) for value in named(importlib.import_module(f"shardfn.{other}")).values()}
    return {name: value for name, value in named(module).items() if id(value) not in before}


def pages() -> dict[str, str]:
    """Returns the texts of all pages by their file names."""
    return {"index.md": index()} | {f"{room}.md": page(room) for room in ROOMS}


def public_names() -> list[str]:
    """Returns the public names: `sf.adamw` where `shardfn` itself has a name, else `shardfn.optim.adamw`."""
    short = {f"sf.{name}" for name, value in named(shardfn).items()}
    return sorted(short | {f"shardfn.{room}.{name}" for room, name, _ in _everywhere()})


def main() -> None:
    """Writes the pages, or the list of names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="write docs/names.txt in place of the pages")
    if parser.parse_args().names:
        NAMES.write_text("\n".join(public_names()) + "\n")
        return
    OUT.mkdir(exist_ok=True)
    for file, text in pages().items():
        (OUT / file).write_text(text)


if __name__ == "__main__":
    main()
