"""The head of every result file, and the layout of tables."""

import datetime
import json
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch


def hardware() -> dict[str, str]:
    """The machine and the versions, for the head of a result file."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "date": datetime.date.today().isoformat(),
        "command": "python " + shlex.join(sys.argv),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, rule, *rows])


def publish(title: str, body: str, *, out: str = "", data: dict[str, Any] | None = None, as_json: bool = False) -> None:
    """Prints the report, writes it to `out`, and with `as_json` the raw numbers beside it (or to the screen)."""
    about = hardware()
    text = "\n".join([f"# {title}", "", *(f"- {k}: {v}" for k, v in about.items()), "", body, ""])
    raw = json.dumps({"about": about, **(data or {})}, indent=1)
    print(text if not as_json or out else raw)
    if out:
        path = pathlib.Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if as_json:
            path.with_suffix(".json").write_text(raw + "\n")
