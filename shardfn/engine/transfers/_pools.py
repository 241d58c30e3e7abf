"""The disk of a step: one pool of files per rank and directory, and commits that survive the process.

After each step the state is committed. The previous commit is dropped when all ranks have begun the next step, and so
have this one. So whenever the ranks end, there is a commit that all of them have.
"""

import logging
import pathlib
import secrets
from typing import Any

from shardfn.collectives import AnyControl, GlobalTensor
from shardfn.core import Disk, Mesh, PerMesh, PyTree, StoredValue, load, named_leaves, raise_all
from shardfn.engine.plan import Plan, Planner
from shardfn.memory import POOLS, AnyPool, Pool, TracedPool
from shardfn.state import TrainState, check_origins, codes_of, lies_on_disk, origin_of

log = logging.getLogger("shardfn.memory")

# Leaves of at most this many elements are committed wherever they are, as are those that persist.
SMALL = 1024

_COMMITS: PerMesh[dict[str | None, int]] = PerMesh()
_RUNS: PerMesh[dict[str | None, str]] = PerMesh()


def pool_of(plan: Plan) -> AnyPool | None:
    """Returns the pool of a plan, or a substitute while a step is captured, or None without a directory."""
    if plan.zero.directory is None:
        return None
    return TracedPool() if plan.captured else disk_of(plan)


def disk_of(plan: Plan | Planner) -> Pool | None:
    """Returns the pool of a plan, opened on first use, or None if it keeps nothing on disk."""
    disk, pools = plan.zero.disk, _open_pools(plan.mesh)
    if disk is None:
        return None
    if disk.directory not in pools:
        # One for all steps on the mesh: a directory has one owner.
        pools[disk.directory] = Pool(_find_directory(disk, plan.mesh), checksum=disk.checksum)
    return pools[disk.directory]


def _open_pools(mesh: Mesh) -> dict[str | None, Pool]:
    """Returns the pools of a mesh's steps by directory. They are closed with the mesh."""
    pools = POOLS.of(mesh, dict)
    mesh.at_close("pools", lambda why: _close_all(pools))
    return pools


def _close_all(pools: dict[str | None, Pool]) -> None:
    for pool in pools.values():
        pool.close()


def close_pool(planner: Planner) -> None:
    """Closes the pool of a directory, if it is open."""
    for kept in (_COMMITS, _RUNS):
        (kept.get(planner.mesh) or {}).pop(planner.zero.directory, None)
    pool = (POOLS.get(planner.mesh) or {}).pop(planner.zero.directory, None)
    if pool is not None:
        pool.close()


def begin(plan: Plan, state: TrainState, control: AnyControl) -> None:
    """Commits the first state of a run. Collective, where there is a directory.

    Raises:
        ValueError: the directory has the states of another `init` of this process.
    """
    if plan.zero.directory is None:
        return
    if plan.zero.directory in _count_commits(plan):
        raise ValueError(
            f"{plan.zero.directory} has the states of another init. Use another directory for this init, or close the"
            " step and remove the directory."
        )
    lost = [path for path, _, kept in _list_leaves(plan, state) if not kept]
    if lost:
        where = plan.zero.directory
        log.warning("states under %s cannot be resumed; these are kept in memory only: %s", where, ", ".join(lost))
    # Rank 0's draw identifies the run, so that parts of different runs are not put together.
    _identify_runs(plan)[plan.zero.directory] = str(control.gather(secrets.token_hex(4))[0])
    commit(plan, state)


def commit(plan: Plan, state: TrainState) -> None:
    """Commits a state for `reopen`, if each leaf is on disk, small, or a cast of a master copy on disk.

    Commits have numbers of their own, as a step that is skipped or repeated has the number of another step.
    """
    disk, pool = plan.zero.disk, disk_of(plan)
    leaves = [] if pool is None else _list_leaves(plan, state)
    if disk is None or pool is None or not all(kept for _, _, kept in leaves):
        return
    number = _count_commits(plan).get(disk.directory, -1) + 1
    values = {path: _committed_value(x) for path, x, _ in leaves if _is_held(plan, x)}
    run = _identify_runs(plan).get(disk.directory, "")
    about = origin_of(plan.mesh, run, *cut_parts(state))
    pool.commit(values, number, durable=disk.durable, keep_before=True, about=about)
    _count_commits(plan)[disk.directory] = number


