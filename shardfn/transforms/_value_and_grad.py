"""Losses and their derivatives: `accumulate`, `mixed_precision`, `value_and_grad` and `grad`.

`accumulate`: the same loss, evaluated and differentiated one microbatch at a time.

`mixed_precision`: the same loss, computed in the precision of a policy.

`value_and_grad` and `grad`: reverse mode over pytrees, one microbatch at a time.

Both use `torch.autograd.grad`: `torch.func.grad` refuses the saved-tensor hooks that keep gathered parameters out of
the graph. Transforms of torch.func stay usable inside the loss.
"""

import contextlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import core, engine
from shardfn.collectives import GlobalTensor, local
from shardfn.core import Policy
from shardfn.engine import WeightedMean
from shardfn.optim import LossScale


def accumulate(
    loss: Callable[..., Any], num_microbatches: int, *, has_state: bool = False, split: engine.Split | None = None
) -> engine.Accumulated:
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
    engine.check_order("accumulate", loss)
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(f"accumulate needs a positive number of microbatches, got {num_microbatches!r}.")
    engine.check_state("accumulate", loss, has_state=has_state)
    if split is not None and not callable(split):
        raise TypeError(
            f"accumulate(split={split!r}): pass a function, split(batch, num_microbatches) -> list of batches."
        )
    return engine.Accumulated(loss, num_microbatches, has_state, split)


