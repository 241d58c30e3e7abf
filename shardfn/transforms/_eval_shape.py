"""`eval_shape`: what a function would return, uncomputed; and the abstract states that steps are lowered for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardfn.collectives import GlobalTensor, bind_mesh
from shardfn.core import PyTree, block_slices, tree_flatten, tree_map, tree_unflatten
from shardfn.optim import GradientTransformation

from ._fakes import fake, fakes
from ._plan import Plan, Planner
from ._state import TrainState
from ._update import init_optimizer, kept, wrap


def eval_shape(f: Callable[..., Any], *args: Any) -> Any:
    """What `f(*args)` returns, with tensors that have a shape and a dtype but no data; nothing is computed.

    Args:
        f: a function of trees of tensors; `step.init` among them.
        *args: its arguments; tensors may be abstract themselves.

    Returns:
        The tree that `f` returns, its tensors on the device "meta".

    Example:
        >>> import torch
        >>> eval_shape(lambda x: x @ x.T, torch.empty(1 << 20, 8, device="meta")).shape
        torch.Size([1048576, 1048576])
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = tree_map(lambda x: fake(x, "cpu") if isinstance(x, Tensor) else x, args)
        return tree_map(_meta, f(*inputs))


def is_abstract(leaves: list[Any]) -> bool:
    """Whether any of these tensors has no data, or none is made any more."""
    active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return active or any(isinstance(x, FakeTensor) or x.device.type == "meta" for x in leaves)


def abstract_init(
    plan: Plan, optimizer: GradientTransformation, key: Tensor | None, loss_scale: PyTree = ()
) -> TrainState:
    """The first state of a step as shapes: this rank's blocks, without data."""
    mesh = plan.mesh
    with bind_mesh(mesh), FakeTensorMode(allow_non_fake_inputs=True):
        blocks = []
        for leaf in plan.leaves:
            where = block_slices(tuple(leaf.shape), leaf.param, mesh.shape, mesh.coords)
            shape = [s.stop - s.start for s in where]
            blocks.append(torch.empty(shape, dtype=leaf.dtypes.master, device=mesh.device))
        opt_state = init_optimizer(plan, optimizer, blocks)
        held = wrap(plan, kept(plan, blocks))
    return TrainState(held, opt_state, torch.zeros((), dtype=torch.int64), () if key is None else key, loss_scale)


def as_state(
    planner: Planner, optimizer: GradientTransformation, key: Tensor | None, loss_scale: PyTree, given: PyTree
) -> TrainState:
    """A state, or the first state of a tree of parameters, of which only shapes and dtypes count."""
    if isinstance(given, TrainState):
        return given
    leaves, treedef = tree_flatten(given)
    return abstract_init(planner.plan(treedef, leaves), optimizer, key, loss_scale)


def abstract_leaves(tree: PyTree, device: torch.device) -> PyTree:
    """The tree with tensors without data; those on "meta" are taken to be on `device`."""
    leaves, treedef = tree_flatten(tree)
    return tree_unflatten(treedef, fakes(leaves, device))


def _meta(x: Any) -> Any:
    if isinstance(x, GlobalTensor):
        return GlobalTensor(_meta(x.held), x.shape, x.spec, x.mesh, x.memory_kind)
    if isinstance(x, Tensor):
        with torch._C._DisableTorchDispatch():
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return x
