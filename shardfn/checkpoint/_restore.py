"""`restore`: reads a checkpoint into a tree of any other mesh, memory and dtype. Each rank reads only local blocks.

States of an optimizer by kind: found in the checkpoint at any place of the rule in the chain.

A kind is the fields of a state, such as `count, mu, nu` of Adam. Behind a clip, or inside of a wrapper, Adam's state
has another path but the same fields:

the tree has                        the checkpoint has
opt_state[1][0].mu['w']             opt_state[0].mu['w']           chain(clip, adamw) for adamw
opt_state.inner[0].mu['w']          opt_state[0].mu['w']           apply_if_finite(adamw) for adamw
opt_state[1][2].count                                              a schedule for a number: a new state
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.collectives import Box, GlobalTensor, blocks_of
from shardfn.core import (
    Mesh,
    PyTree,
    Stored,
    StoredValue,
    a_kind,
    explains_keywords,
    progress,
    raise_all,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_path_parts,
    tree_unflatten,
)
from shardfn.engine import agree_on_step, comms_of, is_abstract, losing_no_peer, told_before
from shardfn.memory import DiskTensor, Pool, host_empty
from shardfn.optim import AverageParamsState, LookaheadState, MasterState, ScheduleFreeState
from shardfn.state import check_alive, empty_block, lies_on_disk

from ._contents import as_codes, from_codes, mesh_of
from ._located import check_directory, find_checkpoint
from ._manifest import Manifest
from ._match import ByKind, ReadOptions, Rename, Source, Target, match_leaves, remedy, source_of
from ._place import read_manifest
from ._read import BoxReader, ChunkReader
from ._reshard_residuals import reshard_residuals

_PART = re.compile(r"""\.?[^\W\d]\w*|\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]""")
_ROOT = "opt_state"
# The fields that begin as copies of the parameters.
_COPIES = {AverageParamsState: "average", LookaheadState: "slow", MasterState: "master", ScheduleFreeState: "z"}


class OptimizerState(NamedTuple):
    """A state with fields.

    Attributes:
        path: path of the state, such as "opt_state[0]".
        fields: fields with leaves outside of inner states.
        leaves: the paths of these leaves inside of the state.
    """

    path: str
    fields: frozenset[str]
    leaves: frozenset[str]

    def has(self, path: str) -> bool:
        """Returns whether a leaf belongs to the state, and not to an inner state."""
        return any(_starts_with(path, f"{self.path}.{field}") for field in self.fields)


class KindMatch(NamedTuple):
    """Optimizer states of a tree, with the states of a checkpoint that continue in the tree.

    Attributes:
        moved: state of the tree -> path of the state in the checkpoint. None: the state is initialized.
        left: states of the checkpoint that no state of the tree continues.
        problems: kinds with different numbers of states on both sides, for example 2 Adam states here and 1 there.
    """

    moved: dict[OptimizerState, str | None]
    left: tuple[OptimizerState, ...]
    problems: list[str]

    @property
    def keeps_some(self) -> bool:
        """Returns whether a state is continued, and the match is unambiguous."""
        return not self.problems and any(self.moved.values())

    def rename(self, otherwise: Rename | None) -> Rename:
        """Returns the function from paths of the tree to paths of the checkpoint. Other leaves follow `otherwise`."""

        def find_source(path: str) -> str | None:
            state = next((state for state in self.moved if state.has(path)), None)
            if state is None:
                return path if otherwise is None else otherwise(path)
            old = self.moved[state]
            return None if old is None else old + path.removeprefix(state.path)

        return find_source

    def leaves_out(self, path: str) -> bool:
        """Returns whether a leaf of the checkpoint belongs to a state that is left out."""
        return any(state.has(path) for state in self.left)

    def text(self) -> str:
        """Returns a text with the states that are continued, initialized and left out."""
        on = {state: old for state, old in self.moved.items() if old is not None}
        parts = [f"{s.path}{f' continues with {old}' if s.path != old else ' continues'}" for s, old in on.items()]
        parts += [f"{_show_state(s)} begins anew" for s, old in self.moved.items() if old is None]
        parts += [f"{_show_state(s)} of the checkpoint is left out" for s in self.left]
        return ", ".join(parts)


def match_kinds(targets: Sequence[Target], there: Iterable[str]) -> KindMatch:
    """Matches the optimizer states of a tree with the states of a checkpoint, by fields.

    Args:
        targets: the leaves of the tree.
        there: paths of the checkpoint.
    """
    here, old = _find_states([t.path for t in targets]), _find_states(there)
    moved: dict[OptimizerState, str | None] = {}
    # States with the same leaves first: the states of several groups of parameters have one kind.
    for key in (lambda s: (s.fields, s.leaves), lambda s: s.fields):
        here, old = _pair_up(here, old, key, moved)
    both = {s.fields for s in here} & {s.fields for s in old}
    problems = [
        f"states with {', '.join(sorted(fields))}: here {_show_states(here, fields)}, in the checkpoint"
        f" {_show_states(old, fields)}"
        for fields in sorted(both, key=sorted)
    ]
    moved |= {s: None for s in here if s.fields not in both}
    return KindMatch(moved, tuple(s for s in old if s.fields not in both), problems)


def _read_copies(
    like: PyTree, targets: Sequence[Target], manifest: Manifest, rename: Rename | None, *, partial: bool
) -> Rename | None:
    """Returns `rename`, extended so that kept copies of parameters are read from the checkpoint's parameters.

    An average or master copies begin as the parameters that `step.init` was given. If parameters are read from a
    checkpoint, the copies must begin as the read parameters. Else the next step would restore the first parameters.
    """
    nodes = tree_leaves(like, is_leaf=lambda x: isinstance(x, tuple(_COPIES)))
    copies = {id(x) for node in nodes if type(node) in _COPIES for x in tree_leaves(getattr(node, _COPIES[type(node)]))}
    fresh: set[str] = set()
    for target, x in zip(targets, tree_leaves(like), strict=True):
        if id(x) not in copies:
            continue
        found = source_of(target, manifest, rename)
        if found is None or (partial and found == target.path):
            at = max(k for k, part in enumerate(target.parts) if part.startswith(".") and part[1:] in _COPIES.values())
            fresh.add("".join(target.parts[: at + 1]).removeprefix("."))
    if not fresh:
        return rename

    def find_source(path: str) -> str | None:
        at = next((p for p in fresh if _starts_with(path, p)), None)
        read = None if at is None else "params" + path.removeprefix(at)
        if at is None or read is None or (rename is not None and rename(read) is None):
            return path if rename is None else rename(path)
        wide = (p for p in manifest.leaves if p.startswith(_ROOT) and p.endswith(f".master{path.removeprefix(at)}"))
        return next(wide, read if rename is None else rename(read))

    return find_source


def _pair_up(
    here: list[OptimizerState],
    old: list[OptimizerState],
    key: Callable[[OptimizerState], object],
    moved: dict[OptimizerState, str | None],
) -> tuple[list[OptimizerState], list[OptimizerState]]:
    """Pairs states of equal keys in order, where both sides have equally many, and returns the remaining states."""
    for wanted in dict.fromkeys(map(key, here)):
        a, b = ([s for s in side if key(s) == wanted] for side in (here, old))
        if len(a) == len(b):
            moved |= {x: y.path for x, y in zip(a, b, strict=True)}
    used = {*moved.values()}
    return [s for s in here if s not in moved], [s for s in old if s.path not in used]


def _find_states(paths: Iterable[str]) -> list[OptimizerState]:
    """Returns the states with fields among the leaves of an optimizer, in the order of their first leaves."""
    own: dict[str, dict[str, str]] = {}
    for path in paths:
        parts = _PART.findall(path)
        if not parts or parts[0] != _ROOT or "".join(parts) != path:
            continue
        at = max((k for k, part in enumerate(parts) if k and part.startswith(".")), default=0)
        if at:
            own.setdefault("".join(parts[:at]), {})["".join(parts[at:])] = parts[at].removeprefix(".")
    return [OptimizerState(path, frozenset(leaves.values()), frozenset(leaves)) for path, leaves in own.items()]


def _starts_with(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", ".", "[")


def _show_state(state: OptimizerState) -> str:
    """Returns a text with the fields of a state, because inner states may be continued separately."""
    return f"{state.path} ({', '.join(sorted(state.fields))})"


def _show_states(states: Sequence[OptimizerState], fields: frozenset[str]) -> str:
    return ", ".join(s.path for s in states if s.fields == fields)


log = logging.getLogger("shardfn.checkpoint")
_UNEQUAL = (
    "ByKind needs as many states of a kind in the checkpoint as in the tree. Pass a function as rename= that returns"
    " each state's path:"
)
# For a leaf on disk or on a device: bytes that are in memory at a time.
_PIECE = 32 << 20


class Restored(NamedTuple):
    """The result of `restore`.

    Attributes:
        tree: a tree like the given one, with the checkpoint's values.
        step: number of the checkpoint.
        user: the values saved as `user`.
        read: number of bytes that this rank has read.
    """

    tree: Any
    step: int
    user: Any
    read: int


class LeafTask(NamedTuple):
    """A leaf to be filled."""

    like: Any
    source: Source | None
    mesh: Mesh
    pool: Pool | None
    donate: bool


class NoRecuts(NamedTuple):
    """Converts no leaf: see `ReshardedState`."""

    at: frozenset[int] = frozenset()
    paths: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()

    def apply(self, leaves: list[Any], reader: BoxReader) -> list[Any]:
        del reader
        return leaves


class ReadPlan(NamedTuple):
    """A tree that fits a checkpoint, with the source of each leaf."""

    tasks: list[LeafTask]
    recuts: Any

    def read(self, reader: BoxReader) -> list[Any]:
        """Returns the leaves with the checkpoint's values."""
        return self.recuts.apply(_read_leaves(self.tasks, self.recuts.at, reader), reader)


