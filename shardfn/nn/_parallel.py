"""Four edges of tensor parallelism, and linear layers between the edges.

Between blocks a value is whole on all ranks of `axis`, or each rank has some rows of the sequence (sequence
parallelism). Inside a block each rank has some features. `enter_parallel` leads in and `leave_parallel` leads out. Each
is the transpose of the other.

    between blocks      enter         inside              leave
    x[T, D]             pvary         h[T, F_axis]        psum
    x[T_axis, D]        all_gather    h[T, F_axis]        psum_scatter

So every block sends twice forward and twice backward. With an `axis` of None, missing in the mesh or of size 1 the
edges are the identity: the same function is the layer of a single device.

D features between blocks, F features inside, T tokens. Shoeybi et al., Megatron-LM, 2019,
https://arxiv.org/abs/1909.08053 Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
2022, https://arxiv.org/abs/2205.05198 (sequence parallelism)
"""

import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from shardfn.collectives import (
    all_gather,
    axis_index,
    axis_size,
    current_mesh,
    psum,
    psum_scatter,
    pvary,
    take_own_block,
)
from shardfn.core import Axes, P, all_coords, block_slices, checkpoint_name

from ._batch_invariant import AnyWeight, BatchInvariantWeight, leave_in_order, linear_of, linears_of, rank_node
from ._rounded_products import is_rounding, multiply_rounded

# The size of a single dim, or the sizes of several dims, a single dim cut by an axis.
Features = int | Sequence[int] | None


def enter_parallel(
    x_D: Float[Tensor, "*batch d"], axis: Axes, sequence: int | None = None
) -> Float[Tensor, "*batch2 d"]:
    """Enters a block with features cut along `axis`: all ranks have all tokens, for different uses.

    Gathered tokens have the name "tp_gather" in policies.

    Args:
        x_D: whole input, or with `sequence` the rank's rows of the tokens, [*batch, T_axis, D].
        axis: mesh axes. None means a single device.
        sequence: number of tokens T, where `x_D` is cut along tokens.

    Returns:
        All tokens.

    Example:
        >>> import torch
        >>> enter_parallel(torch.ones(2, 5, 3), "tp", sequence=5).shape
        torch.Size([2, 5, 3])
    """
    if sequence is None:
        return pvary(x_D, axis)
    return checkpoint_name(all_gather(x_D, axis, dim=-2, size=sequence), "tp_gather")


def leave_parallel(
    y_D: Float[Tensor, "*batch d"], axis: Axes, sequence: int | None = None
) -> Float[Tensor, "*batch2 d"]:
    """Leaves a block: returns the sum of the ranks' results of local features, whole or as rows of the tokens.

    The sum has the name "tp_sum" in policies.

    Args:
        y_D: summand of the rank, for all tokens.
        axis: mesh axes. None means a single device.
        sequence: T where each rank is to have its rows of the tokens. None gives every rank all tokens.

    Returns:
        The sum, or the rank's rows of the sum.

    Raises:
        ValueError: `sequence` is not the number of tokens.

    Example:
        >>> import torch
        >>> leave_parallel(torch.ones(2, 5, 3), "tp").shape
        torch.Size([2, 5, 3])
    """
    if sequence is None:
        return checkpoint_name(psum(y_D, axis), "tp_sum")
    if y_D.shape[-2] != sequence:
        raise ValueError(f"leave_parallel: sequence={sequence}, but y of shape {tuple(y_D.shape)} has other tokens.")
    return checkpoint_name(psum_scatter(y_D, axis, dim=-2), "tp_sum")


def between(w: Tensor, axis: Axes, sequence: int | None = None) -> Tensor:
    """Returns a whole leaf for use between blocks, such as a norm's: varying where ranks apply the leaf to local rows.

    Args:
        w: the leaf, whole on all ranks.
        axis: mesh axes. None means a single device.
        sequence: T where the values between blocks are cut along the tokens.

    Example:
        >>> import torch
        >>> between(torch.ones(3), "tp", sequence=5).shape
        torch.Size([3])
    """
    return w if sequence is None else pvary(w, axis)


def rank_tokens(
    x_D: Float[Tensor, "*batch t d"], axis: Axes, sequence: int | None = None
) -> Float[Tensor, "*batch t2 d"]:
    """Returns the rank's rows of a tensor on all ranks, such as a table of positions, or all rows without `sequence`.

    Args:
        x_D: T rows on all ranks.
        axis: mesh axes. None means a single device.
        sequence: T where the values between blocks are cut along the tokens.

    Example:
        >>> import torch
        >>> rank_tokens(torch.ones(5, 3), "tp", sequence=5).shape
        torch.Size([5, 3])
    """
    return x_D if sequence is None else take_own_block(x_D, axis, dim=-2)


