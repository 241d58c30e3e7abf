"""Tensors of a turn of several lanes: the plans of all parts of the ranks, in one bucket, stacked.

A rank takes the plan of its part. Results are those of all parts, on all ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shardfn.collectives import GlobalTensor, all_gather_invariant, take_own_block
from shardfn.core import Mesh, P, PyTree, tree_map

from ._cache import LaneAxis
from ._limits import Limits
from ._plan import StepPlan, make_padding, widen_plan
from ._tensors import StepTensors, make_tensors


class LanePlan(NamedTuple):
    """Plan of a part of the ranks in a turn.

    Attributes:
        plan: plan, or None where the part has nothing to compute.
        lane: number of the lane that has begun the plan.
        allowed: tokens that each row may draw. None is all.
    """

    plan: StepPlan | None
    lane: int
    allowed: np.ndarray | None = None


def widen_plans(plans: Sequence[LanePlan], limits: Limits) -> list[StepPlan]:
    """Returns plans of one bucket, the largest, and of one kind. A part without a plan has padding."""
    given = [x.plan for x in plans if x.plan is not None]
    bucket, extended = max(x.bucket for x in given), any(x.histories is not None for x in given)
    wide = [x if x.plan is not None else x._replace(plan=make_padding(bucket, limits)) for x in plans]
    return [widen_plan(x.plan, bucket, limits, extended=extended) for x in wide if x.plan is not None]


def make_lane_tensors(
    plans: Sequence[LanePlan], wide: Sequence[StepPlan], limits: Limits, device: torch.device, lanes: LaneAxis
) -> list[StepTensors]:
    """Returns the tensors of each part's plan. In stages, the lanes of a cache have separate blocks."""
    grammars, made = any(x.allowed is not None for x in plans), list[StepTensors]()
    for one, plan in zip(plans, wide, strict=True):
        allowed = np.ones((len(plan.rows), limits.vocab), bool) if grammars else None
        if allowed is not None and one.allowed is not None:
            allowed[: len(one.allowed)] = one.allowed
        step, first = make_tensors(plan, limits, device, allowed), one.lane * limits.blocks if lanes.stages else 0
        made.append(step._replace(tables=step.tables + first, slots=step.slots + first * limits.block))
    return made


def stack_steps(steps: Sequence[StepTensors]) -> PyTree:
    """Returns the tensors of all parts, with the parts along the first dim."""
    return tree_map(lambda *each: torch.stack(each), *steps)


def take_step(steps: PyTree, lanes: LaneAxis) -> StepTensors:
    """Returns the tensors of this rank's part."""
    return tree_map(lambda x: take_own_block(x, lanes.axis, dim=0)[0], steps)


def gather_parts(results: PyTree, lanes: LaneAxis, num: int) -> PyTree:
    """Returns the results of all parts, with the parts along the first dim."""
    return tree_map(lambda x: all_gather_invariant(x[None], lanes.axis, dim=0, size=num), results)


def make_carry(
    carry: GlobalTensor | None, rows: int, width: int, dtype: torch.dtype, lanes: LaneAxis, mesh: Mesh
) -> Any:
    """Returns the states that come from the part before, for a number of rows. Rows beyond are of no plan."""
    block = torch.zeros(rows, width, dtype=dtype, device=mesh.device)
    if carry is not None:
        num = min(rows, len(carry.local))
        block[:num] = carry.local[:num]
    shape = torch.Size((rows * mesh.axis_size(lanes.axis), width))
    return GlobalTensor(block, shape, P(lanes.axis), mesh)


def split_part(results: PyTree, part: int) -> PyTree:
    """Returns the results of one part."""
    return tree_map(lambda x: x[part], results)


def list_moves(plan: LanePlan, limits: Limits, lanes: LaneAxis) -> list[tuple[int, int]]:
    """Returns the moves of slots of a part's plan, in the cache of the part."""
    first = plan.lane * limits.blocks * limits.block if lanes.stages else 0
    return [] if plan.plan is None else [(first + old, first + new) for old, new in plan.plan.moves]
