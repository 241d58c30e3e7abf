"""Notices ranks that all pass the whole batch where each rank should pass separate rows."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import AnyControl
from shardfn.core import P, PyTree, RankError, broadcast_prefix, tree_leaves, tree_paths
from shardfn.engine.loss import checksum, is_spec
from shardfn.engine.plan import Plan


class SeenBatch(NamedTuple):
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
    def of(plan: Plan, batch: PyTree) -> "SeenBatch":
        """Returns the facts of this rank."""
        leaves, specs = tree_leaves(batch), broadcast_prefix(plan.batch, batch, is_spec, names=("batch spec", "batch"))
        varied = [_is_varying(x, spec, plan) for x, spec in zip(leaves, specs, strict=True)]
        return SeenBatch(dict(plan.mesh.coords), [checksum(x) for x in leaves], varied)


def warn_of_same_rows(plan: Plan, batch: PyTree, seen: Sequence[SeenBatch], control: AnyControl) -> None:
    """Warns, on the first rank, if all ranks along an axis pass equal rows of every leaf it cuts. Collective.

    Leaves with equal rows on each rank, such as constants of a test, prove nothing.

    Raises:
        RankError: the program turns warnings into errors. Raised on all ranks, with nothing consumed.
    """
    paths, specs = (
        tree_paths(batch, "batch"),
        broadcast_prefix(plan.batch, batch, is_spec, names=("batch spec", "batch")),
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
        error = RankError(text)
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


def _is_varying(x: Tensor, spec: P, plan: Plan) -> bool:
    cut = [d for d in range(x.ndim) if plan.mesh.axes(spec.dim_axes(d))]
    if not cut or not x.numel():
        return False
    dim = next((d for d in cut if x.shape[d] > 1), None)
    first = x.reshape(-1)[:1] if dim is None else x.narrow(dim, 0, 1)
    return bool(torch.any(x != first))
