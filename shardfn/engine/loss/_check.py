"""Checks of the arguments of a step, made before anything is sent, and errors about batches of which ranks differ."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from shardfn.collectives import Agreed, AnyControl, Constant, chosen_channel
from shardfn.core import (
    HOUSE_AXES,
    Draw,
    Mesh,
    P,
    PyTree,
    RankError,
    Sharding,
    Zero,
    a_kind,
    broadcast_prefix,
    did_you_mean,
    draw_block,
    find_directory_problem,
    first_of,
    named_leaves,
    raise_all,
    tree_leaves,
    tree_paths,
)

_SHOWN = 20
_INDICES = re.compile(r"(\[\d+\])+$")


def no_tensors(tree: PyTree, name: str) -> list[str]:
    """Returns a line for each leaf of a tree, called `name`, that is not a tensor, with the remedy.

    Lists are trees here. For a list of numbers, at any depth, there is a single line, with the first number.

    Example:
        >>> no_tensors({"x": [[1, 2], [3, 4]]}, "batch")
        ["batch['x'] is a list of numbers (batch['x'][0][0] is an int). Write torch.tensor(batch['x'])"]
    """
    if _are_named(tree):
        return [f"{name} is a {type(tree).__name__} of pairs of a name and a tensor. Write dict({name})"]
    told: dict[str, str] = {}
    named = named_leaves(tree, name)
    mixed = {_INDICES.sub("", path) for path, x in named if not isinstance(x, int | float)}
    for path, x in named:
        if isinstance(x, Tensor):
            continue
        of = _INDICES.sub("", path)
        if isinstance(x, int | float) and of != path and of not in mixed:
            told.setdefault(of, f"{of} is a list of numbers ({path} is {a_kind(x)}). Write torch.tensor({of})")
        else:
            told[path] = f"{path} is {a_kind(x)}{_leaf_remedy(path, x)}"
    return first_of(list(told.values()), _SHOWN)


def _are_named(tree: PyTree) -> bool:
    """Returns whether a tree is the list that a module's `named_parameters()` yields."""
    pairs = isinstance(tree, list | tuple) and bool(tree) and all(isinstance(x, tuple) and len(x) == 2 for x in tree)
    return pairs and all(isinstance(k, str) and isinstance(x, Tensor) for k, x in tree)


def _leaf_remedy(path: str, x: Any) -> str:
    if isinstance(x, numpy.ndarray | numpy.generic):
        make = f"torch.from_numpy({path})" if isinstance(x, numpy.ndarray) else f"torch.tensor({path})"
        return f". Write {make}"
    if isinstance(x, bool | int | float | complex):
        return f". Write torch.tensor({x!r})"
    if isinstance(x, str | bytes):
        return ", which no rank can compute with. Leave it out"
    if isinstance(x, nn.Module):
        return ". For a module write params, apply = sf.from_module(module)"
    if isinstance(x, Mapping):
        return f", a mapping that is not a dict. Write dict({path})"
    if callable(x):
        return ". Unpack the result of from_module: params, apply = sf.from_module(module)"
    if hasattr(x, "__iter__"):
        if path == "batch":
            return ", which is not one batch but an iterable: pass its items, for batch in ...: step(state, batch)"
        return ". For a module write params, apply = sf.from_module(module)"
    return ""


_LEAF = re.compile(r"(batch.*): (torch\.\w+) (\[.*\])")


def remedy_of_absent(texts: list[str]) -> str:
    """Returns the remedy for leaves of a batch that only some ranks have, empty without such leaves."""
    found = [{m[1]: m for line in text.splitlines() if (m := _LEAF.fullmatch(line))} for text in texts]
    if not all(found):  # a rank without a batch is at another call
        return ""
    lines = []
    for path in dict.fromkeys(path for leaves in found for path in leaves):
        without = [rank for rank, leaves in enumerate(found) if path not in leaves]
        if without:
            _, dtype, dims = next(leaves[path] for leaves in found if path in leaves).groups()
            sizes = ", ".join(n.strip("' ").replace("*", "0") for n in dims[1:-1].split(",")) + "," * ("," not in dims)
            lines.append(
                f"\n{path} is missing on ranks {without}. A batch has the same leaves on all ranks. A rank without rows"
                f" of one passes an empty tensor: torch.zeros(({sizes}), dtype={dtype})."
            )
    return "".join(first_of(lines, 3))


class UnequalBatchesError(ValueError):
    """Error of batches of different sizes on ranks with a loss that is a plain mean."""