def plan_reads(
    like: PyTree,
    manifest: Manifest,
    options: ReadOptions,
    what: str,
    find_recuts: Callable[..., Any] = lambda *_: NoRecuts(),
) -> ReadPlan:
    """Finds the source of each leaf of a tree. No value is read.

    Args:
        like: the tree, with leaves of bytes in place of quantized leaves.
        manifest: manifest of the checkpoint.
        options: options for reading.
        what: name of the checkpoint in messages.
        find_recuts: function with the arguments of `reshard_residuals`, which finds the leaves to convert.

    Raises:
        ValueError: leaves do not fit. The message lists all.
    """
    leaves, targets = tree_leaves(like), find_targets(like, options.at)
    kinds, rename, left = match_kinds(targets, manifest.leaves), options.rename, []
    if by_kind := isinstance(rename, ByKind):
        raise_all(ValueError, _UNEQUAL, kinds.problems)
        left = [path for path in manifest.leaves if kinds.leaves_out(path)]
        rename = kinds.rename(rename.otherwise)
    rename = _keep_paths(rename, options.kept)
    if not options.at:
        rename = _read_copies(like, targets, manifest, rename, partial=options.partial)
    recuts = find_recuts(like, targets, manifest, rename)
    sources, problems = match_leaves(targets, manifest, rename, options, recuts, left)
    problems += recuts.problems
    helps = problems and options.rename is None and not options.partial
    how = remedy(targets, sources, manifest, options.at, recuts, kinds) if helps else ""
    problems = problems or _find_unplaced(targets, leaves, sources, options.pool, recuts.at)
    raise_all(ValueError, f"{what} does not fit.{how} They differ in:", problems)
    if by_kind:
        log.info("restoring by kind: %s", kinds.text())
    mesh = mesh_of(like)
    tasks = [LeafTask(x, s, mesh, options.pool, options.donate) for x, s in zip(leaves, sources, strict=True)]
    return ReadPlan(tasks, recuts)


