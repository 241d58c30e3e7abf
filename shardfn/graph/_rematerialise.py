"""Chooses which activations to keep under a budget of bytes, and which to compute again in the backward.

Activation checkpointing by the graph. Chen et al., Training deep nets with sublinear memory cost, 2016,
https://arxiv.org/abs/1604.06174. Greedy here: most bytes per operation first.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Graph, GraphModule, Node

from ._cost import node_bytes, node_flops
from ._edit import abstract_value, finish, revalue
from ._hazards import Memory, dependences, is_random
from ._reuse import value_numbers
from ._transfers import is_start, is_wait, start_of
from ._values import phases_of

# Plans that run parts of the forward again: the activations that such a plan can compute, with inputs and costs.


@dataclasses.dataclass(frozen=True, eq=False)
class Again:
    """Node that runs a second time."""

    node: Node


@dataclasses.dataclass(frozen=True)
class Step:
    """Position of a plan.

    Attributes:
        value: node that runs there, or that runs there again.
        swaps: inputs that are replaced, with the replacements.
    """

    value: Node | Again
    swaps: Mapping[Node, Node | Again]


@dataclasses.dataclass
class Chain:
    """Ops that compute an activation again while all other activations are kept.

    Attributes:
        nodes: number of ops that run again.
        work: cost, in operations and bytes.
        held: bytes that live longer because of the chain.
        inputs: activations that the chain reads.
    """

    nodes: int = 0
    work: int = 0
    held: int = 0
    inputs: set[int] = dataclasses.field(default_factory=set)


class Replay:
    """Facts about a graph, independent of the plan.

    Attributes:
        memory: facts about memory.
        phases: phase of each node.
        before: dependences.
        activations: memories made in the forward, by ops that can run again, and used only in forward and backward,
            with the position of the first use in the backward.
        late_uses: nodes of the forward that show activations, by node of the backward that takes the nodes.
        needs: nodes with values alive while a node runs, by node.
        held: memories of a node and of the node's needs, without given memories.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.memory = memory = Memory(gm)
        self.phases = phases_of(gm)
        self.before = dependences(memory)
        self._last = {m: i for i, n in enumerate(memory.order) for a in n.all_input_nodes for m in memory.shown(a)}
        self._end = max((i for i, n in enumerate(memory.order) if self.phases[n] == "backward"), default=-1)
        self._writes = {m: [] for m in memory.mutated}
        for i, node in enumerate(memory.order):
            for m in memory.mutates(node):
                self._writes[m].append(i)
        self._makers: dict[int, Node] = {}
        for node in memory.order:
            for m in memory.shown(node):
                self._makers.setdefault(m, node)
        self.activations = self._find_activations()
        self.late_uses = {n: found for n in memory.order if (found := self._late_uses(n))}
        self.needs = {n: needed_by(n) for n in memory.order}
        self.held = {n: self._live_memories(n) for n in memory.order}
        self._chains: dict[int, Chain | None] = {}
        self._number = value_numbers(memory)
        self._twins: dict[int, list[Node]] = {}
        for node in memory.order:
            if self.phases[node] == "backward" and memory.shown(node):
                self._twins.setdefault(self._number[node], []).append(node)

    def ranking(self) -> list[int]:
        """Returns the activations that can be computed again, most bytes per operation first."""
        worth: list[tuple[float, int]] = []
        for m in sorted(self.activations):
            chain = self.chain(m)
            saved = 0 if chain is None else self.memory.sizes[m] - chain.held
            if chain is not None and saved > 0:
                worth.append((-saved / (1 + chain.work), m))
        return [m for _, m in sorted(worth)]

    def thinned(self, chosen: Sequence[int], reach: int) -> set[int]:
        """Returns the chosen activations without activations for which more than `reach` ops would run again."""
        weight: dict[int, int] = {}
        for m in sorted(chosen, key=lambda m: self.memory.position[self._makers[m]]):
            chain = self.chain(m)
            assert chain is not None
            total = chain.nodes + sum(weight.get(u, 0) for u in chain.inputs)
            if total <= reach:
                weight[m] = total
        return set(weight)

    def stand_in(self, node: Node, i: int, chosen: set[int]) -> Node | None:
        """Returns the value that an op run again at position i reads instead of `node`.

        None if `node` must run again, too.
        """
        shown = self.memory.shown(node)
        if any(m in chosen for m in shown):
            return None
        if all(m in self.memory.given or m in self.activations or self._last.get(m, -1) >= i for m in shown):
            return node
        # The backward computes or gathers the same value anyway. Taken from there, the value costs nothing more.
        twins = self._twins.get(self._number[node], ())
        twin = next((t for t in twins if any(self._last.get(m, -1) >= i for m in self.memory.shown(t))), None)
        return twin or (None if self._can_run_again(node) else node)

    def chain(self, m: int) -> Chain | None:
        """Returns the ops that compute activation m again, or None if that is impossible."""
        if m not in self._chains:
            self._chains[m] = self._follow_chain(m)
        return self._chains[m]

    def _follow_chain(self, m: int, limit: int = 2048) -> Chain | None:
        out, stack, seen, i = Chain(), [self._makers[m]], set[Node](), self.activations[m]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            out.nodes, out.work = out.nodes + 1, out.work + node_flops(node) + node_bytes(node)
            for a in node.all_input_nodes:
                taken = self.stand_in(a, i, {m})
                if taken is None:
                    stack.append(a)
                # The value is read later than before: a write in between would change the value.
                elif not self._is_steady(a, node):
                    return None
                elif taken is a:
                    self._note_chain(out, a, i)
            if out.nodes > limit:
                return None
        return out

    def _note_chain(self, chain: Chain, taken: Node, i: int) -> None:
        for u in self.memory.shown(taken):
            if u in self.activations:
                chain.inputs.add(u)
            elif u not in self.memory.given and self._last.get(u, -1) < i:
                chain.held += self.memory.sizes[u]

    def _is_steady(self, node: Node, reader: Node) -> bool:
        """Returns whether the memory of `node` stays unchanged from `reader` to the end of the backward."""
        begin = self.memory.position[reader]
        return not any(begin < i <= self._end for m in self.memory.shown(node) for i in self._writes.get(m, ()))

    def _can_run_again(self, node: Node) -> bool:
        memory, shown = self.memory, self.memory.shown(node)
        # Not transfers (other ranks take part), nor random draws (draws would differ), nor writes (done twice).
        if node.op != "call_function" or self.phases[node] != "forward" or not shown:
            return False
        if is_start(node) or is_wait(node) or is_random(node) or memory.mutates(node):
            return False
        return memory.is_view(node) or not any(m in memory.mutated or m in memory.given for m in shown)

    def _late_uses(self, node: Node) -> list[Node]:
        if self.phases[node] != "backward":
            return []
        early = [a for a in node.all_input_nodes if self.phases[a] == "forward"]
        return [a for a in early if any(m in self.activations for m in self.memory.shown(a))]

    def _live_memories(self, node: Node) -> set[int]:
        shown = {m for a in (node, *self.needs[node]) for m in self.memory.shown(a)}
        return shown - self.memory.given

    def _find_activations(self) -> dict[int, int]:
        uses: dict[int, list[int]] = {}
        for i, node in enumerate(self.memory.order):
            for m in {m for a in node.all_input_nodes for m in self.memory.shown(a)}:
                uses.setdefault(m, []).append(i)
        order, out = self.memory.order, dict[int, int]()
        for m, positions in sorted(uses.items()):
            backward = [i for i in positions if self.phases[order[i]] == "backward"]
            inside = all(
                self.phases[order[i]] in ("forward", "backward") and order[i].op != "output" for i in positions
            )
            if backward and inside and self._can_run_again(self._makers[m]):
                out[m] = backward[0]
        return out


