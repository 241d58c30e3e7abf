"""`leaf_norms`: the norm of each leaf of a tree that is spread over ranks."""

import torch

from shardfn.collectives import GlobalTensor, bind_mesh
from shardfn.core import PyTree, raise_all, tree_flatten, tree_paths, tree_unflatten
from shardfn.optim import squares_of
from shardfn.state import check_alive


def leaf_norms(tree: PyTree) -> PyTree:
    """The Euclidean norm of each whole leaf: `sqrt(sum_i x_i^2)` over the blocks of all ranks.

    With it, each layer of a gradient can be clipped by its own norm. Ranks exchange one number a leaf, no elements.
    Collective.

    Args:
        tree: tree of `GlobalTensor`s on one mesh, such as the gradients of `step.gradients` or a state's params.

    Returns:
        A tree of 0-d float32 tensors, the same on all ranks.

    Raises:
        TypeError: a leaf is not a `GlobalTensor`; all are listed.
        DonatedError: a call has consumed a leaf.

    Example:
        >>> import shardfn as sf
        >>> step = sf.sharded_step(lambda p, x: (p["a"] * x).sum() + 2 * p["b"].sum(), sf.optim.sgd(0.1))
        >>> state = step.init({"a": torch.ones(2), "b": torch.ones(4)})
        >>> grads, _ = step.gradients(state, torch.tensor([3.0, 4.0]))
        >>> leaf_norms(grads)
        {'a': tensor(5.), 'b': tensor(4.)}
    """
    leaves, treedef = tree_flatten(tree)
    named = zip(tree_paths(tree, "tree"), leaves, strict=True)
    raise_all(
        TypeError,
        "leaf_norms takes a tree of GlobalTensors; a plain tensor has x.norm():",
        [f"{path} is a {type(x).__name__}" for path, x in named if not isinstance(x, GlobalTensor)],
    )
    check_alive(tree, "tree")
    if not leaves:
        return tree
    mesh = leaves[0].mesh
    # One leaf at a time, as those elsewhere need not fit on the device together.
    with bind_mesh(mesh), torch.no_grad():
        squares = [squares_of([x.local.to(mesh.device)], [x.spec], torch.float64)[0] for x in leaves]
    return tree_unflatten(treedef, [x.sqrt().to(torch.float32) for x in squares])
