"""The memory of compressed collectives: the error of each rank, and of each rank as the server of its chunk.

    worker  [P, N]  P(axis)   row i is the part that rank i has not sent yet
    server  [N]     P(axis)   chunk j is the part that rank j, which sums chunk j for all, has not handed out yet

For a tensor of n elements over P ranks and a compressor of quantum q, `d = lcm(P, q)` and N is n rounded up to a
multiple of P d. Each rank holds a row and a chunk. Where the leaf's block differs along other axes, of T ranks
together, each of the T ranks has separate errors: `[P, T N]` with spec `P(axis, others)`, and `[T N]`, `P((others,
axis))`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import core
from shardfn.core import P

from ._axis_group import axis_size, current_mesh
from ._compressor import Compressor, Memory
from ._global_tensor import GlobalTensor, unshard

# Elements of a single message: half a megabyte at one bit each.


class Residual(NamedTuple):
    """Error-feedback residuals of a leaf under compressed reduction.

    Attributes:
        worker: error of this rank, `[1, N]`, or `()` if the compressor has no memory.
        server: error of the chunk that this rank sums, `[N / P]`, or `()` if the sum is not compressed again.
    """

    worker: Any
    server: Any


@dataclasses.dataclass(frozen=True)
class Cut:
    """Cut of a leaf's elements into rows.

    Attributes:
        n: elements.
        inner: number of pieces along the inner axes, each padded to `piece`.
        ranks: number of rows of each piece: P.
        piece: elements of a piece.
        c: elements of a row, padding included.
    """

    n: int
    inner: int
    ranks: int
    piece: int
    c: int


def cut_of(n: int, ranks: int, quantum: int, inner: int = 1) -> Cut:
    """Returns the rows of a leaf of n elements.

    Example:
        >>> [ranks * cut_of(1000, ranks, 8).c for ranks in (2, 3, 4, 8, 16)]
        [1008, 1008, 1024, 1024, 1024]
    """
    piece = -(-n // inner)
    d = math.lcm(ranks, quantum)
    return Cut(n, inner, ranks, piece, -(-piece // (ranks * d)) * d)


def split_axes(op: str, axis: core.Axes, outer: core.Axes) -> tuple[core.Axes, core.Axes]:
    """Returns the axes between compressed ranks, and the inner axes, along which everything is exact.

    Raises:
        ValueError: `outer` is not among `axis`.
    """
    if outer is None:
        return axis, None
    given, compressed = _axis_names(axis), _axis_names(outer)
    if not set(compressed) <= set(given):
        raise ValueError(
            f"{op}: outer must be among axis={axis!r}, got outer={outer!r}. Name in `axis` all axes that it crosses."
        )
    return compressed, tuple(a for a in given if a not in compressed)


def compressed_init(
    tree: core.PyTree, axis: core.Axes, compressor: Compressor, *, outer: core.Axes = None
) -> core.PyTree:
    """Returns zeros, the errors before the first call of `compressed_pmean` or a similar collective.

    Args:
        tree: tensors of the shapes that will be averaged, on the same devices. Local, without communication.
        axis: axis of the collective.
        compressor: compressor of the collective.
        outer: outer axes of the collective.

    Returns:
        A tree like `tree` with a `Residual` for each leaf: this rank's blocks. `global_residuals` makes global tensors
        of the blocks.

    Raises:
        ValueError: an unknown axis.
        TypeError: `compressor` is not a `Compressor`.

    Example:
        >>> from shardfn.collectives import error_feedback, sign
        >>> state = compressed_init({"w": torch.ones(9)}, "dp", error_feedback(sign()))
        >>> state["w"].worker.shape, state["w"].server.shape
        (torch.Size([1, 16]), torch.Size([16]))
    """
    check_compressor("compressed_init", compressor)
    compressed, inside = split_axes("compressed_init", axis, outer)
    ranks, inner = axis_size(compressed), axis_size(inside)
    leaves, treedef = core.tree_flatten(tree)
    return core.tree_unflatten(
        treedef, [_make_zeros(x, cut_of(x.numel(), ranks, compressor.quantum, inner), compressor) for x in leaves]
    )


def _make_zeros(x: Tensor, cut: Cut, compressor: Compressor) -> Residual:
    like = x.new_empty((cut.ranks, cut.c), dtype=torch.float32)
    return Residual(_reshape_memory(compressor.init(like), 1, -1), _reshape_memory(compressor.init(like[:1]), -1))


def _reshape_memory(memory: Memory, *shape: int) -> Memory:
    if not isinstance(memory, Tensor):
        return memory
    return memory.reshape(tuple(memory.numel() if s == -1 else s for s in shape))


def check_compressor(op: str, compressor: Any) -> None:
    """Raises a TypeError unless `compressor` is a `Compressor`."""
    if not isinstance(compressor, Compressor):
        called = " Call it: it makes one." if callable(compressor) else ""
        raise TypeError(
            f"{op}: compressor must be a Compressor, got {compressor!r}.{called} The compressors are sign(), int8(),"
            " int4(), top_k(fraction), identity(), and error_feedback(...) of each."
        )


def check_memory(
    path: str, x: Tensor, residual: Any, worker: tuple[int, ...] | None, server: tuple[int, ...] | None
) -> list[str]:
    """Returns the problems of a leaf's state, as lines of a message.

    `worker` and `server` are the expected shapes. None means no error.
    """
    if not isinstance(residual, Residual):
        return [f"{path}: the state must be a Residual, got {type(residual).__name__}. Make it by compressed_init."]
    out = []
    for name, have, shape in (("worker", residual.worker, worker), ("server", residual.server, server)):
        found = (tuple(have.shape), have.dtype) if isinstance(have, Tensor) else None
        want = None if shape is None else (shape, torch.float32)
        if found != want:
            out.append(f"{name} error is {_describe_value(found)}, and is to be {_describe_value(want)}")
    return [f"{path} of shape {tuple(x.shape)}: its {' and its '.join(out)}"] if out else []


def check_dims(op: str, leaves: list[Tensor], paths: list[str], dim: int) -> None:
    """Raises unless every leaf has a dim `dim`."""
    bad = [f"{path} has shape {tuple(x.shape)}. Reshape it" for path, x in zip(paths, leaves, strict=True)
           if not -x.ndim <= dim < x.ndim]  # fmt: skip
    core.raise_all(ValueError, f"{op}: dim={dim} is out of range:", bad)


def _describe_value(what: Any) -> str:
    return "()" if what is None else f"{what[1]} {list(what[0])}".removeprefix("torch.")


def global_residuals(
    state: core.PyTree, axis: core.Axes, specs: core.PyTree = P(), *, outer: core.Axes = None
) -> core.PyTree:
    """Returns the errors of all ranks as `GlobalTensor`s with this rank's blocks.

    Blocks along other axes must be of the same size: pad a dim that an axis does not divide.

    Args:
        state: the result of `compressed_init`, or the state that a compressed collective returned.
        axis: the axes of the mean.
        specs: a prefix tree of `P`: the specs of the averaged blocks in their leaves. Along the axes of a spec each
            rank has separate errors.
        outer: see `compressed_pmean`.

    Returns:
        A tree like `state`.

    Raises:
        ValueError: an unknown axis, or `specs` does not match.

    Example:
        >>> from shardfn.collectives import error_feedback, sign
        >>> state = compressed_init({"w": torch.ones(9)}, "dp", error_feedback(sign()))
        >>> global_residuals(state, "dp", {"w": P(None, "tp")})["w"].worker
        GlobalTensor((1, 16), torch.float32, P('dp', 'tp'); 64 B here on device, mesh of one)
    """
    compressed, inside = (_axis_names(a) for a in split_axes("global_residuals", axis, outer))
    mesh = current_mesh()
    residuals, treedef = core.tree_flatten(state, is_leaf=_is_residual)
    like = core.tree_unflatten(treedef, range(len(residuals)))
    cuts = core.broadcast_prefix(specs, like, lambda x: isinstance(x, P), names=("specs", "state"))

    def globalize_leaf(residual: Residual, spec: P) -> Residual:
        own = (*(a for a in spec.axes if a not in (*compressed, *inside)), *inside)
        return Residual(
            _make_global(residual.worker, P(compressed, own), mesh),
            _make_global(residual.server, P((*own, *compressed)), mesh),
        )

    return core.tree_unflatten(treedef, [globalize_leaf(r, s) for r, s in zip(residuals, cuts, strict=True)])


def _is_residual(x: Any) -> bool:
    return isinstance(x, Residual)


def _axis_names(axis: core.Axes) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis or ())


def _make_global(block: Memory, spec: P, mesh: core.Mesh) -> Any:
    if not isinstance(block, Tensor):
        return block
    shape = torch.Size(size * mesh.axis_size(spec.dim_axes(dim)) for dim, size in enumerate(block.shape))
    return GlobalTensor(block, shape, spec, mesh)


def recut_residuals(
    state: core.PyTree, like: core.PyTree, num_ranks: int, compressor: Compressor, *, inner: int = 1, others: int = 1
) -> core.PyTree:
    """Returns errors for another number of ranks, with the same total as the old errors.

    Every new rank gets the mean of the old workers' errors, so that the mean stays, for example from 8 ranks to 6. The
    server's errors of the real elements are cut again. The errors of padding are zero.

        mean_i e_i' + server' = mean_i e_i + server

    Args:
        state: the errors of all old ranks, the result of `unshard(global_residuals(...))`: for each leaf worker `[P, T
            N]` and server `[T N]`, T = inner * others. `GlobalTensor`s are gathered, which is collective.
        like: a tree of the averaged tensors, as on each rank (only shapes count).
        num_ranks: the new P.
        compressor: compressor as before.
        inner: the number of ranks along the exact axes, or 1 without such axes.
        others: number of blocks of the leaf along axes that are not averaged over. The same for all leaves.

    Returns:
        A tree like `state`, for the new ranks: worker `[P', T N']`, server `[T N']`. Rows of a worker share memory.

    Raises:
        ValueError: a leaf's errors do not fit the leaf's size. Every leaf is listed.

    Example:
        >>> old = {"w": Residual(torch.tensor([[1.0] * 16, [3.0] * 16]), torch.ones(16))}
        >>> from shardfn.collectives import error_feedback, sign
        >>> new = recut_residuals(old, {"w": torch.ones(9)}, 4, error_feedback(sign()))["w"]
        >>> new.worker.shape, new.worker[3, :10], new.server.shape
        (torch.Size([4, 32]), tensor([2., 2., 2., 2., 2., 2., 2., 2., 2., 0.]), torch.Size([32]))
    """
    check_compressor("recut_residuals", compressor)
    leaves, treedef = core.tree_flatten(like)
    residuals = treedef.flatten_up_to(unshard(state))
    blocks, problems, out = inner * others, [], []
    for x, residual, path in zip(leaves, residuals, core.tree_paths(like, "state"), strict=True):
        new = cut_of(x.numel(), num_ranks, compressor.quantum, inner)
        worker, server = residual
        out.append(Residual((), ()))
        if not compressor.remembers:
            continue
        old = cut_of(x.numel(), len(worker), compressor.quantum, inner)
        size = blocks * old.ranks * old.c
        if worker.ndim != 2 or worker.shape[1] != size or tuple(server.shape) != (size,):
            problems.append(
                f"{path} has a worker error of {list(worker.shape)} and a server error of {list(server.shape)}; a block"
                f" of {old.n} elements had errors of {[old.ranks, size]} and {[size]}: pass the whole errors of the old"
                " ranks (unshard), and the right number of blocks (inner, others)."
            )
            continue
        mean = _refit_error(worker.sum(0) / len(worker), blocks, new)
        out[-1] = Residual(mean.expand(num_ranks, -1), _refit_error(server, blocks, new))
    core.raise_all(ValueError, "errors that cannot be cut again:", problems)
    return core.tree_unflatten(treedef, out)


def _refit_error(error: Tensor, blocks: int, cut: Cut) -> Tensor:
    """Returns the errors of the real elements of each block, with the padding of the new cut."""
    real = error.view(blocks, -1)[:, : cut.piece]
    return torch.nn.functional.pad(real, (0, cut.ranks * cut.c - cut.piece)).view(-1)
