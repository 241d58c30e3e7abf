"""Finds the leaves of a checkpoint to read: by path, or layer by layer where one side is stacked.

the tree has                          the checkpoint has
params['blocks']['w']    [L, a, b]    params['blocks'][0]['w'], ... of shape [a, b]: a pile of them
params['blocks'][3]['w'] [a, b]       params['blocks']['w'] of shape [L, a, b]: row 3
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from shardfn.collectives import Box
from shardfn.core import did_you_mean, explains_fields
from shardfn.memory import Pool

from ._manifest import Manifest, StoredLeaf
from ._read import BoxReader, dtype_of

# From the path of a leaf in the tree to the path in the checkpoint. None: the leaf keeps its value.
Rename = Callable[[str], str | None]
_INDEX = re.compile(r"\[(\d+)\]", re.ASCII)


class ReadKeywords(TypedDict, total=False):
    """Options for filling a tree from a checkpoint. `restore` documents each option.

    Attributes:
        at: a prefix of the tree's paths.
        rename: function from a path of the tree to the name in the source. None: the leaf keeps its value.
        keep: prefixes of paths. Leaves there keep their values.
        partial: whether leaves that only one side has are ignored.
        cast: whether values may be rounded to a leaf's dtype.
        donate: whether the memory of the tree is reused. The tree cannot be used afterwards.
        pool: pool for leaves on disk of an abstract tree.
    """

    at: str
    rename: "Rename | ByKind | None"
    keep: str | Sequence[str]
    partial: bool
    cast: bool
    donate: bool
    pool: Pool | None


class ByKind(NamedTuple):
    """Finds the states of an optimizer by their fields, at any place in the chain: `restore(..., rename=ByKind())`.

    For example, the moments `count, mu, nu` of Adam are found when the new optimizer has a clip in front of Adam, or a
    wrapper around Adam. States that the checkpoint lacks are initialized. States that the new optimizer lacks are left
    out. Both are logged.

    Attributes:
        otherwise: function from a path of the tree to the path in the checkpoint, for all other leaves. Default: the
            same path.
    """

    otherwise: Rename | None = None


@explains_fields(by_kind="rename=checkpoint.ByKind()")
class ReadOptions(NamedTuple):
    """The options of `ReadKeywords`, with their defaults."""

    at: str = ""
    rename: Rename | ByKind | None = None
    keep: str | Sequence[str] = ()
    partial: bool = False
    cast: bool = False
    donate: bool = True
    pool: Pool | None = None

    @property
    def kept(self) -> tuple[str, ...]:
        """Returns the prefixes of `keep`."""
        return (self.keep,) if isinstance(self.keep, str) else (*self.keep,)


class Recuts(Protocol):
    """Leaves that are converted when they are read, instead of matched here."""

    @property
    def at(self) -> frozenset[int]:
        """Returns the numbers of the leaves in the tree."""
        ...

    @property
    def paths(self) -> frozenset[str]:
        """Returns the paths of the source leaves in the checkpoint."""
        ...


class Kinds(Protocol):
    """States of an optimizer that are paired by their fields: `KindMatch`."""

    @property
    def keeps_some(self) -> bool:
        """Returns whether a state is continued, and the match is unambiguous."""
        ...

    def text(self) -> str:
        """Returns a text with the states that are continued, initialized and left out."""
        ...


class Target(NamedTuple):
    """Leaf of the tree: path entry by entry, shape and dtype."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def path(self) -> str:
        """Returns the path as errors show it."""
        return "".join(self.parts).removeprefix(".")


class Source(NamedTuple):
    """Source of a leaf in a checkpoint.

    Attributes:
        paths: paths of leaves of the checkpoint.
        leaves: leaves at the paths. Several leaves are layers of a stack.
        row: row of dim 0, if the leaf is a layer of a stacked leaf. None: the whole leaf.
        piled: whether the leaves are stacked along dim 0.
    """

    paths: tuple[str, ...]
    leaves: tuple[StoredLeaf, ...]
    row: int | None = None
    piled: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the leaf."""
        one = self.leaves[0].shape
        return (len(self.leaves), *one) if self.piled else one if self.row is None else one[1:]

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype in the checkpoint."""
        return dtype_of(self.leaves[0])

    def read(self, reader: BoxReader, box: Box, out: Tensor, *, check: bool = True) -> None:
        """Fills `out`, a host tensor, with a box of the leaf."""
        if self.piled:
            (first, last), rest = box[0], box[1:]
            for i in range(first, last):
                reader.box(self.leaves[i], rest, out[i - first], check=check)
        elif self.row is not None:
            reader.box(self.leaves[0], ((self.row, self.row + 1), *box), out.unsqueeze(0), check=check)
        else:
            reader.box(self.leaves[0], box, out, check=check)


