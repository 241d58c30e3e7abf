"""Lanes: schedules of disjoint sequences, whose plans run at the same time on parts of the ranks.

    groups    in each turn all L lanes begin a plan; part d of the ranks runs the plan of lane d
    stages    in turn n lane n mod L begins a plan; part s of the ranks runs the plan of s turns before, on its layers

All ranks hold the schedules of all lanes, so that the calls of an engine are equal on all ranks. A step gets the plans
of all parts, stacked, and a rank takes its own. A part without a plan has padding.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from shardfn.core import PyTree

from ._engine_core import Admitted, EngineCore, Launch
from ._lane_tensors import LanePlan
from ._requests import Request
from ._results import CacheStats, EngineStats, SpeculationStats, Token
from ._runner import Cache, Runner
from ._runner import Weights as ServedWeights
from ._state import State


class LaneCore:
    """Cores of several lanes over one mesh and one list of caches, with the interface of an `EngineCore`.

    Args:
        runner: graphs of a decoder with lanes.
        params: parameters.
        states: state of each lane before the first event.
        **more: other arguments of an `EngineCore`.

    Raises:
        ValueError: there is a log of decisions.
    """

    def __init__(self, runner: Runner, params: PyTree, states: Sequence[State], **more: Any) -> None:
        if more.get("decisions") is not None:
            raise ValueError(
                f"engine: decisions= is a log of one schedule, but {runner.lanes} has several. Leave it out."
            )
        packed = runner.pack_weights(params)
        self._runner, self._cache, self._carry = runner, runner.empty_cache(), None
        self._cores = [EngineCore(runner, None, state, packed=packed, **more) for state in states]
        self._lanes: dict[str, EngineCore] = {}  # by the names of requests in progress, in order of arrival
        self._parts = deque[tuple[EngineCore, Launch] | None]([None] * len(states))
        self._turn, self._failed = 0, None

    def __contains__(self, name: str) -> bool:
        return any(name in x for x in self._cores)

    @property
    def idle(self) -> bool:
        """Returns whether no request is in progress."""
        return all(x.idle for x in self._cores)

    @property
    def requests(self) -> dict[str, Request]:
        """Returns the requests in progress by name, in order of arrival."""
        found = {name: request for x in self._cores for name, request in x.requests.items()}
        return {name: found[name] for name in self._lanes if name in found}

    @property
    def running(self) -> list[str]:
        """Returns the requests that hold blocks, by lane."""
        return [name for x in self._cores for name in x.running]

    @property
    def weights(self) -> ServedWeights:
        """Returns the newest weights in their served form, by layout."""
        return self._cores[0].weights

    @property
    def version(self) -> int:
        """Returns the version of the newest weights."""
        return self._cores[0].version

    @property
    def cache(self) -> Cache:
        """Returns the KV cache."""
        return self._cache

    @property
    def stats(self) -> EngineStats:
        """Returns counts so far, of all lanes together."""
        each = [x.stats for x in self._cores]
        counts = {name: sum(x.counts[name] for x in each) for name in each[0].counts}
        guessed = SpeculationStats(*map(sum, zip(*(x.speculation for x in each), strict=True)))
        cached = CacheStats(*map(sum, zip(*(x.cache for x in each), strict=True)))
        return EngineStats(counts, sum(x.padding for x in each) / len(each), guessed, cached)

    def admit(self, request: Request) -> Admitted:
        """Returns a checked request that `begin` takes."""
        return self._cores[0].admit(request)

    def begin(self, name: str, admitted: Admitted) -> None:
        """Puts a request in line, in the lane with the fewest choices in progress.

        Raises:
            ValueError: a request of this name is in progress.
        """
        held = next((x for x in self._cores if name in x), None)
        core = min(self._cores, key=lambda x: x.num_sequences) if held is None else held
        core.begin(name, admitted)
        self._lanes.pop(name, None)
        self._lanes[name] = core

    def cancel(self, name: str) -> None:
        """Ends a request as "cancelled". The name of an ended request is passed over."""
        if name in self._lanes:
            self._lanes[name].cancel(name)

    def tick(self, time: int) -> None:
        """Sets the clock's reading for deadlines, in milliseconds, equal on all ranks."""
        for core in self._cores:
            core.tick(time)

    def drain(self) -> None:
        """Ends requests that are added from now on as "refused". Requests in progress continue."""
        for core in self._cores:
            core.drain()

    def update_weights(self, params: PyTree, *, recompute: bool) -> int:
        """Changes the weights, and returns their version.

        Raises:
            RuntimeError: the engine is closed.
            ValueError: the parameters are of another model, or `recompute` is False and the lanes share experts.
        """
        if not recompute and not self._runner.lanes.stages:
            raise ValueError(
                f"update_weights: lanes over {self._runner.lanes.axis!r} share experts, so that all change at once."
                " Pass recompute=True."
            )
        packed = self._runner.pack_weights(params, like=self.weights)
        versions = [x.take_weights(packed, recompute=recompute) for x in self._cores]
        return versions[0]

    def step(self) -> list[Token]:
        """Takes what has happened since the last turn, runs the next turn, and returns the tokens of ended plans.

        Raises:
            RankError: ranks hold different states. The message names the first field that differs.
            RuntimeError: the engine is closed, or an earlier step failed.
        """
        self._cores[0].check_open()
        if self._failed is not None:
            raise RuntimeError("a step of this engine failed before. Make another engine.") from self._failed
        try:
            return self._run_turn()
        except BaseException as error:
            self._failed = error
            raise

    def close(self) -> None:
        """Drops weights and cache. Calls that step or need weights are refused from now on."""
        for core in self._cores:
            core.close()
        self._cache, self._carry = [], None

    def _run_turn(self) -> list[Token]:
        found, num, stages = list[Token](), len(self._cores), self._runner.lanes.stages
        for lane in [self._turn % num] if stages else range(num):
            tokens, launch = self._cores[lane].schedule()
            found += tokens
            self._parts.pop() if stages else self._parts.popleft()
            begun = None if launch.plan is None else (self._cores[lane], launch)
            self._parts.appendleft(begun) if stages else self._parts.append(begun)
        for name in {x.name for x in found if x.finish_reason is not None}:
            if name in self._lanes and name not in self._lanes[name]:
                del self._lanes[name]
        if any(self._parts):
            lanes = [(self._turn - s) % num if stages else s for s in range(num)]
            plans, columns, weights = list[LanePlan](), list[dict[str, Any]](), list[ServedWeights]()
            for lane, begun in zip(lanes, self._parts, strict=True):
                launch = Launch(None, {}, self.weights) if begun is None else begun[1]
                plans.append(LanePlan(launch.plan, lane, launch.columns.get("allowed")))
                columns.append(launch.columns)
                weights.append(launch.weights)
            ran = self._runner.run_lanes(weights, self._cache, plans, columns, self._carry)
            self._cache, self._carry = ran.cache, ran.carry
            for part in [num - 1] if stages else range(num):
                begun, results = self._parts[part], ran.results[part]
                if begun is not None and begun[1].plan is not None and results is not None:
                    begun[0].finish(begun[1].plan, results)
        self._turn += 1
        return found
