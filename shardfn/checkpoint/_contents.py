"""The contents of a checkpoint: a tree's leaves by path, with this rank's blocks, and the files of each rank.

Divides the writing among ranks: each element is written once, and ranks write about equally much.

The division is a function of only shapes, specs and the mesh, so all ranks compute the division without communication.

Leaves in codes, in a checkpoint: the bytes of their codes, so that a restored leaf has the same codes.

A leaf [..., K] is stored as uint8 [..., bytes of a row's blocks], cut along the same dims.
"""

import collections
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import collectives, core
from shardfn.core import Mesh, P
from shardfn.kernels import block_bytes
from shardfn.memory import Bytes, as_bytes
from shardfn.optim import check_in_round
from shardfn.state import codes_of, with_codes

from ._manifest import DTYPES, File, Manifest, StoredChunk, StoredLeaf
from ._safetensors import safetensors_header

# From this size on, replicated blocks are split among the holding ranks. Smaller blocks are not split.
_CUT_BYTES = 1 << 20


class Owned(NamedTuple):
    """A box of a leaf, and the rank of the mesh that writes it."""

    leaf: int
    box: collectives.Box
    owner: int


def owned(leaves: Sequence[tuple[tuple[int, ...], int, P]], mesh: Mesh) -> list[Owned]:
    """Returns all boxes, in the order of the leaves.

    Args:
        leaves: shape, bytes of an element, and spec of each leaf.
        mesh: mesh of all leaves.

    Example:
        >>> import torch
        >>> mesh = Mesh({"dp": 2}, torch.device("cpu"))
        >>> [(x.box, x.owner) for x in owned([((4,), 4, P("dp")), ((1,), 4, P())], mesh)]
        [(((0, 2),), 0), (((2, 4),), 1), (((0, 1),), 0)]
    """
    found = [_find_holders(shape, spec, mesh) for shape, _, spec in leaves]
    total = sum(math.prod(shape) * itemsize for shape, itemsize, _ in leaves)
    cut = max(_CUT_BYTES, total // (4 * mesh.size))
    load = [0] * mesh.size
    out: list[Owned] = []
    shared: list[tuple[int, int, collectives.Box, list[int]]] = []
    for i, ((_, itemsize, _), holders) in enumerate(zip(leaves, found, strict=True)):
        for box, ranks in holders.items():
            size = _box_numel(box) * itemsize
            if len(ranks) == 1:
                out.append(Owned(i, box, ranks[0]))
                load[ranks[0]] += size
                continue
            most = -(-_box_numel(box) // len(ranks)) if size > cut else _box_numel(box)
            shared += [(_box_numel(b) * itemsize, i, b, ranks) for b in collectives.pieces(box, most)]
    # The largest first, each to the rank with the least load: at most 4/3 of the optimum (Graham 1969).
    for size, i, box, ranks in sorted(shared, key=lambda x: -x[0]):
        owner = min(ranks, key=lambda r: (load[r], r))
        load[owner] += size
        out.append(Owned(i, box, owner))
    return sorted(out)


def _find_holders(shape: tuple[int, ...], spec: P, mesh: Mesh) -> dict[collectives.Box, list[int]]:
    """Returns the blocks that have elements, each with the ranks that hold it."""
    out: dict[collectives.Box, list[int]] = {}
    for rank, box in enumerate(collectives.blocks_of(shape, spec, mesh)):
        if _box_numel(box):
            out.setdefault(box, []).append(rank)
    return out


def _box_numel(box: collectives.Box) -> int:
    return math.prod(hi - lo for lo, hi in box)


def as_codes(x: Any) -> Any:
    """Returns a view of a leaf in codes as a leaf of bytes, and other values unchanged."""
    quantization = x.quantization if isinstance(x, collectives.GlobalTensor) and not x.donated else None
    if not isinstance(quantization, str):
        return x
    shape = torch.Size((*x.shape[:-1], block_bytes(x.shape[-1], quantization)))
    return collectives.GlobalTensor(codes_of(x.held), shape, x.spec, x.mesh, x.memory_kind, x.frozen)


def from_codes(found: Any, like: Any) -> Any:
    """Returns a leaf like another leaf, from the bytes of the codes. Inverts `as_codes`."""
    if not isinstance(like, collectives.GlobalTensor) or like.donated or not isinstance(like.quantization, str):
        return found
    return like.with_block(with_codes(like.held, found.held, like.memory_kind))


# Bytes that are read, hashed and written at a time.
_PIECE = 8 << 20
# Leaves are grouped into files by the first field of the path, for example "params" of `params['w']`.
_GROUP = re.compile(r"[a-z][a-z_]{0,40}")


class Content(NamedTuple):
    """A leaf to be saved.

    Attributes:
        path: path of the leaf, such as "params['w']".
        shape: global shape.
        dtype: dtype of the elements.
        spec: mesh axes that cut each dim.
        held: this rank's block.
        start: index of the block's first element in the leaf, along each dim.
        same_as: number of an earlier leaf that shares the block (tied weights). None: the leaf is not tied.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P
    held: core.StoredValue
    start: tuple[int, ...]
    same_as: int | None


class Part(NamedTuple):
    """A box of a leaf in a file, from a byte on."""

    leaf: int
    box: collectives.Box
    start: int


class FilePlan(NamedTuple):
    """A file to be written."""

    name: str
    header: bytes
    parts: tuple[Part, ...]
    bytes: int


def mesh_of(tree: core.PyTree) -> Mesh:
    """Returns the mesh of a tree's leaves. For plain tensors, a mesh of a single device.

    Raises:
        ValueError: the leaves have several meshes, or none in a program of several ranks.
    """
    meshes = {id(x.mesh): x.mesh for x in core.tree_leaves(tree) if isinstance(x, collectives.GlobalTensor)}
    first = next(iter(meshes.values()), None)
    odd = [repr(m) for m in meshes.values() if first is not None and not m.is_like(first)]
    core.raise_all(
        ValueError, f"leaves are on other meshes than {first!r}; checkpoint the leaves of each by themselves:", odd
    )
    return core.as_mesh(None) if first is None else first


def contents(tree: core.PyTree, at: str, mesh: Mesh) -> list[Content]:
    """Returns the leaves of a tree.

    Raises:
        TypeError: a leaf is not a tensor, or has a dtype that cannot be read back.
        ValueError: some leaves cannot be saved. The message lists all such leaves.
    """
    named = [(path.removeprefix("."), as_codes(x)) for path, x in core.named_leaves(tree, at)]
    odd = [
        f"{p or 'the tree'} is a {type(x).__name__}"
        for p, x in named
        if not isinstance(x, collectives.GlobalTensor | Tensor)
    ]
    core.raise_all(TypeError, "a checkpoint has tensors; pass values that JSON can hold as user=:", odd)
    check_in_round(tree)
    apart = [
        f"{p} is on {x.mesh!r}"
        for p, x in named
        if isinstance(x, collectives.GlobalTensor) and not x.mesh.is_like(mesh)
    ]
    core.raise_all(ValueError, f"leaves are on another mesh than {mesh!r}, which saves them:", apart)
    several = [p for p, count in collections.Counter(p for p, _ in named).items() if count > 1]
    core.raise_all(ValueError, "several leaves have the same path:", several)
    unknown = [f"{p} is {x.dtype}" for p, x in named if DTYPES.get(core.dtype_name(x.dtype)) != x.dtype]
    core.raise_all(TypeError, "a checkpoint cannot have leaves of these dtypes; view them as another one:", unknown)
    stacks = [
        f"{p} has a block for each member" for p, x in named if isinstance(x, collectives.GlobalTensor) and x.stacked
    ]
    core.raise_all(ValueError, "the state of a population is saved member by member, member(state, i):", stacks)
    out: list[Content] = []
    seen: dict[int, int] = {}
    for i, (path, x) in enumerate(named):
        spec, held = (x.spec, x.held) if isinstance(x, collectives.GlobalTensor) else (P(), x)
        box = collectives.blocks_of(tuple(x.shape), spec, mesh)[mesh.rank]
        first = seen.setdefault(id(held), i)
        same = first if first != i and out[first].spec == spec and math.prod(x.shape) else None
        out.append(Content(path, tuple(x.shape), x.dtype, spec, held, tuple(lo for lo, _ in box), same))
    return out


def describe(leaves: Sequence[Content]) -> str:
    """Returns a text that must be equal on all ranks: one line a leaf, with digests of small replicated leaves."""
    lines = []
    for x in leaves:
        small = x.spec == P() and isinstance(x.held, Tensor) and x.held.numel() <= 1024
        value = hashlib.sha256(b"".join(map(bytes, windows(x.held, ())))).hexdigest()[:16] if small else ""
        lines.append(f"{x.path} {x.shape} {x.dtype} {x.spec!r} {x.same_as or ''} {value}".rstrip())
    return "\n".join(lines)


def files_of(rank: int, boxes: Sequence[Owned], leaves: Sequence[Content], file_bytes: int) -> list[FilePlan]:
    """Plans the files of a rank: leaves in order, until a file is full.

    Leaves of different fields are in different files, for example parameters and optimizer states.
    """
    groups: dict[str, list[list[Owned]]] = {}
    sizes: dict[str, int] = {}
    for x in boxes:
        if x.owner != rank:
            continue
        found = _GROUP.match(leaves[x.leaf].path)
        group, size = found[0] if found else "leaves", _box_bytes(x.box, leaves[x.leaf].dtype)
        files = groups.setdefault(group, [[]])
        if files[-1] and sizes[group] + size > file_bytes:
            files.append([])
        sizes[group] = size + (sizes[group] if files[-1] else 0)
        files[-1].append(x)
    return [
        _plan_file(f"{group}-{rank:05d}-{k:04d}.safetensors", own, leaves)
        for group, files in groups.items()
        for k, own in enumerate(files)
    ]


def manifest_of(
    step: int,
    user: Any,
    metrics: Mapping[str, float],
    mesh: Mesh,
    leaves: Sequence[Content],
    written: Sequence[tuple[FilePlan, Sequence[str]]],
) -> Manifest:
    """Returns the manifest of the written files, with the digests of all parts."""
    chunks: list[list[StoredChunk]] = [[] for _ in leaves]
    files = {}
    for plan, digests in written:
        files[plan.name] = File(plan.bytes, len(plan.header), hashlib.sha256(plan.header).hexdigest())
        for part, digest in zip(plan.parts, digests, strict=True):
            offset, shape = tuple(lo for lo, _ in part.box), tuple(hi - lo for lo, hi in part.box)
            chunks[part.leaf].append(StoredChunk(offset, shape, plan.name, part.start, digest))
    own = [chunks[i if x.same_as is None else x.same_as] for i, x in enumerate(leaves)]
    named = {
        x.path: StoredLeaf(x.shape, core.dtype_name(x.dtype), _spec_axes(x.spec), tuple(sorted(c)))
        for x, c in zip(leaves, own, strict=True)
    }
    return Manifest(step, user, dict(mesh.shape), named, files, metrics)


def local_slices(leaf: Content, box: collectives.Box) -> tuple[slice, ...]:
    """Returns the slices of this rank's block that a box of the leaf covers."""
    return tuple(slice(lo - at, hi - at) for (lo, hi), at in zip(box, leaf.start, strict=True))


def windows(held: core.StoredValue, where: tuple[slice, ...]) -> Iterator[Bytes]:
    """Yields the bytes of a part of a block, row-major, a few megabytes at a time, from any memory."""
    if isinstance(held, Tensor):
        x = held.detach().resolve_conj().resolve_neg()[where]
        if x.device.type == "cpu" and x.is_contiguous():
            data = as_bytes(x)
            yield from (data[i : i + _PIECE] for i in range(0, len(data), _PIECE))
            return
        first, count = 0, len(x) if x.ndim else 1
    else:
        x, (first, last) = held, (where[0].start, where[0].stop) if where else (0, held.shape[0] if held.shape else 1)
        count = last - first
    row = math.prod(x.shape[1:]) * x.dtype.itemsize
    step = max(1, _PIECE // max(row, 1))
    for lo in range(first, first + count, step):
        hi = min(lo + step, first + count)
        if isinstance(x, Tensor):
            yield as_bytes((x[lo:hi] if x.ndim else x).cpu().contiguous())
        else:
            yield as_bytes(
                core.read_rows(x, lo, hi).result()[(slice(None), *where[1:]) if x.shape else ()].contiguous()
            )


def _plan_file(name: str, own: Sequence[Owned], leaves: Sequence[Content]) -> FilePlan:
    # The widest elements first, which aligns every tensor to its element size.
    order = sorted(own, key=lambda x: -leaves[x.leaf].dtype.itemsize)
    entries = [
        (_tensor_name(leaves[x.leaf], x.box), leaves[x.leaf].dtype, tuple(hi - lo for lo, hi in x.box)) for x in order
    ]
    head = safetensors_header(entries)
    parts, at = [], len(head)
    for x in order:
        parts.append(Part(x.leaf, x.box, at))
        at += _box_bytes(x.box, leaves[x.leaf].dtype)
    return FilePlan(name, head, tuple(parts), at)


def _spec_axes(spec: P) -> tuple[tuple[str, ...], ...]:
    return tuple(spec.dim_axes(dim) for dim in range(len(spec)))


def _tensor_name(leaf: Content, box: collectives.Box) -> str:
    """Returns the tensor's name in the file, for example "params['w'][0:4, 0:8]" for a part of a leaf."""
    whole = all(hi - lo == size for (lo, hi), size in zip(box, leaf.shape, strict=True))
    return leaf.path + ("" if whole else f"[{', '.join(f'{lo}:{hi}' for lo, hi in box)}]")


def _box_bytes(box: collectives.Box, dtype: torch.dtype) -> int:
    return math.prod(hi - lo for lo, hi in box) * dtype.itemsize
