"""`mixed_precision`: the same loss, computed in the precision of a policy."""

import types
from collections.abc import Callable
from typing import Any

import torch

from shardfn.core import Policy
from shardfn.engine import Mixed, check_order, check_state
from shardfn.optim import LossScale


def mixed_precision(
    loss: Callable[..., Any], policy: Policy, loss_scale: LossScale | None = None, *, has_state: bool = False
) -> Mixed:
    """Computes `loss` in a policy's precision: `cast(loss(cast(params), cast(batch)))`.

    Called directly, the result casts parameters and floating-point leaves of the batch to `policy.compute`, and the
    value to `policy.output`. `sharded_step(mixed_precision(loss, policy), ...)` also stores parameters in
    `policy.param`, with wide copies in the optimizer's state (`MasterState`, sharded like the state), gathers
    parameters in `policy.compute`, sends gradients in `policy.reduce` and sums gradients in `policy.accum`. The result
    equals the step of a single device under the same policy.

    With a loss scale the step differentiates `scale * loss` and divides the gradients by the same scale before the norm
    and the clipping. If gradients are not finite on some rank, all ranks skip the step: the state stays bitwise the
    same, except for the scale.

    Args:
        loss: `loss(params, batch, ...)`, which may be accumulated, rematerialised or jitted, inside or outside.
        policy: the precision.
        loss_scale: loss scale from `optim.static_loss_scale` or `optim.dynamic_loss_scale`. A step in float16 needs a
            loss scale.
        has_state: for calls outside of a step: whether the loss is `loss(params, model_state, batch, ...)` and returns
            the model state last. The model state is not cast, as in a step. A step with `has_state` carries the model
            state in any case.

    Raises:
        TypeError: `policy` is not a `Policy`.
        ValueError: `loss` has a policy already, or contains a transform with another `has_state`, or scaled gradients
            would be summed in float16, where the division by the scale would lose small gradients again, or (when
            called) an exception of the policy matches no leaf.

    Example:
        >>> from shardfn.core import Policy
        >>> loss = mixed_precision(lambda w, x: (w @ x).sum(), Policy.bf16())
        >>> loss(torch.full((1,), 1.001), torch.ones(1))
        tensor(1.)

    References:
        Micikevicius et al., Mixed Precision Training, 2017, https://arxiv.org/abs/1710.03740
    """
    check_order("mixed_precision", loss, deep=True)
    if not isinstance(policy, Policy):
        shown = policy.__name__ if isinstance(policy, types.FunctionType) else repr(policy)
        raise TypeError(
            f"mixed_precision(loss, {shown}): the policy is a Policy; write sf.Policy.bf16(), or name the dtypes,"
            " sf.Policy(param=..., compute=...)."
        )
    if loss_scale is not None and policy.accum == torch.float16:
        raise ValueError(
            "Policy(accum=torch.float16) with a loss scale: gradients are divided by the scale in the dtype they are"
            " added up in, where they would become 0 again. Use accum=torch.float32."
        )
    check_state("mixed_precision", loss, has_state=has_state)
    return Mixed(loss, policy, loss_scale, has_state)
