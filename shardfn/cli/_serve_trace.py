"""Traces of requests for the plan of a server: files of JSON lines, with tokens or only their numbers.

A line is an object with `seconds`, `prompt` and `answer`, each of the last two a list of token ids or a number of
tokens. Or the line is of Mooncake's traces: `timestamp` in milliseconds, `input_length`, `output_length`, and
`hash_ids`, which name blocks of 512 tokens, so that equal beginnings of prompts are found in the cache. Or the file is
a log of decisions.

References:
    Qin et al., Mooncake, 2024, https://arxiv.org/abs/2407.00079
"""

import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardfn.core import raise_all
from shardfn.inference import LoggedStep, Request, Sampling, TimedRequest, check_trace, replay_log

_BLOCK = 512  # tokens of a block of Mooncake's traces
_MOST = 5  # problems of lines that a message lists


class ServeTrace(NamedTuple):
    """Requests of a trace.

    Attributes:
        requests: requests, in the order of their times.
        steps: steps of a log of decisions, empty for other files.
    """

    requests: list[TimedRequest]
    steps: Sequence[LoggedStep] = ()


def read_trace(path: str | os.PathLike[str], vocab: int, context: int) -> ServeTrace:
    """Returns the requests of a file.

    Args:
        path: file.
        vocab: number of tokens of the model.
        context: most tokens of a sequence.

    Raises:
        ValueError: lines are no requests, times run backwards, or a request does not fit. Lists the first lines.
    """
    lines = [(i, line) for i, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1) if line.strip()]
    if lines and '"limits"' in lines[0][1][:20]:
        found = replay_log(path)
        requests, steps = found.trace, found.steps
    else:
        requests, steps, problems = [], [], list[str]()
        for i, line in lines:
            try:
                requests.append(_read_line(line, i, vocab))
            except (ValueError, TypeError) as error:
                problems.append(f"line {i}: {error}")
        raise_all(ValueError, f"--trace {os.fspath(path)}:", problems[:_MOST])
    if not requests:
        raise ValueError(f"--trace {os.fspath(path)}: the file must have a request, got none.")
    long = [
        f"request {i} has {len(x.request.prompt)} + {len(x.answer)} tokens; the context is {context}"
        for i, x in enumerate(requests)
        if len(x.request.prompt) + len(x.answer) > context
    ]
    raise_all(ValueError, f"--trace {os.fspath(path)}: requests must fit; raise --context, or leave out:", long[:_MOST])
    check_trace(requests)
    return ServeTrace(requests, steps)


def _read_line(text: str, number: int, vocab: int) -> TimedRequest:
    told = json.loads(text)
    if not isinstance(told, Mapping):
        raise ValueError(f"a request is an object, got a {type(told).__name__}")
    if "timestamp" in told:
        seconds, prompt, answer = told["timestamp"] / 1e3, told.get("input_length"), told.get("output_length")
    else:
        seconds, prompt, answer = (told.get(name) for name in ("seconds", "prompt", "answer"))
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ValueError(f"seconds must be a number from 0 on, got {seconds!r}")
    draw = random.Random(number)
    tokens = _read_tokens("prompt", prompt, draw, vocab, told.get("hash_ids", ()))
    answered = _read_tokens("answer", answer, draw, vocab)
    return TimedRequest(float(seconds), Request(tokens, Sampling(max_tokens=len(answered))), answered)


def _read_tokens(name: str, told: Any, draw: random.Random, vocab: int, blocks: Sequence[Any] = ()) -> tuple[int, ...]:
    """Returns tokens, made up where a number of tokens is given."""
    if isinstance(told, list):
        if not told or any(type(x) is not int or not 0 <= x < vocab for x in told):
            raise ValueError(f"{name} must be token ids from 0 to {vocab - 1}, got {told!s:.60}")
        return tuple(told)
    if type(told) is not int or told < 1:
        raise ValueError(f"{name} must be a list of token ids, or a number of tokens, at least 1, got {told!r:.60}")
    made = list[int]()
    for block in blocks:
        same = random.Random(repr(block))
        made += [same.randrange(vocab) for _ in range(min(_BLOCK, told - len(made)))]
    return tuple(made + [draw.randrange(vocab) for _ in range(told - len(made))])
