"""Inspects checkpoints: verifies digests, lists leaves, reads single leaves, and compares two checkpoints."""

import hashlib
import math
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from shardfn.collectives import pieces
from shardfn.memory import DamagedError, host_empty

from ._located import find_checkpoint
from ._manifest import Manifest, StoredLeaf, nbytes
from ._place import read_manifest
from ._read import ChunkReader, dtype_of

_PIECE = 8 << 20


class Verified(NamedTuple):
    """Result of `verify`: the numbers of intact files and bytes."""

    step: int
    files: int
    bytes: int


class Difference(NamedTuple):
    """A leaf in which two checkpoints differ.

    Attributes:
        path: path of the leaf.
        what: description of the difference, such as "3 of 64 elements differ".
        largest: the largest difference of an element, or None if elements are not comparable.
    """

    path: str
    what: str
    largest: float | None = None


def verify(directory: str | os.PathLike[str], step: int | None = None) -> Verified:
    """Reads a checkpoint from the first byte to the last, and compares all bytes with the digests.

    Args:
        directory: directory of a run's checkpoints, or of a single checkpoint.
        step: step of the checkpoint. Default: the newest step.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        DamagedError: some parts have changed or are missing. The message lists all such parts.

    Example:
        >>> import tempfile, torch
        >>> from shardfn.checkpoint import save
        >>> directory = tempfile.mkdtemp()
        >>> _ = save(directory, {"w": torch.ones(3)}, step=7)
        >>> verify(directory).step
        7
    """
    place = find_checkpoint(directory, step)
    manifest = read_manifest(place)
    problems: list[str] = []
    with ChunkReader(place, manifest) as reader:
        for name, file in manifest.files.items():
            try:
                head = _chunk_digest(reader, name, 0, file.header)
            except DamagedError as problem:
                problems.append(str(problem))
                continue
            if head != file.sha256:
                problems.append(f"{place}/{name}: its header has changed")
            problems += _changed_chunks(reader, manifest, name)
    if problems:
        lines = "\n".join(f"  - {p}" for p in problems)
        raise DamagedError(f"{place} differs from the data that was written. Use another checkpoint:\n{lines}")
    return Verified(manifest.step, len(manifest.files), sum(f.bytes for f in manifest.files.values()))


def inspect(directory: str | os.PathLike[str], step: int | None = None) -> str:
    """Describes the contents of a checkpoint as text: a line a leaf.

    Args:
        directory: directory of a run's checkpoints, or of a single checkpoint.
        step: step of the checkpoint. Default: the newest step.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        DamagedError: the manifest has changed since the save.

    Example:
        >>> import tempfile, torch
        >>> from shardfn.checkpoint import save
        >>> directory = tempfile.mkdtemp()
        >>> _ = save(directory, {"w": torch.ones(3, 2)}, step=7)
        >>> print(inspect(directory).splitlines()[-1])
        ['w']  (3, 2)  float32  24  1 chunk
    """
    place = find_checkpoint(directory, step)
    manifest = read_manifest(place)
    total = sum(nbytes(x.shape, x.itemsize) for x in manifest.leaves.values())
    mesh = ", ".join(f"{axis} {size}" for axis, size in manifest.mesh.items()) or "one device"
    lines = [
        f"{place}: step {manifest.step}, saved on a mesh of {mesh}",
        f"{_count_words(manifest.leaves, 'leaf', 'leaves')} of {total:,} bytes,"
        f" in {_count_words(manifest.files, 'file', 'files')}",
        f"user: {manifest.user!r}",
        *([f"metrics: {dict(manifest.metrics)!r}"] if manifest.metrics else []),
    ]
    for path, x in manifest.leaves.items():
        spec = "" if not any(x.spec) else f"  cut by {', '.join('*'.join(axes) or '-' for axes in x.spec)}"
        size, count = nbytes(x.shape, x.itemsize), len(x.chunks)
        lines.append(f"{path}  {x.shape}  {x.dtype}  {size:,}  {count} chunk{'s' * (count != 1)}{spec}")
    return "\n".join(lines)


def stored(directory: str | os.PathLike[str], step: int | None = None) -> dict[str, torch.Tensor]:
    """Returns the leaves of a checkpoint by path, without values: tensors on "meta".

    Args:
        directory: directory of a run's checkpoints, or of a single checkpoint.
        step: step of the checkpoint. Default: the newest step.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        DamagedError: the manifest has changed since the save.

    Example:
        >>> import tempfile, torch
        >>> from shardfn.checkpoint import save
        >>> directory = tempfile.mkdtemp()
        >>> _ = save(directory, {"w": torch.ones(3, 2)}, step=7)
        >>> {path: tuple(x.shape) for path, x in stored(directory).items()}
        {"['w']": (3, 2)}
    """
    leaves = read_manifest(find_checkpoint(directory, step)).leaves
    return {path: torch.empty(x.shape, dtype=dtype_of(x), device="meta") for path, x in leaves.items()}


