"""The routes of a server.

The order of checks: host, key, size of the body, JSON, fields, template and tokens, context and pool, the line.

The page at `/`: one file, with a policy that permits only the page's script, and only calls of its server.
"""

import asyncio
import base64
import concurrent.futures
import functools
import hashlib
import pathlib
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ._access import ApiKeys, ClientOrigin, make_headers, make_permission
from ._admin_routes import (
    ADMIN,
    LOAD,
    START_PROFILE,
    STOP_PROFILE,
    UNLOAD,
    AdapterChange,
    AdapterChanges,
    Profiles,
    parse_load,
    parse_unload,
)
from ._anthropic_messages import count_tokens, parse_messages
from ._beams import search_beams
from ._dialects import AnswerWriter, DialectAnswer
from ._embeddings import parse_embeddings
from ._errors import ApiError, json_response, raise_failures
from ._fields import read_json
from ._metrics import Metrics
from ._model import Model, check_model
from ._open_responses import parse_responses
from ._parse_request import ParsedRequest, PooledRequest, parse_chat, parse_completions
from ._request_tracker import DOWN, ClientRequest, RequestTracker
from ._responses import CHAT_FORMAT, COMPLETION_FORMAT, ResponseBuilder, ResponseFormat
from ._scores import parse_classify, parse_rerank, parse_score
from ._settings import Settings
from ._streaming import Disconnected, EventStream, Stalled, pace_answer, while_connected
from ._tokenize import detokenize, tokenize
from ._transcriptions import FORM, parse_transcription

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_T = TypeVar("_T")
_KEYED = ("/v1/", "/v2/", "/tokenize", "/detokenize", "/score", "/rerank", "/classify")
# Routes whose answers have no tokens, under all paths of vLLM's interface.
_POOLED = {
    "/v1/embeddings": parse_embeddings,
    **dict.fromkeys(("/v1/score", "/score"), parse_score),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), parse_rerank),
    **dict.fromkeys(("/v1/classify", "/classify"), parse_classify),
}
TRANSCRIPTIONS = "/v1/audio/transcriptions"
_SHORT = 1 << 16  # bytes of a body that is read at once


