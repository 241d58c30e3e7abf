"""`partition`: a loss that is written for one device, run on blocks along a mesh axis."""

from collections.abc import Callable
from typing import Any

from shardfn.engine import Partitioned, check_order


def partition(loss: Callable[..., Any], axes: str | tuple[str, ...] = "tp", *, sequence: bool = False) -> Partitioned:
    """Tensor parallelism of an unmodified loss: inside it leaves are whole along `axes`, outside they are blocks.

    `sharded_step(partition(loss), ..., specs=specs)` has the result of `sharded_step(loss, ...)` on one device. Only
    the specs of the leaves are needed. The layout of the values between them follows from the operations: each has a
    rule for its result on blocks. With Megatron's specs a transformer block sends two sums in the forward and two in
    the backward. An operation without a rule runs on whole values.

    The loss's Python runs once a signature, as under `jit`: it may not depend on the values of tensors.

    Args:
        loss: `loss(params, batch, ...)`, which does not use `axes`. It may be rematerialised, accumulated, of mixed
            precision or jitted, inside or outside.
        axes: the mesh axis, or several. Several axes may cut different dims of a leaf, or one dim in this order,
            P(("tp", "sp")). All but the last must divide the dim or block that they cut. An axis that the mesh lacks,
            or of size 1, has no effect.
        sequence: whether values between blocks (residuals, norms) stay cut along the sequence or the samples, so that
            each rank holds and computes a part of them. This sends the same number of bytes: a `psum_scatter` and an
            `all_gather` replace a `psum` and its transpose. One more sum is sent for each leaf that all ranks hold. It
            is Megatron's sequence parallelism, along the same axis.

    Returns:
        The loss. Its `as_text()` lists, once it was run or lowered, each collective with its bytes and its line.

    Raises:
        ValueError: the loss is partitioned already; (when called) the batch is cut along `axes`, the loss writes to its
            arguments, calls collectives, draws without a key, or has autograd functions with a custom backward.
        CaptureError: (when called) the loss depends on the value of a tensor. The message names the line.

    Example:
        >>> import torch
        >>> loss = partition(lambda w, x: (x @ w).square().mean())
        >>> loss(torch.ones(2, 2), torch.ones(1, 2))
        tensor(4.)

    References:
        Shoeybi et al., Megatron-LM, 2019, https://arxiv.org/abs/1909.08053
        Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
        https://arxiv.org/abs/2205.05198 (sequence parallelism)
        Xu et al., GSPMD: General and Scalable Parallelization for ML Computation Graphs, 2021,
        https://arxiv.org/abs/2105.04663
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names or not all(isinstance(x, str) for x in names) or len(set(names)) < len(names):
        raise ValueError(f"partition(axes={axes!r}): name a mesh axis, or several, each once.")
    check_order("partition", loss, deep=True)
    return Partitioned(loss, names, sequence)
