"""The rows of `shardfn finetune`: checked before the run, and encoded as tokens and labels."""

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from shardfn import core
from shardfn.data import IGNORED, encode_chat

_KEYS = ("text", "prompt", "completion", "messages", "tools")
_EXPECTED = "expected 'text', or 'prompt' and 'completion', or 'messages'"
_LISTED = 5
# Conversations of further forms are encoded when the run comes to them.
_FORMS = 64


class Scan(NamedTuple):
    """Result of reading a file of rows once.

    Attributes:
        problems: a text for each wrong row, with the file and the line.
        samples: place and value of a single row of each form, for example of each sequence of roles.
        chats: whether there are rows of messages.
    """

    problems: tuple[str, ...]
    samples: tuple[tuple[str, Any], ...]
    chats: bool


def scan_rows(path: str, learn: str) -> Scan:
    """Reads all rows of a file, and lists the wrong rows. An unchanged file is read only once.

    Args:
        path: file of JSON lines.
        learn: "answers" or "everything"; answers need a message of the assistant.
    """
    about = os.stat(path)
    return _scan_rows(path, learn, (about.st_mtime_ns, about.st_size))


@functools.lru_cache(maxsize=4)
def _scan_rows(path: str, learn: str, version: tuple[int, int]) -> Scan:
    del version
    problems, samples = list[str](), dict[Any, tuple[str, Any]]()
    any_row = False
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            any_row, place = True, f"{path}:{number}"
            try:
                row = json.loads(line.strip())
            except ValueError as error:
                at = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                problems.append(f"{place}: expected one JSON object a line, got {at}")
                continue
            found = [*_row_problems(row, learn)]
            problems += [f"{place}: {problem}" for problem in found]
            if not found and len(samples) < _FORMS:
                samples.setdefault(_form_of(row), (place, row))
    if not any_row:
        problems.append(f"{path} has no lines; write one JSON object a line")
    return Scan(tuple(problems), tuple(samples.values()), any("messages" in row for _, row in samples.values()))


def row_problems(name: str, path: str, learn: str) -> Iterator[str]:
    """Yields the problems of a file's rows, five problems and the number of further problems."""
    yield from core.first_of([f"{name} {problem}" for problem in scan_rows(path, learn).problems], _LISTED)


def check_samples(
    tokenizer: Any, paths: Iterable[str], *, length: int, learn: str, vocab_size: int | None = None
) -> None:
    """Encodes one row of each form, so that a chat template that does not fit is found before the run.

    Raises:
        ValueError: a row cannot be encoded. The message names the file and the line of each.
    """
    problems = []
    for path in paths:
        for place, row in scan_rows(path, learn).samples:
            try:
                encode_row(tokenizer, row, length=length, learn=learn, vocab_size=vocab_size)
            except ValueError as error:
                problems.append(f"{place}: {error}")
    core.raise_all(
        ValueError, "these rows, and others of their form, cannot be encoded:", core.first_of(problems, _LISTED)
    )


def encode_row(
    tokenizer: Any, row: Mapping[str, Any], *, length: int, learn: str = "answers", vocab_size: int | None = None
) -> dict[str, list[int]]:
    """Returns the tokens of a row and its labels, cut to `length`.

    A text and a completion end with the end of sequence.

    Args:
        tokenizer: tokenizer of transformers.
        row: a row without `row_problems`.
        length: number of tokens at most.
        learn: "answers" for labels only on completions and messages of the assistant, or "everything" for labels on all
            tokens.
        vocab_size: number of the model's embeddings.

    Raises:
        ValueError: the chat template cannot encode the row, or a token is not in the model's vocabulary.
    """
    if "messages" in row:
        made = encode_chat(tokenizer, row["messages"], tools=row.get("tools"), learn=learn)
    elif _is_pair(row) and not isinstance(row["prompt"], str):
        whole = [*row["prompt"], *row["completion"]]
        made = encode_chat(tokenizer, whole, tools=row.get("tools"), start=len(row["prompt"]), learn=learn)
    elif _is_pair(row):
        made = _encode_text(tokenizer, row["prompt"], row["completion"], learn)
    else:
        made = _encode_text(tokenizer, "", row["text"], learn)
    if vocab_size is not None and max(made["tokens"], default=0) >= vocab_size:
        raise ValueError(
            f"token ids must be below {vocab_size}, the size of the model's vocabulary, got {max(made['tokens'])}. Use"
            " the tokenizer of the model."
        )
    return {name: ids[:length] for name, ids in made.items()}


