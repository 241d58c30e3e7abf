"""Embeddings: from the body of a request to prompts, and from vectors to the answer."""

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardfn.inference import Request, Sampling

from ._errors import ApiError
from ._fields import EMBEDDINGS, read_fields
from ._model import Model, adapter_of
from ._parse_request import check_fields
from ._prompts import read_prompts

_MOST = 2048  # most inputs of one body, as in OpenAI's interface
_FORMATS = ("float", "base64")


class Inputs(NamedTuple):
    """A body of `/v1/embeddings`, checked.

    Attributes:
        model: model as the client has named it.
        requests: requests, one for each input.
        encoded: whether vectors are written as base64.
        dimensions: number of dimensions of a vector, or None for all.
    """

    model: str
    requests: list[Request]
    encoded: bool
    dimensions: int | None = None


def parse_embeddings(body: Mapping[str, Any], model: Model) -> Inputs:
    """Returns the meaning of a body of `/v1/embeddings`.

    Raises:
        ApiError: names the field that is wrong, or the model has no embeddings.
    """
    given = read_fields(body, EMBEDDINGS)
    adapter = adapter_of(given, model)
    if not model.width:
        text = f"model {model.name!r} has no embeddings: its layers are not exact; serve it in float32."
        raise ApiError(400, text, "model", "unsupported_parameter")
    kind = given.get("encoding_format", "float")
    if kind not in _FORMATS:
        text = f"encoding_format must be one of {', '.join(map(repr, _FORMATS))}, got {kind[:60]!r}."
        raise ApiError(400, text, "encoding_format")
    if not 1 <= given.get("dimensions", model.width) <= model.width:
        text = f"dimensions must be from 1 to {model.width}, as embeddings of this model have, got"
        raise ApiError(400, f"{text} {given['dimensions']}.", "dimensions")
    inputs = read_prompts(given, model, "input", _check_number)
    requests = [Request(tuple(x), Sampling(max_tokens=1, temperature=0.0), adapter=adapter) for x in inputs]
    check_fields(requests, model.limits, given)
    return Inputs(given["model"], requests, kind == "base64", given.get("dimensions"))


def make_embeddings_response(inputs: Inputs, vectors: Sequence[bytes], tokens: int) -> dict[str, Any]:
    """Returns the answer.

    Args:
        inputs: inputs of the body.
        vectors: vectors of each input, float32 in the order of bytes of this machine.
        tokens: tokens of all inputs.
    """
    rows = [
        {"object": "embedding", "index": i, "embedding": _write_vector(_shorten_vector(vector, inputs), inputs.encoded)}
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": rows, "model": inputs.model, "usage": usage}


def _check_number(num: int) -> None:
    if num > _MOST:
        raise ApiError(400, f"input must have at most {_MOST} entries, got {num}.", "input")


def _shorten_vector(vector: bytes, inputs: Inputs) -> bytes:
    """Returns the first dimensions of a vector, divided by their length."""
    numbers = array("f", vector)
    if inputs.dimensions is None or inputs.dimensions == len(numbers):
        return vector
    kept = numbers[: inputs.dimensions].tolist()
    length = math.sqrt(math.fsum(x * x for x in kept))
    return array("f", [x / length if length else x for x in kept]).tobytes()


def _write_vector(vector: bytes, encoded: bool) -> Any:
    return base64.b64encode(vector).decode() if encoded else array("f", vector).tolist()
