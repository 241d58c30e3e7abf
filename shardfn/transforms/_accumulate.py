"""`accumulate`: the same loss, evaluated and differentiated one microbatch at a time."""

from collections.abc import Callable
from typing import Any

from shardfn.engine import Accumulated, Split, check_order, check_state


def accumulate(
    loss: Callable[..., Any], num_microbatches: int, *, has_state: bool = False, split: Split | None = None
) -> Accumulated:
    """Cuts the batch in microbatches along dim 0 and averages: `mean_i loss(params, batch_i)`.

    This is gradient accumulation. For a mean over rows the value and the gradient equal those of `loss(params, batch)`.
    Activations of a single microbatch at a time are in memory, and a step takes more time. Every tensor of the batch is
    cut along dim 0; 0-d tensors go to each microbatch whole. Every microbatch gets the same key. Draws differ by
    sample.

    A `WeightedMean` is averaged by its weights, exactly, also where microbatches differ in size: for example 7 rows in
    3 microbatches are 3, 2 and 2 rows, and with fewer rows than microbatches some are empty.

    Args:
        loss: `loss(params, batch, ...)`.
        num_microbatches: the number of pieces. The number must divide the rows, unless `loss` returns a `WeightedMean`.
        has_state: for calls outside of a step: whether the loss is `loss(params, model_state, batch, ...)` and returns
            the model state last. Each microbatch passes the model state on to the next as a constant, as in a step. A
            step with `has_state` carries the model state in any case.
        split: `split(batch, num_microbatches)` returns the microbatches, for batches with leaves that are not all cut
            along dim 0 in the same way, such as the patches of images. Each microbatch has all leaves of the batch. A
            step calls `split` before the graph runs, so `split` may read values under `jit` too.

    Raises:
        TypeError: `split` is not a function.
        ValueError: `num_microbatches` is not positive. `loss` is sharded already, or contains a transform with another
            `has_state`, or (when called) leaves have different numbers of rows. The number does not divide the rows,
            and `loss` does not return a `WeightedMean`, or the result of `loss` cannot be averaged.

    Example:
        >>> import torch
        >>> loss = lambda w, x: (w * x).mean()
        >>> accumulate(loss, 2)(torch.tensor(2.0), torch.arange(4.0))
        tensor(3.)

        With four rows of 2 and 1 patches each:

        >>> import shardfn as sf
        >>> def by_example(batch, n):
        ...     patches = batch["patches"].split(batch["num_patches"].tolist())
        ...     rows = torch.arange(len(patches)).tensor_split(n)
        ...     return [
        ...         {"patches": torch.cat([patches[i] for i in part]), "num_patches": batch["num_patches"][part]}
        ...         for part in rows
        ...     ]
        >>> batch = {"patches": torch.arange(6.0), "num_patches": torch.tensor([2, 1, 2, 1])}
        >>> loss = lambda w, b: sf.WeightedMean((w * b["patches"]).sum(), len(b["num_patches"]))
        >>> accumulate(loss, 3, split=by_example)(torch.tensor(2.0), batch).mean()
        tensor(7.5000)
    """
    check_order("accumulate", loss)
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(f"accumulate needs a positive number of microbatches, got {num_microbatches!r}.")
    check_state("accumulate", loss, has_state=has_state)
    if split is not None and not callable(split):
        raise TypeError(
            f"accumulate(split={split!r}): pass a function, split(batch, num_microbatches) -> list of batches."
        )
    return Accumulated(loss, num_microbatches, has_state, split)
