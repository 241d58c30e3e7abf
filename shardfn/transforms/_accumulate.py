"""`accumulate`: the same loss, evaluated and differentiated one microbatch at a time."""

from collections.abc import Callable
from typing import Any

from shardfn.engine import Accumulated, check_order, check_state


def accumulate(loss: Callable[..., Any], num_microbatches: int, *, has_state: bool = False) -> Accumulated:
    """Cuts the batch in microbatches along dim 0 and averages: `mean_i loss(params, batch_i)`.

    For a loss that is a mean over rows this equals `loss(params, batch)`, and its gradient too. It saves activation
    memory, which is one microbatch's, and takes more time. A `WeightedMean` is averaged by its weights, exactly. Every
    tensor of the batch is cut along dim 0; 0-d tensors go to each microbatch whole. Every microbatch gets the same key;
    draws differ by sample.

    Args:
        loss: `loss(params, batch, ...)`.
        num_microbatches: the number of pieces; must divide the rows.
        has_state: for calls outside of a step: the loss is `loss(params, model_state, batch, ...)` and returns the
            model state last, which each microbatch passes on to the next one as a constant, as in a step. A step with
            `has_state` carries it in any case.

    Raises:
        ValueError: `num_microbatches` is not positive; `loss` is sharded already, or was told otherwise of a model
            state; or (when called) the number does not divide a leaf's rows, or what `loss` returns cannot be averaged.

    Example:
        >>> import torch
        >>> loss = lambda w, x: (w * x).mean()
        >>> accumulate(loss, 2)(torch.tensor(2.0), torch.arange(4.0))
        tensor(3.)
    """
    check_order("accumulate", loss)
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(f"accumulate needs a positive number of microbatches, got {num_microbatches!r}.")
    check_state("accumulate", loss, has_state=has_state)
    return Accumulated(loss, num_microbatches, has_state)
