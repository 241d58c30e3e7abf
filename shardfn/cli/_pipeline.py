"""Pipelines in a plan: the layers of a rank, the microbatches with activations in memory, and the idle time.

Computed from the schedule. A pipeline fills and drains once for any number of microbatches, so the schedule of a few
microbatches gives the idle time of many.
"""

import functools
import itertools
from typing import NamedTuple

from shardfn.core import did_you_mean
from shardfn.schedules import SCHEDULES, Costs, timeline

from ._states import Setup


class Pipeline(NamedTuple):
    """Pipeline of p ranks.

    Attributes:
        num_chunks: number of pieces of the model on each rank.
        held: largest number of chunks with activations in memory at a time for each rank.
        idle: idle time of a rank in a step, in units of the time of a single microbatch on the rank.
        sends: number of messages of the busiest rank for a single microbatch.
        hops: number of transfers on the way from the first stage to the last and back.
    """

    num_chunks: int
    held: tuple[int, ...]
    idle: float
    sends: int
    hops: int


def pipeline(setup: Setup) -> Pipeline:
    """Returns the pipeline of a run, or a pipeline of a single rank without "pp" in the mesh.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> run = Setup("1t", parse_model("1t"), {"pp": 4}, cluster("a100-80"), Zero(0), batch=8, accumulate=8)
        >>> pipeline(run)
        Pipeline(num_chunks=1, held=(4, 3, 2, 1), idle=3.0, sends=2, hops=6)
    """
    return _plan_pipeline(setup.schedule, setup.axis("pp"), setup.accumulate, setup.remat)


def pipeline_problems(setup: Setup) -> list[str]:
    """Returns the problems of a run's pipeline, as texts, empty if there are no problems."""
    name, p, layers = setup.schedule, setup.axis("pp"), setup.config.num_layers
    if name not in SCHEDULES:
        return [f"--schedule {name!r} is not known.{did_you_mean(name, SCHEDULES)} Known: {', '.join(SCHEDULES)}."]
    if p == 1 or setup.accumulate < 1:
        return []
    if setup.accumulate % p and name == "interleaved":
        return [f"--schedule {name} goes through its chunks {p} microbatches at a time; {setup.accumulate} do not fit."]
    try:
        stages = p * _num_chunks(name, p, min(setup.accumulate, 3 * p))
    except ValueError as e:
        return [str(e)]
    if stages > layers:
        return [f"pp={p} with {name} makes {stages} stages of {layers} layers; some would have no layer."]
    return []


def stage_layers(setup: Setup) -> int:
    """Returns the number of layers of the rank that has the most."""
    chunks = pipeline(setup).num_chunks
    return chunks * -(-setup.config.num_layers // (chunks * setup.axis("pp")))


@functools.lru_cache(maxsize=4096)
def _num_chunks(name: str, p: int, m: int) -> int:
    return SCHEDULES[name](p, m).num_chunks


@functools.lru_cache(maxsize=4096)
def _plan_pipeline(name: str, p: int, m: int, remat: bool) -> Pipeline:
    if p == 1:
        return Pipeline(1, (1,), 0.0, 0, 0)
    if name in ("gpipe", "1f1b"):  # the timeline's results in closed form
        held = tuple(m if name == "gpipe" else min(m, p - rank) for rank in range(p))
        return Pipeline(1, held, p - 1.0, 1 if p == 2 else 2, 2 * (p - 1))
    # From 3 p microbatches on there is a middle, which more microbatches make longer.
    few = min(m, 3 * p)
    schedule = SCHEDULES[name](p, few)
    run = timeline(schedule, Costs(1.0, 2.0 if remat else 1.0, 1.0))
    busy = few * (4.0 if remat else 3.0)
    homes = [schedule.home[s][0] for s in range(schedule.num_stages)]
    crossed = [(a, b) for a, b in itertools.pairwise(homes) if a != b]
    sends = max(sum((a == rank) + (b == rank) for a, b in crossed) for rank in range(p))
    idle = (run.makespan - busy) * few / busy
    return Pipeline(schedule.num_chunks, run.peaks, round(idle, 9), sends, 2 * len(crossed))


def bubble(setup: Setup) -> float:
    """Returns the idle time of a step divided by its busy time, for equal stages: (p - 1) / m for GPipe and 1F1B.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> model = parse_model("mt-nlg-530b")
        >>> run = Setup("mt-nlg-530b", model, {"pp": 35}, cluster("a100-80"), Zero(0), batch=240, accumulate=240)
        >>> round(bubble(run), 4) == round(34 / 240, 4)
        True
    """
    return pipeline(setup).idle / setup.accumulate