def read_leaves(
    directory: str | os.PathLike[str], paths: Iterable[str], step: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Reads whole leaves of a checkpoint, one after another, on one device. The digests are checked.

    Args:
        directory: directory of a run's checkpoints, or of a single checkpoint.
        paths: paths of the leaves, as keys of `stored`.
        step: step of the checkpoint. Default: the newest step.

    Yields:
        Each path and the leaf, on the host, of the shape and dtype that were saved.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        KeyError: the checkpoint has no such leaf.
        DamagedError: files have changed since the save.

    Example:
        >>> import tempfile, torch
        >>> from shardfn.checkpoint import save
        >>> directory = tempfile.mkdtemp()
        >>> _ = save(directory, {"w": torch.ones(2), "b": torch.zeros(9)}, step=7)
        >>> dict(read_leaves(directory, ["['w']"]))
        {"['w']": tensor([1., 1.])}
    """
    place = find_checkpoint(directory, step)
    manifest = read_manifest(place)
    with ChunkReader(place, manifest) as reader:
        for path in paths:
            leaf = manifest.leaves[path]
            out = host_empty(leaf.shape, dtype_of(leaf))
            reader.box(leaf, tuple((0, n) for n in leaf.shape), out)
            yield path, out


def diff(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    steps: tuple[int | None, int | None] = (None, None),
) -> list[Difference]:
    """Returns the leaves in which two checkpoints differ, bit by bit, for any two specs.

    Args:
        first: directory of a run's checkpoints, or of a single checkpoint.
        second: directory to compare with the first.
        steps: steps of the two checkpoints. Default: the newest steps.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        DamagedError: files have changed since the save.

    Example:
        >>> import tempfile, torch
        >>> from shardfn.checkpoint import save
        >>> directory = tempfile.mkdtemp()
        >>> for step in (1, 2):
        ...     _ = save(directory, {"w": torch.ones(3), "n": torch.tensor(step)}, step)
        >>> diff(directory, directory, steps=(1, 2))
        [Difference(path="['n']", what='1 of 1 elements differ', largest=1.0)]
    """
    places = find_checkpoint(first, steps[0]), find_checkpoint(second, steps[1])
    a, b = (read_manifest(p) for p in places)
    out: list[Difference] = []
    with ChunkReader(places[0], a) as one, ChunkReader(places[1], b) as other:
        for path in sorted({*a.leaves, *b.leaves}):
            x, y = a.leaves.get(path), b.leaves.get(path)
            if x is None or y is None:
                out.append(Difference(path, f"only the {'second' if x is None else 'first'} has it"))
            elif (x.shape, x.dtype) != (y.shape, y.dtype):
                out.append(Difference(path, f"{x.shape} {x.dtype} became {y.shape} {y.dtype}"))
            elif [c._replace(file="", start=0) for c in x.chunks] != [c._replace(file="", start=0) for c in y.chunks]:
                out += _compare_values(path, (one, x), (other, y))
    return out


def _count_words(values: Collection[Any], one: str, many: str) -> str:
    return f"{len(values)} {one if len(values) == 1 else many}"


def _compare_values(
    path: str, first: tuple[ChunkReader, StoredLeaf], second: tuple[ChunkReader, StoredLeaf]
) -> list[Difference]:
    leaf = first[1]
    differing, largest = 0, 0.0
    for box in pieces(tuple((0, n) for n in leaf.shape), max(1, _PIECE // leaf.itemsize)):
        shape = tuple(hi - lo for lo, hi in box)
        x, y = (host_empty(shape, dtype_of(leaf)) for _ in range(2))
        first[0].box(first[1], box, x)
        second[0].box(second[1], box, y)
        bits = (t.reshape(-1, 1).view(torch.uint8) for t in (x, y))
        unequal = torch.ne(*bits).any(1)
        differing += int(unequal.sum())
        if unequal.any():
            off = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (x, y)]
            apart = (off[0] - off[1]).abs().nan_to_num(math.inf)
            largest = max(largest, float(apart.max()))
    total = math.prod(leaf.shape)
    return [Difference(path, f"{differing} of {total} elements differ", largest)] if differing else []


def _changed_chunks(reader: ChunkReader, manifest: Manifest, name: str) -> list[str]:
    """Returns the parts of a file that have changed, each once. A part of tied leaves has the first leaf's name."""
    out: dict[int, str] = {}
    seen: set[tuple[int, int, str]] = set()
    for path, leaf in manifest.leaves.items():
        for chunk in leaf.chunks:
            size = nbytes(chunk.shape, leaf.itemsize)
            if chunk.file != name or (chunk.start, size, chunk.sha256) in seen:
                continue
            seen.add((chunk.start, size, chunk.sha256))
            if _chunk_digest(reader, name, chunk.start, size) != chunk.sha256:
                end = chunk.start + size
                out[chunk.start] = f"{reader.place}/{name}: bytes {chunk.start} to {end}, of {path}, have changed"
    return list(out.values())


def _chunk_digest(reader: ChunkReader, name: str, start: int, size: int) -> str:
    digest = hashlib.sha256()
    buffer = host_empty((min(size, _PIECE),), torch.uint8).numpy()
    for lo in range(0, size, _PIECE):
        part = buffer[: min(_PIECE, size - lo)]
        reader.into(name, start + lo, part)
        digest.update(part.data)
    return digest.hexdigest()