def _encode_text(tokenizer: Any, prompt: str, text: str, learn: str) -> dict[str, list[int]]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    first = tokenizer(prompt)["input_ids"] if prompt else []
    ids = tokenizer(prompt + text)["input_ids"]
    if ids[: len(first)] != first:  # a token would span both. The model is used with only the tokens of the prompt
        ids = first + tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = ids + end if ids[-1:] != end else ids
    labels = [*ids] if learn == "everything" else [IGNORED] * len(first) + ids[len(first) :]
    return {"tokens": ids, "labels": labels}


def _row_problems(row: Any, learn: str) -> Iterator[str]:
    if not isinstance(row, Mapping):
        yield f"{_EXPECTED} in a JSON object, got {core.a_kind(row)}"
    elif "messages" in row:
        yield from _message_problems("messages", row["messages"])
        if learn == "answers" and not _has_answer(row["messages"]):
            yield "expected a message with role 'assistant', from which the model learns; or pass --learn everything"
    elif _is_pair(row):
        yield from _pair_problems(row["prompt"], row["completion"], learn)
    elif "text" in row:
        yield from _text_problems("text", row["text"])
    else:
        hints = {core.did_you_mean(str(key), _KEYS) for key in row} - {""}
        yield f"{_EXPECTED}, got {sorted(map(str, row))}.{''.join(sorted(hints)[:1])}"
    if isinstance(row, Mapping) and not isinstance(row.get("tools"), list | None):
        yield f"'tools' must be a list, got {core.a_kind(row['tools'])}"


def _text_problems(name: str, text: Any) -> Iterator[str]:
    if not isinstance(text, str):
        yield f"{name!r} must be a text, got {core.a_kind(text)}"
    elif not text.strip():
        yield f"{name!r} must not be empty"


def _pair_problems(prompt: Any, completion: Any, learn: str) -> Iterator[str]:
    if isinstance(prompt, list) or isinstance(completion, list):
        yield from _message_problems("prompt", prompt)
        yield from _message_problems("completion", completion)
        if learn == "answers" and not _has_answer(completion):
            yield "expected a message with role 'assistant' in 'completion', from which the model learns"
        return
    if not isinstance(prompt, str):
        yield f"'prompt' must be a text, or a list of messages, got {core.a_kind(prompt)}"
    yield from _text_problems("completion", completion)


def _message_problems(name: str, messages: Any) -> Iterator[str]:
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if isinstance(messages, list) else core.a_kind(messages)
        yield f"{name!r} must be a list of messages, got {got}"
        return
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            keys = sorted(message) if isinstance(message, Mapping) else core.a_kind(message)
            yield f"{name}[{i}] must have 'role' and 'content', got {keys}"
        elif not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            content = core.a_kind(message["content"]) if "content" in message else "none"
            yield f"the content of {name}[{i}] must be a text, got {content}"


def _has_answer(messages: Any) -> bool:
    """Returns whether the assistant has a message, or True for values refused by `_message_problems`."""
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages) or not messages:
        return True
    return any(m.get("role") == "assistant" for m in messages)


def _form_of(row: Mapping[str, Any]) -> Any:
    """Returns a key that is equal for rows with equal treatment by a chat template."""
    if "messages" in row:
        return "messages", _message_roles(row["messages"]), bool(row.get("tools"))
    if _is_pair(row) and isinstance(row["prompt"], list):
        return "pair", _message_roles(row["prompt"]), _message_roles(row["completion"]), bool(row.get("tools"))
    return _is_pair(row)


def _is_pair(row: Mapping[str, Any]) -> bool:
    return {"prompt", "completion"} <= row.keys()


def _message_roles(messages: list[Mapping[str, Any]]) -> tuple[Any, ...]:
    return tuple((m["role"], bool(m.get("tool_calls")), type(m.get("content")).__name__) for m in messages)
