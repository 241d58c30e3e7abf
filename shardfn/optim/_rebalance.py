"""`rebalance_residuals`: converts the state of a compressing optimizer for another number of ranks."""

from typing import Any

import torch
from torch import Tensor

from shardfn import collectives, core
from shardfn.collectives import unshard

from ._base import OptState
from ._onebit_adam import OneBitAdamState
from ._onebit_lamb import OneBitLambState
from ._zero_one_adam import ZeroOneAdamState, is_in_round

_KINDS = (OneBitAdamState, OneBitLambState, ZeroOneAdamState)


def rebalance_residuals(opt_state: OptState, like: OptState) -> OptState:
    """Returns the state of a compressing optimizer for another number of ranks. No error is lost.

    Every new rank's error is the mean of the old ranks' errors. The errors that ranks keep as servers are cut again. So

        mean_i e_i' + server' = mean_i e_i + server

    at every element, and the mean of the next momentum does not change. Codes of the last momentum belong to the old
    ranks' chunks. The next step gathers the momentum's rows instead, once.

    Only the number of ranks that errors are averaged over may change, for example from 8 to 4. The specs along other
    axes (of tensor parallelism, and axes with an exact mean) must be the same.

    Args:
        opt_state: whole state, from `unshard` or a checkpoint. `GlobalTensor`s are gathered, a collective. The state
            may be inside the states of a `chain` or of `master_weights`.
        like: a state of the new step (`step.init(params).opt_state`), with the placement of each leaf.

    Returns:
        A tree like `like`.

    Raises:
        ValueError: leaves have other shapes than in `like` (all are listed), or errors do not fit the leaves, or leaves
            were cut by another spec (known for `GlobalTensor`s), or ranks of `zero_one_adam` are between two rounds,
            with different parameters.

    Example:
        >>> from shardfn.optim import onebit_adam
        >>> tx = onebit_adam(0.1, freeze_step=1)
        >>> first = tx.init([torch.ones(3)])
        >>> rebalance_residuals(unshard(first), first).residual[0].worker.shape
        torch.Size([1, 8])

    References:
        Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, 2021,
        https://arxiv.org/abs/2102.02888
    """
    _check_blocks(opt_state, like)
    states, treedef = core.tree_flatten(unshard(opt_state), is_leaf=is_compressing)
    likes = treedef.flatten_up_to(like)
    return core.tree_unflatten(treedef, [_move_states(x, y) for x, y in zip(states, likes, strict=True)])


def _check_blocks(opt_state: OptState, like: OptState) -> None:
    """Refuses errors of leaves that other axes cut into another number of blocks: elements would change places."""
    old, new = (
        [r.worker for r in core.tree_leaves(tree, is_leaf=_is_residual) if _is_residual(r)]
        for tree in (opt_state, like)
    )
    found = [tuple(map(_num_blocks, pair)) for pair in zip(old, new, strict=False)]
    wrong = [f"residual {i}: {a} blocks became {b}" for i, (a, b) in enumerate(found) if a and b and a != b]
    wrong += [f"{len(old)} residuals became {len(new)}"] if len(old) != len(new) else []
    core.raise_all(
        ValueError,
        "errors of leaves that are now cut otherwise along other axes than the mean's; keep those cuts:",
        wrong,
    )


def _num_blocks(worker: Any) -> int | None:
    return worker.mesh.axis_size(worker.spec.dim_axes(1)) if isinstance(worker, collectives.GlobalTensor) else None


def _move_states(state: Any, like: Any) -> Any:
    if not is_compressing(state):
        return _place_leaves(state, like)
    check_in_round(state)
    rest, other = state._replace(residual=()), like._replace(residual=())
    if not isinstance(state, ZeroOneAdamState):
        # Codes are of another cut: the next compressed step gathers, as the first step did.
        freeze = state.freeze._replace(begun=torch.zeros_like(state.freeze.begun))
        none = core.tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype), like.codes)
        rest = rest._replace(freeze=freeze, codes=none)
    rest = _place_leaves(rest, other)
    residuals, treedef = core.tree_flatten(state.residual, is_leaf=_is_residual)
    new = [_recut_residual(x, y) for x, y in zip(residuals, treedef.flatten_up_to(like.residual), strict=True)]
    return rest._replace(residual=core.tree_unflatten(treedef, new))


def _recut_residual(residual: collectives.Residual, like: collectives.Residual) -> collectives.Residual:
    worker, server = residual
    if not isinstance(worker, Tensor):
        return like
    # Rows of the first dim are ranks. Blocks are along the second dim, each with the real elements before the padding.
    (ranks, size), blocks = like.worker.shape, 1
    if isinstance(like.worker, collectives.GlobalTensor):
        blocks = like.worker.mesh.axis_size(like.worker.spec.dim_axes(1))
    mean, server = (
        torch.nn.functional.pad(x.view(blocks, -1), (0, (size - len(x)) // blocks)).view(-1)
        for x in (worker.sum(0) / len(worker), server)
    )
    return _place_leaves(collectives.Residual(mean.expand(ranks, -1), server), like)


def _place_leaves(state: core.PyTree, like: core.PyTree) -> core.PyTree:
    """Returns whole leaves, placed as the leaves of `like`."""
    leaves, treedef = core.tree_flatten(state)
    likes = treedef.flatten_up_to(like)
    pairs = list(zip(leaves, likes, core.tree_paths(state, "opt_state"), strict=True))
    wrong = [f"{path}: {tuple(x.shape)} is not {tuple(y.shape)}" for x, y, path in pairs if x.shape != y.shape]
    core.raise_all(
        ValueError, "leaves of the state are of other shapes than in the state that it is to be like:", wrong
    )
    placed = [
        collectives.shard(x, y.spec, y.mesh) if isinstance(y, collectives.GlobalTensor) else x.to(y.device)
        for x, y, _ in pairs
    ]
    return core.tree_unflatten(treedef, placed)


def is_compressing(x: Any) -> bool:
    """Returns whether a part of a state is the state of a compressing optimizer, for `rebalance_residuals`.

    Example:
        >>> from shardfn.optim import onebit_adam, sgd
        >>> [is_compressing(tx.init([torch.ones(3)])) for tx in (sgd(0.1), onebit_adam(0.1, freeze_step=1))]
        [False, True]
    """
    return isinstance(x, _KINDS)


def check_in_round(tree: core.PyTree) -> None:
    """Refuses a state in which ranks have different parameters, although the leaves seem equal.

    Raises:
        ValueError: the state is from between two rounds of `zero_one_adam`.
    """
    for state in core.tree_leaves(tree, is_leaf=is_compressing):
        if isinstance(state, ZeroOneAdamState) and not is_in_round(state):
            raise ValueError(
                "the state must not be from the middle of a round of zero_one_adam, when ranks have different"
                " parameters and momentum. Save after a step for which optim.is_in_round(opt_state) is true."
            )


def _is_residual(x: Any) -> bool:
    return isinstance(x, collectives.Residual)
