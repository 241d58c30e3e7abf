"""Core of an engine: events in, tokens out, by one schedule and the runs of its plans.

step    drawn tokens of the last plan -> events of texts -> advance -> tokens out -> compare ranks -> run the next plan
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardfn.core import Mesh, PyTree, RankError
from shardfn.engine import comms_of, losing_no_peer

from ._decision_log import DecisionLog
from ._digest import field_digests, first_difference
from ._events import Add, Cancel, Clock, Drain, Event, Stop, Weights, check_time
from ._hooks import EngineHooks, Place, list_active, list_new_tokens
from ._plan import StepPlan
from ._requests import Request
from ._results import EngineStats, Token
from ._runner import Cache, Runner, StepResults
from ._runner import Weights as ServedWeights
from ._schedule import Output, advance
from ._speculate import Permit
from ._state import State

# A round of the control plane takes 60 bits.
_BITS = (1 << 60) - 1


class Admitted(NamedTuple):
    """Request that hooks have admitted.

    Attributes:
        request: request, checked.
        values: value of each extra for the request's beginning.
    """

    request: Request
    values: Sequence[Any]


class Launch(NamedTuple):
    """Plan that is about to run.

    Attributes:
        plan: plan, or None where there is nothing to compute.
        columns: arguments of `Runner.run` for the plan.
        weights: weights of the plan's version.
    """

    plan: StepPlan | None
    columns: dict[str, Any]
    weights: ServedWeights


class EngineCore:
    """Schedule of an engine, its weights and KV cache, and the results of the plan in flight.

    All ranks of the mesh make the same calls.

    Args:
        runner: graphs.
        params: parameters.
        state: state of the schedule before the first event.
        hooks: hooks of texts, grammars and other extras.
        permit: function that keeps the drafts that a request's grammar permits, for example only digits.
        decisions: log of the decisions, or None.
        packed: served form of the parameters, of a core that is one of several lanes. The lanes share a cache, which
            the core does not have then.
    """

    def __init__(
        self,
        runner: Runner,
        params: PyTree,
        state: State,
        hooks: Sequence[EngineHooks],
        permit: Permit,
        decisions: DecisionLog | None = None,
        packed: ServedWeights | None = None,
    ) -> None:
        self._decisions = decisions
        if decisions is not None:
            decisions.begin(state)
        self._runner, self._state, self._hooks, self._permit = runner, state, hooks, permit
        self._active = {name: list_active(hooks, name) for name in EngineHooks._fields}
        self._versions: dict[int, ServedWeights] = {0: runner.pack_weights(params) if packed is None else packed}
        self._cache, self._buffers = runner.empty_cache() if packed is None else [], runner.make_buffers()
        self._events: list[Event] = []
        self._adding: dict[str, None] = {}  # names of requests that no step has taken, in order
        self._results: StepResults | None = None  # of the plan in flight
        self._newest = self._rows = self._run_rows = 0
        self._failed: BaseException | None = None
        self._closed = False

    def __contains__(self, name: str) -> bool:
        return name in self._state.names or name in self._adding

    @property
    def idle(self) -> bool:
        """Returns whether no request is in progress."""
        return self._state.idle and not self._events

    @property
    def requests(self) -> dict[str, Request]:
        """Returns the requests in progress by name, in order of arrival."""
        begun = {name: self._state.sequences[serials[0]].request for name, serials in self._state.names.items()}
        return begun | {event.name: event.request for event in self._events if isinstance(event, Add)}

    @property
    def running(self) -> list[str]:
        """Returns the requests that hold blocks, first in order first."""
        return list(dict.fromkeys(sequence.name for sequence in self._state.running))

    @property
    def weights(self) -> ServedWeights:
        """Returns the newest weights in their served form, by layout.

        Raises:
            RuntimeError: the engine is closed.
        """
        self.check_open()
        return self._versions[self._newest]

    @property
    def version(self) -> int:
        """Returns the version of the newest weights."""
        return self._newest

    @property
    def cache(self) -> Cache:
        """Returns the KV cache."""
        return self._cache

    @property
    def stats(self) -> EngineStats:
        """Returns counts so far."""
        padding = 1 - self._rows / self._run_rows if self._run_rows else 0.0
        return EngineStats(self._state.counts(), padding, self._state.speculation, self._state.cache_stats)

    def admit(self, request: Request) -> Admitted:
        """Returns a checked request that `begin` takes. The request may never begin.

        Raises:
            ValueError: a hook refuses the request, for example for its grammar.
            ImportError: a package is missing.
        """
        return Admitted(request, [x.admit(request) for x in self._hooks])

    def begin(self, name: str, admitted: Admitted) -> None:
        """Puts a request in line.

        Raises:
            ValueError: a request of this name is in progress.
        """
        if name in self:
            raise ValueError(f"a request named {name!r} is in progress. Give the new one another name.")
        self._events.append(Add(self._next_number, name, admitted.request))
        self._adding[name] = None
        for x, value in zip(self._hooks, admitted.values, strict=True):
            x.begin(name, value)

    def cancel(self, name: str) -> None:
        """Ends a request as "cancelled". The name of an ended request is passed over."""
        self._events.append(Cancel(self._next_number, name))

    def tick(self, time: int) -> None:
        """Sets the clock's reading for deadlines, in milliseconds, equal on all ranks."""
        check_time(time)
        self._events.append(Clock(self._next_number, time))

    def drain(self) -> None:
        """Ends requests that are added from now on as "refused". Requests in progress continue."""
        self._events.append(Drain(self._next_number))

    def update_weights(self, params: PyTree, *, recompute: bool) -> int:
        """Changes the weights, and returns their version.

        Raises:
            RuntimeError: the engine is closed.
            ValueError: the parameters are of another model.
        """
        return self.take_weights(self._runner.pack_weights(params, like=self.weights), recompute=recompute)

    def take_weights(self, packed: ServedWeights, *, recompute: bool) -> int:
        """Changes the weights to a served form, and returns their version."""
        if recompute:  # the next step changes to the version at once, and versions that have waited never run
            self._versions = {v: w for v, w in self._versions.items() if v == self._state.version}
        self._newest += 1
        self._versions[self._newest] = packed
        self._events.append(Weights(self._next_number, self._newest, recompute))
        return self._newest

    def step(self) -> list[Token]:
        """Takes what has happened since the last step, runs the next step, and returns the tokens of the last step.

        Raises:
            RankError: ranks hold different states. The message names the first field that differs.
            RuntimeError: the engine is closed, or an earlier step failed.
        """
        self.check_open()
        if self._failed is not None:
            raise RuntimeError("a step of this engine failed before. Make another engine.") from self._failed
        try:
            return self._run_step()
        except BaseException as error:
            self._failed = error
            raise

    def close(self) -> None:
        """Drops weights and cache. Calls that step or need weights are refused from now on."""
        self._closed = True
        self._versions, self._cache, self._results = {}, [], None

    def check_open(self) -> None:
        """Refuses calls of a closed engine.

        Raises:
            RuntimeError: the engine is closed.
        """
        if self._closed:
            raise RuntimeError("this engine is closed. Make another one.")

    @property
    def num_sequences(self) -> int:
        """Returns the number of choices in progress."""
        return len(self._state.sequences) + sum(x.request.sampling.n for x in self._events if isinstance(x, Add))

    def _run_step(self) -> list[Token]:
        began = time.perf_counter()
        found, launch = self.schedule()
        if launch.plan is not None:
            results = self._runner.run(launch.weights, self._cache, launch.plan, **launch.columns)
            self._cache = results.cache
            self.finish(launch.plan, results)
        if self._decisions is not None:
            self._decisions.record(*self._last, self._state, launch.plan, began)
        return found

    def schedule(self) -> tuple[list[Token], Launch]:
        """Takes what has happened since the last step, and returns the tokens of the last step and the next plan."""
        drawn = self._tokens_in_flight
        events, self._events, self._adding = [*self._events, *self._find_stops(drawn)], [], {}
        self._last = events, drawn
        for before in self._active["before"]:
            before(self._state)
        states = None if self._results is None else self._results.states
        self._state, plan, outputs = advance(self._state, events, drawn, self._permit, states)
        for moved in self._active["moved"]:
            moved(self._state.moves if plan is None else plan.moves)
        found = self._make_tokens(outputs)
        for take in self._active["take"]:
            take(outputs)
        self._results = None
        reachable = self._state.version, self._state.pending
        self._versions = {v: w for v, w in self._versions.items() if v in reachable}
        compare_states(self._state, self._runner.mesh)
        if plan is None:
            return found, Launch(None, {}, self.weights)
        self._rows, self._run_rows = self._rows + plan.num_tokens, self._run_rows + plan.bucket
        columns = {k: v for f in self._active["columns"] for k, v in f(self._state, plan).items()}
        columns |= {"states": self._state.wanted_layers, "buffers": self._buffers}
        return found, Launch(plan, columns, self._versions[plan.version])

    def finish(self, plan: StepPlan, results: StepResults) -> None:
        """Takes the results of the plan that `schedule` has returned."""
        self._results = results
        for ran in self._active["ran"]:
            ran(plan, results)

    @property
    def _tokens_in_flight(self) -> list[int]:
        """Returns the tokens of the plan in flight."""
        return [] if self._results is None else self._results.tokens

    def _find_stops(self, drawn: Sequence[int]) -> list[Stop]:
        """Returns the events by which texts end with the tokens of the last plan."""
        if not self._active["ends"]:
            return []
        tokens, ends = list(list_new_tokens(self._state, drawn)), dict[Place, str]()
        for find_ends in self._active["ends"]:
            ends |= find_ends(tokens, ends)
        return [Stop(self._next_number + i, *place, reason) for i, (place, reason) in enumerate(ends.items())]

    @property
    def _next_number(self) -> int:
        return self._state.number + len(self._events)

    def _make_tokens(self, outputs: Sequence[Output]) -> list[Token]:
        """Returns the tokens of the outputs of the plan in flight."""
        fields, results, found = self._active["fields"], self._results, list[Token]()
        drawn, logprobs, tops = ([], [], []) if results is None else (results.tokens, results.logprobs, results.top)
        if not fields and not tops:
            return [
                Token(n, c, p, t, None, v, f)
                if row is None
                else Token(n, c, p, t, logprobs[row], v, f, is_greedy=drawn[row] == t)
                for n, c, p, t, row, v, f in outputs
            ]
        for out in outputs:
            name, choice, position, token, row, version, reason = out
            more = {k: v for f in fields for k, v in f(out).items()}
            if row is not None and drawn[row] != token:  # a scored token, which is not the most probable one
                more["is_greedy"] = False
            if tops and row is not None:
                more["top"] = tops[row]
            logprob = None if row is None else logprobs[row]
            found.append(Token(name, choice, position, token, logprob, version, reason, **more))
        return found


def compare_states(state: State, mesh: Mesh) -> None:
    """Compares the states of all ranks. Collective.

    Raises:
        RankError: states differ. The message names the first field that differs, and the ranks.
    """
    if mesh.size == 1:
        return
    comms = comms_of(mesh)
    with losing_no_peer(comms):
        comms.control.begin(f"step {state.step} of an engine")
        chains = comms.control.exchange(int.from_bytes(state.chain, "little") & _BITS)
        if len(set(chains)) == 1:
            return
        everywhere: list[Any] = comms.control.gather(field_digests(state))
    raise RankError(_describe_difference(everywhere, state.step))


def _describe_difference(everywhere: list[Mapping[str, bytes]], step: int) -> str:
    for rank, theirs in enumerate(everywhere):
        field = first_difference(everywhere[0], theirs)
        if field is not None:
            return (
                f"step {step} of an engine: ranks 0 and {rank} differ in {field}; all ranks must pass the same requests"
                " and events, in the same order, to each step."
            )
    return f"step {step} of an engine: ranks had different inputs or plans before; their states are equal now."
