"""Crossings: operations of a program that send along other axes than the axis of the partition.

Ranks along the other axes exchange parts of the operands, as the partition cuts the operands. So all these ranks must
use the same parts. Blocks of other values may differ in size, for example 3, 2 and 2 rows of 7 on 3 ranks. Then each
rank plans a separate graph, and a single plan decides for all ranks how crossings are computed. Dims in which ranks
differ are not cut at crossings, so all other plans can follow the decision.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch.fx import Graph, Node

from shardfn.collectives import pmax, psum, pvary
from shardfn.graph import Form, Strategy, blocks, convert_form

from ._program import Compute, Convert, Loop, PartitionProgram
from ._values import operands_of, results

_TARGETS = (convert_form, psum, pmax, pvary)


class EveryRank:
    """Strategies of the crossings of a graph that all ranks along the other axes can take.

    Args:
        graph: graph to plan.
        chosen: strategy that the deciding plan took for each crossing, in order. None: this plan decides.

    Raises:
        ValueError: the number of crossings differs.
    """

    def __init__(self, graph: Graph, chosen: Sequence[Strategy] | None) -> None:
        nodes = [n for n in graph.nodes if n.target in _TARGETS]
        if chosen is not None and len(chosen) != len(nodes):
            raise ValueError(
                f"partition along several axes: the program of one rank sends {len(chosen)} times along the"
                f" first axes, and another rank's {len(nodes)} times. The numbers must be equal: cut dims"
                " that the first axes divide."
            )
        self._nodes, self._chosen = nodes, None if chosen is None else dict(zip(nodes, chosen, strict=True))

    def offered(self, node: Node, strategies: list[Strategy]) -> list[Strategy]:
        """Returns the strategies of an operation that every rank can take."""
        if node.target not in _TARGETS:
            return strategies
        if self._chosen is not None:
            return [self._chosen[node]]
        # A rank with an empty block might have no summand.
        return [s for s in strategies if all(f.kind != "partial" for f in s.ins)]

    def taken(self, program: PartitionProgram) -> list[Strategy]:
        """Returns the strategies that a program of the graph takes at the crossings, in order."""
        found = dict(_computed_steps(program))
        return [found[n] for n in self._nodes]


def _computed_steps(program: PartitionProgram) -> Iterator[tuple[Node, Strategy]]:
    for step in program.steps:
        if isinstance(step, Loop):
            yield from _computed_steps(step.body)
        elif isinstance(step, Compute):
            yield step.node, step.strategy


def of_several_sizes(programs: Sequence[PartitionProgram]) -> Mapping[str, list[int]]:
    """Returns the axes along which ranks have blocks of several sizes, each with an index for each kind of rank.

    The first index is 0. Ranks of the same kind have blocks of the same sizes of everything.
    """
    held: dict[str, list[tuple[int, ...]]] = {}
    for program in programs:
        sizes = [x for x in _block_lengths(program) if len(set(x)) > 1]
        if sizes:
            before = held.setdefault(program.axis, [()] * program.num)
            held[program.axis] = [(*old, *new) for old, new in zip(before, zip(*sizes, strict=True), strict=True)]
    return {axis: [i for i, x in enumerate(kinds) if x not in kinds[:i]] for axis, kinds in held.items()}


def _block_lengths(program: PartitionProgram) -> Iterator[tuple[int, ...]]:
    """Yields the length of each rank's block for each value that is cut."""
    for step in program.steps:
        if isinstance(step, Loop):
            yield from _block_lengths(step.body)
            continue
        for form, shape in _forms_of(step):
            if form.kind == "cut":
                yield tuple(map(sum, zip(*blocks(shape[form.dim], program.num, form), strict=True)))


def _forms_of(step: Compute | Convert) -> list[tuple[Form, tuple[int, ...]]]:
    if isinstance(step, Convert):
        return [(step.before, step.shape), (step.after, step.shape)]
    given = [tuple(n.meta["val"].shape) for n in operands_of(step.node)]
    made = [tuple(x.shape) for x in results(step.node) if x is not None]
    return [*zip(step.strategy.ins, given, strict=True), *zip(step.strategy.outs, made, strict=True)]