def _keep_paths(rename: Rename | None, keep: tuple[str, ...]) -> Rename | None:
    """Returns `rename`, with None for the paths under `keep`."""
    if not keep:
        return rename
    return lambda path: None if path.startswith(keep) else path if rename is None else rename(path)


@explains_keywords(by_kind="rename=checkpoint.ByKind()", check="nothing, digests are always compared")
def restore(
    directory: str | os.PathLike[str],
    like: PyTree,
    *,
    step: int | None = None,
    at: str = "",
    rename: Rename | ByKind | None = None,
    keep: str | Sequence[str] = (),
    partial: bool = False,
    cast: bool = False,
    donate: bool = True,
    pool: Pool | None = None,
) -> Restored:
    """Reads a checkpoint into a tree like `like`. Collective over the mesh of the leaves.

    The tree may have another mesh, ZeRO stage, memory and dtype than the saved tree, and the layers may be stacked or
    in a list. For example, a run with 8 ranks can continue on 2 ranks. Each rank reads only the bytes of the local
    blocks. No value is written before all leaves fit.

    Args:
        directory: directory of a run's checkpoints, or of a single checkpoint.
        like: the result of `step.init(params)`, or a part of the result with `at`. Abstract parameters give an abstract
            tree without memory.
        step: the checkpoint of a run; default the newest.
        at: a prefix of the tree's paths, such as "params" for `state.params`.
        rename: function from a path of the tree to the path in the checkpoint. If the function returns None, the leaf
            keeps the current value. `ByKind()` finds the states of an optimizer by their fields, for an optimizer with
            additional rules, such as a clip, a schedule or `apply_if_finite`.
        keep: prefixes of paths, such as "opt_state" to continue with another optimizer. Leaves there keep the values in
            `like`, and the checkpoint's leaves are ignored. Copies of parameters in a new state of the optimizer, such
            as master copies and averages, are made of the parameters that are read.
        partial: whether leaves that only one side has are ignored. Such leaves of `like` stay unchanged.
        cast: whether values may be rounded to a leaf's dtype. Casts that lose nothing are always made.
        donate: whether the memory of `like` is reused. `like` cannot be used afterwards. If False, the result has
            separate memory.
        pool: pool for leaves on disk of an abstract tree. The leaves of other trees stay in the tree's pool.

    Returns:
        The tree, and the values that were saved as `user`.

    Raises:
        TypeError: the arguments are swapped, or `like` is not a tree.
        FileNotFoundError: there is no such checkpoint. The message lists the existing checkpoints.
        ValueError: leaves are missing, additional or of another shape, or values would be rounded. The message lists
            all such leaves. Or the checkpoint is of a newer version.
        DamagedError: files have other contents than were written.
        DonatedError: a step has consumed `like`.
        RankError: another rank failed, or ranks read different checkpoints.

    Example:
        >>> import tempfile
        >>> from shardfn.checkpoint import save
        >>> directory = tempfile.mkdtemp()
        >>> _ = save(directory, {"a": torch.ones(2), "b": torch.zeros(2)}, step=1, user={"epoch": 3})
        >>> restore(directory, torch.zeros(2), rename=lambda path: "['a']", partial=True)
        Restored(tree=tensor([1., 1.]), step=1, user={'epoch': 3}, read=8)
    """
    check_directory(directory)
    if callable(like):
        raise TypeError(
            f"restore expected a tree of tensors, got {a_kind(like)}. Write restore(directory, step.init(params))."
        )
    check_alive(like, abstract=True)
    comms = comms_of(mesh_of(like))
    options = ReadOptions(at, rename, keep, partial, cast, donate, pool)
    with told_before(comms.control):
        place = find_checkpoint(directory, step)
        manifest = read_manifest(place)
        plan = plan_reads(tree_map(as_codes, like), manifest, options, f"the checkpoint {place}", reshard_residuals)
    agree_on_step(comms.control, "checkpoint.restore", (f"{place.name}, step {manifest.step}", ()))
    with ChunkReader(place, manifest) as reader:
        return Restored(fill_tree(like, plan, reader, donate), manifest.step, manifest.user, reader.read_bytes)


