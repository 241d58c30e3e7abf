"""Optimizers that average gradients themselves, and the plan of their next step.

Such a rule names the axes over which it averages, and its state gives the current `Phase`. In a local phase gradients
are not summed over those axes: the plan of the step differs only in its reductions.
"""

from torch import Tensor

from shardfn.collectives import local
from shardfn.core import PyTree, raise_all, tree_leaves
from shardfn.optim import GradientTransformation, Phase

from ._plan import Plan


def in_phase(
    plan: Plan, optimizer: GradientTransformation, opt_state: PyTree = None, phase: Phase | None = None
) -> Plan:
    """Returns the plan of the step that comes after `opt_state`; `plan` itself for an optimizer without phases.

    Args:
        plan: the layout.
        optimizer: the optimizer.
        opt_state: state.
        phase: the phase. None: that of the state.

    Raises:
        ValueError: the state has no values, or the layout does not fit the axes that the optimizer averages over.
    """
    phases = optimizer.needs.phases
    if phases is None:
        if phase is not None:
            raise ValueError(f"phase={phase} has no effect: the optimizer has no phases.")
        return plan
    if phase is None:
        here = local(opt_state)
        if any(isinstance(x, Tensor) and x.ndim == 0 and _has_no_value(x) for x in tree_leaves(here)):
            raise ValueError(
                "the optimizer has phases, and the phase of a state without values is unknown; pass"
                " phase=optim.Phase(name, local)."
            )
        phase = phases.next(here)
    return plan.in_phase(phase, phases.axes)


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
    blocks = [] if phases.by_leaf else [x for x in leaves if over & set(x.own_axes)]
    raise_all(
        ValueError,
        whose,
        [
            f"{leaf.path} is computed in blocks {leaf.compute!r}: along {leaf.own_axes} each rank has other elements,"
            f" and its gradient a mean over {leaf.mean_axes} alone; pass the optimizer such axes, or use one that"
            " averages by leaf (Phases.by_leaf), such as optim.onebit_adam"
            for leaf in blocks
        ],
    )
    raise_all(ValueError, whose, _find_idle_axes(plan, over))
    raise_all(
        ValueError,
        whose,
        [
            f"{leaf.path} is sharded over {leaf.zero_axes}, and it averages over some of these axes; use"
            f" Zero(axis=...) with those axes only, or with others only"
            for leaf in leaves
            if over & set(leaf.zero_axes) and not set(leaf.zero_axes) <= over
        ],
    )
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