def match_leaves(
    targets: Sequence[Target],
    manifest: Manifest,
    rename: Rename | None,
    options: ReadOptions,
    recuts: Recuts,
    left: Sequence[str] = (),
) -> tuple[list[Source | None], list[str]]:
    """Returns the source of each leaf of the tree, None for leaves that keep their values, and the problems found.

    Args:
        targets: the leaves of the tree.
        manifest: manifest of the checkpoint.
        rename: function from paths of the tree to paths of the checkpoint.
        options: other options for reading.
        recuts: leaves to skip, because other code converts them.
        left: leaves of the checkpoint that are left out.
    """
    keep = options.kept
    problems = [
        f"keep={k!r} begins no path of the tree" for k in keep if not any(t.path.startswith(k) for t in targets)
    ]
    sources = [None if i in recuts.at else source_of(t, manifest, rename) for i, t in enumerate(targets)]
    used = recuts.paths.union(path for x in sources if isinstance(x, Source) for path in x.paths)
    free = [p for p in manifest.leaves if p not in used and p not in left]
    out: list[Source | None] = []
    for target, found in zip(targets, sources, strict=True):
        out.append(None if isinstance(found, str) else found)
        if isinstance(found, str):
            if not options.partial:
                problems.append(f"{target.path} is not in the checkpoint, as {found}.{did_you_mean(found, free)}")
        elif found is not None:
            problems += _find_mismatch(target, found, options.cast)
    extra = [p for p in free if p.startswith(options.at) and not p.startswith(keep)]
    if not options.partial:
        problems += _layers_left(sources)
        problems += [f"{p} of the checkpoint has no place in the tree" for p in extra]
    return out, problems


def remedy(
    targets: Sequence[Target],
    sources: Sequence[Source | None],
    manifest: Manifest,
    at: str,
    recuts: Recuts,
    kinds: Kinds,
) -> str:
    """Returns the arguments of `restore` that would read a checkpoint with other leaves than the tree.

    Args:
        targets: the leaves of the tree.
        sources: sources as `match_leaves` found them.
        manifest: manifest of the checkpoint.
        at: the prefix of the tree's paths.
        recuts: leaves to skip, because other code converts them.
        kinds: the states of the optimizer, paired by their fields.
    """
    used = recuts.paths.union(path for x in sources if x is not None for path in x.paths)
    extra = [p for p in manifest.leaves if p not in used and p.startswith(at)]
    pairs = zip(targets, sources, strict=True)
    missing = [t.path for i, (t, x) in enumerate(pairs) if x is None and i not in recuts.at]
    moved = _find_prefixes(missing, set(extra))
    if moved is not None and len(missing) == len(extra):
        old, new = moved
        return (
            " The checkpoint has the missing leaves under another path. Pass"
            f" rename=lambda path: path.replace({old!r}, {new!r}, 1)."
        )
    if not missing and not extra:
        return ""
    if all(path.startswith("opt_state") for path in [*missing, *extra]):
        by_kind = f" rename=checkpoint.ByKind() reads the states that both sides have: {kinds.text()}."
        other = "keep='opt_state' keeps" if missing else "partial=True ignores the checkpoint's states, and keeps"
        return (
            f" Only states of the optimizer differ.{by_kind if kinds.keeps_some else ''} {other} the new states of the"
            " tree, and reads all other leaves. To continue with the checkpoint's optimizer, pass a state of a step"
            " with that optimizer."
        )
    return (
        " If leaves have another path in the checkpoint, pass rename=, a function from a path of the tree to a path of"
        " the checkpoint. partial=True ignores leaves that only one side has, and such leaves of the tree keep their"
        " values."
    )


