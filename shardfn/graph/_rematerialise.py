"""Chooses which activations to keep under a budget of bytes, and which to compute again in the backward.

Activation checkpointing by the graph. Chen et al., Training deep nets with sublinear memory cost, 2016,
https://arxiv.org/abs/1604.06174. Greedy here: most bytes per operation first.
"""

from collections.abc import Sequence

from torch.fx import Graph, GraphModule, Node

from ._edit import abstract_value, finish, revalue
from ._hazards import Memory
from ._replay import Again, Replay, ReplayPlan, Step

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
