"""Optimizers that average gradients themselves, and the plan of their next step.

Such a rule names the axes over which it averages, and its state gives the `Phase` of the next step. If the phase is
local, gradients stay summands along these axes: the plan of the step differs only in its reductions.
"""

from torch import Tensor

from shardfn.collectives import local
from shardfn.core import PyTree, raise_all, tree_leaves
from shardfn.optim import GradientTransformation, Phase

from ._plan import Plan


def reduced_for(
    plan: Plan, optimizer: GradientTransformation, opt_state: PyTree = None, phase: Phase | None = None
) -> Plan:
    """Returns the plan of the step after `opt_state`: gradients stay summands along axes that the optimizer reduces.

    Args:
        plan: layout.
        optimizer: optimizer.
        opt_state: state.
        phase: phase of the step. None: phase by the state.

    Raises:
        ValueError: the state has no values.
    """
    phase, phases = phase_of(optimizer, opt_state, phase), optimizer.needs.phases
    return plan if phase is None or phases is None or not phase.local else plan.with_unreduced(phases.axes)


def phase_of(optimizer: GradientTransformation, opt_state: PyTree = None, phase: Phase | None = None) -> Phase | None:
    """Returns the phase of the step after `opt_state`, or `phase` if given. None for an optimizer without phases.

    Raises:
        ValueError: the state has no values, or a phase is given for an optimizer without phases.
    """
    phases = optimizer.needs.phases
    if phases is None and phase is not None:
        raise ValueError(f"phase={phase} has no effect: the optimizer has no phases.")
    if phases is None or phase is not None:
        return phase
    here = local(opt_state)
    if any(isinstance(x, Tensor) and x.ndim == 0 and _has_no_value(x) for x in tree_leaves(here)):
        raise ValueError(
            "the optimizer has phases, and the phase of a state without values is unknown. Pass"
            " phase=optim.Phase(name, local)."
        )
    return phases.next(here)


def check_phases(plan: Plan, optimizer: GradientTransformation) -> None:
    """Refuses layouts in which an optimizer's own averages would mean something else.

    Raises:
        ValueError: a leaf does not fit the axes that the optimizer averages over, which are listed, or these axes have
            no effect.
    """
    phases = optimizer.needs.phases
    if phases is None:
        return
    over = {a for a in phases.axes if plan.mesh.axis_size(a) > 1}
    leaves = [leaf for leaf in plan.leaves if leaf.trainable]
    whose = f"the optimizer averages over {phases.axes} itself:"
    raise_all(ValueError, whose, _find_idle_axes(plan, over))
    raise_all(
        ValueError,
        whose,
        [
            f"{leaf.path} is kept at {leaf.home!r}, its gradient at {leaf.ways.summed.memory_kind!r} and its optimizer"
            f" state at {leaf.ways.state.memory_kind!r}; keep them on the device"
            for leaf in leaves
            if not leaf.ways.at_home
        ],
    )


def _find_idle_axes(plan: Plan, over: set[str]) -> list[str]:
    """Returns the optimizer's axes along which there is nothing to average, or gradients are averaged already."""
    batch = tuple(a for a in plan.batch_axes if plan.mesh.axis_size(a) > 1)
    out = [f"the batch is not cut along {a!r}, so that all ranks there have one gradient" for a in over - set(batch)]
    if batch and not over:
        out.append(
            f"the mesh has no such axis of more than one rank, while the batch is cut along {batch}; pass the optimizer"
            f" axis={(batch[0] if len(batch) == 1 else batch)!r}, or use one that does not average"
        )
    return sorted(out)


def _has_no_value(x: Tensor) -> bool:
    return x.device.type == "meta" or type(x) is not Tensor