def _find_prefixes(missing: Sequence[str], extra: set[str]) -> tuple[str, str] | None:
    """Returns the beginnings of paths, here and in the checkpoint, by which all missing leaves are found.

    None if none are.
    """
    for other in sorted(extra) if missing else ():
        pairs = zip(reversed(missing[0]), reversed(other), strict=False)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        old, new = missing[0][: len(missing[0]) - same], other[: len(other) - same]
        if old and all(p.startswith(old) and new + p.removeprefix(old) in extra for p in missing):
            return old, new
    return None


def is_lossless(src: torch.dtype, dst: torch.dtype) -> bool:
    """Returns whether a dtype represents every value of another dtype of the same sort.

    Example:
        >>> pairs = (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.int32, torch.float64)
        >>> [is_lossless(*pair) for pair in pairs]
        [True, False, False]
    """
    sort = [(d.is_floating_point, d.is_complex, d == torch.bool) for d in (src, dst)]
    if src == dst or sort[0] != sort[1]:
        return src == dst
    try:
        return torch.promote_types(src, dst) == dst
    except RuntimeError:  # torch has no common type for 8-bit floats
        return src.itemsize == 1 and dst in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def source_of(target: Target, manifest: Manifest, rename: Rename | None) -> Source | str | None:
    """Returns the source of a leaf, or None if `rename` leaves it out, or the path that the checkpoint lacks."""
    path = find_path(target.parts, rename)
    if path is None:
        return None
    if path in manifest.leaves:
        return Source((path,), (manifest.leaves[path],))
    for row, layer in _stack_candidates(target.parts):
        found = find_path(layer, rename)
        leaf = None if found is None else manifest.leaves.get(found)
        if found is not None and leaf is not None and leaf.shape[1:] == target.shape and row < (*leaf.shape, 0)[0]:
            return Source((found,), (leaf,), row=row)
    for k in range(len(target.parts), 0, -1):
        found = _find_layers(target, k, manifest, rename)
        if found is not None:
            return found
    return path


def find_path(parts: Sequence[str], rename: Rename | None) -> str | None:
    """Returns the path in the checkpoint of a leaf of the tree, or None if `rename` leaves it out."""
    path = "".join(parts).removeprefix(".")
    return path if rename is None else rename(path)


def _stack_candidates(parts: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields the possible stacks of a layer: the index of the layer, and the path of the stack."""
    for k, part in enumerate(parts):
        if index := _INDEX.fullmatch(part):
            yield int(index[1]), (*parts[:k], *parts[k + 1 :])


def _find_layers(target: Target, k: int, manifest: Manifest, rename: Rename | None) -> Source | None:
    """Returns the layers of a stack, if the checkpoint has exactly these layers, with an index before entry `k`."""
    if not target.shape:
        return None
    paths = []
    for i in range(target.shape[0] + 1):
        path = find_path((*target.parts[:k], f"[{i}]", *target.parts[k:]), rename)
        if path is None or path not in manifest.leaves:
            break
        paths.append(path)
    leaves = tuple(manifest.leaves[p] for p in paths)
    alike = len({(x.shape, x.dtype) for x in leaves}) == 1 and leaves[0].shape == target.shape[1:]
    return Source(tuple(paths), leaves, piled=True) if alike and len(paths) == target.shape[0] else None


def _layers_left(sources: Sequence[Source | str | None]) -> list[str]:
    """Returns the stacks of the checkpoint with layers that the tree lacks."""
    rows: dict[tuple[str, int], set[int]] = {}
    for x in sources:
        if isinstance(x, Source) and x.row is not None:
            rows.setdefault((x.paths[0], x.leaves[0].shape[0]), set()).add(x.row)
    return [
        f"{path} of the checkpoint has {num} layers, and {len(own)} have a place in the tree"
        for (path, num), own in rows.items()
        if len(own) < num
    ]


def _find_mismatch(target: Target, found: Source, cast: bool) -> list[str]:
    if found.shape != target.shape:
        return [f"{target.path} is {target.shape} here, but {found.shape} in the checkpoint ({found.paths[0]})"]
    if not cast and not is_lossless(found.dtype, target.dtype):
        return [
            f"{target.path} is {target.dtype} here, but {found.dtype} in the checkpoint, whose values it would round;"
            " pass cast=True to have that"
        ]
    return []
