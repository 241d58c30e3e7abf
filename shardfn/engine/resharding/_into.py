"""The leaves that `reshard(into=)` overwrites, and the reasons why some cannot be."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from shardfn._torch import FakeTensor
from shardfn.collectives import GlobalTensor
from shardfn.core import PyTree, StoredValue, did_you_mean, raise_all, tree_leaves, tree_paths

_UNTIE = "reshard it without into=, or give each leaf of into memory of its own"


class Write(NamedTuple):
    """A leaf and the leaf that is overwritten with it.

    Attributes:
        path: the path of `x` in `tree`.
        x: the leaf.
        y: the leaf of `into`.
    """

    path: str
    x: GlobalTensor
    y: GlobalTensor

    @property
    def target(self) -> str:
        """Returns the path of `y`."""
        return into_path(self.path)


def into_path(path: str) -> str:
    """Returns the path in `into` of the leaf that has `path` in `tree`."""
    return "into" + path.removeprefix("tree")


def leaves_of_into(into: PyTree, tree: PyTree) -> list[GlobalTensor | None]:
    """Returns the leaf of `into` for each leaf of `tree`, or None for a leaf that is not a `GlobalTensor`.

    Raises:
        ValueError: lists every path that only one of the two trees has, or where only one has a `GlobalTensor`.
    """
    paths = tree_paths(tree, "tree")
    found = dict(zip(tree_paths(into, "tree"), tree_leaves(into), strict=True))
    missing = [path for path in paths if path not in found]
    extra = [path for path in found if path not in set(paths)]
    problems = [f"{into_path(path)} has no leaf in tree.{did_you_mean(path, missing)}" for path in extra]
    problems += [f"{path} has no leaf in into; reshard(tree, to) makes one" for path in missing]
    rows = [(path, x, found[path]) for path, x in zip(paths, tree_leaves(tree), strict=True) if path in found]
    problems += [
        f"{path} is a {type(x).__name__}, and {into_path(path)} is a {type(y).__name__}; a GlobalTensor overwrites"
        " only another, which sf.shard(y, spec, mesh) or reshard(tree, to) makes"
        for path, x, y in rows
        if isinstance(x, GlobalTensor) != isinstance(y, GlobalTensor)
    ]
    raise_all(ValueError, "reshard: into does not match tree, and nothing has moved:", problems)
    return [y if isinstance(y, GlobalTensor) else None for _, _, y in rows]


def write_problems(write: Write) -> Iterator[str]:
    """Yields the reasons why a leaf cannot be overwritten, empty where it can. Neither leaf was donated."""
    path, x, y = write.target, write.x, write.y
    if y.shape != x.shape:
        yield f"{path} has shape {tuple(y.shape)}, and {write.path} {tuple(x.shape)}; pass leaves of the same shape"
    if y.dtype != x.dtype and not (x.dtype.is_floating_point and y.dtype.is_floating_point):
        yield (
            f"{path} has dtype {y.dtype}, and {write.path} {x.dtype}; only floating-point elements are cast, so pass"
            " a leaf of the same dtype"
        )
    if y.placement.is_stored:
        form = "on disk" if y.quantization is None else f"in codes of {y.quantization}"
        yield f"{path} is {form}, where values are replaced and never overwritten; leave it out of into=, and pass to="
    elif isinstance(y.held, Tensor):
        yield from _block_problems(path, y, y.held)


def _block_problems(path: str, y: GlobalTensor, block: Tensor) -> Iterator[str]:
    if y.stacked:
        yield f"{path} holds the blocks of several members; take one by member(into, i)"
        return
    fits = not any(y.placement.problems(tuple(y.shape), y.mesh))
    want = y.placement.block_shape(y.shape, y.mesh.shape, y.mesh.coords) if fits else block.shape
    if block.shape != want:
        yield f"{path} has a block of shape {tuple(block.shape)}, and its layout {tuple(want)}; make it by sf.shard"
    if block.is_meta or isinstance(block, FakeTensor):
        yield f"{path} has a block without memory, on {block.device}; pass leaves that have values"
    elif block.is_inference():
        yield f"{path} was made under torch.inference_mode(), so it is never overwritten; make it under torch.no_grad()"
    elif _overlaps_itself(block):
        yield f"{path} has a block of strides {block.stride()}, whose elements share memory; pass a contiguous one"


def _overlaps_itself(x: Tensor) -> bool:
    """Returns whether elements may share memory: each stride must reach beyond the extent of the smaller ones."""
    extent = 0
    for stride, n in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride <= extent:
            return True
        extent += stride * (n - 1)
    return False


def overwrite(y: GlobalTensor, block: StoredValue) -> Tensor:
    """Writes a new block over that of a leaf, and returns the latter."""
    held = y.held
    assert isinstance(held, Tensor)
    assert isinstance(block, Tensor)
    # Where `tree` has the leaf itself, its block is the new one already.
    return held if held.data_ptr() == block.data_ptr() else held.copy_(block)


def shared_memory(writes: Sequence[Write]) -> list[str]:
    """Returns the blocks on this rank that would be overwritten before they are read, or twice.

    A leaf of `into` may be the leaf of `tree` itself, in the same layout: nothing is written then.
    """
    regions = [_Extent(*_find_extent(w.y.held), w.target, True) for w in writes if _has_memory(w.y.held)]
    regions += [
        _Extent(*_find_extent(w.x.held), w.path, False)
        for w in writes
        if _has_memory(w.x.held) and not _is_same_block(w)
    ]
    problems: list[str] = []
    reached: dict[bool, _Extent] = {}  # the region with the highest end so far: of targets, of sources
    for region in sorted(regions):
        others = reached.values() if region.target else [reached[True]] if True in reached else []
        problems += [
            _intersect_regions(region, other)
            for other in others
            if other.device == region.device and region.start < other.stop
        ]
        last = reached.get(region.target)
        if last is None or last.device != region.device or last.stop < region.stop:
            reached[region.target] = region
    return problems


class _Extent(NamedTuple):
    """The addresses of a block."""

    device: str
    start: int
    stop: int
    path: str
    target: bool


def _intersect_regions(*regions: _Extent) -> str:
    (first, start), (second, start_2) = sorted((region.path, region.start) for region in regions)
    return f"{first} and {second} share memory, at {start:#x} and {start_2:#x}; {_UNTIE}"


def _find_extent(held: object) -> tuple[str, int, int]:
    assert isinstance(held, Tensor)
    last = sum((n - 1) * stride for n, stride in zip(held.shape, held.stride(), strict=True))
    return str(held.device), held.data_ptr(), held.data_ptr() + (last + 1) * held.dtype.itemsize


def _has_memory(held: object) -> bool:
    return isinstance(held, Tensor) and not held.is_meta and not isinstance(held, FakeTensor) and held.numel() > 0


def _is_same_block(write: Write) -> bool:
    """Returns whether the two are one block in a single layout."""
    x, y = write.x.held, write.y.held
    if write.x.mesh is not write.y.mesh or write.x.placement != write.y.placement or not _has_memory(y):
        return False
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    return x.stride() == y.stride() and _find_extent(x) == _find_extent(y)