@contextlib.contextmanager
def naming_unequal(batch: PyTree, specs: PyTree, mesh: Mesh, sizes: Sequence[Sequence[int]]) -> Iterator[None]:
    """Names, in a step's error, the leaves of a batch by which ranks differ, if the loss cannot take such batches.

    Args:
        batch: this rank's rows.
        specs: cut of the global batch.
        mesh: the mesh.
        sizes: sizes by rank, from `describe_batch`, empty if equal.
    """
    try:
        yield
    except UnequalBatchesError as error:
        cuts = broadcast_prefix(specs, batch, lambda x: isinstance(x, P), names=("batch spec", "batch"))
        named = zip(tree_paths(batch, "batch"), tree_leaves(batch), cuts, strict=True)
        dims = [(path, d) for path, x, spec in named for d in range(x.ndim) if mesh.axes(spec.dim_axes(d))]
        lines = [
            f"{path}: dim {d} is {', '.join(f'{n} on rank {rank}' for rank, n in enumerate(by_rank))}"
            for (path, d), by_rank in zip(dims, zip(*sizes, strict=True), strict=True)
            if len(set(by_rank)) > 1
        ]
        raise_all(ValueError, f"{error} They differ in:", lines)
        raise


def is_spec(x: Any) -> bool:
    """Returns whether `x` is a leaf of a tree of specs."""
    return isinstance(x, P | Sharding)


def _is_entry(x: Any) -> bool:
    """Returns whether `x` is a spec, or a bare sequence of axis names that is meant as a spec."""
    bare = type(x) in (tuple, list) and all(e is None or isinstance(e, str) for e in x)
    return is_spec(x) or (bare and any(x))


def _spec_remedy(x: Any) -> str:
    """Returns the remedy for a value that is not a spec: the spec to write instead."""
    if type(x).__name__ in ("Shard", "Replicate", "Partial"):
        return "A P has an entry for each dim, the mesh axis that cuts it: Shard(0) on the axis 'dp' is P('dp')."
    return f"Did you mean P({', '.join(map(repr, x)) if isinstance(x, tuple | list) else repr(x)})?"


def check_specs(specs: PyTree, batch: PyTree, zero: Zero, mesh: Mesh) -> None:
    """Refuses axes that are not in the mesh, and leaves that are not specs.

    Raises:
        ValueError: lists every entry.
    """
    problems = []
    for name, tree in (("specs", specs), ("batch", batch)):
        paths = tree_paths(tree, name, is_leaf=_is_entry)
        for path, spec in zip(paths, tree_leaves(tree, is_leaf=_is_entry), strict=True):
            if not is_spec(spec):
                problems.append(f"{path} is {spec!r}, not a P. {_spec_remedy(spec)}")
                continue
            if isinstance(spec, Sharding) and name == "batch":
                problems.append(f"{path} is {spec!r}. A batch is given whole, so write {spec.spec!r}.")
            if isinstance(spec, Sharding) and find_directory_problem([spec.memory_kind], zero.disk) == "missing":
                problems.append(
                    f"{path} is to be kept on disk. Name the directory: Zero(disk=Disk('/path/to/a/fast/disk'))."
                )
            spec = spec.spec if isinstance(spec, Sharding) else spec
            problems += [
                f"{path} = {spec!r}: {_unknown_axis(a, mesh)}" for a in spec.axes if not _is_known_axis(a, mesh)
            ]
    axes = (zero.axis,) if isinstance(zero.axis, str) else zero.axis
    problems += [f"Zero(axis={zero.axis!r}): {_unknown_axis(a, mesh)}" for a in axes if not _is_known_axis(a, mesh)]
    if zero.stage and mesh.size > 1 and not any(a in mesh.shape for a in axes):
        problems.append(
            f"Zero(stage={zero.stage}, axis={zero.axis!r}) has no effect: the mesh has axes {mesh.axis_names}; "
            + _axis_for_zero(specs, mesh)
        )
    near = f"Travel(secondary_axis={zero.travel.secondary_axis!r})"
    problems += [f"{near}: {_unknown_axis(a, mesh)}" for a in zero.near if not _is_known_axis(a, mesh)]
    if zero.near and mesh.size > 1 and not 1 < mesh.axis_size(zero.near) < mesh.axis_size(zero.axis):
        problems.append(
            f"Zero(axis={zero.axis!r}, travel=Travel(secondary_axis={zero.travel.secondary_axis!r})) has no effect: the"
            f" mesh is {mesh.shape}; both the secondary axis and the others must have more than one rank."
        )
    raise_all(ValueError, "the specs do not fit the mesh:", problems)