def column_linear(
    x_D: Float[Tensor, "*batch d"],
    w_FD: Float[AnyWeight, "*f d"],
    b_F: Float[Tensor, "*f"] | None = None,
    *,
    features: Features = None,
    axis: Axes = None,
    sequence: int | None = None,
) -> Float[Tensor, "..."]:
    """Returns the affine map y = x w^T + b, where each rank computes some features: w[F_axis, D], b[F_axis].

    A weight may have several output dims, [*F, D], with any of these dims cut: for example [3, H, K, D] with `P(None,
    axis)` is a fused projection cut between heads, [2, F, D] the two halves of a gated layer.

    Args:
        x_D: whole input, or with `sequence` the rank's rows of the tokens.
        w_FD: block of the weight of the rank.
        b_F: block of the bias of the rank, or None.
        features: output dims F of the whole layer, needed where the axis has several ranks.
        axis: mesh axes. None means a single device.
        sequence: T where `x_D` is cut along the tokens.

    Returns:
        The rank's features of all tokens.

    Raises:
        ValueError: the weight is not the rank's block of a layer of `features`.

    Example:
        >>> import torch
        >>> column_linear(torch.ones(5, 3), torch.ones(2, 4, 3), features=(2, 4), axis="tp").shape
        torch.Size([5, 2, 4])
    """
    check_block("column_linear: w_FD", w_FD.shape[:-1], features, axis, option="features")
    return affine(enter_parallel(x_D, axis, sequence), w_FD, b_F)


def row_linear(
    x_F: Float[Tensor, "*batch f"],
    w_DF: Float[AnyWeight, "d *f"],
    b_D: Float[Tensor, " d"] | None = None,
    *,
    features: Features = None,
    axis: Axes = None,
    sequence: int | None = None,
) -> Float[Tensor, "*batch2 d"]:
    """Returns the affine map y = x w^T + b, where each rank has some input features: x[F_axis], w[D, F_axis].

    The bias is whole on all ranks, and is added once, to the sum. With a `BatchInvariantWeight` the sum goes by the
    weight's tree, so the result has the same bits on any number of ranks, for example 1, 2 and 4.

    Args:
        x_F: features of the rank, in a single last dim.
        w_DF: block of the weight of the rank. Several input dims, as in [D, H, K], count as a single dim.
        b_D: bias, or None.
        features: input dims F of the whole layer, needed where the axis has several ranks.
        axis: mesh axes. None means a single device.
        sequence: T where each rank is to have its rows of the tokens.

    Returns:
        All features, whole or as rows of the tokens.

    Raises:
        ValueError: the weight is not the rank's block of a layer of `features`, or the weight is batch-invariant, and
            the rank's chunks are not a node of the tree.

    Example:
        >>> import torch
        >>> row_linear(torch.ones(5, 8), torch.ones(3, 2, 4), features=(2, 4), axis="tp").shape
        torch.Size([5, 3])
    """
    check_block("row_linear: w_DF", w_DF.shape[1:], features, axis, option="features")
    w_DF = w_DF.flatten(1) if w_DF.ndim > 2 else w_DF
    if axis_size(axis) == 1:
        return _linear(x_F, w_DF, b_D)
    then = None
    if isinstance(w_DF, BatchInvariantWeight):
        then, w_DF = w_DF.then, rank_node(w_DF, _product_of_sizes(features), axis)
        y_D = leave_in_order(w_DF.linear(x_F), axis, sequence)
    else:
        y_D = leave_parallel(_linear(x_F, w_DF, None), axis, sequence)
    y_D = y_D if b_D is None else y_D + between(b_D, axis, sequence)
    return y_D if then is None else then(x_F, y_D)


def affine(x_D: Tensor, w_FD: AnyWeight, b_F: Tensor | None) -> Tensor:
    """Returns the affine map x w^T + b, with the weight's output dims."""
    if w_FD.ndim == 2:
        return _linear(x_D, w_FD, b_F)
    y_F = _linear(x_D, w_FD.flatten(0, -2), None if b_F is None else b_F.flatten())
    return y_F.unflatten(-1, w_FD.shape[:-1])


