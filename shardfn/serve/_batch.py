"""Files of requests: each line is a request in OpenAI's batch format, and each line of the other file is an answer."""

import asyncio
import json
import os
import pathlib
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

from ._http_client import open_answer

PATHS = (
    *(f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings", "responses", "messages")),
    *(f"/v1/{name}" for name in ("score", "rerank", "classify")),
)
_FIELDS = ("custom_id", "method", "url", "body")
_LISTED = 10  # mistakes in a message
_LONGEST_WAIT = 30.0  # seconds before a request that the server cannot take now is sent again
_BUSY = (429, 503)


class BatchRequest(NamedTuple):
    """A request of a file.

    Attributes:
        custom_id: name of the request, by which its answer is found.
        url: path of the route, for example "/v1/chat/completions".
        body: body of the request.
    """

    custom_id: str
    url: str
    body: dict[str, Any]


def read_batch(path: pathlib.Path) -> list[BatchRequest]:
    """Returns the requests of a file. Empty lines are left out.

    Args:
        path: file of JSON lines, each with `custom_id`, `method` "POST", `url` and `body`, as OpenAI's batch interface
            takes them.

    Raises:
        ValueError: lines are not such requests. The message has the first ten lines, with the reason for each.
        OSError: the file cannot be read.

    Example:
        >>> import tempfile
        >>> line = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}'
        >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        ...     _ = file.write(line), file.flush()
        ...     read_batch(pathlib.Path(file.name))
        [BatchRequest(custom_id='a', url='/v1/completions', body={'prompt': 'Hi'})]
    """
    found, wrong = dict[str, BatchRequest](), list[str]()
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        request = _parse_line(line)
        if isinstance(request, str):
            wrong.append(f"line {number}: {request}")
        elif request.custom_id in found:
            wrong.append(f"line {number}: custom_id must be unique, got {request.custom_id!r} again")
        else:
            found[request.custom_id] = request
    if wrong:
        more = f"\n  and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise ValueError(
            f"{path} has lines that are not requests of a batch:\n  " + "\n  ".join(wrong[:_LISTED]) + more
        )
    if not found:
        raise ValueError(f"{path} must have at least one request, got an empty file.")
    return list(found.values())


def _parse_line(line: bytes) -> BatchRequest | str:
    """Returns the request of a line, or the reason why the line is not a request."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"must be JSON, got {line[:40].decode(errors='replace')!r} ({error})"
    if not isinstance(row, dict):
        return f"must be an object with {', '.join(_FIELDS)}, got {row!r}"
    if missing := [name for name in _FIELDS if name not in row]:
        return f"must have {', '.join(_FIELDS)}, got no {', '.join(missing)}"
    if not isinstance(row["custom_id"], str) or not row["custom_id"]:
        return f"custom_id must be a string with at least one character, got {row['custom_id']!r}"
    if row["method"] != "POST":
        return f"method must be 'POST', got {row['method']!r}"
    if row["url"] not in PATHS:
        return f"url must be one of {', '.join(PATHS)}, got {row['url']!r}"
    if not isinstance(row["body"], dict):
        return f"body must be an object, got {row['body']!r}"
    if row["body"].get("stream"):
        return "body must not have stream, since an answer is a whole line; leave stream out"
    return BatchRequest(row["custom_id"], row["url"], row["body"])


def read_answered(path: pathlib.Path, requests: Sequence[BatchRequest]) -> set[str]:
    """Returns the names of requests that a file has answers to. A last line that was cut short is removed.

    Args:
        path: file of answers, which an earlier run has begun.
        requests: requests of the batch.

    Raises:
        ValueError: a line is not an answer to one of the requests.
    """
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        data = data[: data.rfind(b"\n") + 1]
        os.truncate(path, len(data))
    known, found = {request.custom_id for request in requests}, set[str]()
    for number, line in enumerate(data.splitlines(), 1):
        try:
            name = json.loads(line)["custom_id"]
        except (ValueError, KeyError, TypeError):
            name = None
        if name not in known:
            raise ValueError(
                f"{path}, line {number}: must be an answer to a request of this batch, got {line[:60]!r}. Write the"
                " answers to another file."
            )
        found.add(name)
    return found


async def send_batch(url: str, key: str, requests: Sequence[BatchRequest], out: IO[str], *, at_once: int = 64) -> int:
    """Sends requests to a server, and writes each answer as a line when the answer is there.

    An answer has OpenAI's form: `{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`. A
    request that the server refuses has an answer, too, with the status and the body of the refusal. A request that the
    server could not take, since the server was full or ended, has no line.

    Args:
        url: address of the server, for example "http://127.0.0.1:8000".
        key: key of the client.
        requests: requests.
        out: file, whose lines are in the order in which answers arrive.
        at_once: most requests in progress.

    Returns:
        The number of requests without an answer.
    """
    free, lost = asyncio.Semaphore(at_once), 0

    async def send_one(request: BatchRequest) -> None:
        nonlocal lost
        async with free:
            answer = await _send_request(url, key, request)
        if answer is None:
            lost += 1
            return
        out.write(json.dumps(answer, ensure_ascii=False) + "\n")
        out.flush()

    await asyncio.gather(*map(send_one, requests))
    return lost


async def _send_request(url: str, key: str, request: BatchRequest) -> dict[str, Any] | None:
    """Returns the line of a request's answer, or None without an answer."""
    import h11

    data = json.dumps(request.body).encode()
    while True:  # a server that ends refuses the connection
        try:
            status, headers, body = await open_answer(url + request.url, key, data)
        except (OSError, h11.ProtocolError):
            return None
        if status not in _BUSY:
            number = headers.get("x-request-id", "")
            answer = {"status_code": status, "request_id": number, "body": json.loads(body)}
            return {"id": f"batch_req_{number}", "custom_id": request.custom_id, "response": answer, "error": None}
        if status == 503 and json.loads(body).get("error", {}).get("code") != "engine_dead":
            return None  # the server ends
        await asyncio.sleep(min(_LONGEST_WAIT, float(headers.get("retry-after", 1))))