class ReplayPlan:
    """Order of execution in which the chosen activations are computed again.

    Args:
        replay: facts about the graph.
        chosen: activations.

    Attributes:
        steps: nodes that run, in order.
    """

    def __init__(self, replay: Replay, chosen: set[int]) -> None:
        self._replay, self._chosen = replay, chosen
        self._again: dict[Node, Again] = {}
        self._done: set[Node] = set()
        self.steps: list[Step] = []
        for node in replay.memory.order:
            self._emit_node(node)

    def peak(self) -> int:
        """Returns the most bytes of values, arguments excepted, that are alive at any step."""
        first, last, sizes = _lifetimes_of(self._replay, self.steps)
        change = [0] * (len(self.steps) + 1)
        for m, begin in first.items():
            change[begin] += sizes[m]
            change[last[m] + 1] -= sizes[m]
        return max(itertools.accumulate(change))

    def _emit_node(self, target: Node) -> None:
        """Runs the node, after the nodes that must come before."""
        # By hand and not by recursion: chains are as long as a model is deep.
        stack = [target]
        while stack:
            node = stack[-1]
            missing = [] if node in self._done else [p for p in self._replay.before[node] if p not in self._done]
            stack.extend(reversed(missing))
            if not missing:
                stack.pop()
                if node not in self._done:
                    self._run_node(node)

    def _run_node(self, node: Node) -> None:
        swaps: dict[Node, Node | Again] = {}
        replay = self._replay
        for a in replay.late_uses.get(node, ()) if self._chosen else ():
            if any(m in self._chosen for m in replay.memory.shown(a)):
                swaps[a] = self._need_again(a, replay.memory.position[node])
        if node not in self._done:
            self._done.add(node)
            self.steps.append(Step(node, swaps))

    def _need_again(self, root: Node, i: int) -> Again:
        """Runs `root` again before position i, with the inputs that must run again, unless `root` already did."""
        stack = [root]
        while stack:
            node = stack[-1]
            inputs = {a: self._replay.stand_in(a, i, self._chosen) for a in node.all_input_nodes}
            missing = [a for a, taken in inputs.items() if taken is None and a not in self._again]
            if node not in self._again and missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if node not in self._again:
                self._append_again(node, inputs)
        return self._again[root]

    def _append_again(self, node: Node, inputs: Mapping[Node, Node | None]) -> None:
        # A replacement may come later in the graph: it runs now.
        for taken in inputs.values():
            if taken is not None:
                self._emit_node(taken)
        swaps = {a: self._again[a] if taken is None else taken for a, taken in inputs.items() if taken is not a}
        self._again[node] = Again(node)
        self.steps.append(Step(self._again[node], swaps))