def mixed_precision(
    loss: Callable[..., Any], policy: Policy, loss_scale: LossScale | None = None, *, has_state: bool = False
) -> engine.Mixed:
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

    References: Micikevicius et al., Mixed Precision Training, 2017, https://arxiv.org/abs/1710.03740
    """
    engine.check_order("mixed_precision", loss, deep=True)
    if not isinstance(policy, Policy):
        shown = policy.__name__ if isinstance(policy, types.FunctionType) else repr(policy)
        raise TypeError(
            f"mixed_precision(loss, {shown}) expected a Policy. Write sf.Policy.bf16(), or the dtypes as"
            " sf.Policy(param=..., compute=...)."
        )
    if loss_scale is not None and policy.accum == torch.float16:
        raise ValueError(
            "Policy(accum=torch.float16) with a loss scale: gradients are divided by the scale in the dtype they are"
            " added up in, where they would become 0 again. Use accum=torch.float32."
        )
    engine.check_state("mixed_precision", loss, has_state=has_state)
    return engine.Mixed(loss, policy, loss_scale, has_state)


def value_and_grad(loss: engine.Loss, *, has_aux: bool = False) -> Callable[..., Any]:
    """Returns a function to the loss and the gradient with respect to the first argument.

    Leaves may be `GlobalTensor`s, in a `sharded` function. Their gradients are then `GlobalTensor`s, too.

    Args:
        loss: `loss(params, ...)` -> 0-d tensor, or `(0-d tensor, aux)`, or with a `WeightedMean` for the tensor.
        has_aux: whether the loss returns an aux.

    Returns:
        `f(params, *args) -> (value, grads)`, or `((value, aux), grads)`. The gradients have the structure of params,
        with zeros where the loss does not depend on a leaf.

    Raises:
        TypeError: (when called) a leaf of params is not a floating-point tensor. All such leaves are listed.
        ValueError: (when called) the loss depends on no leaf at all, or a weight of the mean requires a gradient.

    Example:
        >>> import torch
        >>> value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        (tensor(5.), {'w': tensor([2., 4.])})
    """

    def sum_microbatches(params: core.PyTree, *args: Any) -> Any:
        leaves, treedef = core.tree_flatten(params)
        _check_leaves(params, leaves)
        handles = [x.detach().requires_grad_() for x in local(leaves)]
        tree = core.tree_unflatten(treedef, map(_restore_leaf, handles, leaves))

        def differentiate_one(inner: engine.Loss, batch: core.PyTree) -> _Totals:
            with torch.enable_grad():
                value = engine.evaluate(inner, tree, (batch, *args[1:]) if args else (), has_aux)
            grads, total = _compute_grads(value.total, handles), 0.0 + value.total.detach()
            return _Totals(total, 1.0 if value.weight is None else value.weight, grads, [value.aux])

        total, weight, grads, auxes = (
            engine.fold(loss, args[0], differentiate_one, _add_totals) if args else differentiate_one(loss, None)
        )
        if handles and all(g is None for g in grads):
            raise engine.NoGradientError(core.tree_paths(params, "params"))
        scaled = [torch.zeros_like(x) if g is None else g / weight for g, x in zip(grads, handles, strict=True)]
        out: Any = total / weight
        if has_aux:
            out = out, {k: sum(a[k].total for a in auxes) / sum(a[k].weight for a in auxes) for k in auxes[0]}
        return out, core.tree_unflatten(treedef, map(_gradient_of, leaves, scaled))

    def value_and_grad_call(params: core.PyTree, *args: Any) -> Any:
        # A function of only this rank's blocks need not be called by all ranks, and has no communicators.
        meshes = [x.mesh for x in core.tree_leaves(params) if isinstance(x, GlobalTensor)]
        mesh = next((m for m in meshes if engine.COMMS.get(m) is not None), None)
        with contextlib.nullcontext() if mesh is None else engine.losing_no_peer_purely(mesh, ""):
            return sum_microbatches(params, *args)

    return value_and_grad_call


def grad(loss: engine.Loss, *, has_aux: bool = False) -> Callable[..., Any]:
    """Returns a function to the gradient only, or to `(grads, aux)`. See `value_and_grad`.

    Example:
        >>> import torch
        >>> grad(lambda p: p**3)(torch.tensor(2.0))
        tensor(12.)
    """
    both = value_and_grad(loss, has_aux=has_aux)

    def grad_call(params: core.PyTree, *args: Any) -> Any:
        value, grads = both(params, *args)
        return (grads, value[1]) if has_aux else grads

    return grad_call


class _Totals(NamedTuple):
    """Sums over microbatches, and the aux of each microbatch."""

    total: Tensor
    weight: Any
    grads: list[Tensor | None]
    auxes: list[dict[str, WeightedMean]]


def _add_totals(a: _Totals, b: _Totals) -> _Totals:
    pairs = zip(a.grads, b.grads, strict=True)
    grads = [y if x is None else x if y is None else x + y for x, y in pairs]
    return _Totals(a.total + b.total, a.weight + b.weight, grads, a.auxes + b.auxes)


def _compute_grads(total: Tensor, handles: list[Tensor]) -> list[Tensor | None]:
    # torch.autograd.grad would raise. A loss that uses no parameter has no gradient, like a parameter without a use.
    if not total.requires_grad:
        return [None] * len(handles)
    return list(torch.autograd.grad(total, handles, allow_unused=True))


def _check_leaves(params: core.PyTree, leaves: list[Any]) -> None:
    pairs = zip(core.tree_paths(params, "params"), leaves, strict=True)
    bad = [f"{p} is {getattr(x, 'dtype', type(x).__name__)}" for p, x in pairs if not _is_float(x)]
    if bad:
        raise TypeError("can only differentiate floating-point tensors; " + ", ".join(bad) + ". Close over the others.")


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor | GlobalTensor) and x.dtype.is_floating_point


def _gradient_of(leaf: Any, x: Tensor) -> Any:
    """Returns the gradient of a leaf. The gradient of a leaf on disk is on the host."""
    return leaf.replace_block(x) if isinstance(leaf, GlobalTensor) else x


def _restore_leaf(x: Tensor, leaf: Any) -> Any:
    """Returns a tensor in the place of a leaf: for a sharded leaf, with the tensor as this rank's block."""
    return leaf.with_block(x) if isinstance(leaf, GlobalTensor) else x
