"""`shardfn serve`: a server of OpenAI's interface, from files of several kinds."""

import importlib.util
import os
import pathlib
import sys
from typing import Any

import torch

from shardfn.core import num_launched
from shardfn.kernels import num_processors
from shardfn.pretrained import compile_chat_template, load_text
from shardfn.serve import Settings, Text, read_keys, serve
from shardfn.waits import end_start

from ._generate import flatten_message
from ._serve_job import ServeJob, choose_devices, command_of

_PACKAGES = ("starlette", "uvicorn", "jinja2")


def serve_command(job: ServeJob) -> int:
    """Serves until SIGTERM, SIGINT or the end of a rank; reports to stderr.

    Returns:
        The exit status: 0 after a signal, or 1 if a rank has ended; 2 if the model or a setting is refused.
    """
    try:
        if num_launched() > 1:
            raise ValueError(
                "shardfn serve must be started without torchrun: it starts the ranks itself, for example with --mesh"
                " tp=2"
            )
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise ImportError(f"it needs {', '.join(missing)}, which is missing: pip install 'shardfn[serve]'")
        keys = () if job.api_key_file is None else read_keys(pathlib.Path(job.api_key_file))
        settings = Settings(keys=keys, **job.server)
        changes: dict[str, Any] = {}
        if job.chat_template is not None:
            source = pathlib.Path(job.chat_template).read_text(encoding="utf-8")
            changes = {"chat": compile_chat_template(source), "template": source}

        def load_front_text() -> Text:
            text = load_text(job.model)._replace(**changes)
            return Text(text.encode, text.tokenizer, text.chat, text.plain, text.template, text.pair)

        all_ranks = settings.replicas * job.model.ranks
        num = torch.cuda.device_count() if settings.replicas > 1 else 0  # a single replica sees all devices
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num)))).split(",") if num else []
        end_start()  # from here on the first rank reports
        return serve(
            settings,
            load_front_text,
            lambda end: command_of(job, end, sys.executable),
            ranks=job.model.ranks,
            threads=None if "OMP_NUM_THREADS" in os.environ else max(1, num_processors() // all_ranks),
            environment=lambda replica: choose_devices(replica, job.model.ranks, devices),
            report=_write_line,
        )
    except (ValueError, OSError, ImportError) as error:
        end_start()
        print(f"shardfn serve: error: {flatten_message(error)}", file=sys.stderr)
        return 2


def _write_line(line: str) -> None:
    """Writes a line to stderr, past Python's buffer, whose lock could hold up the end of the process."""
    data = f"{line}\n".encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(sys.stderr.fileno(), data) :]
