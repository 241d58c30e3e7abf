"""Makes the parts of a step, from an unwrapped loss and an optimizer; and the text on which ranks agree."""

from torch import Tensor

from shardfn.core import Mesh, PyTree, describe
from shardfn.engine.loss import Finish, Unwrapped, check_scaled, describe_step, num_microbatches, with_masters
from shardfn.engine.pipeline import check_stages, pipelined_in, table_of
from shardfn.engine.plan import Plan
from shardfn.engine.transfers import StepParts, accumulation
from shardfn.optim import GradientTransformation, LossScale
from shardfn.schedules import as_text
from shardfn.state import TrainState, scale_of

from ._check_canonical import check_canonical
from ._update import decided_on


def step_parts(
    loss: Unwrapped, optimizer: GradientTransformation, mesh: Mesh, *, finish: Finish | None = None, **flags: bool
) -> StepParts:
    """The parts of a step that accumulates, microbatch by microbatch, or runs stages of a pipeline side by side.

    The optimizer keeps master copies if the loss's policy requires it.

    Raises:
        ValueError: the pipeline cannot run on the mesh.
    """
    mixed = loss.mixed
    if mixed is not None:
        check_scaled(mixed)
        optimizer = with_masters(optimizer, mixed.policy)
    num = num_microbatches(loss.loss)
    how = {"loss_scale": mixed and mixed.loss_scale, "schedule": accumulation(num), "table": table_of(loss, num, mesh)}
    how |= {"finish": finish}
    return StepParts(loss.loss, optimizer, **flags, **how)  # pyright: ignore[reportArgumentType]


def step_lines(
    unwrapped: Unwrapped, parts: StepParts, plan: Plan, key: Tensor | None, state_specs: PyTree
) -> list[str]:
    """The facts that ranks agree on before the first transfer, besides the layout, one a line."""
    flags = f"donate {parts.donate} skip_nonfinite {parts.skip_nonfinite} has_aux {parts.has_aux}"
    kept = [f"state_specs {state_specs}"] if parts.has_state else []
    kept += [] if parts.finish is None else describe(parts.finish, "finish")
    seed = f"key {None if key is None else key.tolist()}"
    made = describe_step(unwrapped, decided_on(plan, parts.optimizer))
    check_canonical(plan, parts, jitted=unwrapped.jitted is not None)
    staged = pipelined_in(parts.loss)
    if parts.table is not None and staged is not None:
        check_stages(plan, staged)
        return [flags, seed, *made, f"pipeline along {staged.axis!r}: {parts.table.as_text()}", *kept]
    return [flags, seed, *made, f"schedule {as_text(parts.schedule)}", *kept]


def check_scale(state: TrainState, rule: LossScale | None) -> None:
    """Refuses a state with a loss scale in a step without one, and the reverse.

    Raises:
        ValueError: names the one that has it.
    """
    if (scale_of(state) is None) != (rule is None):
        has, built = ("a", "without one") if rule is None else ("no", "with one")
        raise ValueError(
            f"the state has {has} loss scale, but the step was built {built}; make it with this step's init."
        )


def check_pure(parts: StepParts) -> None:
    """Refuses a step that cannot be a pure function.

    Raises:
        ValueError: it decides something on the host.
    """
    if parts.skip_nonfinite:
        raise ValueError(
            "skip_nonfinite=True decides on the host, which a step inside a torch.func transform cannot; build it"
            " without, and choose by torch.where on metrics['finite']."
        )
    if parts.optimizer.needs.phases is not None:
        raise ValueError(
            "the optimizer decides by counters of its state which values it averages, which a step inside a torch.func"
            " transform cannot read; use an optimizer without phases."
        )
