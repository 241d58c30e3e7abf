"""The parity harness of `step.loss`: derivatives equal the derivatives on a single device."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import derivatives_of_decompositions
from shardfn.collectives import shard, unshard
from shardfn.core import Mesh, P, PyTree, as_mesh, tree_flatten, tree_leaves, tree_map, tree_unflatten
from shardfn.optim import sgd
from shardfn.transforms import WeightedMean, default_batch, sharded_step, value_and_grad

from ._parity import Run, assert_same, shard_rows

DERIVATIVES = ("loss", "value_and_grad", "grad", "jvp", "hvp")


def assert_derivative_parity(
    loss: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    mesh: Mesh | None,
    reference: Callable[..., Any] | None = None,
    specs: PyTree = P(),
    batch_spec: PyTree = None,
    own: PyTree = None,
    derivatives: Sequence[str] = DERIVATIVES,
    **options: Any,
) -> None:
    """Asserts that `step.loss` and its derivatives equal the loss and derivatives on a single device.

    Compared are the value, `value_and_grad`, and by `torch.func` the gradient, a directional derivative, and a product
    of the Hessian with a vector. For your models: call the function inside `testing.distributed`.

    Args:
        loss: sharded loss, which may be transformed.
        params: tree of whole floating-point tensors, the same on all ranks.
        batch: global batch.
        mesh: mesh of the ranks.
        reference: plain loss of a single device. Default: `loss`.
        specs: compute specs of params.
        batch_spec: specs of the batch. Default: as in `sharded_step`.
        own: this rank's part of the batch. Default: the rows by `batch_spec`.
        derivatives: names of derivatives to compare. For example, `torch.func` takes no saved-tensor hooks of torch.
        **options: further options of `sharded_step`.

    Raises:
        AssertionError: lists every leaf that differs by more than `RTOL` of its largest element.

    Example:
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> assert_derivative_parity(lambda w, b: (b @ w).tanh().sum(), torch.ones(2), x, mesh=None)
    """
    cut = default_batch(specs, as_mesh(mesh)) if batch_spec is None else batch_spec
    vector = tree_map(lambda x: x.cos() / 2, params)
    want = _run_one_device(reference or loss, params, batch, vector, derivatives)
    step = sharded_step(loss, sgd(0.1), mesh=mesh, specs=specs, batch=cut, **options)
    mine = shard_rows(batch, cut, as_mesh(mesh)) if own is None else own
    kept = step.init(tree_map(torch.clone, params)).params
    direction = tree_map(lambda v, x: x.with_block(shard(v, x.spec, x.mesh).local), vector, kept)
    if "jvp" in derivatives:
        _load_forward_mode()
    for name in derivatives:
        found = _FUNCTIONS[name](lambda p: step.loss(p, mine), kept, direction)
        assert_same(Run({name: unshard(found)}, (), []), Run({name: want[name]}, (), []))
    step.close()


def _load_forward_mode() -> None:
    """Loads modules that forward-mode AD would load on first use, as torch then warns of torch's code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        derivatives_of_decompositions()


def _run_one_device(
    loss: Callable[..., Any], params: PyTree, batch: PyTree, vector: PyTree, derivatives: Sequence[str]
) -> dict[str, PyTree]:
    leaves, treedef = tree_flatten(params)
    handles = [x.clone().requires_grad_() for x in leaves]
    value: Any = loss(tree_unflatten(treedef, handles), batch)
    value = value.total / value.weight if isinstance(value, WeightedMean) else value

    def differentiate_at(x: Tensor) -> list[Tensor]:
        if not x.requires_grad:  # the slope of a linear loss
            return [torch.zeros_like(h) for h in handles]
        return list(torch.autograd.grad(x, handles, create_graph=True, materialize_grads=True))

    grads = differentiate_at(value)
    slope = torch.stack([(g * v).sum() for g, v in zip(grads, tree_leaves(vector), strict=True)]).sum()
    total, tree = value.detach(), tree_unflatten(treedef, [g.detach() for g in grads])
    out = {"loss": total, "value_and_grad": (total, tree), "grad": tree, "jvp": (total, slope.detach())}
    if "hvp" in derivatives:
        out["hvp"] = tree_unflatten(treedef, [x.detach() for x in differentiate_at(slope)])
    return out


# By name, from f(params) = step.loss(params, batch), the params, and a direction.
_FUNCTIONS: dict[str, Callable[..., PyTree]] = {
    "loss": lambda f, params, direction: f(params),
    "value_and_grad": lambda f, params, direction: value_and_grad(f)(params),
    "grad": lambda f, params, direction: torch.func.grad(f)(params),
    "jvp": lambda f, params, direction: torch.func.jvp(f, (params,), (direction,)),
    "hvp": lambda f, params, direction: torch.func.vjp(torch.func.grad(f), params)[1](direction)[0],
}