def affines(x_D: Tensor, weights: Sequence[AnyWeight], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Applies `affine` of several layers to the same input, in a single call where weights are packed."""
    flat = [w.flatten(0, -2) if w.ndim > 2 else w for w in weights]
    flat_biases = [b if b is None else b.flatten() for b in biases]
    if is_rounding():
        ys = [_linear(x_D, w, b) for w, b in zip(flat, flat_biases, strict=True)]
    else:
        ys = linears_of(x_D, flat, flat_biases)
    return [y if w.ndim == 2 else y.unflatten(-1, w.shape[:-1]) for y, w in zip(ys, weights, strict=True)]


def _linear(x: Tensor, w: AnyWeight, b: Tensor | None) -> Tensor:
    """Applies `linear`, with the rounding of the loss that runs."""
    if not is_rounding():
        return linear_of(x, w, b)
    if isinstance(w, BatchInvariantWeight):
        raise ValueError("rounded operands: layers must not be batch-invariant. Use Config(batch_invariant=False).")
    y = multiply_rounded(x, w)
    return y if b is None else y + b


def _product_of_sizes(features: Features) -> int:
    assert features is not None  # as several ranks need it
    return math.prod((features,) if isinstance(features, int) else features)


def check_block(name: str, block: Sequence[int], whole: Features, axis: Axes, *, option: str) -> None:
    """Raises for a weight with a wrong cut: with whole weights the sum would count features n times.

    Args:
        name: name of the layer and of the weight.
        block: dims that the axis may cut, in sizes of the rank.
        whole: same dims of the whole layer. The axis cuts a single dim. None is allowed only on a single rank.
        axis: mesh axes. None means a single device.
        option: the layer's name for `whole`.

    Raises:
        ValueError: wrong block. The message gives the rank's block, and the remedy.

    Example:
        >>> check_block("mlp: w_up", (8,), 8, "tp", option="d_ff")
    """
    n = axis_size(axis)
    if whole is None:
        if n > 1:
            raise ValueError(
                f"{name} is a block over the {n} ranks of {axis!r}: pass {option}=, of the whole layer. Without it a"
                " block looks like a leaf that was left whole."
            )
        return
    dims, have = (whole,) if isinstance(whole, int) else tuple(whole), tuple(block)
    if n == 1 and have == dims:
        return
    wanted = []
    for i, size in enumerate(dims):
        start, stop = rank_range(size, axis)
        wanted.append((*dims[:i], stop - start, *dims[i + 1 :]))
    if have not in wanted:
        shapes = " or ".join(str(w) for w in dict.fromkeys(wanted))
        raise ValueError(
            f"{name} has {have} of {option}={whole}, but this rank's block over the {n} ranks of {axis!r} is {shapes}."
            f" Cut the leaf along {axis!r} in its compute spec, or correct {option}."
        )


def rank_range(size: int, axis: Axes) -> tuple[int, int]:
    """Returns the start and stop of the rank's block of `size` rows, for example (6, 7) on rank 2 of 3 for 7 rows.

    Example:
        >>> rank_range(7, "tp")
        (0, 7)
    """
    return all_ranges(size, axis)[int(axis_index(axis))]


def all_ranges(size: int, axis: Axes) -> list[tuple[int, int]]:
    """Returns the start and stop of the blocks of all ranks along `axis`, by index.

    Example:
        >>> all_ranges(7, "tp")
        [(0, 7)]
    """
    mesh = current_mesh()
    axes = mesh.axes(axis)
    if not axes:  # as in most layers of most steps
        return [(0, size)]
    return ranges_over(size, [mesh.shape[a] for a in axes])


def ranges_over(size: int, num_ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Returns `all_ranges` over axes of `num_ranks` ranks, major to minor. Ranks without a row have empty blocks.

    Example:
        >>> ranges_over(5, [4]), ranges_over(5, [2, 2])
        ([(0, 2), (2, 4), (4, 5), (5, 5)], [(0, 2), (2, 3), (3, 4), (4, 5)])
    """
    axes = {str(i): num for i, num in enumerate(num_ranks)}
    cuts = [block_slices((size,), P(tuple(axes)), axes, at)[0] for at in all_coords(axes)]
    return [(cut.start, cut.stop) for cut in cuts]


def evenly(read: list[int], keys: int) -> bool:
    """Returns whether query heads read `keys` key heads in runs of equal length, as in attention."""
    return not read or (len(read) % keys == 0 and read == [h // (len(read) // keys) for h in range(len(read))])


def keys_of(queries: tuple[int, int], ratio: int) -> tuple[int, int]:
    """Returns the key heads read by a range of query heads."""
    start, stop = queries
    return (start // ratio, -(-stop // ratio)) if start < stop else (0, 0)


def assign_heads(H: int, G: int, axis: Axes) -> tuple[list[int] | None, list[int]]:
    """Returns the key heads of ranks, equally many each, and for each query head the index of the key head.

    The first result is None if `torch.chunk` of the key heads gives each rank the right heads.
    """
    queries, held = all_ranges(H, axis), all_ranges(G, axis)
    ratio = H // G if G else 1  # a rank may have no heads if heads are cut along another axis, too
    needed, own = [keys_of(q, ratio) for q in queries], queries[int(axis_index(axis))]
    read = [h // ratio - needed[int(axis_index(axis))][0] for h in range(*own)]
    if all(a == b or (a[0] == a[1] and b[0] == b[1]) for a, b in zip(needed, held, strict=True)):
        return None, read
    width = max(b - a for a, b in needed)
    return [min(a + i, G - 1) for a, _ in needed for i in range(width)], read