def _lifetimes_of(replay: Replay, steps: Sequence[Step]) -> tuple[dict[int, int], dict[int, int], list[int]]:
    """Returns the first and the last step at which each memory that is not given is held, and all sizes."""
    memory, sizes = replay.memory, list(replay.memory.sizes)
    # By value, the memories in the plan, where different from the graph's.
    names: dict[Node | Again, dict[int, int]] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, step in enumerate(steps):
        value = step.value
        held: Iterable[int]
        if isinstance(value, Node) and not step.swaps and names.keys().isdisjoint(replay.needs[value]):
            held = replay.held[value]
        else:
            held = _alive_memories(memory, step, names, sizes)
        for m in held:
            first.setdefault(m, i)
            last[m] = i
    return first, last, sizes


def _alive_memories(
    memory: Memory, step: Step, names: dict[Node | Again, dict[int, int]], sizes: list[int]
) -> set[int]:
    """Returns the memories alive while the step runs, by their names in the plan.

    New memories get names.
    """
    value, node = step.value, _node_of(step.value)
    inputs = [step.swaps.get(a, a) for a in needed_by(node)]
    shown = [names.get(a) or {m: m for m in memory.shown(_node_of(a))} for a in inputs]
    own: dict[int, int] = {}
    for m in memory.shown(node):
        own[m] = next((named[m] for named in shown if m in named), m)
        if isinstance(value, Again) and not memory.is_view(node):
            # A value that is made again is separate memory, next to the first value's.
            own[m] = len(sizes)
            sizes.append(sizes[m])
    names[value] = own
    return {m for named in (own, *shown) for m in named.values() if m not in memory.given}


def _node_of(value: Node | Again) -> Node:
    return value.node if isinstance(value, Again) else value


def needed_by(node: Node) -> list[Node]:
    """Returns the nodes with values alive while `node` runs. A wait holds the transfer's operands."""
    return [*node.all_input_nodes, *(start_of(node).all_input_nodes if is_wait(node) else ())]