def fill_tree(like: PyTree, plan: ReadPlan, reader: BoxReader, donate: bool) -> Any:
    """Returns a tree with the values of a checkpoint. All ranks have an error, or none has.

    Args:
        like: the tree.
        plan: the sources of the leaves.
        reader: reader of the checkpoint.
        donate: whether leaves that have been replaced are marked as donated.
    """
    leaves, treedef = tree_flatten(like)
    comms = comms_of(mesh_of(like))
    with losing_no_peer(comms), torch.no_grad():
        rows = zip(plan.read(reader), leaves, plan.tasks, strict=True)
        out = [x if task.like is y else from_codes(x, y) for x, y, task in rows]
        for x, new in zip(leaves, out, strict=True):
            if donate and isinstance(x, GlobalTensor) and x is not new and not x.donated:
                x.donate()
        comms.control.exchange(0)
    return tree_unflatten(treedef, out)


def _read_leaves(tasks: Sequence[LeafTask], but: frozenset[int], reader: BoxReader) -> list[Any]:
    """Returns the leaves with the checkpoint's values, except `but`. Leaves tied in the checkpoint stay tied."""
    # Taken before any donation, while all blocks are alive and the ids distinct.
    blocks = [id(t.like.held if isinstance(t.like, GlobalTensor) else t.like) for t in tasks]
    seen: dict[Any, Any] = {}
    written: set[int] = set()
    out = []
    rows, mesh = zip(tasks, blocks, strict=True), tasks[0].mesh if tasks else None
    bar = progress(rows, total=len(tasks), desc="restoring", unit="leaf", mesh=mesh, part=True)
    for i, (task, block) in enumerate(bar):
        if i in but:
            out.append(task.like)
            continue
        key = block, None if task.source is None else task.source._replace(paths=())
        if key not in seen:
            seen[key] = _fill_leaf(task._replace(donate=task.donate and block not in written), reader)
            written.add(block)
        out.append(seen[key])
    return out


