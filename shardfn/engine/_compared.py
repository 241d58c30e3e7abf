"""What ranks must have alike, compared once: after the first step, when there are values to look at."""

from torch import Tensor

from shardfn.collectives import AnyControl
from shardfn.core import tree_leaves
from shardfn.state import TrainState

from ._check import check_same_loss
from ._model_state import check_same_state
from ._plan import Plan


def compare_first_step(plan: Plan, new: TrainState, metrics: dict[str, Tensor], control: AnyControl) -> None:
    """Refuses a loss or a model state that differs between ranks which should have the same. Collective.

    Called after each step by all ranks; those after the first that was not skipped cost nothing.

    Raises:
        RankError: they differ; says each rank's.
    """
    if plan.compared:
        return
    if plan.mesh.size > plan.mesh.axis_size(plan.batch_axes):
        check_same_loss(metrics["loss"], plan, control)
    check_same_state(new.model_state, plan.mesh, control)
    # A step that was skipped has kept the model state, which says nothing of the loss.
    plan.compared = not tree_leaves(new.model_state) or not bool(metrics["skipped"])
