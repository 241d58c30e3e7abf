"""Calls: requests of clients in progress, each with one or more requests of the engine and the requests' tokens."""

import asyncio
import itertools
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardfn.inference import Add, CacheStats, Cancel, Drain, Request, SpeculationStats, Token

from ._errors import ApiError, refusal
from ._ipc import Capture, End, Message, Result, StepReport
from ._metrics import Metrics

# The counters of the fields of `SpeculationStats`, and of `CacheStats`.
_OF_ENGINE = (
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
)


# Function from number, name and request to an event that begins the request.
MakeEvent = Callable[[int, str, Request], Message]


class Chunk(NamedTuple):
    """A token of a call.

    Attributes:
        choice: number among all choices of the call.
        token: token of the engine.
    """

    choice: int
    token: Token


class ClientRequest:
    """A client's request in progress, made by `RequestTracker.open`.

    Attributes:
        prompt_tokens: tokens of all prompts.
        drawn: tokens so far.
        event: type of the requests' events.
        results: results in place of tokens so far, by the number of the request.
        began: time of arrival.
        ran: beginning of the first step, or None before the first step.
        first: time of the first token, or None before the first token, and for results in place of tokens.
    """

    def __init__(self, requests: Sequence[Request], number: int, event: MakeEvent = Add) -> None:
        self.event = event
        self.results = dict[int, Result]()
        self.names = {f"{number}.{i}": i for i in range(len(requests))}
        self.choices = [request.sampling.n for request in requests]
        self.lengths = [len(request.prompt) for request in requests]
        self.prompt_tokens, self.drawn = sum(self.lengths), 0
        self.starts = [0, *itertools.accumulate(self.choices)]  # the first choice of each request
        self.left = self.starts[-1]  # choices without an end
        self.waiting = dict(zip(self.names, self.lengths, strict=True))
        self.began, self.last = time.monotonic(), dict[int, float]()
        self.ran: float | None = None
        self.first: float | None = None
        self._due, self._news = list[Chunk](), asyncio.Event()
        self._error: ApiError | None = None

    @property
    def has_tokens(self) -> bool:
        """Returns whether prompts are continued."""
        return self.event is Add

    def request_of(self, choice: int) -> int:
        """Returns the number of the request that has a choice."""
        return bisect_right(self.starts, choice) - 1

    @property
    def done(self) -> bool:
        """Returns whether all choices have ended, or the call has failed."""
        return not self.left or self._error is not None

    async def take(self) -> list[Chunk]:
        """Waits for pieces that no call has returned, and returns them. None follow the last piece.

        Raises:
            ApiError: the call has failed. Earlier pieces are returned first.
        """
        if not self._due and not self.done:
            await self._news.wait()
        self._news.clear()
        due, self._due = self._due, []
        if not due and self._error is not None:
            raise self._error
        return due

    def put(self, piece: Chunk) -> None:
        """Adds a piece."""
        self._due.append(piece)
        self.left -= piece.token.finish_reason is not None
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """Ends the call by an error, unless the call has ended."""
        if not self.done:
            self._error = error
            self._news.set()