# How many ops may be run again for a single value. Longer chains stop at a value that is kept.
_REACH = (128, 512, 2048)


def rematerialise(gm: GraphModule, *, budget: int) -> GraphModule:
    """Computes activations again just before the backward needs the values, until live values fit `budget` bytes.

    An activation is memory made in the forward and used in the backward, by ops that are pure and not random.
    Activations with the most bytes per operation go first. Inputs are alive then, computed again too, or gathered by
    the backward anyway (such a gather then moves up, and gathers keep their order). `out.meta["rematerialise"]` has the
    result: `{"budget": ..., "reached": peak bytes, "again": number of ops run again}`.

        y = gelu(x)   # forward            y = gelu(x)
        z = y @ w                          z = y @ w
        ...                         =>     ...
        dw = y.t() @ dz                    y1 = gelu(x)
                                           dw = y1.t() @ dz

    Args:
        gm: captured step. Nodes have a `meta["phase"]`.
        budget: bytes that the step's values may hold at any time. Arguments do not count.

    Returns:
        A new graph with the same bits. If the budget cannot be reached, the graph with the lowest peak that was found.

    Raises:
        ValueError: `budget` is negative.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def f(x):
        ...     y = x.sin()
        ...     return (y * x.repeat(4).sum(),)
        >>> gm = make_fx(f, tracing_mode="fake")(torch.ones(256))
        >>> for node in gm.graph.nodes:
        ...     node.meta["phase"] = "backward" if node.name == "mul" else "forward"
        >>> out = rematerialise(gm, budget=0)
        >>> [n.name for n in out.graph.nodes][1:]
        ['sin', 'repeat', 'sum_1', 'sin_1', 'mul', 'output']
    """
    if budget < 0:
        raise ValueError(f"rematerialise(budget={budget}): a budget of bytes must not be negative.")
    replay = Replay(gm)
    steps, peak = _search_plan(replay, budget)
    again = sum(isinstance(s.value, Again) for s in steps)
    out = _build_graph(gm, replay.memory, steps)
    out.meta["rematerialise"] = {"budget": budget, "reached": peak, "again": again}
    return out


def _make_plan(replay: Replay, chosen: Sequence[int], reach: int = 0) -> tuple[list[Step], int]:
    plan = ReplayPlan(replay, replay.thinned(chosen, reach))
    return plan.steps, plan.peak()


def _search_plan(replay: Replay, budget: int) -> tuple[list[Step], int]:
    """Returns the plan that fits and computes the fewest activations again.

    If no plan fits, the plan with the lowest peak.
    """
    best = _make_plan(replay, [])
    ranking = [] if best[1] <= budget else replay.ranking()
    for reach in _REACH if ranking else ():
        for part in (4, 3, 2, 1):
            plan = _make_plan(replay, ranking[: -(-len(ranking) * part // 4)], reach)
            best = min(best, plan, key=lambda p: p[1])
            if plan[1] <= budget:
                return _find_fewest(replay, ranking[: -(-len(ranking) * part // 4)], reach, budget, plan)
    return best


def _find_fewest(
    replay: Replay, ranking: Sequence[int], reach: int, budget: int, fits: tuple[list[Step], int]
) -> tuple[list[Step], int]:
    low, high = 0, len(ranking)
    while high - low > 1:
        middle = (low + high) // 2
        plan = _make_plan(replay, ranking[:middle], reach)
        low, high = (low, middle) if plan[1] <= budget else (middle, high)
        fits = plan if plan[1] <= budget else fits
    return fits


def _build_graph(gm: GraphModule, memory: Memory, steps: Sequence[Step]) -> GraphModule:
    graph, new, changed = Graph(), dict[Node | Again, Node](), set[Node]()
    for step in steps:
        old = step.value.node if isinstance(step.value, Again) else step.value
        inputs = {a: new[step.swaps.get(a, a)] for a in old.all_input_nodes}
        node = new[step.value] = graph.node_copy(old, inputs.__getitem__)
        if isinstance(step.value, Again):
            node.meta["phase"] = "backward"
            node.meta["val"] = abstract_value(node)
            changed.add(node)
        else:
            revalue(node, old, changed, memory)
    return finish(gm, graph)