def check_cuts(batch: PyTree, zero: Zero) -> None:
    """Refuses a batch that canonical sums cannot cut in chunks of rows.

    Raises:
        ValueError: lists every entry.
    """
    if not zero.is_canonical:
        return
    named = named_leaves(batch, "batch", is_leaf=is_spec)
    raise_all(
        ValueError,
        "Zero(reduction='canonical') cuts the batch in chunks of rows, so along dim 0 alone:",
        [f"{path} = {spec!r}" for path, spec in named if len(spec) > 1],
    )
    cuts = {spec.dim_axes(0) for _, spec in named} - {()}
    raise_all(
        ValueError,
        "Zero(reduction='canonical') cuts rows in chunks, so at least one leaf is cut (on one device, too, P('dp')"
        " marks the leaves with rows), and all of these are cut along the same axes:",
        [f"{path} = {spec!r}" for path, spec in named if len(cuts) != 1],
    )


def _axis_for_zero(specs: PyTree, mesh: Mesh) -> str:
    """Returns the remedy if ZeRO's axis is not in the mesh: the largest axis that no leaf's spec names, if any."""
    leaves = [s.spec if isinstance(s, Sharding) else s for s in tree_leaves(specs, is_leaf=is_spec) if is_spec(s)]
    free = {a: num for a, num in mesh.shape.items() if not any(a in spec.axes for spec in leaves)}
    if not free:
        return "all of them are in specs of leaves. Leave out zero=, or give the mesh an axis of data, such as 'dp'."
    return f"pass Zero(axis={max(free, key=lambda a: free[a])!r}), say."


def check_travel(leaves: Sequence[Any], zero: Zero, mesh: Mesh) -> None:
    """Refuses options of travel or pace that apply to no leaf, unless there is only one rank.

    Raises:
        ValueError: names each such option.
    """
    if mesh.axis_size(zero.axis) == 1:
        return
    large = f"more than persist_elements={zero.persist_elements} elements"
    kept = f"is sharded along {zero.axis!r}: none has {large} and can be cut"
    used = {
        "gather": (any(leaf.ways.use.quantization for leaf in leaves), f"no leaf of floats {kept}"),
        "secondary_axis": (any(leaf.manner.far for leaf in leaves), f"no leaf {kept} along both these axes and others"),
        "reduce": (
            any(leaf.trainable and leaf.ways.reduce.quantization for leaf in leaves),
            f"no trainable leaf of {large} has its gradient cut along {zero.axis!r}",
        ),
    }
    raise_all(
        ValueError,
        "options of Zero(travel=Travel(...)) have no effect:",
        [
            f"{name}={getattr(zero.travel, name)!r}: {why}. Lower persist_elements, or leave it out"
            for name, (some, why) in used.items()
            if getattr(zero.travel, name) is not None and not some
        ],
    )


def check_params(params: PyTree) -> None:
    """Refuses leaves that are not tensors.

    Raises:
        TypeError: lists every such leaf.
    """
    raise_all(TypeError, "params must be a tree of tensors:", no_tensors(params, "params"))


def default_batch(specs: PyTree, mesh: Mesh) -> P:
    """Returns the default spec of a batch: along "dp", and along all axes that no spec uses.

    Example:
        >>> default_batch(P(None, "tp"), Mesh({"data": 2, "tp": 2}, torch.device("cpu")))
        P('data')
    """
    trees = [s.spec if isinstance(s, Sharding) else s for s in tree_leaves(specs, is_leaf=is_spec)]
    used = {axis for s in trees if isinstance(s, P) for axis in s.axes} - {"dp"}
    free = tuple(a for a in mesh.axis_names if a not in used)
    return P(free[0] if len(free) == 1 else free or "dp")


def check_same_loss(loss: Tensor, plan: Any, control: AnyControl) -> None:
    """Refuses ranks with different rows along axes that do not cut the batch. Collective.

    Parameters of such ranks would drift, by the gradients of different rows. The losses of the first step are compared
    to three digits, as ranks may round differently.

    Raises:
        RankError: the losses differ. The message lists each rank's loss.
    """
    rows: list[Any] = control.gather(float(loss))
    finite = [x for x in rows if math.isfinite(x)]
    if len(finite) in (0, len(rows)) and max(finite, default=0.0) - min(finite, default=0.0) <= 1e-3 * max(
        map(abs, finite), default=0.0
    ):
        return
    cut = plan.batch_axes
    free = tuple(a for a in plan.mesh.axes(plan.mesh.axis_names) if a not in cut)
    both = tuple(a for a in plan.mesh.axis_names if a in (*cut, *free))
    blocks = tuple(a for a in free if any(a in leaf.compute.axes for leaf in plan.leaves))
    unsummed = (
        f" Specs cut leaves along {blocks}, where the loss sees a block on each rank: it must sum the results of"
        f" blocks, by sf.psum(x, {blocks[0]!r}), or be partitioned, sf.partition(loss, axes={blocks[0]!r})."
        if blocks
        else ""
    )
    raise_all(
        RankError,
        f"ranks that should have one loss have different ones: the batch is cut along {cut or 'no axis'}, so along"
        f" {free} all ranks must pass the same rows. If each has rows of its own, pass"
        f" batch={P(both[0] if len(both) == 1 else both)!r}; if not, check other differences, such as random numbers"
        f" without a key.{unsummed} The losses are:",
        [f"rank {r}: {x:.6g}" for r, x in enumerate(rows)],
    )