class App:
    """Answers of a server to HTTP.

    Args:
        settings: settings of the server.
        calls: calls in progress.
        metrics: metrics of the server.

    Attributes:
        model: model, or None until the ranks are ready.
        closed: reason why no request is taken any more, or "" while requests are taken.
    """

    def __init__(self, settings: Settings, calls: RequestTracker, metrics: Metrics) -> None:
        self._settings, self._calls, self._metrics = settings, calls, metrics
        self._keys, self._admin_keys = ApiKeys(settings.keys), ApiKeys(settings.admin_keys)
        self._adapters = AdapterChanges(calls)
        self.model: Model | None = None
        self.closed = ""
        self._html, self._html_headers = _page()
        # Short bodies do not wait for the tokens of long bodies.
        self._reading, self._reading_long = (
            concurrent.futures.ThreadPoolExecutor(1, "shardfn-serve-text") for _ in "ab"
        )

    def asgi(self) -> "ASGIApp":
        """Returns the application."""
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.routing import Route

        routes = [
            Route("/", self._send_page),
            Route("/health", self._send_health),
            Route("/ready", self._send_ready),
            Route("/metrics", self._page_of_metrics),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._list_models),
            Route("/v1/completions", self._make_route(COMPLETION_FORMAT, parse_completions), methods=["POST"]),
            Route("/v1/chat/completions", self._make_route(CHAT_FORMAT, parse_chat), methods=["POST"]),
            *(Route(path, self._make_pooled(read), methods=["POST"]) for path, read in _POOLED.items()),
            Route("/v1/responses", self._make_dialect(parse_responses), methods=["POST"]),
            Route("/v1/messages", self._make_dialect(parse_messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._make_reply(count_tokens), methods=["POST"]),
            Route(TRANSCRIPTIONS, self._transcribe, methods=["POST"]),
            Route("/tokenize", self._make_reply(tokenize), methods=["POST"]),
            Route("/detokenize", self._make_reply(detokenize), methods=["POST"]),
        ]
        if (root := self._settings.adapter_root) is not None:
            read_load = functools.partial(parse_load, root=root)
            routes.append(Route(LOAD, self._make_change(read_load), methods=["POST"]))
            routes.append(Route(UNLOAD, self._make_change(parse_unload), methods=["POST"]))
        if (root := self._settings.profile_root) is not None:
            profiles = Profiles(self._calls, root)
            routes.append(Route(START_PROFILE, self._make_action(profiles.start), methods=["POST"]))
            routes.append(Route(STOP_PROFILE, self._make_action(profiles.stop), methods=["POST"]))
        handlers: Mapping[Any, Any] = {
            ApiError: _answer_error,
            HTTPException: _answer_unserved,
            Exception: _answer_failure,
        }
        inner = Starlette(routes=routes, exception_handlers=handlers)
        return functools.partial(self._guard_app, inner)

    async def _guard_app(self, inner: "ASGIApp", scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Counts answers, paces them, and refuses clients before anything of a body is read."""
        if scope["type"] != "http":
            return
        send = pace_answer(send, scope, self._settings.stall_seconds)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        more = make_headers(headers, self._settings.origins)

        async def count_answer(message: "Message") -> None:
            if message["type"] == "http.response.start":
                self._metrics.add("shardfn:answers", label=str(message["status"]))
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        try:
            if scope["method"] == "OPTIONS" and self._settings.origins and (permits := make_permission(headers)):
                await count_answer({"type": "http.response.start", "status": 204, "headers": permits})
                await count_answer({"type": "http.response.body", "body": b""})
                return
            await self._admit_client(inner, headers, more[0][1].decode(), scope, receive, count_answer)
        except Stalled:
            self._metrics.add("shardfn:stalled")

    async def _admit_client(
        self,
        inner: "ASGIApp",
        headers: Mapping[bytes, str],
        name: str,
        scope: "Scope",
        receive: "Receive",
        send: "Send",
    ) -> None:
        """Answers a client that has a key within its limits, and means this server, and refuses all other clients."""
        key = headers.get(b"authorization")
        if key is None and b"x-api-key" in headers:  # of Anthropic's interface
            key = f"Bearer {headers[b'x-api-key']}"
        try:
            if not self._settings.allows(headers.get(b"host", "localhost")):
                raise ApiError(421, f"the header Host is {headers[b'host'][:60]!r}, and this server is at loopback.")
            is_admin = scope["path"] in ADMIN
            use = (self._admin_keys if is_admin else self._keys).find_use(key)
            if (is_admin or scope["path"].startswith(_KEYED)) and use is None:
                of = " of an administrator" if is_admin else ""
                text = f"The key{of} is missing or wrong. Send the header Authorization: Bearer KEY."
                raise ApiError(401, text, headers={"WWW-Authenticate": "Bearer"})
            use = None if is_admin or scope["method"] != "POST" else use
            if use is not None:
                use.begin()
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        trace = {x: headers[x.encode()] for x in ("traceparent", "tracestate") if x.encode() in headers}
        scope.setdefault("state", {})["origin"] = ClientOrigin(use, name, trace)
        try:
            await inner(scope, receive, send)
        finally:
            if use is not None:
                use.end()

    # Without the engine.

    async def _send_page(self, request: "Request") -> "Response":
        from starlette.responses import Response

        return Response(self._html, media_type="text/html", headers=self._html_headers)

    async def _send_health(self, request: "Request") -> "Response":
        behind = self._calls.behind
        if self.closed and self.closed != "The server ends.":
            raise ApiError(503, self.closed)
        if behind > self._settings.health_seconds:
            raise ApiError(503, f"the last step of the engine was {behind:.0f} s ago, and there is work.")
        return json_response({"status": "ok"})

    async def _send_ready(self, request: "Request") -> "Response":
        self._open_model()
        return json_response({"status": "ready"})

    async def _page_of_metrics(self, request: "Request") -> "Response":
        from starlette.responses import Response

        counts = self._calls.counts
        usable = {i: sum(x.get(name, 0) for name in ("free", "held", "cached")) for i, x in counts.items()}

        def list_counts(name: str) -> dict[str, float]:
            return {i: x.get(name, 0) for i, x in counts.items()}

        gauges: dict[str, float | Mapping[str, float]] = {
            "shardfn:replica_up": {str(i): float(str(i) in counts) for i in range(self._settings.replicas)},
            "vllm:num_requests_running": list_counts("running"),
            "vllm:num_requests_waiting": list_counts("waiting"),
            "vllm:kv_cache_usage_perc": {i: x / max(1, usable[i]) for i, x in list_counts("held").items()},
            "shardfn:cached_blocks": list_counts("cached"),
            "shardfn:free_blocks": list_counts("free"),
            "shardfn:waiting_tokens": self._calls.waiting,
            "shardfn:open_streams": len(self._calls),
        }
        return Response(self._metrics.text(gauges), media_type="text/plain; version=0.0.4")

    async def _list_models(self, request: "Request") -> "Response":
        model = self._open_model()
        _check_address(request)
        if (name := request.path_params.get("name")) is None:
            return json_response({"object": "list", "data": [_describe_model(each, model) for each in model.names]})
        check_model(name, model)
        return json_response(_describe_model(name, model))

    # With the engine.

    def _make_route(
        self, form: ResponseFormat, read: Callable[[Mapping[str, Any], Model], ParsedRequest]
    ) -> Callable[..., Any]:
        async def answer_request(request: "Request") -> Any:
            model, asked = await self._read_asked(request, read)
            if asked.beams is not None:
                work = search_beams(self._calls, model, asked.requests, asked.beams, request.state.origin)
                call = await self._send_while_connected(work, request)
                return json_response(await ResponseBuilder(form, model, asked, call).whole())
            call = self._calls.open(asked.requests, origin=request.state.origin)
            made = ResponseBuilder(form, model, asked, call)
            if asked.stream:
                return EventStream(made.events(), functools.partial(self._end_call, call))
            return json_response(await self._send_whole(call, made.whole(), request))

        return answer_request

    async def _transcribe(self, request: "Request") -> "Response":
        """Returns the text of a sound."""
        from starlette.responses import PlainTextResponse

        self._open_model()
        _check_address(request)
        data, kind = await _read_body(request, self._settings, FORM), request.headers["content-type"]
        model, loop = self._open_model(), asyncio.get_running_loop()
        found = await loop.run_in_executor(self._reading_long, lambda: parse_transcription(data, kind, model))
        self._open_model()
        call = self._calls.open(found.asked.requests, origin=request.state.origin)
        made = ResponseBuilder(COMPLETION_FORMAT, model, found.asked, call)
        answer = found.write((await self._send_whole(call, made.whole(), request))["choices"][0]["text"])
        return PlainTextResponse(answer["text"] + "\n") if found.plain else json_response(answer)

    def _make_dialect(
        self, read: Callable[[Mapping[str, Any], Model], tuple[ParsedRequest, AnswerWriter]]
    ) -> Callable[..., Any]:
        async def answer_request(request: "Request") -> Any:
            model, (asked, writer) = await self._read_asked(request, read)
            call = self._calls.open(asked.requests, origin=request.state.origin)
            made = DialectAnswer(writer, model, asked, call)
            if asked.stream:
                return EventStream(made.events(), functools.partial(self._end_call, call))
            return json_response(await self._send_whole(call, made.whole(), request))

        return answer_request

    def _make_reply(self, reply: Callable[[Mapping[str, Any], Model], dict[str, Any]]) -> Callable[..., Any]:
        """Returns the answer of a route that needs no engine."""

        async def answer_request(request: "Request") -> "Response":
            return json_response((await self._read_asked(request, reply))[1])

        return answer_request

    def _make_change(self, read: Callable[[Mapping[str, Any], Model], AdapterChange]) -> Callable[..., Any]:
        """Returns the answer of a route that changes the adapters: the models of the server after the change."""

        async def answer_request(request: "Request") -> "Response":
            _, change = await self._read_asked(request, read)
            await self._adapters.apply(self, change)
            model = self._open_model()
            return json_response({"object": "list", "data": [_describe_model(each, model) for each in model.names]})

        return answer_request

    def _make_action(self, act: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> Callable[..., Any]:
        """Returns the answer of a route that has no body."""

        async def answer_request(request: "Request") -> "Response":
            self._open_model()
            return json_response(await act())

        return answer_request

    def _make_pooled(self, read: Callable[[Mapping[str, Any], Model], PooledRequest]) -> Callable[..., Any]:
        """Returns the answer of a route whose answers have no tokens."""

        async def answer_request(request: "Request") -> "Response":
            _, asked = await self._read_asked(request, read)
            results, tokens = list[Any](), 0
            for requests in asked.stages:
                call = self._calls.open(requests, asked.event, request.state.origin)
                await self._send_whole(call, _wait_end(call), request)
                results += [call.results[i] for i in range(len(requests))]
                tokens += call.prompt_tokens
            # Megabytes of numbers, made in a thread so that no other request waits.
            return await asyncio.to_thread(lambda: json_response(asked.write(results, tokens)))

        return answer_request

    async def _read_asked(self, request: "Request", read: Callable[[Mapping[str, Any], Model], _T]) -> tuple[Model, _T]:
        """Returns the meaning of a body."""
        self._open_model()
        if not request.url.path.startswith("/v1/messages"):  # Anthropic's client sends ?beta=true
            _check_address(request)
        data = await _read_body(request, self._settings)
        model = self._open_model()  # the server may end in between
        loop, thread = asyncio.get_running_loop(), self._reading_long if _is_slow(data) else self._reading
        asked = await loop.run_in_executor(thread, lambda: read(read_json(data), model))
        self._open_model()
        return model, asked

    async def _send_whole(self, call: ClientRequest, work: Coroutine[Any, Any, _T], request: "Request") -> _T:
        """Returns a whole answer.

        Raises:
            ApiError: the call has failed, or the client has left.
        """
        try:
            return await self._send_while_connected(work, request)
        finally:
            self._end_call(call, "")

    async def _send_while_connected(self, work: Coroutine[Any, Any, _T], request: "Request") -> _T:
        try:
            return await while_connected(work, request.receive)
        except Disconnected as error:
            self._metrics.add("shardfn:disconnected")
            raise ApiError(499, "The client has left.") from error

    def _end_call(self, call: ClientRequest, how: str) -> None:
        if how:
            self._metrics.add(f"shardfn:{how}")
        self._calls.close(call)

    def _open_model(self) -> Model:
        """Returns the model, if requests are taken."""
        if self.closed:
            raise ApiError(503, self.closed, headers={"Retry-After": "5"})
        if self.model is None:
            raise ApiError(503, "The model is being loaded.", headers={"Retry-After": "5"})
        if not self._calls.is_up:
            raise ApiError(503, DOWN, code="engine_dead", headers={"Retry-After": "5"})
        return self.model


def _is_slow(data: bytes) -> bool:
    """Returns whether a body is long, or may have an image, so that short bodies do not wait for its reading."""
    return len(data) > _SHORT or b"image_url" in data or b'"image"' in data


async def _wait_end(call: ClientRequest) -> None:
    while pieces := await call.take():
        raise_failures(piece.token.finish_reason for piece in pieces)


def _describe_model(name: str, model: Model) -> dict[str, Any]:
    """Returns a model or an adapter, as clients list it."""
    row = {"id": name, "object": "model", "created": 0, "owned_by": "shardfn", "max_model_len": model.limits.context}
    return row if name == model.name else row | {"parent": model.name}


def _check_address(request: "Request") -> None:
    """Refuses fields after a question mark: no route has any."""
    if (name := next(iter(request.query_params), None)) is not None:
        raise ApiError(400, f"{name[:60]} is not served in the address. Give fields in the body.", name[:60])


async def _read_body(request: "Request", settings: Settings, wanted: str = "application/json") -> bytes:
    """Returns the bytes of a body within the limits of size and time."""
    from starlette.requests import ClientDisconnect

    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != wanted:  # forms of pages of other sites cannot send JSON
        raise ApiError(415, f"Content-Type must be {wanted!r}, got {kind[:60]!r}.")
    origin = request.headers.get("origin")
    if wanted == FORM and origin is not None and not {origin, "*"} & {*settings.origins}:
        raise ApiError(403, f"Forms of {origin[:60]!r} are not taken. Permit the site by --allowed-origin.")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise ApiError(415, f"Content-Encoding is {coding[:60]!r}. Send the body as it is.")
    large = ApiError(413, f"The body has more than {settings.max_body} bytes, the most that this server takes.")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > settings.max_body:
        raise large
    data = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.stream():
                data += part
                if len(data) > settings.max_body:
                    raise large
    except TimeoutError as error:
        text = f"The body did not arrive within {settings.body_seconds:g} s."
        raise ApiError(408, text, headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise ApiError(400, "The client left before the body was whole.") from error
    return bytes(data)


async def _answer_error(request: "Request", error: Exception) -> "Response":
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def _answer_unserved(request: "Request", error: Exception) -> "Response":
    """Returns the answer to a path or a method that is not served."""
    from starlette.exceptions import HTTPException

    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:60]} is not served."
    return ApiError(error.status_code, text, headers=error.headers).response()


async def _answer_failure(request: "Request", error: Exception) -> "Response":
    return ApiError(500, f"The server has failed: {type(error).__name__}.").response(request.url.path)


_PATH = pathlib.Path(__file__).with_name("page.html")


def _page() -> tuple[str, dict[str, str]]:
    """Returns the page, and the headers of the answer.

    Example:
        >>> html, headers = _page()
        >>> headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
        True
    """
    html = _PATH.read_text(encoding="utf-8")
    own = {tag: _digest_element(html, tag) for tag in ("script", "style")}
    rules = [
        "default-src 'none'",
        *(f"{tag}-src 'sha256-{digest}'" for tag, digest in own.items()),
        "connect-src 'self'",
        "img-src data:",  # the empty icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(rules),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return html, headers


def _digest_element(html: str, tag: str) -> str:
    """Returns the digest of the page's single element of a tag."""
    [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
