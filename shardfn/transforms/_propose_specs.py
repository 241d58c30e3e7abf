"""`propose_specs`: how the leaves of a loss for one device are best cut along a mesh axis."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardfn.core import Mesh, PyTree, tree_flatten, tree_leaves
from shardfn.engine import proposed
from shardfn.graph import HeldBytes
from shardfn.optim import GradientTransformation

from ._eval_shape import eval_shape


def propose_specs(
    loss: Callable[..., Any],
    params: PyTree,
    mesh: Mesh,
    *batch: Any,
    axes: str = "tp",
    optimizer: GradientTransformation | None = None,
    memory: float | None = None,
) -> PyTree:
    """Specs for `partition(loss)` that send few bytes while no rank holds more than `memory`.

    The cost of a layout is the number of bytes that `partition` plans to send with it, forward and backward;
    computation is not counted. Whole leaves cost nothing, so leaves are cut only because of the limit. For a
    transformer the result is Megatron's layout, or one that sends less. Leaves at the same place of equal layers get
    the same spec; a leaf that the loss does not use is cut, as that sends nothing. The search is not exhaustive: there
    may be a better layout.

    Args:
        loss: `loss(params, *batch)`, written for one device, such that `partition` accepts it.
        params: a tree of tensors, with data or without.
        mesh: has the axis; may be abstract. Its other axes do not matter.
        *batch: the other arguments of the loss: the rows of one rank, with data or without. Their shapes count.
        axes: the axis along which leaves are cut.
        optimizer: whose states count, where they have the shape of their leaf as cut with it; None: none.
        memory: bytes that a rank may hold of parameters and the optimizer's states; gradients and activations come on
            top. None: an even share and a quarter more, or what the leaves need at least.

    Returns:
        A tree of specs like `params`: `P`, or `Sharding(P, stacked=True)` of what the loss takes apart by `scan`.

    Raises:
        TypeError: several axes are named.
        ValueError: the leaves do not fit, whatever is cut; the mesh has no such axis; or see `partition`.

    Example:
        >>> import torch
        >>> from shardfn.core import make_mesh
        >>> params = {"up": torch.ones(64, 256), "down": torch.ones(256, 64)}
        >>> loss = lambda p, x: ((x + 1) @ p["up"]).relu().matmul(p["down"]).square().mean()
        >>> propose_specs(loss, params, make_mesh({"tp": 2}, abstract=True), torch.ones(8, 64))
        {'up': P(None, 'tp'), 'down': P('tp')}

    References:
        Shoeybi et al., Megatron-LM, 2019, https://arxiv.org/abs/1909.08053
        Zheng et al., Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning, 2022,
        https://arxiv.org/abs/2201.12023
    """
    if not isinstance(axes, str):
        raise TypeError(
            f"propose_specs(axes={axes!r}): specs are proposed along one axis; name one, and cut leaves along the"
            " others by hand."
        )
    if axes not in mesh.shape:
        raise ValueError(f"propose_specs(axes={axes!r}): the mesh has the axes {list(mesh.shape)}; name one of them.")
    kept = _kept(tree_flatten(params)[0], optimizer)
    return proposed(loss, params, batch, axes, mesh.shape[axes], kept, memory)


def _kept(leaves: Sequence[Tensor], optimizer: GradientTransformation | None) -> list[HeldBytes]:
    """Of each leaf the bytes that are kept, by what an optimizer makes of the leaf alone."""
    found: dict[Any, HeldBytes] = {}
    for x in leaves:
        key = tuple(x.shape), x.dtype
        if key not in found:
            has_states = optimizer is not None and x.is_floating_point()
            states = tree_leaves(eval_shape(optimizer.init, [x])) if has_states else []  # pyright: ignore[reportOptionalMemberAccess]
            tensors = [s for s in states if isinstance(s, Tensor)]
            like = sum(s.element_size() for s in tensors if s.shape == x.shape)
            other = sum(s.element_size() * s.numel() for s in tensors if s.shape != x.shape)
            found[key] = HeldBytes(x.element_size() + like, other)
    return [found[tuple(x.shape), x.dtype] for x in leaves]
