"""Graphs of an engine, captured before the first request needs them."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardfn.kernels import building
from shardfn.waits import waiting

from ._drafters import BatchDrafter, Drafter, find_wanted_layers
from ._engine_core import EngineCore
from ._lanes import LaneCore
from ._low_rank import LowRank
from ._runner import Runner


class GraphKind(NamedTuple):
    """Arguments of `Runner.bind` that choose a graph."""

    bucket: int
    extended: bool = False
    grammars: bool = False
    hidden: bool = False
    low: LowRank | None = None
    routed: bool = False
    states: tuple[int, ...] = ()
    layout: str = ""


def list_graph_kinds(
    bucket: int,
    *,
    extended: bool,
    grammars: bool,
    hidden: bool,
    low: LowRank | None,
    routed: bool = False,
    states: tuple[int, ...] = (),
) -> list[GraphKind]:
    """Returns the graphs of a bucket: the plain graph first, and graphs of these kinds, without and with adapters."""
    made = list[GraphKind]()
    for added in (None,) if low is None else (None, low):
        kind = GraphKind(bucket, low=added, routed=routed, states=states)
        for longer in (False, True)[: 1 + extended]:
            made += [kind._replace(extended=longer, grammars=x) for x in (False, True)[: 1 + grammars]]
        if hidden and not routed:
            made.append(kind._replace(hidden=True))
    return made


class GraphCaptures:
    """Captures of an engine's graphs, some at once and the rest one by one.

    Args:
        core: core of the engine, with weights and cache.
        runner: graphs.
        drafter: drafter of the engine, or None.
        kernels: ops of a plain step.
        routed: whether steps record experts.
    """

    def __init__(
        self, core: EngineCore | LaneCore, runner: Runner, drafter: Drafter | None, kernels: Sequence[str], routed: bool
    ) -> None:
        self._core, self._runner, self._drafter, self._kernels, self._routed = core, runner, drafter, kernels, routed
        self._left = deque[GraphKind]()

    def warm_up(
        self,
        *,
        penalties: bool,
        grammars: bool,
        hidden: bool,
        adapters: Callable[[int], LowRank | None],
        later: bool,
        capture: bool,
    ) -> None:
        """Captures the graphs of all buckets. See `Engine.warm_up`.

        Args:
            penalties: whether to capture graphs of steps with penalties.
            grammars: whether to capture graphs of steps with grammars.
            hidden: whether to capture graphs of steps that embed.
            adapters: function from a bucket to adapters of padding, or to None for graphs without adapters only.
            later: whether to leave most graphs to `capture_next`.
            capture: whether to capture graphs, and not only to build the C++.
        """
        buckets = self._runner.limits.buckets
        ops = [*self._kernels, *(["grouped_product"] if adapters(buckets[0]) else [])]
        with building(self._runner.mesh.device, [*ops, *["penalise"] * penalties]):
            if not capture:
                return
            if isinstance(self._drafter, BatchDrafter):
                self._drafter.warm_up(extended=penalties)
            kinds: dict[str, Any] = {"extended": penalties, "grammars": grammars, "hidden": hidden}
            kinds["states"] = find_wanted_layers(self._drafter)
            each = [list_graph_kinds(bucket, low=adapters(bucket), routed=self._routed, **kinds) for bucket in buckets]
            first = [each[0][0], each[-1][0]] if later else []
            # Plain graphs of all buckets come before graphs of rarer steps.
            rest = [kind for same in itertools.zip_longest(*each) for kind in same if kind is not None]
            self._left = deque([*first, *rest])
            num = len(first) if later else len(rest)
            with waiting("capturing graphs", total=num) as wait:
                for _ in range(num):
                    self.capture_next()
                    wait.update()

    @property
    def num_left(self) -> int:
        """Returns the number of graphs that `capture_next` has left to capture."""
        return len(self._left)

    def capture_next(self) -> bool:
        """Captures a graph that `warm_up(later=True)` has left, if there is such a graph. Collective.

        Returns:
            Whether a graph was captured.

        Raises:
            RuntimeError: the engine is closed.
        """
        if not self._left:
            return False
        self._runner.bind(weights=self._core.weights, cache=self._core.cache, **self._left.popleft()._asdict())
        return True
