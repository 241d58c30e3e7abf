"""`shardfn serve`: a server of OpenAI's interface, from files of several kinds. `shardfn batch`: answers to a file."""

import argparse
import importlib.util
import os
import pathlib
import secrets
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import torch

from shardfn.core import num_launched
from shardfn.inference import ImageReader
from shardfn.kernels import num_processors
from shardfn.pretrained import compile_chat_template, load_text_and_images
from shardfn.serve import (
    Settings,
    Text,
    check_join_key,
    read_answered,
    read_batch,
    read_keys,
    run_joiner,
    send_batch,
    serve,
)
from shardfn.waits import end_start

from ._generate import flatten_message
from ._serve_job import ServeJob, add_serve_arguments, choose_devices, command_of, parse_serve

_PACKAGES = ("starlette", "uvicorn", "jinja2")


# Options of the address and the clients of a server, which a batch does not have.
_ADDRESS = ("host", "port", "api_key_file", "allowed_host", "allowed_origin", "adapter_root", "admin_key_file")
_ADDRESS += ("profile_root", "otlp_traces_endpoint")


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `shardfn batch`."""
    add = parser.add_argument
    add("requests", metavar="IN", help="requests, a line of JSON each: custom_id, method, url and body")
    add("answers", metavar="OUT", help="answers, a line of JSON each, in the order in which they arrive")
    text = "continue with an OUT of an earlier run: a request with an answer there is not sent again"
    add("--resume", action="store_true", help=text)
    add("--at-once", type=int, default=64, metavar="N", help="the most requests in progress (default %(default)s)")
    add_serve_arguments(parser)


def parse_batch(args: argparse.Namespace) -> Callable[[], int]:
    """Returns the command that the arguments describe. The requests are read, and no weights are loaded.

    Raises:
        ValueError: lists mistakes of the options, or of the lines.
    """
    unused = argparse.ArgumentParser()
    add_serve_arguments(unused)
    given = [f"--{name.replace('_', '-')}" for name in _ADDRESS if getattr(args, name) != unused.get_default(name)]
    if given:
        raise ValueError(f"a batch has no clients but itself, got {', '.join(given)}. Leave these options out")
    if args.at_once < 1:
        raise ValueError(f"--at-once must be at least 1, got {args.at_once}")
    answers, requests = pathlib.Path(args.answers), read_batch(pathlib.Path(args.requests))
    if answers.exists() and not args.resume:
        raise ValueError(f"{answers} must not exist. Write to another file, or continue this file with --resume")
    done = read_answered(answers, requests) if answers.exists() else set[str]()
    left = [request for request in requests if request.custom_id not in done]
    job, key = parse_serve(args), secrets.token_urlsafe()

    async def work(url: str) -> int:
        with answers.open("a", encoding="utf-8") as out:
            lost = await send_batch(url, key, left, out, at_once=args.at_once)
        line = f"{len(left) - lost} requests have an answer in {answers}"
        line += f", {lost} have none: the server ended. Run the command again with --resume" if lost else ""
        _write_line(f"shardfn batch: {line}")
        return int(lost > 0)

    def run() -> int:
        if left:
            return serve_command(replace(job, server=job.server | {"port": 0, "keys": (key,)}), work)
        _write_line(f"shardfn batch: all {len(requests)} requests have an answer in {answers}")
        return 0

    return run


def serve_command(job: ServeJob, work: Callable[[str], Coroutine[Any, Any, int]] | None = None) -> int:
    """Serves until SIGTERM, SIGINT or the end of a rank; reports to stderr.

    Args:
        job: settings of the server.
        work: function from the server's address to work whose end is the server's end, or None.

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
        join_key = b"" if job.join_key_file is None else check_join_key(pathlib.Path(job.join_key_file).read_bytes())
        if job.join is not None:
            end_start()
            return _join_front(job, join_key)
        keys = () if job.api_key_file is None else read_keys(pathlib.Path(job.api_key_file))
        admins = () if job.admin_key_file is None else read_keys(pathlib.Path(job.admin_key_file))
        server: dict[str, Any] = {"keys": keys, "admin_keys": admins, "join_key": join_key, **job.server}
        settings = Settings(**server)
        changes: dict[str, Any] = {}
        if job.chat_template is not None:
            source = pathlib.Path(job.chat_template).read_text(encoding="utf-8")
            changes = {"chat": compile_chat_template(source), "template": source}

        def load_front_text() -> Text:
            text = load_text_and_images(job.model)._replace(**changes)
            if text.images is None and job.image_root is not None:
                raise ValueError(f"--image-root needs a model of images and text, got {job.model.model}. Leave it out")
            images = None if text.images is None else ImageReader(text.images, job.image_root, **job.image_limits)
            return Text(
                text.encode, text.tokenizer, text.chat, text.plain, text.template, text.pair, images, text.speech
            )

        local = settings.replicas - settings.joined
        all_ranks = local * job.model.ranks
        num = torch.cuda.device_count() if local > 1 else 0  # a single replica sees all devices
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num)))).split(",") if num else []
        end_start()  # from now on the first rank reports
        return serve(
            settings,
            load_front_text,
            lambda end: command_of(job, end, sys.executable),
            ranks=job.model.ranks,
            threads=None if "OMP_NUM_THREADS" in os.environ else max(1, num_processors() // all_ranks),
            environment=lambda replica: choose_devices(replica, job.model.ranks, devices),
            report=_write_line,
            work=work,
        )
    except (ValueError, OSError, ImportError) as error:
        end_start()
        print(f"shardfn serve: error: {flatten_message(error)}", file=sys.stderr)
        return 2


def _join_front(job: ServeJob, key: bytes) -> int:
    """Runs this machine's ranks as a replica of a front on another machine."""
    assert job.join is not None
    return run_joiner(
        *job.join,
        key,
        lambda end: command_of(job, end, sys.executable),
        ranks=job.model.ranks,
        threads=None if "OMP_NUM_THREADS" in os.environ else max(1, num_processors() // job.model.ranks),
        report=_write_line,
    )


def _write_line(line: str) -> None:
    """Writes a line to stderr, past Python's buffer, whose lock could hold up the end of the process."""
    data = f"{line}\n".encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(sys.stderr.fileno(), data) :]
