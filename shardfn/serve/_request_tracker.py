"""Calls: requests of clients in progress, each with one or more requests of the engine and the requests' tokens."""

import asyncio
import functools
import itertools
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardfn.inference import (
    Add,
    CacheStats,
    Cancel,
    Drain,
    Limits,
    PrefixScope,
    Request,
    SpeculationStats,
    Token,
    list_prefix_keys,
)

from ._access import NOBODY, ClientOrigin
from ._errors import ApiError, refusal
from ._ipc import Capture, End, Message, RemoveAdapter, Result, StepReport
from ._metrics import Metrics, RequestTraces
from ._router import PrefixTable, choose_replica

# The counters of the fields of `SpeculationStats`, and of `CacheStats`.
_OF_ENGINE = (
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
)


USUAL_ANSWER = 256  # tokens of an answer whose length is not known
DOWN = "All replicas of the model have ended, and are started again. Try again later."
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
        origin: sender.
        sampling: sampling of the first request.
        results: results in place of tokens so far, by the number of the request.
        began: time of arrival.
        ran: beginning of the first step, or None before the first step.
        first: time of the first token, or None before the first token, and for results in place of tokens.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        number: int,
        event: MakeEvent = Add,
        origin: ClientOrigin = NOBODY,
        *,
        continues: bool = False,
    ) -> None:
        self.event, self.origin, self.sampling = event, origin, requests[0].sampling if requests else None
        self.results = dict[int, Result]()
        self.names = {f"{number}.{i}": i for i in range(len(requests))}
        self.choices = [request.sampling.n for request in requests]
        self.lengths = [len(request.prompt) for request in requests]
        given = [0 if continues else len(request.given) for request in requests]
        self.prompt_tokens, self.drawn = sum(given), 0
        self.starts = [0, *itertools.accumulate(self.choices)]  # the first choice of each request
        self.left = self.starts[-1]  # choices without an end
        self.waiting = dict(zip(self.names, given, strict=True))
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
    def error(self) -> ApiError | None:
        """Returns the error that has ended the call, or None."""
        return self._error

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


class _Replica:
    """A replica as the tracker sees it, from its readiness until its end: numbered events, and reports.

    Args:
        send: function that takes each event.
        limits: sizes of the replica's engine.
    """

    def __init__(self, send: Callable[[Message], None], limits: Limits) -> None:
        self._send, self.table = send, PrefixTable(limits.usable)
        self.events = self.taken = 0
        self.progress = time.monotonic()
        self.counts: dict[str, int] = {}
        self.so_far = (*SpeculationStats(), *CacheStats())
        self.changes: dict[int, asyncio.Future[str]] = {}  # of adapters, by the numbers of their events

    def send(self, make: Callable[[int], Message]) -> None:
        """Sends an event, made from its number."""
        self.events += 1
        self._send(make(self.events - 1))

    def send_change(self, make: Callable[[int], Message]) -> asyncio.Future[str]:
        """Sends a change of adapters, and returns the future of its result."""
        self.send(make)
        found = self.changes[self.events - 1] = asyncio.get_running_loop().create_future()
        return found


@dataclass
class _SentRequest:
    """A request of the engine that has not ended.

    Attributes:
        call: call of the request.
        request: request.
        replica: number of the replica that computes the request.
        prompt: tokens of the prompt that the replica's cache lacks.
        begun: whether a token has arrived.
    """

    call: ClientRequest
    request: Request
    replica: int
    prompt: int
    begun: bool = False

    def load_of(self, name: str) -> int:
        """Returns the tokens to compute. A completion without a close limit counts as a usual answer."""
        sampling = self.request.sampling
        waiting = self.prompt if name in self.call.waiting else 0
        return waiting + sampling.n * min(sampling.max_tokens, USUAL_ANSWER)


