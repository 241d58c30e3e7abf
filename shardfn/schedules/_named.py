"""Table of schedules by name, for steps and for plans."""

from collections.abc import Callable, Mapping

from shardfn.core import did_you_mean

from ._chunked import dual_pipe_v, interleaved, zero_bubble_v
from ._schedule import PipelineSchedule
from ._single import gpipe, one_f_one_b, zero_bubble_h1

SCHEDULES: Mapping[str, Callable[[int, int], PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
    "dualpipe-v": dual_pipe_v,
}
"""By name, from the numbers of ranks and microbatches to the schedule; of two chunks where it is of several."""


def named_schedule(name: str, num_chunks: int = 1) -> Callable[[int, int], PipelineSchedule]:
    """Returns the schedule with this name and number of chunks, as a function of the numbers of ranks and microbatches.

    Raises:
        ValueError: the name is unknown (such as "gpipe2"), or the schedule has another number of chunks.

    Example:
        >>> named_schedule("interleaved", 3)(2, 4).num_chunks
        3
        >>> named_schedule("zb-v", 2)(2, 4).turns
        True
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} must be one of {', '.join(SCHEDULES)}.{did_you_mean(name, SCHEDULES)}")
    if name == "interleaved" and num_chunks > 1:
        return lambda num_ranks, num_microbatches: interleaved(num_ranks, num_microbatches, num_chunks)
    own = SCHEDULES[name](2, 4).num_chunks
    if own != num_chunks or name == "interleaved":
        allowed = "two chunks or more" if name == "interleaved" else f"num_chunks={own}"
        raise ValueError(
            f"schedule={name!r} with num_chunks={num_chunks}: the schedule must have {allowed}. For several"
            " chunks use 'interleaved'."
        )
    return SCHEDULES[name]
