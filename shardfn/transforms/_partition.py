"""`partition`: a loss written for a single device, run on blocks along a mesh axis."""

from collections.abc import Callable
from typing import Any

from shardfn.engine import Partitioned, check_order


def partition(loss: Callable[..., Any], axes: str | tuple[str, ...] = "tp", *, sequence: bool = False) -> Partitioned:
    """Runs an unmodified loss with tensor parallelism: the loss sees whole leaves, a step has blocks along `axes`.

    `sharded_step(partition(loss), ..., specs=specs)` has the result of `sharded_step(loss, ...)` on a single device.
    Only the specs of the leaves are needed. The layout of all other values follows from the operations: each operation
    has a rule for the result on blocks. For example, P(None, "tp") and P("tp") for the two weights of an MLP give one
    sum in the forward. With Megatron's specs a transformer block sends two sums in the forward and two in the backward.
    An operation without a rule runs on whole values.

    The loss's Python runs once per signature, as under `jit`, and may not depend on the values of tensors.

    Args:
        loss: `loss(params, batch, ...)` without a use of `axes`. The loss may be rematerialised, accumulated, of mixed
            precision or jitted, inside or outside.
        axes: mesh axis, or several axes. Several axes may cut different dims of a leaf, or one dim in this order,
            P(("tp", "sp")). All but the last must divide the dim or block. An axis that the mesh lacks, or of size 1,
            has no effect.
        sequence: whether values between blocks (residuals, norms) stay cut along the sequence or the samples, so each
            rank holds and computes a part. The number of sent bytes is the same: a `psum_scatter` and an `all_gather`
            replace a `psum` and its transpose. One more sum is sent for each leaf held by all ranks. This is Megatron's
            sequence parallelism, along the same axis.

    Returns:
        The loss. After a run or a lowering, `as_text()` lists each collective with the bytes and the line of code.

    Raises:
        ValueError: the loss is partitioned already, or (when called) the batch is cut along `axes`, the loss writes to
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
