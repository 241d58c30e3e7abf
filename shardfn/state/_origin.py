"""The origin of a directory: the rank, mesh and run that wrote it, which must be the same when it is resumed.

The blocks of two ranks have the same shapes, as a rule, and nothing else shows whose they are. So a commit records its
origin, and directories that were exchanged, of another mesh, or of different runs are refused.
"""

import logging
import math
import pathlib
import re
from typing import Any

from shardfn.collectives import AnyControl, GlobalTensor
from shardfn.core import Mesh, P, PyTree, named_leaves, raise_all

log = logging.getLogger("shardfn.memory")


def origin_of(mesh: Mesh, run: str, *named: tuple[str, PyTree]) -> dict[str, Any]:
    """Returns the origin that a commit records.

    Args:
        mesh: the mesh.
        run: an identifier of the run.
        *named: parts of the state, each with the name that its paths begin with.
    """
    shape, coords = _find_shape(mesh), {a: mesh.coords[a] for a in _find_shape(mesh)}
    return {"run": run, "rank": mesh.rank, "mesh": shape, "coords": coords, "cut": cuts_of(mesh, *named)}


def cuts_of(mesh: Mesh, *named: tuple[str, PyTree]) -> dict[str, list[list[str]]]:
    """Returns the axes that cut each dim of a leaf, by path, and leaves that are whole are left out."""
    leaves = [pair for name, tree in named for pair in named_leaves(tree, name)]
    cuts = {path: _find_cut(mesh, x.spec) for path, x in leaves if isinstance(x, GlobalTensor)}
    return {path: cut for path, cut in cuts.items() if any(cut)}


def check_origins(mesh: Mesh, control: AnyControl, place: pathlib.Path, told: dict[str, Any] | None) -> None:
    """Refuses directories that are not each rank's own, of this mesh and of one run. Collective.

    Args:
        mesh: the mesh.
        control: agreement between ranks.
        place: this rank's directory.
        told: the origin in its last commit, empty if an older version wrote it, or None without a commit.

    Raises:
        ValueError: another number of ranks wrote them, or lists every rank whose directory is another rank's.
    """
    mine = {k: told[k] for k in ("run", "rank", "mesh", "coords")} if told else {}
    beyond = _ranks_beside(place) if told == {} else -1
    mine |= {"here": mesh.rank, "at": mesh.coords, "place": str(place), "beyond": beyond}
    rows: list[Any] = control.gather(mine)
    known, shape = [row for row in rows if "rank" in row], _find_shape(mesh)
    worlds = {_count_ranks(row["mesh"]) for row in known} | {
        row["beyond"] + 1 for row in rows if row["beyond"] >= mesh.size
    }
    if worlds - {mesh.size}:
        there = max(worlds - {mesh.size})
        raise ValueError(
            f"the state under {place.parent} must be resumed on {there} ranks, by which it was written, got"
            f" {mesh.size} ranks. The directory of a rank has only that rank's blocks."
        )
    raise_all(
        ValueError,
        "ranks find files that others have written; give each rank the directory that it wrote:",
        [problem for row in known if (problem := _find_problem(row, shape))],
    )
    several = len({row["run"] for row in known}) > 1
    raise_all(
        ValueError,
        "the ranks' directories are of different runs; put those of one run together:",
        [f"rank {row['here']}: {row['place']} is of run {row['run']}" for row in known] if several else [],
    )
    if told == {}:
        log.warning("%s has no record of the rank that wrote it; that it is this rank's own was not checked.", place)


def _find_problem(row: dict[str, Any], shape: dict[str, int]) -> str:
    """Returns the problem of a rank's directory, empty if there is no problem."""
    if row["mesh"] != shape:
        return f"rank {row['here']}: {row['place']} was written on the mesh {row['mesh']}, this one is {shape}"
    at = {a: row["at"][a] for a in shape}
    if row["coords"] == at:
        return ""
    where = "" if len(at) < 2 else f" at {row['coords']}; this rank is at {at}"
    return f"rank {row['here']}: {row['place']} was written by rank {row['rank']}{where}"


def _ranks_beside(place: pathlib.Path) -> int:
    """Returns the highest rank that has a directory next to this directory, or -1."""
    found = [re.fullmatch(r"rank(\d+)", p.name) for p in place.parent.glob("rank*") if any(p.glob("manifest*.json"))]
    return max([int(match[1]) for match in found if match], default=-1)


def _find_cut(mesh: Mesh, spec: P) -> list[list[str]]:
    return [list(mesh.axes(spec.dim_axes(d))) for d in range(len(spec))]


def _find_shape(mesh: Mesh) -> dict[str, int]:
    """Returns the axes with several ranks. Other axes cut nothing."""
    return {a: n for a, n in mesh.shape.items() if n > 1}


def _count_ranks(shape: dict[str, int]) -> int:
    return math.prod(shape.values())
