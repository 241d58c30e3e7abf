"""`leaf_norms`: the norm of each leaf of a tree on several ranks."""

from collections.abc import Collection

import torch
from torch import Tensor

from shardfn import collectives, core
from shardfn.optim import leaf_squares
from shardfn.state import check_alive


def leaf_norms(tree: core.PyTree, stacked: str | Collection[str] = ()) -> core.PyTree:
    """Returns the Euclidean norm of each whole leaf: `sqrt(sum_i x_i^2)` over the blocks of all ranks.

    For example, to clip each layer of a gradient by the layer's norm. Ranks exchange a number for each leaf, no
    elements. Collective.

    Args:
        tree: tree of `GlobalTensor`s on one mesh, such as the gradients of `step.gradients` or a state's params.
        stacked: keys, such as "blocks", below which a leaf `[L, ...]` has a layer in each row: the leaf gets a norm for
            each layer.

    Returns:
        A tree of 0-d float32 tensors, of vectors `[L]` where leaves are stacked, the same on all ranks.
        `sf.metrics.by_layer` adds the norms up by layer.

    Raises:
        TypeError: a leaf is not a `GlobalTensor`. All are listed.
        ValueError: no leaf is below a key of `stacked`, or such a leaf has no rows.
        DonatedError: a call has consumed a leaf.

    Example:
        >>> import shardfn as sf
        >>> step = sf.sharded_step(lambda p, x: (p["a"] * x).sum() + 2 * p["b"].sum(), sf.optim.sgd(0.1))
        >>> state = step.init({"a": torch.ones(2), "b": torch.ones(4)})
        >>> grads, _ = step.gradients(state, torch.tensor([3.0, 4.0]))
        >>> leaf_norms(grads)
        {'a': tensor(5.), 'b': tensor(4.)}
    """
    leaves, treedef = core.tree_flatten(tree)
    named = zip(core.tree_paths(tree, "tree"), leaves, strict=True)
    core.raise_all(
        TypeError,
        "leaf_norms takes a tree of GlobalTensors; a plain tensor has x.norm():",
        [f"{path} is a {type(x).__name__}" for path, x in named if not isinstance(x, collectives.GlobalTensor)],
    )
    check_alive(tree, "tree")
    if not leaves:
        return tree
    mesh, rows = leaves[0].mesh, _is_stacked(tree, {stacked} if isinstance(stacked, str) else {*stacked})
    # One leaf at a time: leaves on the host or disk need not fit on the device together.
    with collectives.bind_mesh(mesh), torch.no_grad():
        squares = [_sum_row_squares(x) if row else _sum_squares(x) for x, row in zip(leaves, rows, strict=True)]
    return core.tree_unflatten(treedef, [x.sqrt().to(torch.float32) for x in squares])


def _sum_squares(x: collectives.GlobalTensor) -> Tensor:
    """Returns the sum of the squares of a leaf."""
    return leaf_squares([x.local.to(x.mesh.device)], [x.spec], torch.float64)[0]


def _sum_row_squares(x: collectives.GlobalTensor) -> Tensor:
    """Returns the sum of the squares of each row of a leaf."""
    start, stop = collectives.blocks_of(tuple(x.shape), x.spec, x.mesh)[x.mesh.rank][0]
    own = x.local.to(x.mesh.device).double().square()
    own = own.sum(tuple(range(1, own.ndim))) if own.ndim > 1 else own
    rows = torch.zeros(x.shape[0], dtype=torch.float64, device=x.mesh.device)
    rows[start:stop] = own
    axes = x.mesh.axes(x.spec.axes)
    return collectives.psum(rows, tuple(axes)) if axes else rows


def _is_stacked(tree: core.PyTree, keys: set[str]) -> list[bool]:
    """Returns whether each leaf is below one of the keys."""
    paths, entries = core.tree_paths(tree, "tree"), core.tree_entries(tree)
    known = {str(entry) for own in entries for entry in own}
    problems = [f"no leaf is below {key!r}.{core.did_you_mean(key, known)}" for key in sorted(keys - known)]
    rows = [not keys.isdisjoint(map(str, own)) for own in entries]
    leaves = zip(paths, core.tree_leaves(tree), rows, strict=True)
    problems += [
        f"{path} is 0-d, and a stacked leaf has a layer in each row" for path, x, row in leaves if row and not x.ndim
    ]
    core.raise_all(ValueError, f"leaf_norms(stacked={sorted(keys)}):", problems)
    return rows