class RequestTracker:
    """All calls in progress, and the numbered events of the calls.

    Args:
        send: function that takes each event.
        metrics: metrics, kept up to date.
        max_waiting: most tokens of prompts in line for a first token.
    """

    def __init__(self, send: Callable[[Message], None], metrics: Metrics, max_waiting: int) -> None:
        self._send, self._metrics, self.max_waiting = send, metrics, max_waiting
        self._numbers, self._events = itertools.count(), 0
        self._of: dict[str, ClientRequest] = {}  # by names of the engine's requests
        self._open: dict[int, ClientRequest] = {}
        self.waiting = 0  # tokens
        self.taken, self.progress = 0, time.monotonic()
        self._rate = 0.0  # prompt tokens a second that have left the line, lately
        self.counts: dict[str, int] = {}
        self._ending = False
        self._so_far = (*SpeculationStats(), *CacheStats())

    def __len__(self) -> int:
        return len(self._open)

    @property
    def behind(self) -> float:
        """Returns the seconds since the last step, while there is work."""
        return time.monotonic() - self.progress if self._of or self.taken < self._events else 0.0

    def open(self, requests: Sequence[Request], event: MakeEvent = Add) -> ClientRequest:
        """Begins a call.

        Args:
            requests: requests of the engine.
            event: function that makes the event of each request. `Add` continues prompts. Other events have a result in
                place of tokens.

        Raises:
            ApiError: the prompts have more tokens than may ever wait, 413. Or too many tokens wait already, 429, with
                the seconds after which to try again.
        """
        call = ClientRequest(requests, next(self._numbers), event)
        if call.prompt_tokens > self.max_waiting:
            raise ApiError(
                413,
                f"The request has {call.prompt_tokens} tokens in {len(requests)} prompts, and the line of this server"
                f" takes at most {self.max_waiting}. Send fewer prompts in each request, or start the server with a"
                " larger --max-waiting-tokens.",
                code="too_many_tokens",
            )
        if self.waiting + call.prompt_tokens > self.max_waiting:
            raise ApiError(
                429,
                f"{self.waiting} tokens of prompts wait, and the request has {call.prompt_tokens} more. Together they"
                f" must be at most {self.max_waiting}. Try again later.",
                headers={"Retry-After": str(self.retry_after)},
            )
        self.progress = self.progress if self._of else time.monotonic()
        self.waiting += call.prompt_tokens
        self._open[id(call)] = call
        for name, request in zip(call.names, requests, strict=True):
            self._of[name] = call
            self._send_event(event(self._events, name, request))
        return call

    @property
    def retry_after(self) -> int:
        """Returns the seconds in which the line will be shorter by half, as of its rate so far."""
        return min(60, max(1, math.ceil(self.waiting / 2 / self._rate))) if self._rate else 1

    def close(self, call: ClientRequest) -> None:
        """Ends a call. Requests in progress are cancelled, and their blocks of the KV cache become free."""
        if self._open.pop(id(call), None) is None:
            return
        for name in call.names:
            self._record_start(call, name)
            if self._of.pop(name, None) is not None:
                self._send_event(Cancel(self._events, name))

    def report(self, report: StepReport) -> None:
        """Hands the tokens of a step to their calls."""
        now = time.monotonic()
        for name in report.begun:
            if (call := self._of.get(name)) is not None and call.ran is None:
                call.ran = max(call.began, self.progress)  # a step begins with the report of the step before
        self.counts, self.taken, self.progress = dict(report.stats.counts), report.taken, now
        before, self._so_far = self._so_far, (*report.stats.speculation, *report.stats.cache)
        for name, old, new in zip(_OF_ENGINE, before, self._so_far, strict=True):
            self._metrics.add(name, new - old)
        for name, reason in report.refused.items():
            if (call := self._of.pop(name, None)) is not None:
                call.fail(refusal(reason))
        for name, result in report.results.items():
            if (call := self._of.get(name)) is not None:
                call.results[call.names[name]] = result
        ends = dict[str, int]()
        for token in report.tokens:
            call = self._of.get(token.name)
            if call is None:  # closed in between
                continue
            self._record_token(call, token, now)
            if token.finish_reason is not None:
                ends[token.name] = ends.get(token.name, 0) + 1
        for name, num in ends.items():
            call = self._of[name]
            at = call.names[name]
            call.choices[at] -= num
            if not call.choices[at]:
                del self._of[name]
        self.capture_next(report.graphs_left)

    def capture_next(self, graphs_left: int) -> None:
        """Lets the ranks capture a further graph if they have nothing else to do. The report then brings the next."""
        if graphs_left and not self._ending and not self._of and self.taken == self._events:
            self.progress = time.monotonic()
            self._send_event(Capture(self._events))

    def fail_all(self, error: ApiError) -> None:
        """Ends all calls by an error."""
        for call in self._open.values():
            call.fail(error)

    def drain(self) -> None:
        """Lets the engine refuse further requests."""
        self._ending = True
        self._send_event(Drain(self._events))

    def stop(self) -> None:
        """Ends the ranks."""
        self._send_event(End(self._events))

    def _send_event(self, event: Message) -> None:
        self._events += 1
        self._send(event)

    def _record_token(self, call: ClientRequest, token: Token, now: float) -> None:
        at = call.names[token.name]
        choice = call.starts[at] + token.choice
        is_drawn = token.token is not None and token.position >= call.lengths[at]  # not a token of the prompt
        if token.name in call.waiting and (is_drawn or token.finish_reason == "length"):
            waited = now - call.began
            if call.first is None and call.has_tokens:
                call.first = now
                self._metrics.observe("vllm:time_to_first_token_seconds", waited)
            num = self._record_start(call, token.name)
            self._metrics.add("vllm:prompt_tokens", num)
            self._rate = 0.9 * self._rate + 0.1 * num / max(waited, 1e-3)
        if is_drawn and call.has_tokens:
            self._record_drawn(call, choice, now)
        if token.finish_reason in ("stop", "length") and call.has_tokens:
            self._metrics.add("vllm:request_success", label=token.finish_reason)
        call.put(Chunk(choice, token))
        if not call.left:
            self._record_end(call, now)

    def _record_end(self, call: ClientRequest, now: float) -> None:
        self._metrics.observe("vllm:e2e_request_latency_seconds", now - call.began)
        if call.ran is None:  # a request without a step
            return
        self._metrics.observe("vllm:request_queue_time_seconds", call.ran - call.began)
        self._metrics.observe("vllm:request_inference_time_seconds", now - call.ran)
        if call.first is not None:
            self._metrics.observe("vllm:request_prefill_time_seconds", call.first - call.ran)
            self._metrics.observe("vllm:request_decode_time_seconds", now - call.first)

    def _record_drawn(self, call: ClientRequest, choice: int, now: float) -> None:
        call.drawn += 1
        self._metrics.add("vllm:generation_tokens")
        if (last := call.last.get(choice)) is not None:
            self._metrics.observe("vllm:inter_token_latency_seconds", now - last)
        call.last[choice] = now

    def _record_start(self, call: ClientRequest, name: str) -> int:
        """Takes a prompt out of the waiting prompts, and returns the number of its tokens."""
        num = call.waiting.pop(name, 0)
        self.waiting -= num
        return num