class RequestTracker:
    """All calls in progress, and their requests on the replicas that are up.

    Args:
        replicas: number of replicas.
        metrics: metrics, kept up to date.
        max_waiting: most tokens of prompts in line for a first token.
        traces: spans of calls that have ended, or None.
    """

    def __init__(self, replicas: int, metrics: Metrics, max_waiting: int, traces: RequestTraces | None = None) -> None:
        self._metrics, self.max_waiting, self._traces = metrics, max_waiting, traces
        self._replicas: list[_Replica | None] = [None] * replicas
        self._limits: Limits | None = None
        self._numbers, self._arrivals = itertools.count(), itertools.count()
        self._sent: dict[str, _SentRequest] = {}  # by names of the engine's requests
        self._open: dict[int, ClientRequest] = {}
        self.waiting = 0  # tokens
        self._adapters: dict[str, Callable[[int], Message]] = {}  # changes since the start, for replicas that begin
        self._rate = 0.0  # prompt tokens a second that have left the line, lately
        self._ending = False

    def __len__(self) -> int:
        return len(self._open)

    @property
    def behind(self) -> float:
        """Returns the longest time in seconds since the last step of a replica with work."""
        now, busy = time.monotonic(), {sent.replica for sent in self._sent.values()}
        return max((now - x.progress for i, x in self._list_up() if i in busy or x.taken < x.events), default=0.0)

    @property
    def num_events(self) -> int:
        """Returns the number of events so far of the replicas that are up."""
        return sum(x.events for _, x in self._list_up())

    @property
    def is_up(self) -> bool:
        """Returns whether a replica takes requests."""
        return any(self._list_up())

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Returns counts of sequences and blocks, by the number of the replica."""
        return {str(i): dict(x.counts) for i, x in self._list_up()}

    def begin(self, replica: int, send: Callable[[Message], None], limits: Limits, graphs_left: int = 0) -> None:
        """Takes a replica that is ready.

        Args:
            replica: number of the replica.
            send: function that takes each event of the replica.
            limits: sizes of the replica's engine.
            graphs_left: see `StepReport`.
        """
        made = self._replicas[replica] = _Replica(send, limits)
        self._limits = limits
        for change in self._adapters.values():
            made.send(change)
        if self._ending:
            made.send(Drain)
        self.capture_next(replica, graphs_left)

    def lose(self, replica: int, error: ApiError) -> None:
        """Takes the end of a replica. Its requests without a token go to another one, and the others' calls fail.

        Args:
            replica: number of the replica.
            error: error of the calls that fail.
        """
        before, self._replicas[replica] = self._replicas[replica], None
        for change in before.changes.values() if before is not None else ():
            change.set_result("")  # a replica that begins has all changes
        for name, sent in [(name, sent) for name, sent in self._sent.items() if sent.replica == replica]:
            if sent.begun or self._ending or sent.call.done or not self._send_request(name, sent.call, sent.request):
                del self._sent[name]
                sent.call.fail(error)

    def open(
        self,
        requests: Sequence[Request],
        event: MakeEvent = Add,
        origin: ClientOrigin = NOBODY,
        *,
        continues: bool = False,
    ) -> ClientRequest:
        """Begins a call.

        Args:
            requests: requests of the engine.
            event: function that makes the event of each request. `Add` continues prompts. Other events have a result in
                place of tokens.
            origin: sender.
            continues: whether an earlier call has had the prompts, but for their last tokens, so that they do not
                count.

        Raises:
            ApiError: the prompts have more tokens than may ever wait, 413. Or too many tokens wait already, 429, with
                the seconds after which to try again. Or no replica is up, 503.
        """
        call = ClientRequest(requests, next(self._numbers), event, origin, continues=continues)
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
        if not self.is_up:
            raise ApiError(503, DOWN, code="engine_dead", headers={"Retry-After": "5"})
        self.waiting += call.prompt_tokens
        self._open[id(call)] = call
        for name, request in zip(call.names, requests, strict=True):
            self._send_request(name, call, request)
        return call

    async def add_adapter(self, name: str, load: Callable[[int], Message]) -> str:
        """Adds an adapter to all replicas or to none, and returns "" or the reason of a refusal.

        Args:
            name: name of the adapter.
            load: function from a number to the event.
        """
        self._adapters[name] = load
        reason = await self.change_all(load)
        if reason:
            del self._adapters[name]
            await self.change_all(functools.partial(RemoveAdapter, name=name))
        return reason

    async def remove_adapter(self, name: str, remove: Callable[[int], Message]) -> str:
        """Removes an adapter from all replicas, and returns "" or the reason of a refusal."""
        before, reason = self._adapters.pop(name, None), await self.change_all(remove)
        if reason and before is not None:
            self._adapters[name] = before
        elif not reason and before is None:  # an adapter of the start, which a replica that begins has again
            self._adapters[name] = remove
        return reason

    def count_users(self, adapter: str) -> int:
        """Returns the number of requests in progress that have an adapter."""
        return sum(sent.request.adapter == adapter.encode() for sent in self._sent.values())

    async def change_all(self, change: Callable[[int], Message]) -> str:
        """Sends a change to all replicas, and returns "" or the first reason of a refusal.

        Args:
            change: function from a number to the event.
        """
        found = await asyncio.gather(*(replica.send_change(change) for _, replica in self._list_up()))
        return next(filter(None, found), "")

    def _send_request(self, name: str, call: ClientRequest, request: Request) -> bool:
        """Sends a request to a replica, and returns whether a replica is up."""
        assert self._limits is not None
        # Requests share the blocks of prefixes only within an adapter and a salt.
        scope = PrefixScope(0, request.adapter, self._limits.cache_dtype, request.salt)
        tokens = request.given if request.images is None else request.images.keys
        keys = list_prefix_keys(tokens, self._limits.block, scope)
        hits = [None if x is None else x.table.count_hits(keys) for x in self._replicas]
        at = choose_replica(hits, self._list_loads(), next(self._arrivals))
        replica = None if at is None else self._replicas[at]
        if at is None or replica is None:
            return False
        if not any(sent.replica == at for sent in self._sent.values()):
            replica.progress = time.monotonic()
        replica.table.record(keys)
        missing = len(request.given) - (hits[at] or 0) * self._limits.block
        self._sent[name] = _SentRequest(call, request, at, missing)
        replica.send(lambda number: call.event(number, name, request))
        return True

    def _list_loads(self) -> list[int]:
        """Returns the tokens to compute of each replica."""
        loads = [0] * len(self._replicas)
        for name, sent in self._sent.items():
            loads[sent.replica] += sent.load_of(name)
        return loads

    def _list_up(self) -> list[tuple[int, _Replica]]:
        return [(i, x) for i, x in enumerate(self._replicas) if x is not None]

    @property
    def retry_after(self) -> int:
        """Returns the seconds in which the line will be shorter by half, as of its rate so far."""
        return min(60, max(1, math.ceil(self.waiting / 2 / self._rate))) if self._rate else 1

    def close(self, call: ClientRequest) -> None:
        """Ends a call. Requests in progress are cancelled, and their blocks of the KV cache become free."""
        if self._open.pop(id(call), None) is None:
            return
        if call.origin.use is not None:
            call.origin.use.add_tokens(call.prompt_tokens + call.drawn)
        if self._traces is not None:
            self._traces.record(call, time.monotonic())
        for name in call.names:
            self._record_start(call, name)
            sent = self._sent.pop(name, None)
            if sent is not None and (replica := self._replicas[sent.replica]) is not None:
                replica.send(functools.partial(Cancel, name=name))

    def report(self, report: StepReport, replica: int = 0) -> None:
        """Hands the tokens of a replica's step to their calls."""
        now, source = time.monotonic(), self._replicas[replica]
        if source is None:
            return
        for name in report.begun:
            if (sent := self._sent.get(name)) is not None and sent.call.ran is None:
                sent.call.ran = max(sent.call.began, source.progress)  # a step begins with the report of the one before
        source.counts, source.taken, source.progress = dict(report.stats.counts), report.taken, now
        before, source.so_far = source.so_far, (*report.stats.speculation, *report.stats.cache)
        for name, old, new in zip(_OF_ENGINE, before, source.so_far, strict=True):
            self._metrics.add(name, new - old, str(replica))
        for name, reason in report.refused.items():
            if (sent := self._sent.pop(name, None)) is not None:
                sent.call.fail(refusal(reason))
        for number, reason in report.changes.items():
            if (change := source.changes.pop(number, None)) is not None and not change.done():
                change.set_result(reason)
        for name, result in report.results.items():
            if (sent := self._sent.get(name)) is not None:
                sent.call.results[sent.call.names[name]] = result
        ends = dict[str, int]()
        for token in report.tokens:
            sent = self._sent.get(token.name)
            if sent is None:  # closed in between
                continue
            sent.begun = True
            self._record_token(sent.call, token, now, str(replica))
            if token.finish_reason is not None:
                ends[token.name] = ends.get(token.name, 0) + 1
        for name, num in ends.items():
            call = self._sent[name].call
            at = call.names[name]
            call.choices[at] -= num
            if not call.choices[at]:
                del self._sent[name]
        self.capture_next(replica, report.graphs_left)

    def capture_next(self, replica: int, graphs_left: int) -> None:
        """Lets a replica capture a further graph if it has nothing else to do. The report then brings the next."""
        target = self._replicas[replica]
        if target is None or not graphs_left or self._ending or target.taken < target.events:
            return
        if not any(sent.replica == replica for sent in self._sent.values()):
            target.progress = time.monotonic()
            target.send(Capture)

    def fail_all(self, error: ApiError) -> None:
        """Ends all calls by an error."""
        for call in self._open.values():
            call.fail(error)

    def drain(self) -> None:
        """Lets the engines refuse further requests."""
        self._ending = True
        for _, replica in self._list_up():
            replica.send(Drain)

    def stop(self) -> None:
        """Ends the ranks."""
        for _, replica in self._list_up():
            replica.send(End)

    def _record_token(self, call: ClientRequest, token: Token, now: float, replica: str) -> None:
        at = call.names[token.name]
        choice = call.starts[at] + token.choice
        is_drawn = token.token is not None and token.position >= call.lengths[at]  # not a token of the prompt
        if token.name in call.waiting and (is_drawn or token.finish_reason == "length"):
            waited = now - call.began
            if call.first is None and call.has_tokens:
                call.first = now
                self._metrics.observe("vllm:time_to_first_token_seconds", waited)
            num = self._record_start(call, token.name)
            self._metrics.add("vllm:prompt_tokens", num, replica)
            self._rate = 0.9 * self._rate + 0.1 * num / max(waited, 1e-3) if num else self._rate
        if is_drawn and call.has_tokens:
            self._record_drawn(call, choice, now, replica)
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

    def _record_drawn(self, call: ClientRequest, choice: int, now: float, replica: str) -> None:
        call.drawn += 1
        self._metrics.add("vllm:generation_tokens", 1, replica)
        if (last := call.last.get(choice)) is not None:
            self._metrics.observe("vllm:inter_token_latency_seconds", now - last)
        call.last[choice] = now

    def _record_start(self, call: ClientRequest, name: str) -> int:
        """Takes a prompt out of the waiting prompts, and returns the number of its tokens."""
        num = call.waiting.pop(name, 0)
        self.waiting -= num
        return num
