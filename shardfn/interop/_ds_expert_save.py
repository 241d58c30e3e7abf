"""Saves a state with experts as a checkpoint of DeepSpeed. Experts go from their ranks directly to files."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from shardfn.core import Mesh
from shardfn.engine import comms_of, losing_no_peer

from ._ds_expert_files import ExpertFiles
from ._ds_expert_ranks import Experts
from ._ds_job import Partition
from ._ds_parts import StatePart
from ._ds_places import PlacedPart
from ._gathered_leaf import Turns, layer_of, own_rows, whole


def save_experts(files: ExpertFiles, entries: Sequence[PlacedPart], cut: Partition, mesh: Mesh) -> None:
    """Writes the files of a job. Collective.

    Args:
        files: files of the job.
        entries: all leaves, in an order equal on all ranks.
        cut: the job's partition.
        mesh: mesh of the leaves.

    Raises:
        OSError: a file cannot be written, or the ranks do not share the directory.
        RankError: another rank failed.
    """
    turns, first = Turns(mesh, "interop.save_deepspeed"), mesh.rank == 0
    try:
        turns.take("begun", files.make if first else bool)
        turns.take("found", bool if first else files.open)
        with losing_no_peer(comms_of(mesh)):
            failed = _put_leaves(files, _local_leaves(entries, cut.experts, first=first))
        turns.take("leaves written", lambda: _raise_failure(failed))
        turns.take("files written", lambda: files.write(mesh.rank, mesh.size))
        turns.take("named", files.name if first else bool)
    finally:
        if first:
            files.remove()


def _put_leaves(files: ExpertFiles, leaves: Iterator[tuple[StatePart, Tensor]]) -> Exception | None:
    """Writes this rank's leaves. After an error the rank gathers on, as peers wait for the gathers."""
    failed: Exception | None = None
    for part, x in leaves:
        try:
            if failed is None:
                files.put(part, x)
        except Exception as problem:
            failed = problem
    return failed


def _raise_failure(failed: Exception | None) -> None:
    if failed is not None:
        raise failed


def _local_leaves(
    entries: Sequence[PlacedPart], experts: Experts, *, first: bool
) -> Iterator[tuple[StatePart, Tensor]]:
    """Yields the leaves, and rows of leaves, that this rank writes."""
    stacks: dict[int, tuple[Any, dict[int, StatePart]]] = {}
    for part, x, layer in entries:
        if layer is not None and experts.has(part.name):
            stacks.setdefault(id(x), (x, {}))[1][layer] = part
            continue
        value = whole(x) if layer is None else layer_of(x, layer)
        if first:
            yield part, value
    for x, parts in stacks.values():
        yield from ((parts[i], row) for i, row in own_rows(x))
