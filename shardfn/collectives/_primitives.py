"""The collectives that a loss calls, by their transposes, and the checks of their arguments before any message.

    all_gather, all_gather_invariant, quantized_all_gather    blocks to wholes
    psum_scatter, take_own_block                              wholes to blocks
    all_to_all                                                blocks of a dim to blocks of another dim
    psum, pmean, pmax, pvary                                  reductions over an axis, and the transpose of a sum
    ppermute                                                  point to point

Every rank fails in the same way, and no rank is left waiting.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from shardfn import core

from ._axis_group import AxisGroup, axis_group_along, count_ranks
from ._primitive import Call, as_one, bind, recording, start


def map_tensors(op: str, f: Callable[[Tensor], Tensor], tree: core.PyTree) -> core.PyTree:
    """Applies `f` to each leaf, and returns the tree of results.

    Raises:
        TypeError: names every leaf that is not a tensor.
    """
    if isinstance(tree, Tensor):
        return f(tree)
    leaves: list[Any] = core.tree_flatten(tree)[0]
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        pairs = zip(core.tree_paths(tree, "x"), leaves, strict=True)
        bad = [f"{path} is {leaf!r}. Wrap it in torch.tensor" for path, leaf in pairs if not isinstance(leaf, Tensor)]
        core.raise_all(TypeError, f"{op} takes tensors:", bad)
    return core.tree_map(f, tree)


def tensor_dim(op: str, x: Shaped[Tensor, "..."], dim: int, name: str = "dim") -> int:
    """Returns `dim` counted from the front.

    Raises:
        ValueError: `x` has no dim `dim`.
    """
    if -x.ndim <= dim < x.ndim:
        return dim % x.ndim
    remedy = f"Use {-x.ndim} to {x.ndim - 1}" if x.ndim else "Unsqueeze it first"
    raise ValueError(f"{op}: {name}={dim} is out of range for x of shape {tuple(x.shape)}. {remedy}.")


def find_global_size(op: str, x: Shaped[Tensor, "..."], line: AxisGroup | None, dim: int, size: int | None) -> int:
    """Returns the global size along a dim on which blocks are joined.

    Without `size`, every block is as long as this block.

    Raises:
        ValueError: this rank's block is not of the length that follows from `size`.
    """
    n, index = (1, 0) if line is None else (line.size, line.index)
    if size is None:
        return n * x.shape[dim]
    want = size if line is None else line.lengths(size)[index]
    if x.shape[dim] != want:
        raise ValueError(
            f"{op}: size={size} over {n} rank{'s' * (n > 1)} gives index {index} a block of {want} along dim {dim}, but"
            f" got x of shape {tuple(x.shape)}. Pass the global size of that dim, or cut x as torch.chunk does."
        )
    return size


def all_gather(
    x: Shaped[torch.Tensor, "..."], axis: core.Axes, *, dim: int = 0, size: int | None = None
) -> Shaped[torch.Tensor, "..."]:
    """Returns the blocks along `axis`, concatenated along `dim`: `V -> V`.

        NCCL: all_gather.  Slow spec: `[cat(blocks, dim)] * n`.  Layout: `A[I_axis] -> A[I]`.

        [A] [B]  =>  [A, B] [A, B]

    Transpose: `psum_scatter`. Each rank may use the whole in another way, so cotangents differ and are summed.

    When: every rank needs the whole and continues differently, for example with ZeRO's parameters or the sequence
    before attention. When all ranks continue in the same way, use `all_gather_invariant`: the gradient then needs no
    communication.

    Args:
        x: this rank's block.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity.
        dim: the dim along which `x` is a block.
        size: the global size along `dim`. Needed where the axis does not divide the size: blocks are as `torch.chunk`
            cuts, for example 7 rows on 3 ranks as 3, 3, 1 (with several axes, the major axis cuts first). Default: n
            times this block, on all ranks.

    Returns:
        The whole, of `size` along `dim`.

    Raises:
        ValueError: unknown axis, `dim` out of range, or a block whose length does not match `size`.

    Example:
        >>> all_gather(torch.arange(3), "dp")
        tensor([0, 1, 2])
    """
    line = axis_group_along(axis)
    dim = tensor_dim("all_gather", x, dim)
    size = find_global_size("all_gather", x, line, dim, size)
    return x if line is None else bind(x, Call("all_gather", line, dim, size))


def all_gather_invariant(
    x: Shaped[torch.Tensor, "..."], axis: core.Axes, *, dim: int = 0, size: int | None = None
) -> Shaped[torch.Tensor, "..."]:
    """Returns the blocks along `axis`, concatenated along `dim`, as a value that counts once: `V -> I`.

        NCCL: all_gather.  Slow spec: `[cat(blocks, dim)] * n`.  Layout: `A[I_axis] -> A[I]`.

        [A] [B]  =>  [A, B] [A, B]

    Transpose: `take_own_block`, without communication: the cotangent is the same everywhere.

    When: all ranks continue with the same arithmetic, for example at the end of a program, with logits, outputs or
    metrics.

    Args:
        x: this rank's block.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity.
        dim: the dim along which `x` is a block.
        size: the global size along `dim`. See `all_gather`.

    Returns:
        The whole, of `size` along `dim`.

    Raises:
        ValueError: unknown axis, `dim` out of range, or a block whose length does not match `size`.

    Example:
        >>> all_gather_invariant(torch.ones(2, 3), "dp", dim=1).shape
        torch.Size([2, 3])
    """
    line = axis_group_along(axis)
    dim = tensor_dim("all_gather_invariant", x, dim)
    size = find_global_size("all_gather_invariant", x, line, dim, size)
    return x if line is None else bind(x, Call("all_gather_invariant", line, dim, size))


def quantized_all_gather(
    x: Float[torch.Tensor, "..."],
    axis: core.Axes,
    *,
    dim: int = 0,
    size: int | None = None,
    bits: Literal[8, 4] = 8,
    block: int = 256,
) -> Float[torch.Tensor, "..."]:
    """Returns `all_gather` at 8 or 4 bits per element and a scale per block: `V -> V`.

        NCCL: all_gather.  Slow spec: `[cat(map(rounded, blocks), dim)] * n`.  Layout: `A[I_axis] -> A[I]`.

        [A] [B]  =>  [A', B'] [A', B'],  |A - A'| <= max|A| / 2^bits, in each block of elements

    Every rank gets the same rounded whole, with the local block rounded, too. The largest positive element of a block
    may lose one step, `max|A| / 2^(bits - 1)`.

    Transpose: `psum_scatter`, exact: gradients ignore the rounding.

    When: ranks gather values that bear some noise over a slow link, such as ZeRO's parameters for the forward (ZeRO++'s
    qwZ).

    Args:
        x: this rank's block; float32, bfloat16 or float16. Computed in float32.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity, without rounding.
        dim: the dim along which `x` is a block.
        size: the global size along `dim`. See `all_gather`.
        bits: 8 or 4.
        block: number of neighbours in the block, in row-major order with `dim` first, with a common scale. With 4 bits
            the number must be even.

    Returns:
        The whole, of `size` along `dim` and of the dtype of `x`.

    Raises:
        ValueError: unknown axis, `dim` out of range, a block whose length does not match `size`, or other bits.
        TypeError: another dtype.

    References:
        Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training,
        https://arxiv.org/abs/2306.10209, 2023.

    Example:
        >>> quantized_all_gather(torch.ones(2, 3), "dp", bits=4).shape
        torch.Size([2, 3])
    """
    line = axis_group_along(axis)
    dim = tensor_dim("quantized_all_gather", x, dim)
    size = find_global_size("quantized_all_gather", x, line, dim, size)
    if x.dtype not in _QUANTIZED:
        raise TypeError(f"quantized_all_gather: x must be one of {', '.join(map(str, _QUANTIZED))}, got {x.dtype}.")
    if bits not in (4, 8) or block < 1 or (bits == 4 and block % 2):
        raise ValueError(
            f"quantized_all_gather: bits must be 8, or 4 with an even block, got bits={bits}, block={block}."
        )
    return x if line is None else bind(x, Call("quantized_all_gather", line, dim, size, bits=bits, block=block))


_QUANTIZED = (torch.float32, torch.bfloat16, torch.float16)


def all_to_all(
    x: Shaped[torch.Tensor, "..."], axis: core.Axes, *, split_dim: int, concat_dim: int, size: int | None = None
) -> Shaped[torch.Tensor, "..."]:
    """Cuts `split_dim`, sends block i to rank i, and joins the blocks that arrive along `concat_dim`: `V -> V`.

        NCCL: all_to_all.  Slow spec: `out[r] = cat([x.chunk(n, split_dim)[r] for x in blocks], concat_dim)`.
        Layout: `A[I_axis, J] -> A[I, J_axis]` with split_dim = J, concat_dim = I.

        [A, B] [C, D]  =>  [A; C] [B; D]

    Transpose: `all_to_all` with the two dims (and their global sizes) swapped.

    When: a sharding moves from a dim to another (sequence to heads, tokens to experts), at 1 / n of a gather's bytes.

    Args:
        x: whole along `split_dim`, a block along `concat_dim`.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity.
        split_dim: the dim that is cut. Any size: blocks are those of `torch.chunk`.
        concat_dim: the dim that is joined. May be `split_dim`: blocks are exchanged and the shape stays. The axis must
            then divide the dim.
        size: the global size of `concat_dim`, needed where the axis does not divide it. Default: n times this block.
            The transpose knows the size of `split_dim` from `x`.

    Returns:
        A block along `split_dim`, whole along `concat_dim`.

    Raises:
        ValueError: unknown axis, a dim out of range, a block whose length does not match `size`, or one dim for both
            that the axis does not divide.

    Example:
        >>> all_to_all(torch.ones(4, 6), "sp", split_dim=1, concat_dim=0).shape
        torch.Size([4, 6])
    """
    line = axis_group_along(axis)
    split_dim = tensor_dim("all_to_all", x, split_dim, "split_dim")
    concat_dim = tensor_dim("all_to_all", x, concat_dim, "concat_dim")
    if split_dim == concat_dim:
        size = _exchanged_size(x, line, split_dim, size)
    else:
        size = find_global_size("all_to_all", x, line, concat_dim, size)
    if line is None:
        return x
    return bind(x, Call("all_to_all", line, split_dim, x.shape[split_dim], concat_dim, size))


def _exchanged_size(x: Shaped[torch.Tensor, "..."], line: AxisGroup | None, dim: int, size: int | None) -> int:
    n, rows = count_ranks(line), x.shape[dim]
    if size is not None:
        raise ValueError(
            f"all_to_all: size={size} has no meaning where split_dim and concat_dim are both {dim}. Drop it."
        )
    if rows % n:
        raise ValueError(
            f"all_to_all: split_dim and concat_dim are both {dim}, of which {n} ranks must divide the size, got {rows}."
            f" Pad it to {-(-rows // n) * n}."
        )
    return rows


def psum(x: core.PyTree, axis: core.Axes) -> core.PyTree:
    """Returns the sum over the ranks along `axis`: `V -> I`.

        NCCL: all_reduce.  Slow spec: `[sum(blocks)] * n`.  Layout: `A{U_axis} -> A`.

        [A] [B]  =>  [A + B] [A + B]

    Transpose: `pvary`. The cotangent of an invariant value is invariant, and counts once: a loss that ends in `psum`
    has the gradient of the sum, not n times the gradient.

    When: all ranks need the whole sum. When each rank continues with a block, `psum_scatter` sends half the bytes.

    Args:
        x: a tensor, or a tree of tensors, of the same shape on all ranks. Booleans are counted, as by `torch.sum`
            (int64).
        axis: mesh axes. None, a missing axis and an axis of size 1 are the identity.

    Returns:
        A tree like `x`.

    Raises:
        ValueError: an axis is neither in the mesh nor a house name, or is named twice.
        TypeError: a leaf is not a tensor.
        AxisTypeError: in `shard_map` or a loss, a leaf varies along some of several axes but not along all, so that the
            leaf would be counted once a rank there.

    Example:
        >>> psum(torch.tensor([1.0, 2.0]), "dp")
        tensor([1., 2.])
    """
    line = axis_group_along(axis)

    def sum_leaf(t: Tensor) -> Tensor:
        t = t.long() if t.dtype == torch.bool else t
        return t if line is None else bind(t, Call("psum", line))

    return map_tensors("psum", sum_leaf, x)


def pmean(x: core.PyTree, axis: core.Axes) -> core.PyTree:
    """Returns the mean over the ranks along `axis`: `V -> I`, `psum(x) / n`.

        NCCL: all_reduce.  Slow spec: `[sum(blocks) / n] * n`.

        [A] [B]  =>  [(A + B) / 2] [(A + B) / 2]

    Transpose: `pvary(y) / n`.

    When: ranks hold equally many rows. With unequal numbers, for example 3 and 5 rows, sum totals and weights
    separately and divide once.

    Args:
        x: a tensor, or a tree of tensors, of the same shape on all ranks. Integers give the default float.
        axis: mesh axes. None, a missing axis and an axis of size 1 are the identity.

    Returns:
        A tree like `x`.

    Raises:
        ValueError: an axis is neither in the mesh nor a house name, or is named twice.
        TypeError: a leaf is not a tensor.

    Example:
        >>> pmean({"loss": torch.tensor(3.0)}, "dp")
        {'loss': tensor(3.)}
    """
    line = axis_group_along(axis)

    def average_leaf(t: Tensor) -> Tensor:
        if line is None:
            return t if t.is_floating_point() or t.is_complex() else t / 1
        size = line.size
        return as_one(lambda: psum(t, axis) / size)

    return map_tensors("pmean", average_leaf, x)


def pmax(x: core.PyTree, axis: core.Axes) -> core.PyTree:
    """Returns the elementwise maximum over the ranks along `axis`: `V -> I`.

        NCCL: all_reduce (max).  Slow spec: `[max(blocks)] * n`.

        [A] [B]  =>  [max(A, B)] [max(A, B)]

    A NaN on a single rank gives NaN on all, on every backend, as in JAX.

    Not differentiable: the maximum is nonlinear, and its gradient is an error. The minimum is `-pmax(-x)`.

    When: for example the shift of a softmax over sharded logits (`pmax(x.detach(), axis)`), a scale that ranks share, a
    flag.

    Args:
        x: a tensor, or a tree of tensors, of the same shape on all ranks.
        axis: mesh axes. None, a missing axis and an axis of size 1 are the identity.

    Returns:
        A tree like `x`.

    Raises:
        ValueError: an axis is neither in the mesh nor a house name, or is named twice.
        TypeError: a leaf is not a tensor.
        NotImplementedError: a gradient is asked for (raised in the backward, or in a jvp).

    Example:
        >>> pmax(torch.tensor([1, 5]), "tp")
        tensor([1, 5])
    """
    line = axis_group_along(axis)

    def max_leaf(t: Tensor) -> Tensor:
        if line is None:
            return t
        if t.dtype != torch.bool:
            return bind(t, Call("pmax", line))
        # Backends have no maximum of booleans. "any" is the maximum of bytes.
        call = Call("pmax", line)
        return as_one(lambda: bind(t.byte(), call).bool())

    return map_tensors("pmax", max_leaf, x)


def pvary(x: core.PyTree, axis: core.Axes) -> core.PyTree:
    """Returns the identity that declares an invariant value varying: `I -> V`.

        NCCL: nothing forward, all_reduce backward.  Slow spec: `blocks`.

        [A] [A]  =>  [A] [A]

    Transpose: `psum`. Each rank's use of `x` gives a part of its gradient. The parts are summed.

    When: an invariant value (replicated weights, activations between tensor-parallel layers) meets a varying value.

    Args:
        x: a tensor, or a tree of tensors, equal on all ranks.
        axis: mesh axes. None, a missing axis and an axis of size 1 are the identity.

    Returns:
        A tree like `x`.

    Raises:
        ValueError: an axis is neither in the mesh nor a house name, or is named twice.
        TypeError: a leaf is not a tensor.

    Example:
        >>> pvary([torch.tensor(1)], "tp")
        [tensor(1)]
    """
    line = axis_group_along(axis)
    return map_tensors("pvary", lambda t: t if line is None else bind(t, Call("pvary", line)), x)


def psum_scatter(x: Shaped[Tensor, "..."], axis: core.Axes, *, dim: int = 0) -> Shaped[Tensor, "..."]:
    """This rank's block, along `dim`, of the sum over the ranks along `axis`: `V -> V`.

        NCCL: reduce_scatter.  Slow spec: `sum(blocks).chunk(n, dim)`.  Layout: `A[I]{U_axis} -> A[I_axis]`.

        [A, B] [C, D]  =>  [A + C] [B + D]

    Transpose: `all_gather`, of the same global size.

    On gloo the blocks are exchanged and summed in the order of ranks, 16-bit floats in 32 bits. Other backends sum by
    their native operation.

    When: each rank continues with a block of the sum, for example ZeRO's gradients or sequence-parallel activations.

    Args:
        x: this rank's summand, of the same shape on all ranks. Booleans are counted (int64).
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity.
        dim: the dim that is cut. Any size: blocks are those of `torch.chunk` (with several axes, the major axis cuts
            first), the last blocks short or empty. `all_gather(..., size=x.shape[dim])` joins the blocks again.

    Returns:
        This rank's block of the sum.

    Raises:
        ValueError: unknown axis, or `dim` out of range.

    Example:
        >>> psum_scatter(torch.tensor([1, 2, 3]), "dp")
        tensor([1, 2, 3])
    """
    line = axis_group_along(axis)
    dim = tensor_dim("psum_scatter", x, dim)
    x = x.long() if x.dtype == torch.bool else x
    return x if line is None else bind(x, Call("psum_scatter", line, dim, x.shape[dim]))


def take_own_block(x: Shaped[Tensor, "..."], axis: core.Axes, *, dim: int = 0) -> Shaped[Tensor, "..."]:
    """Returns this rank's block along `dim` of a value that all ranks hold: `I -> V`.

        NCCL: nothing forward, all_gather backward.  Slow spec: `blocks[0].chunk(n, dim)`.  Layout: `A[I] -> A[I_axis]`.

        [A, B] [A, B]  =>  [A] [B]

    Transpose: `all_gather_invariant`, of the same global size.

    When: ranks share out work on a single value, for example rows of an invariant tensor.

    Args:
        x: the whole, equal on all ranks.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 are the identity.
        dim: the dim that is cut, as `psum_scatter` cuts it.

    Returns:
        A copy of this rank's block.

    Raises:
        ValueError: unknown axis, or `dim` out of range.

    Example:
        >>> take_own_block(torch.tensor([1, 2, 3]), "dp")
        tensor([1, 2, 3])
    """
    line = axis_group_along(axis)
    dim = tensor_dim("take_own_block", x, dim)
    return x if line is None else bind(x, Call("take_own_block", line, dim, x.shape[dim]))


def ppermute(x: Shaped[Tensor, "..."], axis: core.Axes, perm: Sequence[tuple[int, int]]) -> Shaped[Tensor, "..."]:
    """Sends `x` from each source to a destination. A rank that receives nothing gets zeros: `V -> V`.

        NCCL: send / recv.  Slow spec: `out = zeros; out[dst] = blocks[src] for src, dst in perm`.

        [A] [B] [C]  =>  [0] [A] [B]        with perm = [(0, 1), (1, 2)]

    Transpose: `ppermute` with every pair reversed.

    When: a ring (such as attention over sequence blocks), a pipeline's hand-over, a halo.

    Args:
        x: tensor of the same shape on all ranks.
        axis: mesh axes, major to minor. None, a missing axis and an axis of size 1 have a single index 0: `[(0, 0)]`,
            the form of every ring there, is the identity, and `[]`, the form of every shift, gives zeros.
        perm: pairs (source, destination) of indices along `axis`. The same list on all ranks.

    Returns:
        A tensor like `x`.

    Raises:
        ValueError: unknown axis, an index out of range, or two pairs with one source or one destination.

    Example:
        >>> ppermute(torch.tensor([1, 2]), "pp", [(0, 0)])
        tensor([1, 2])
        >>> ppermute(torch.tensor([1, 2]), "pp", [])
        tensor([0, 0])
    """
    line = axis_group_along(axis)
    pairs = tuple((int(src), int(dst)) for src, dst in perm)
    _check_pairs(pairs, count_ranks(line))
    if line is not None:
        return bind(x, Call("ppermute", line, perm=pairs))
    # Not zeros_like: the result is a function of x, with gradient zero, on a single rank as on many.
    return x if pairs else x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)


def ppermute_start(x: Shaped[Tensor, "..."], axis: core.Axes, perm: Sequence[tuple[int, int]]) -> Callable[[], Tensor]:
    """Starts a `ppermute` of a plain tensor that is not differentiated. The result waits for the transfer.

    In a capture the tensor is sent and waited for at once: the passes over the graph decide on overlap.

    Args:
        x: tensor of the same shape on all ranks, not to be written before the wait.
        axis: see `ppermute`.
        perm: see `ppermute`.

    Raises:
        ValueError: as `ppermute`.

    Example:
        >>> ppermute_start(torch.tensor([1, 2]), "pp", [(0, 0)])()
        tensor([1, 2])
    """
    line = axis_group_along(axis)
    if line is None or recording():
        here = ppermute(x, axis, perm)
        return lambda: here
    pairs = tuple((int(src), int(dst)) for src, dst in perm)
    _check_pairs(pairs, line.size)
    return start(x, Call("ppermute", line, perm=pairs))


def _check_pairs(pairs: tuple[tuple[int, int], ...], n: int) -> None:
    known = f"Use 0 to {n - 1}" if n > 1 else "A single rank has only index 0"
    problems = [f"{p}: an index is out of range. {known}" for p in pairs if not all(0 <= i < n for i in p)]
    for side, word in ((0, "source"), (1, "destination")):
        ends = [p[side] for p in pairs]
        problems += [f"{word} {i} must occur in one pair, got {ends.count(i)}" for i in set(ends) if ends.count(i) > 1]
    core.raise_all(
        ValueError, f"ppermute: perm={list(pairs)} is not a permutation of {n} rank{'s' * (n > 1)}:", problems
    )
