"""`propose_specs`: how the leaves of a loss for one device are best cut along a mesh axis."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn.core import (
    Mesh,
    PyTree,
    RankError,
    named_leaves,
    raise_all,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from shardfn.engine import HeldBytes, SpecSearch, Unplaced, agree_on_step, comms_of
from shardfn.graph import Cluster
from shardfn.graph import cluster as named_cluster
from shardfn.optim import GradientTransformation, decided

from ._eval_shape import eval_shape


def propose_specs(
    loss: Callable[..., Any],
    params: PyTree,
    mesh: Mesh,
    *batch: Any,
    axes: str | tuple[str, ...] = "tp",
    optimizer: GradientTransformation | None = None,
    memory: float | None = None,
    cluster: Cluster | str | None = None,
) -> PyTree:
    """Returns specs for `partition(loss)` that send few bytes while no rank holds more than `memory`.

    All ranks get the same specs, those for the largest of their batches. Collective, unless the mesh is abstract.

    The cost of a layout is the number of bytes that `partition` plans to send with it, forward and backward. Without a
    `cluster` computation is not counted: then whole leaves are free, and are cut only because of the limit. For a
    transformer the result is Megatron's layout, or one that sends less. Leaves at the same place of equal layers get
    the same spec. A leaf that the loss does not use is cut, as that sends nothing. The search is not exhaustive: there
    may be a better layout.

    Args:
        loss: `loss(params, *batch)`, written for one device, such that `partition` accepts it. For an accumulated or
            pipelined loss one microbatch counts. The stacked layers of a pipelined one are cut along its axis, too, if
            the mesh has it. A rank holds the rows of its stages.
        params: a tree of tensors, with data or without.
        mesh: has the axes; may be abstract. Its other axes do not matter, but for that of a pipeline.
        *batch: the other arguments of the loss: the rows of one rank, with data or without. Their shapes count, and
            ranks may have different numbers of rows, for example 4 and 3.
        axes: the axis along which leaves are cut, or several, as `partition` takes them. They are searched one after
            another: specs along the first are held while those along the second are searched. Each search prices the
            whole program along its axis; layouts that are better for both together only are not found.
        optimizer: the optimizer whose states count. Those with the shape of their leaf are cut with it. None: states do
            not count.
        memory: bytes that a rank may hold of parameters and the optimizer's states. Gradients and activations come on
            top. None: an even share of all ranks along `axes` and a quarter more, or what the leaves need at least.
        cluster: a `Cluster` or its name. A matmul that every rank repeats costs the bytes that the axis's link could
            send in that time. One that is cut costs the rank's share of that. Transfers and arithmetic count as if they
            did not overlap, and latencies are not counted. None: work is free.

    Returns:
        A tree of specs like `params`: `P`, or `Sharding(P, stacked=True)` for leaves that the loss scans over.

    Raises:
        ValueError: the leaves do not fit, with any cut. The mesh has no such axis. The loss is partitioned already, or
            its stages lie along the axis. No device has that name, or it does not compute in the dtype of most of the
            work, or see `partition`.
        TypeError: the cluster is neither a name nor a value.
        RankError: the batches of ranks differ in more than their numbers of rows. The message lists them.

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
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names or len(set(names)) < len(names) or not set(names) <= set(mesh.shape):
        raise ValueError(
            f"propose_specs(axes={axes!r}): the mesh has the axes {list(mesh.shape)}; name one of them, or several,"
            " each once."
        )
    on = named_cluster(cluster) if isinstance(cluster, str) else cluster
    if on is not None and not isinstance(on, Cluster):
        raise TypeError(
            f"propose_specs(cluster={cluster!r}): a Cluster, as sf.graph.calibrate(mesh) and sf.graph.cluster(name)"
            " make, or a name of sf.graph.DEVICES."
        )
    of = Unplaced.of(loss, params, _largest_batch(batch, mesh), mesh.shape)
    if of.stages in names:
        raise ValueError(
            f"propose_specs(axes={axes!r}): the layers of the pipeline lie along {of.stages!r}, and are cut along it"
            " anyway; name another axis."
        )
    return SpecSearch(of, mesh, names, _kept_bytes(params, optimizer), memory, on).found()


def _largest_batch(batch: tuple[Any, ...], mesh: Mesh) -> tuple[Any, ...]:
    """Returns the batch of the rank with the most elements, without data, or this rank's where all shapes are equal.

    Raises:
        RankError: the batches of ranks differ in their trees or dtypes. The message lists them.
    """
    if mesh.abstract or mesh.size == 1:
        return batch
    control = comms_of(mesh).control
    agree_on_step(control, "propose_specs")
    shown = tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x, batch)
    of_all: list[Any] = control.gather(shown)
    tensors = [[(path, x) for path, x in named_leaves(b, "batch") if isinstance(x, Tensor)] for b in of_all]
    looks = [[(path, x.dtype, x.ndim) for path, x in own] for own in tensors]
    if any(look != looks[0] for look in looks):
        raise_all(
            RankError,
            "propose_specs: the batches of ranks must have the same leaves, dtypes and numbers of dims; got:",
            [
                f"rank {r}: {', '.join(f'{p} {tuple(x.shape)} {x.dtype}' for p, x in own)}"
                for r, own in enumerate(tensors)
            ],
        )
    if all([x.shape for _, x in own] == [x.shape for _, x in tensors[0]] for own in tensors):
        return batch
    return max(of_all, key=lambda b: sum(x.numel() for x in tree_leaves(b) if isinstance(x, Tensor)))


def _kept_bytes(params: PyTree, optimizer: GradientTransformation | None) -> list[HeldBytes]:
    """Returns the bytes kept of each leaf, from an optimizer's state where the other leaves are absent."""
    leaves, treedef = tree_flatten(params)
    rule = None if optimizer is None else decided(optimizer, params)
    by_leaf = rule is not optimizer  # a rule that decides by leaf, as `multi_transform` does
    found: dict[Any, HeldBytes] = {}
    out: list[HeldBytes] = []
    for i, x in enumerate(leaves):
        key = i if by_leaf else (tuple(x.shape), x.dtype)
        if key not in found:
            alone = tree_unflatten(treedef, [y if j == i else None for j, y in enumerate(leaves)])
            found[key] = _held_bytes(x, alone, rule if x.is_floating_point() else None)
        out.append(found[key])
    return out


def _held_bytes(x: Tensor, alone: PyTree, rule: GradientTransformation | None) -> HeldBytes:
    states = [] if rule is None else tree_leaves(eval_shape(rule.init, alone))
    tensors = [s for s in states if isinstance(s, Tensor)]
    like = sum(s.element_size() for s in tensors if s.shape == x.shape)
    other = sum(s.element_size() * s.numel() for s in tensors if s.shape != x.shape)
    return HeldBytes(x.element_size() + like, other)
