"""Plans along an axis of several, such that ranks along the other axes agree without a message."""

import itertools
from collections.abc import Callable, Sequence

from shardfn.collectives import seen_from
from shardfn.graph import Strategy

from ._crossings import EveryRank, of_several_sizes
from ._partition_plan import LossCall
from ._partition_program import PartitionProgram


def agreed_program(
    call: LossCall, before: Sequence[str], made: Callable[[], list[PartitionProgram]]
) -> PartitionProgram:
    """Returns the program along an axis of a call whose graph has the programs along other axes.

    Where ranks along the other axes have blocks of several sizes, each kind of rank has a separate graph. The ranks
    agree without a message: each rank plans for a rank of every kind, and the first kind decides which values are sent
    along the other axes.

    Args:
        call: call to plan.
        before: other axes.
        made: programs along the other axes, once the call was captured.
    """
    own = call.captured()
    kinds = of_several_sizes([x for x in made() if x.axis in before])
    chosen: list[Strategy] | None = None
    for place in itertools.product(*kinds.values()) if kinds else ():
        with seen_from(dict(zip(kinds, place, strict=True))):
            there = call.captured()
            every = EveryRank(there.graph, chosen)
            program = call.planned(there, every)
        chosen = every.taken(program) if chosen is None else chosen
    return call.planned(own, EveryRank(own.graph, chosen) if kinds else None)
