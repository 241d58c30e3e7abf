"""Blocks to wholes: `all_gather`, `all_gather_invariant`."""

import torch
from jaxtyping import Shaped

from shardfn.core import Axes

from ._arguments import joined_size, tensor_dim
from ._line import line_along
from ._primitive import Call, bind


def all_gather(
    x: Shaped[torch.Tensor, "..."], axis: Axes, *, dim: int = 0, size: int | None = None
) -> Shaped[torch.Tensor, "..."]:
    """The blocks along `axis`, concatenated along `dim`: `V -> V`.

        NCCL: all_gather.  Slow spec: `[cat(blocks, dim)] * n`.  Layout: `A[I_axis] -> A[I]`.

        [A] [B]  =>  [A, B] [A, B]

    Transpose: `psum_scatter`. Each rank may use the whole in its own way, so that cotangents differ and are summed.

    When: every rank needs the whole and goes on differently with it: ZeRO's parameters, the sequence before
    attention. When all go on alike, use `all_gather_invariant`, whose gradient needs no communication.

    Args:
        x: this rank's block.
        axis: mesh axes, major to minor; None, a missing axis and an axis of size 1 are the identity.
        dim: the dim along which `x` is a block.
        size: the global size of that dim. Needed where the axis does not divide it: blocks are those of `torch.chunk`
            (with several axes: cut by the major one first). Default: n times this block, which must be so on all ranks.

    Returns:
        The whole, of `size` along `dim`.

    Raises:
        ValueError: unknown axis, `dim` out of range, or a block that is not as long as `size` says.

    Example:
        >>> all_gather(torch.arange(3), "dp")
        tensor([0, 1, 2])
    """
    line = line_along(axis)
    dim = tensor_dim("all_gather", x, dim)
    size = joined_size("all_gather", x, line, dim, size)
    return x if line is None else bind(x, Call("all_gather", line, dim, size))


def all_gather_invariant(
    x: Shaped[torch.Tensor, "..."], axis: Axes, *, dim: int = 0, size: int | None = None
) -> Shaped[torch.Tensor, "..."]:
    """The blocks along `axis`, concatenated along `dim`, as a value that counts once: `V -> I`.

        NCCL: all_gather.  Slow spec: `[cat(blocks, dim)] * n`.  Layout: `A[I_axis] -> A[I]`.

        [A] [B]  =>  [A, B] [A, B]

    Transpose: `take_own_block`, without communication: the cotangent is the same everywhere.

    When: all ranks go on with the same arithmetic, as they do at the end of a program: logits, outputs, metrics.

    Args:
        x: this rank's block.
        axis: mesh axes, major to minor; None, a missing axis and an axis of size 1 are the identity.
        dim: the dim along which `x` is a block.
        size: the global size of that dim; see `all_gather`.

    Returns:
        The whole, of `size` along `dim`.

    Raises:
        ValueError: unknown axis, `dim` out of range, or a block that is not as long as `size` says.

    Example:
        >>> all_gather_invariant(torch.ones(2, 3), "dp", dim=1).shape
        torch.Size([2, 3])
    """
    line = line_along(axis)
    dim = tensor_dim("all_gather_invariant", x, dim)
    size = joined_size("all_gather_invariant", x, line, dim, size)
    return x if line is None else bind(x, Call("all_gather_invariant", line, dim, size))