def cut_parts(state: TrainState) -> list[tuple[str, PyTree]]:
    """Returns the parts of a state that are cut over ranks, each with its name in a commit."""
    return [("params", state.params), ("opt_state", state.opt_state), ("state.model_state", state.model_state)]


def _count_commits(plan: Plan) -> dict[str | None, int]:
    """Returns the number of the last commit, by directory."""
    return _COMMITS.of(plan.mesh, dict)


def _identify_runs(plan: Plan) -> dict[str | None, str]:
    """By directory, an identifier of its run, equal on all ranks and after `resume`."""
    return _RUNS.of(plan.mesh, dict)


def forget(plan: Plan) -> None:
    """Drops the commit before the last. Must be called when all ranks have the last commit."""
    pool = disk_of(plan)
    if pool is not None:
        pool.forget_before()


def reopen(plan: Plan, control: AnyControl) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of the last commit that all ranks have, by path, and the description of the commit.

    Raises:
        ValueError: the plan keeps nothing on disk, or a directory is of another rank, mesh or run.
        FileNotFoundError: the ranks have no common commit. The message lists the commits of each rank.
    """
    disk = plan.zero.disk
    if disk is None:
        raise ValueError(
            "resume() reads the files that the step left on disk, but nothing is kept there: Zero(disk=Disk(...))."
        )
    place = _find_directory(disk, plan.mesh)
    told = Pool.about(place)
    check_origins(plan.mesh, control, place, told if Pool.steps(place) else None)
    steps: list[Any] = control.gather(Pool.steps(place))
    # Ranks are at most one commit apart, and keep the one before.
    common = set(steps[0]).intersection(*steps[1:])
    if not common:
        had = [f"rank {r}: {f'numbers {list(own)}' if own else 'none'}" for r, own in enumerate(steps)]
        raise_all(FileNotFoundError, f"no commit under {disk.directory} is there on all ranks:", had)
    opened = Pool.open(place, max(common), checksum=disk.checksum)
    _open_pools(plan.mesh)[disk.directory] = opened.pool
    _count_commits(plan)[disk.directory] = opened.step
    _identify_runs(plan)[disk.directory] = told.get("run", "")
    return opened.values, told


def _list_leaves(plan: Plan, state: TrainState) -> list[tuple[str, Any, bool]]:
    """Returns each leaf of a state by path, and whether a commit keeps it.

    On disk, or small, or as the cast of a copy on disk.

    The last is the same on all ranks, independent of their blocks.
    """
    copied = [x for x in plan.leaves if x.trainable and x.dtypes.master != x.dtypes.param and x.ways.state.is_stored]
    casts = {leaf.path for leaf in copied}
    parts = ("params", state.params), ("opt_state", state.opt_state), ("state", state._replace(params=(), opt_state=()))
    named = [pair for name, tree in parts for pair in named_leaves(tree, name)]
    return [(path, x, _is_held(plan, x) or path in casts) for path, x in named]


def _committed_value(x: Any) -> Any:
    """Returns the value that a commit holds of a leaf: of a leaf in codes, the codes."""
    held: StoredValue = x.held if isinstance(x, GlobalTensor) else x
    return held if lies_on_disk(x) else load(codes_of(held)).detach().to("cpu", copy=True)


def _is_held(plan: Plan, x: Any) -> bool:
    """Returns whether a commit holds a leaf: it is on disk, or in memory and as small as leaves that never leave it."""
    return lies_on_disk(x) or x.shape.numel() <= max(plan.zero.persist_elements, SMALL)


def _find_directory(disk: Disk, mesh: Mesh) -> pathlib.Path:
    return pathlib.Path(disk.directory) / f"rank{mesh.rank}"


def together(plan: Plan, control: AnyControl) -> None:
    """Waits until all ranks have written their files, and raises if one could not."""
    if plan.zero.directory is not None:
        control.exchange(0)
