"""Compares once the values that must be equal on ranks: first values, and the rows and results of the first step.

Notices ranks that all pass the whole batch where each rank should pass separate rows.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import core
from shardfn.collectives import AnyControl
from shardfn.engine.loss import check_same_loss, check_same_state, checksum, corner, is_spec
from shardfn.engine.plan import Plan


class _SeenBatch(NamedTuple):
    """Facts of a rank's batch that ranks compare.

    Attributes:
        coords: coordinates of the rank on the mesh.
        sums: checksums of the leaves.
        varied: whether rows of the rank differ, for each leaf: equal rows are likely to be equal on all ranks.
    """

    coords: dict[str, int]
    sums: list[int]
    varied: list[bool]

    @staticmethod
    def of(plan: Plan, batch: core.PyTree) -> "_SeenBatch":
        """Returns the facts of this rank."""
        leaves, specs = (
            core.tree_leaves(batch),
            core.broadcast_prefix(plan.batch, batch, is_spec, names=("batch spec", "batch")),
        )
        varied = [_is_varying(x, spec, plan) for x, spec in zip(leaves, specs, strict=True)]
        return _SeenBatch(dict(plan.mesh.coords), [checksum(x) for x in leaves], varied)


def _warn_of_same_rows(plan: Plan, batch: core.PyTree, seen: Sequence[_SeenBatch], control: AnyControl) -> None:
    """Warns, on the first rank, if all ranks along an axis pass equal rows of every leaf it cuts. Collective.

    Leaves with equal rows on each rank, such as constants of a test, prove nothing.

    Raises:
        RankError: the program turns warnings into errors. Raised on all ranks, with nothing consumed.
    """
    paths, specs = (
        core.tree_paths(batch, "batch"),
        core.broadcast_prefix(plan.batch, batch, is_spec, names=("batch spec", "batch")),
    )
    for axis in plan.batch_axes:
        cut = [k for k, spec in enumerate(specs) if axis in plan.mesh.axes(spec.axes)]
        if plan.mesh.axis_size(axis) == 1 or not any(seen[0].varied[k] for k in cut):
            continue
        lines: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for of in seen:
            line = tuple(place for name, place in of.coords.items() if name != axis)
            lines.setdefault(line, set()).add(tuple(of.sums[k] for k in cut))
        if all(len(sums) == 1 for sums in lines.values()):
            _warn_together(_warning_text(plan, axis, [paths[k] for k in cut]), control)


def _warn_together(text: str, control: AnyControl) -> None:
    raised = None
    if control.rank == 0:
        try:
            warnings.warn(text, UserWarning, stacklevel=6)
        except UserWarning as warning:
            raised = warning
    if any(control.exchange(int(raised is not None))):
        error = core.RankError(text)
        error.before_transfers = True
        raise error from raised


def _warning_text(plan: Plan, axis: str, paths: list[str]) -> str:
    size, shown = plan.mesh.axis_size(axis), ", ".join(paths[:3]) + ", ..." * (len(paths) > 3)
    return (
        f"all {size} ranks along {axis!r} pass the same values of {shown}, though the axis cuts the batch: each row is"
        f" computed {size} times, and more ranks train on no more data. Pass each rank its own rows:"
        " batch[step.rows(len(batch))] of a global batch; or read only those, by sf.data.Cursor(batches, stop, mesh)"
        f" or sf.data.shard_rows(loader, rank=mesh.axis_index({axis!r}), world={size}). If every rank shall compute the"
        " whole batch, pass sharded_step(batch=sf.P()). If the rows are equal by chance,"
        f" warnings.filterwarnings('ignore', message='all {size} ranks along')."
    )


def _is_varying(x: Tensor, spec: core.P, plan: Plan) -> bool:
    cut = [d for d in range(x.ndim) if plan.mesh.axes(spec.dim_axes(d))]
    if not cut or not x.numel():
        return False
    dim = next((d for d in cut if x.shape[d] > 1), None)
    first = x.reshape(-1)[:1] if dim is None else x.narrow(dim, 0, 1)
    return bool(torch.any(x != first))


def check_replicas(paths: Sequence[str], leaves: Sequence[Tensor], control: AnyControl) -> None:
    """Refuses first values that differ between ranks, such as values drawn without a common seed. Collective.

    Raises:
        RankError: lists every such leaf, with the sum on rank 0 and on the first rank with another sum.
    """
    if control.size == 1 or not paths:
        return
    rows: list[Any] = control.gather([checksum(x) for x in leaves])
    others = {k: [r for r, row in enumerate(rows) if row[k] != rows[0][k]] for k in range(len(paths))}
    differing = {k: ranks for k, ranks in others.items() if ranks}
    if not differing:
        return
    sums: list[Any] = control.gather({k: _sum_elements(leaves[k]) for k in differing})
    core.raise_all(
        core.RankError,
        "ranks start from different values of the same leaves. Each process draws random numbers of its own: call"
        " torch.manual_seed(0) on every rank before the values are made, or draw them with sf.key(0). Values that are"
        " read from files must come from the same files:",
        [
            f"{paths[k]}: the sum of its elements is {sums[0][k]!r} on rank 0, {sums[ranks[0]][k]!r} on rank {ranks[0]}"
            + f"; {len(ranks)} of {len(rows)} ranks differ from rank 0" * (len(rows) > 2)
            for k, ranks in differing.items()
        ],
    )


def _sum_elements(x: Tensor) -> float | complex:
    """Returns the sum of all elements in double precision, or of a corner of a leaf that is not yet drawn."""
    x = corner(x) if isinstance(x, core.Draw) else x
    dtype = torch.complex128 if x.is_complex() else torch.float64
    return sum(part.to(dtype).sum().item() for part in x.detach().reshape(-1).split(1 << 20))


def compare_first_step(plan: Plan, model_state: core.PyTree, metrics: dict[str, Tensor], control: AnyControl) -> None:
    """Refuses a loss or a model state that differs between ranks, but should be equal. Collective.

    Called by all ranks after each step, or after the step's gradients. Calls after the first step that was not skipped
    cost nothing.

    Raises:
        RankError: the values differ. The message lists each rank's value.
    """
    if plan.learnt.compared:
        return
    if plan.mesh.size > plan.mesh.axis_size(plan.batch_axes):
        check_same_loss(metrics["loss"], plan, control)
    check_same_state(model_state, plan.mesh, control)
    # A skipped step has kept the model state, which then proves nothing about the loss.
    plan.learnt.take_compared(not core.tree_leaves(model_state) or not bool(metrics.get("skipped", False)))


def compare_first_end(plan: Plan, model_state: core.PyTree, control: AnyControl) -> None:
    """Refuses a model state that differs between ranks after the first finishing `update`. Collective.

    Raises:
        RankError: the state differs. The message lists each rank's state.
    """
    if not plan.learnt.compared_end:
        check_same_state(model_state, plan.mesh, control)
        plan.learnt.take_compared_end()


def compare_first_batch(plan: Plan, batch: core.PyTree, control: AnyControl) -> None:
    """Refuses rows that differ along axes that do not cut the batch. Collective, before the first step.

    Such axes belong to the model, for example "tp": each rank computes a part of a result of the same rows. Where rows
    differ, the parts belong to different results, though every rank may get the same loss. Equal rows along an axis
    that cuts the batch are a warning.

    Raises:
        RankError: names the leaves, and the ranks with different rows.
    """
    mesh, cut = plan.mesh, plan.mesh.axes(plan.batch_axes)
    if plan.learnt.compared or mesh.size == 1:
        return
    seen: list[Any] = control.gather(_SeenBatch.of(plan, batch))
    free = tuple(a for a in mesh.axes(mesh.axis_names) if a not in cut)
    _check_free(plan, batch, seen, free)
    _warn_of_same_rows(plan, batch, seen, control)


def _check_free(plan: Plan, batch: core.PyTree, seen: Sequence[_SeenBatch], free: tuple[str, ...]) -> None:
    mesh, cut = plan.mesh, plan.mesh.axes(plan.batch_axes)
    if mesh.axis_size(free) == 1:
        return
    rows = [(tuple(of.coords[a] for a in cut), of.sums) for of in seen]
    paths = core.tree_paths(batch, "batch")
    firsts: dict[Any, int] = {}
    problems = []
    for rank, (at, sums) in enumerate(rows):
        first = firsts.setdefault(at, rank)
        differ = [path for path, a, b in zip(paths, rows[first][1], sums, strict=True) if a != b]
        if differ:
            problems.append(f"rank {rank} passes other values than rank {first}: {', '.join(differ)}")
    names = tuple(a for a in mesh.axis_names if a in (*cut, *free))
    core.raise_all(
        core.RankError,
        f"ranks along {free} must pass the same batch, for it is cut along {cut or 'no axis'}. Give the ranks of {free}"
        " the same rows; or, if they are not axes of the model and each rank has rows of its own, pass"
        f" batch={core.P(names[0] if len(names) == 1 else names)!r}:",
        problems,
    )