def find_targets(like: PyTree, at: str) -> list[Target]:
    """Returns path, shape and dtype of each leaf of a tree."""
    pairs = zip(tree_path_parts(like), tree_leaves(like), strict=True)
    return [Target((at, *parts), tuple(x.shape), x.dtype) for parts, x in pairs]


def _find_unplaced(
    targets: Sequence[Target], leaves: Sequence[Any], sources: Sequence[Source | None], pool: Pool | None, but: Any
) -> list[str]:
    """Returns problems: leaves without a value, or without a place."""
    out = []
    for i, (target, x, source) in enumerate(zip(targets, leaves, sources, strict=True)):
        if i in but:
            continue
        if source is None and _is_empty(x):
            out.append(f"{target.path} is to keep its values, but the tree is abstract, and has no values")
        if source is not None and lies_on_disk(x) and not isinstance(x.held, DiskTensor) and pool is None:
            out.append(f"{target.path} is to be on disk; pass pool=, or a tree from step.init that has its values")
    return out


def _is_empty(x: Any) -> bool:
    held = x.held if isinstance(x, GlobalTensor) else x
    return isinstance(held, Tensor) and is_abstract([held])


def _fill_leaf(task: LeafTask, reader: BoxReader) -> Any:
    """Returns a leaf with the values of the source."""
    x, source = task.like, task.source
    if source is None:
        return x
    if not isinstance(x, GlobalTensor):
        out = torch.empty(x.shape, dtype=x.dtype, device=task.mesh.device if _is_empty(x) else x.device)
        _fill_tensor(reader, source, tuple((0, n) for n in x.shape), out)
        return out
    box = blocks_of(tuple(x.shape), x.spec, x.mesh)[x.mesh.rank]
    held: StoredValue | None = None if x.donated else x.held
    if lies_on_disk(x):
        pool = held.pool if isinstance(held, DiskTensor) else task.pool
        block: StoredValue = _read_to_disk(reader, source, box, x.dtype, pool)
    elif task.donate and isinstance(held, Tensor) and not _is_empty(x):
        block = x.donate()  # from now on the leaf may be partly written
        _fill_tensor(reader, source, box, block)
    else:
        shape = tuple(hi - lo for lo, hi in box)
        block = empty_block(shape, x.dtype, x.memory_kind, x.mesh.device)
        _fill_tensor(reader, source, box, block)
    return x.with_block(block)


def _fill_tensor(reader: BoxReader, source: Source, box: Box, out: Any) -> None:
    """Reads into a tensor: directly, or through a host tensor of the checkpoint's dtype."""
    if out.device.type == "cpu" and out.dtype == source.dtype:
        source.read(reader, box, out)
        return
    staging = host_empty(tuple(out.shape), source.dtype)
    source.read(reader, box, staging)
    out.copy_(staging)


def _read_to_disk(reader: BoxReader, source: Source, box: Box, dtype: torch.dtype, pool: Any) -> Stored:
    """Reads a block to the disk, a few rows at a time."""
    shape = tuple(hi - lo for lo, hi in box)
    if not shape or not torch.Size(shape).numel():
        out = host_empty(shape, dtype)
        _fill_tensor(reader, source, box, out)
        return pool.write(out).result()
    writer = pool.writer(shape, dtype)
    rows = max(1, _PIECE // (torch.Size(shape[1:]).numel() * source.dtype.itemsize))
    for lo in range(0, shape[0], rows):
        hi = min(lo + rows, shape[0])
        out = host_empty((hi - lo, *shape[1:]), dtype)
        _fill_tensor(reader, source, ((box[0][0] + lo, box[0][0] + hi), *box[1:]), out)
        writer.write(lo, out).result()
    return writer.finish()