@contextlib.contextmanager
def told_before(control: AnyControl) -> Iterator[None]:
    """Sends an error in the preparation of a call to the other ranks, which wait in `agree_on_step`."""
    try:
        yield
    except Exception as error:
        text = f"raised {type(error).__name__}: {error}"
        with contextlib.suppress(RankError):
            agree_on_step(control, text)
        raise


def agree_on_step(
    control: AnyControl,
    what: str,
    batch: tuple[str, tuple[int, ...]] = ("", ()),
    constant: Constant | None = None,
    known: tuple[bool, bool] = (True, True),
) -> Agreed:
    """Compares the ranks' calls before the first transfer.

    Args:
        control: the control plane.
        what: the call, in words.
        batch: the result of `describe_batch`.
        constant: the facts that are the same for all calls.
        known: whether this rank already has the results of a first call. See `Agreed`.

    Returns:
        The agreement: whether all ranks pass batches of the same shapes, and have the results of a first call.

    Raises:
        RankError: ranks differ in the call, the step's number, the batch's structure, or in how the step was built, or
            a rank has already failed.
    """
    control.begin(what)
    lines = filter(None, (f"{what}\n{batch[0]}", chosen_channel()))
    agreed = control.agree("what to run", "\n".join(lines), constant, batch[1], known, remedy_of_absent, begins=True)
    # All ranks have chosen the same channel, as the lines name the channel.
    control.share()
    return agreed


def describe_batch(batch: PyTree, specs: PyTree, mesh: Mesh) -> tuple[str, tuple[int, ...]]:
    """Refuses a batch that the specs cannot describe.

    Returns:
        A text that must be the same on all ranks, and the sizes of the dims that are cut.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: a leaf has fewer dims than its spec, or the trees differ.
    """
    paths, leaves = tree_paths(batch, "batch"), tree_leaves(batch)
    named = list(zip(paths, leaves, strict=True))
    if not all(isinstance(x, Tensor) for x in leaves) or not leaves:
        raise_all(
            TypeError, "the batch must be a tree of tensors:", no_tensors(batch, "batch") or ["it is empty: no leaf"]
        )
    cuts = broadcast_prefix(specs, batch, is_spec, names=("batch spec", "batch"))
    raise_all(
        ValueError,
        "the batch does not fit its specs:",
        [
            f"{p} of shape {tuple(x.shape)} has spec {c!r}; {_describe_short(x)}"
            for (p, x), c in zip(named, cuts, strict=True)
            if len(c) > x.ndim
        ],
    )
    fixed, sizes = [], []
    for (path, x), spec in zip(named, cuts, strict=True):
        cut = [d for d in range(x.ndim) if mesh.axes(spec.dim_axes(d))]
        sizes += [x.shape[d] for d in cut]
        fixed.append(f"{path}: {x.dtype} {['*' if d in cut else n for d, n in enumerate(x.shape)]}")
    return "\n".join(fixed), tuple(sizes)


def _describe_short(x: Tensor) -> str:
    what = "one value for all rows" if x.ndim == 0 else "one that is not cut"
    return f"of {what} write sf.P() in sharded_step(batch={{...}}), a tree with a spec for each leaf"


def corner(x: Draw) -> Tensor:
    """Returns the first elements along each dim of a leaf that is not yet drawn."""
    return draw_block(x, tuple(slice(0, min(4, n)) for n in x.shape))


def checksum(x: Tensor) -> int:
    """Returns a sum over the bits of a tensor, or of the corner of an undrawn leaf, equal for equal bits."""
    if isinstance(x, Draw):
        x = corner(x)
    data = x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    total = 0
    for chunk in data.split(1 << 20):
        words = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8)).view(torch.int64)
        total += int((words * (2 * torch.arange(words.numel(), device=words.device) + 1)).sum())
    return total % (1 << 62)


def _is_known_axis(axis: str, mesh: Mesh) -> bool:
    return axis in mesh.shape or axis in HOUSE_AXES


def _unknown_axis(axis: str, mesh: Mesh) -> str:
    return f"axis {axis!r} is not in the mesh, which has {mesh.axis_names}.{did_you_mean(axis, mesh.axis_names)}"
