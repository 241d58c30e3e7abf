"""Embeddings: from the body of a request to prompts, and from vectors to the answer."""

import base64
import functools
import math
from array import array
from collections.abc import Mapping
from typing import Any

from shardfn.inference import Request, Sampling

from ._errors import ApiError
from ._fields import EMBEDDINGS, read_fields
from ._ipc import Embed
from ._model import Model, adapter_of
from ._parse_request import PooledRequest, check_fields
from ._prompts import read_prompts

_MOST = 2048  # most inputs of one body, as in OpenAI's interface
_FORMATS = ("float", "base64")
POOLED = Sampling(max_tokens=1, temperature=0.0)  # of a request with a state in place of a token


def parse_embeddings(body: Mapping[str, Any], model: Model) -> PooledRequest:
    """Returns the meaning of a body of `/v1/embeddings`.

    Raises:
        ApiError: names the field that is wrong, or the model has no embeddings.
    """
    given = read_fields(body, EMBEDDINGS)
    adapter = adapter_of(given, model)
    check_embeds(model)
    kind = given.get("encoding_format", "float")
    if kind not in _FORMATS:
        text = f"encoding_format must be one of {', '.join(map(repr, _FORMATS))}, got {kind[:60]!r}."
        raise ApiError(400, text, "encoding_format")
    num = given.get("dimensions", model.width)
    if not 1 <= num <= model.width:
        text = f"dimensions must be from 1 to {model.width}, as embeddings of this model have, got"
        raise ApiError(400, f"{text} {num}.", "dimensions")
    inputs = read_prompts(given, model, "input", functools.partial(check_number, "input"))
    requests = [Request(tuple(x), POOLED, adapter=adapter) for x in inputs]
    check_fields(requests, model.limits, given)

    def write_answer(vectors: list[bytes], tokens: int) -> dict[str, Any]:
        rows = [_write_vector(_shorten_vector(vector, num), encoded=kind == "base64") for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": given["model"], "usage": usage}

    return PooledRequest([requests], functools.partial(Embed, pooling=model.pooling), write_answer)


def check_embeds(model: Model) -> None:
    """Checks that a model has embeddings.

    Raises:
        ApiError: the model has none.
    """
    if not model.width:
        text = f"model {model.name!r} has no embeddings: its layers are not exact; serve it in float32."
        raise ApiError(400, text, "model", "unsupported_parameter")


def check_number(field: str, num: int) -> None:
    """Checks the number of a body's inputs.

    Raises:
        ApiError: names the field.
    """
    if num > _MOST:
        raise ApiError(400, f"{field} must have at most {_MOST} entries, got {num}.", field)


def _shorten_vector(vector: bytes, num: int) -> bytes:
    """Returns the first dimensions of a vector, divided by their length."""
    numbers = array("f", vector)
    if num == len(numbers):
        return vector
    kept = numbers[:num].tolist()
    length = math.sqrt(math.fsum(x * x for x in kept))
    return array("f", [x / length if length else x for x in kept]).tobytes()


def _write_vector(vector: bytes, *, encoded: bool) -> Any:
    return base64.b64encode(vector).decode() if encoded else array("f", vector).tolist()
