"""The update: the optimizer on this rank's rows, then resident parameters made whole again."""

import torch
from torch import Tensor

from shardfn.collectives import AnyChannels, GlobalTensor
from shardfn.core import PyTree, tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten
from shardfn.optim import GradientTransformation, inplace

from ._layout import LeafLayout
from ._plan import Plan
from ._refresh import refresh
from ._state import TrainState, state_specs


def update(
    plan: Plan,
    channels: AnyChannels,
    optimizer: GradientTransformation,
    state: TrainState,
    grads: dict[int, Tensor],
    *,
    scale: Tensor | None,
    donated: bool,
) -> TrainState:
    """The next state. With `donated` the buffers of `state` become its own; otherwise they are copied first.

    Args:
        plan: the layout.
        channels: the step's communicators.
        optimizer: the optimizer.
        state: the current state.
        grads: by leaf, this rank's rows of the summed gradient, or the whole of it; consumed.
        scale: what gradients are multiplied by first; None for nothing.
        donated: whether `state` is consumed.
    """
    with torch.no_grad():
        params, opt_state = take_state(state, donated=donated, copied=not donated)
        blocks, opt_state = update_blocks(plan, channels, optimizer, tree_leaves(params), opt_state, grads, scale)
    return next_state(plan, state, blocks, opt_state)


def take_state(state: TrainState, *, donated: bool, copied: bool) -> tuple[PyTree, PyTree]:
    """This rank's blocks of params and optimizer state: taken away from `state`, copied, or just looked at."""
    take = _donate if donated else _clone if copied else _look
    with torch.no_grad():
        return take(state.params), take(state.opt_state)


def next_state(plan: Plan, state: TrainState, blocks: list[Tensor], opt_state: PyTree) -> TrainState:
    """The state after `state`, of this rank's new blocks and optimizer state."""
    return state._replace(params=wrap(plan, blocks), opt_state=_like(opt_state, state.opt_state), step=state.step + 1)


def update_blocks(
    plan: Plan,
    channels: AnyChannels,
    optimizer: GradientTransformation,
    blocks: list[Tensor],
    opt_state: PyTree,
    grads: dict[int, Tensor],
    scale: Tensor | None,
) -> tuple[list[Tensor], PyTree]:
    """This rank's blocks and optimizer state after the update; all arguments are consumed."""
    train = [leaf.trainable for leaf in plan.leaves]
    rows = [_rows(plan, leaf, b) if leaf.trainable else None for leaf, b in zip(plan.leaves, blocks, strict=True)]
    own = [_own(plan, plan.leaves[i], grads.pop(i)) if t else None for i, t in enumerate(train)]
    if scale is not None:
        torch._foreach_mul_([g for g in own if g is not None], scale)
    new, opt_state = inplace(optimizer)(
        tree_unflatten(plan.treedef, own),
        opt_state,
        tree_unflatten(plan.treedef, rows),
        specs=tree_unflatten(plan.treedef, [leaf.shard if leaf.trainable else None for leaf in plan.leaves]),
    )
    fresh = iter(tree_leaves(new))
    return refresh(plan, channels, blocks, [next(fresh) if t else None for t in train]), opt_state


def init_optimizer(plan: Plan, optimizer: GradientTransformation, blocks: list[Tensor]) -> PyTree:
    """The optimizer's first state, on this rank's rows, which come in the dtypes that the optimizer updates."""
    rows = [_rows(plan, leaf, b) if leaf.trainable else None for leaf, b in zip(plan.leaves, blocks, strict=True)]
    tree = tree_unflatten(plan.treedef, rows)
    # A state may start as the parameters themselves (a moving average, say); it gets memory of its own.
    held = {x.untyped_storage()._cdata for x in tree_leaves(tree)}
    opt_state = tree_map(lambda x: x.clone() if x.untyped_storage()._cdata in held else x, optimizer.init(tree))
    train = [leaf for leaf in plan.leaves if leaf.trainable]
    where = state_specs(opt_state, tree, [leaf.shard for leaf in train], [leaf.shape for leaf in train])
    leaves, treedef = tree_flatten(opt_state)
    return tree_unflatten(
        treedef, [GlobalTensor(x, torch.Size(s), p, plan.mesh) for x, (s, p) in zip(leaves, where, strict=True)]
    )


def kept(plan: Plan, blocks: list[Tensor]) -> list[Tensor]:
    """This rank's blocks in the dtypes in which they are kept between steps."""
    return [b.to(leaf.dtypes.param) for leaf, b in zip(plan.leaves, blocks, strict=True)]


def wrap(plan: Plan, blocks: list[Tensor]) -> PyTree:
    """This rank's blocks as a tree of global tensors."""
    pairs = zip(blocks, plan.leaves, strict=True)
    return tree_unflatten(plan.treedef, [GlobalTensor(b, leaf.shape, leaf.param, plan.mesh) for b, leaf in pairs])


def _rows(plan: Plan, leaf: LeafLayout, block: Tensor) -> Tensor:
    """The part of a parameter that this rank updates: a view where it can be."""
    return leaf.rows(block, plan.zero_rank(leaf)).contiguous() if leaf.refreshed else block


def _own(plan: Plan, leaf: LeafLayout, grad: Tensor) -> Tensor:
    """The part of a summed gradient that this rank applies."""
    if leaf.cut or leaf.dim is None:
        return grad
    return leaf.rows(grad, plan.zero_rank(leaf)).contiguous()


def _donate(tree: PyTree) -> PyTree:
    return tree_map(lambda x: x.donate() if isinstance(x, GlobalTensor) else x, tree)


def _look(tree: PyTree) -> PyTree:
    return tree_map(lambda x: x.local if isinstance(x, GlobalTensor) else x, tree)


def _clone(tree: PyTree) -> PyTree:
    return tree_map(lambda x: x.local.clone() if isinstance(x, GlobalTensor) else x, tree)


def _like(tree: PyTree, old: PyTree) -> PyTree:
    """Local tensors of an updated optimizer state, wrapped as the old state's leaves were."""
    leaves, treedef = tree_flatten(tree)
    if treedef != tree_structure(old):
        raise ValueError(f"the optimizer changed the structure of its state from {tree_structure(old)} to {treedef}.")
    pairs = zip(leaves, tree_leaves(old), strict=True)
    return tree_unflatten(treedef, [GlobalTensor(x, m.shape, m.spec, m.mesh) for x, m in pairs])
