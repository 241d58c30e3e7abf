"""Transcripts: the route `/v1/audio/transcriptions` of OpenAI's interface, whose body is a form with a sound."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardfn.inference import Request, Sampling, SourceFeatures

from ._errors import ApiError
from ._fields import TRANSCRIPTIONS as FIELDS
from ._fields import read_fields
from ._model import Model, check_model
from ._parse_request import ParsedRequest, check_fields, draw_seed

FORM = "multipart/form-data"
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;",]{1,70}))(?:;|$)')
_NAME = re.compile(r'content-disposition:\s*form-data;[^\r\n]*?\bname="([^"\r\n]{1,60})"', re.IGNORECASE)
_MOST_PARTS, _MOST_HEAD = 32, 1024
_NUMBERS = {"temperature": float, "seed": int, "max_completion_tokens": int}


class Transcription(NamedTuple):
    """Meaning of a form.

    Attributes:
        asked: request for the engine.
        plain: whether the answer is a text, in place of an object of JSON.
        seconds: length of the sound that the model reads.
    """

    asked: ParsedRequest
    plain: bool
    seconds: float

    def write(self, text: str) -> dict[str, Any]:
        """Returns the answer of a transcript."""
        usage = {"type": "duration", "seconds": round(self.seconds, 2)}
        return {"text": text.strip(), "seed": self.asked.requests[0].sampling.seed, "usage": usage}


def read_form(data: bytes, kind: str) -> dict[str, bytes]:
    r"""Returns the fields of a form.

    Args:
        data: body.
        kind: header Content-Type.

    Raises:
        ApiError: the body is no form, or has too many parts, or a field twice.

    Example:
        >>> body = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--x--\r\n'
        >>> read_form(body, "multipart/form-data; boundary=x")
        {'model': b'tiny'}
    """
    found = _BOUNDARY.search(kind)
    if found is None:
        raise ApiError(400, f"Content-Type must have the boundary of its parts, got {kind[:80]!r}.")
    mark = b"\r\n--" + (found[1] or found[2]).encode()
    parts = (b"\r\n" + data).split(mark, _MOST_PARTS + 2)
    if len(parts) < 3 or parts[0].strip() or not parts[-1].startswith(b"--"):
        raise ApiError(400, f"The body must be a form of 1 to {_MOST_PARTS} parts that ends with its boundary.")
    fields = dict[str, bytes]()
    for part in parts[1:-1]:
        head, separator, value = part.partition(b"\r\n\r\n")
        name = _NAME.search(head.decode("utf-8", "replace")) if len(head) <= _MOST_HEAD else None
        if not separator or name is None:
            raise ApiError(400, f"Each part of the form must have a name, got {head[:60]!r}.")
        if name[1] in fields:
            raise ApiError(400, f"{name[1]} is given twice.", name[1])
        fields[name[1]] = value
    return fields


def parse_transcription(data: bytes, kind: str, model: Model) -> Transcription:
    """Returns the meaning of a form.

    Args:
        data: body.
        kind: header Content-Type.
        model: model of the server.

    Raises:
        ApiError: the model reads no sounds, or a field is wrong.
    """
    form = read_form(data, kind)
    sound = form.pop("file", None)
    given = read_fields({name: _read_value(name, value) for name, value in form.items()}, FIELDS)
    if "model" not in given:
        raise ApiError(400, "model is missing.", "model", "missing_parameter")
    check_model(given["model"], model)
    speech = model.text.speech
    if speech is None:
        text = f"model {model.name!r} reads no sounds: serve a Whisper for transcripts."
        raise ApiError(400, text, "model", "unsupported_parameter")
    plain = given.get("response_format", "json")
    if plain not in ("json", "text"):
        raise ApiError(400, f"response_format must be 'json' or 'text', got {plain[:60]!r}.", "response_format")
    if sound is None:
        raise ApiError(400, "file is missing: send the sound as a part of the form.", "file", "missing_parameter")
    try:
        features, seconds = speech.read(sound)
    except ValueError as error:
        raise ApiError(400, f"file: {error}", "file", "invalid_audio") from error
    try:
        prompt = speech.begin(given.get("language"))
    except ValueError as error:
        raise ApiError(400, str(error), "language") from error
    request = _make_request(given, features, prompt, model)
    check_fields([request], model.limits, given)
    return Transcription(ParsedRequest(given["model"], [request], False, False, None), plain == "text", seconds)


def _make_request(given: Mapping[str, Any], features: SourceFeatures, prompt: tuple[int, ...], model: Model) -> Request:
    speech = model.text.speech
    assert speech is not None
    rest = model.limits.context - len(prompt)
    most = given.get("max_completion_tokens", rest)
    if not 1 <= most <= rest:
        text = (
            f"max_completion_tokens must be from 1 to {rest}, the rest of the context of {model.limits.context} tokens"
        )
        raise ApiError(400, f"{text}, got {most}.", "max_completion_tokens")
    sampling = Sampling(
        max_tokens=most,
        temperature=given.get("temperature", 0.0),
        seed=given.get("seed", draw_seed()),
        stop_tokens=tuple(sorted(model.ends)),
        min_tokens=min(most, 1),
        bad_words=tuple((token,) for token in speech.banned),
    )
    return Request(prompt, sampling, source=(0,) * model.limits.source, features=features)


def _read_value(name: str, value: bytes) -> Any:
    """Returns the value of a field as JSON would have it."""
    try:
        text = value.decode()
        return _NUMBERS[name](text) if name in _NUMBERS else text
    except ValueError as error:
        kind = "a number" if name in _NUMBERS else "a text"
        raise ApiError(400, f"{name[:60]} must be {kind}, got {value[:60]!r}.", name[:60]) from error
