"""Errors as OpenAI's interface has them: a status, and an object with message, type, parameter and code."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.responses import Response

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", 413: "body_too_large", 429: "rate_limit_exceeded"}
# The fields of bodies by the names of the engine.
_NAMED = "prompt max_tokens temperature top_k top_p min_p seed n stop logit_bias".split()
_NAMED += "presence_penalty frequency_penalty repetition_penalty top_logprobs".split()
_FIELDS = {name: name for name in _NAMED} | {
    "stop_tokens": "stop_token_ids",
    "salt": "cache_salt",
    "adapter": "model",
    "grammar": "response_format",
}


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> "Response":
    """Returns an answer of JSON."""
    from starlette.responses import JSONResponse

    return JSONResponse(value, status, headers=headers)


def refusal(reason: str) -> "ApiError":
    """Returns the answer to a request that the engine refuses: the same request will be refused again.

    Args:
        reason: reason of the engine, which begins with a name.

    Example:
        >>> refusal("stop_tokens[0] must be an integer from 0 to 8, got 9.").param
        'stop_token_ids'
    """
    name = reason.split()[0].partition("[")[0].rstrip(":") if reason.strip() else ""
    field = _FIELDS.get(name)
    return ApiError(400, reason.replace(name, field, 1) if field else reason, field)


class ApiError(Exception):
    """Answer other than success.

    Args:
        status: status of HTTP.
        message: message for the client's user.
        param: field of the body that is wrong.
        code: word for programs. Default: the status's word, if there is one.
        headers: headers of the answer, such as `Retry-After`.

    Example:
        >>> ApiError(400, "n must be at least 1, got 0.", "n").body["error"]["param"]
        'n'
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = _CODES.get(status) if code is None else code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Returns the object that a client receives."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """Returns the object that a client of Anthropic's interface receives."""
        error = self.body["error"]
        kind = {503: "overloaded_error", 413: "request_too_large"}.get(self.status, error["type"])
        kind = "api_error" if kind == "server_error" else kind
        return {"type": "error", "error": {"type": kind, "message": error["message"]}}

    def response(self, path: str = "") -> "Response":
        """Returns the whole answer, in the form of a path's interface."""
        body = self.anthropic_body if path.startswith("/v1/messages") else self.body
        return json_response(body, self.status, self.headers)

    def event(self) -> bytes:
        """Returns the event that ends a stream."""
        return f"data: {json.dumps(self.body)}\n\n".encode()


_FAILURES = {
    "error": (500, "The logits of the model are not finite; this request has ended."),
    "cancelled": (503, "The server ends; this request was cancelled."),
    "refused": (503, "The server ends; this request was not begun."),
}


def raise_failures(reasons: Iterable[str | None], grammar: str = "") -> None:
    """Raises the error of a choice that has failed.

    Args:
        reasons: reasons that have ended choices, or None.
        grammar: field that has the grammar of the call's requests, or empty.

    Raises:
        ApiError: a choice has ended otherwise than by a stop or its length.
    """
    for reason in reasons:
        if reason == "error" and grammar:
            text = (
                f"{grammar} needs more steps for one token than a server takes; this request has ended. Give a simpler"
            )
            raise ApiError(400, f"{text} one. (Or the logits of the model are not finite.)", grammar)
        if reason in _FAILURES:
            raise ApiError(*_FAILURES[reason])
