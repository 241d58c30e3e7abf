"""`partition` runs a loss for one device along a mesh axis, `propose_specs` finds the cuts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn import core, engine
from shardfn.graph import Cluster
from shardfn.graph import cluster as named_cluster
from shardfn.optim import GradientTransformation, resolve_masks

from ._jit import eval_shape


def partition(
    loss: Callable[..., Any], axes: str | tuple[str, ...] = "tp", *, sequence: bool = False
) -> engine.Partitioned:
    """Runs an unmodified loss with tensor parallelism: the loss sees whole leaves, a step has blocks along `axes`.

    `sharded_step(partition(loss), ..., specs=specs)` has the result of `sharded_step(loss, ...)` on a single device.
    Only the specs of the leaves are needed. The layout of all other values follows from the operations: each operation
    has a rule for the result on blocks. For example, P(None, "tp") and P("tp") for the two weights of an MLP give one
    sum in the forward. With Megatron's specs a transformer block sends two sums in the forward and two in the backward.
    An operation without a rule runs on whole values.

    The loss's Python runs once per signature, as under `jit`, and may not depend on the values of tensors.

    Args:
        loss: `loss(params, batch, ...)` without a use of `axes`. The loss may be rematerialised, accumulated, of mixed
            precision or jitted, inside or outside.
        axes: mesh axis, or several axes. Several axes may cut different dims of a leaf, or one dim in this order,
            P(("tp", "sp")). All but the last must divide the dim or block. An axis that the mesh lacks, or of size 1,
            has no effect.
        sequence: whether values between blocks (residuals, norms) stay cut along the sequence or the samples, so each
            rank holds and computes a part. The number of sent bytes is the same: a `psum_scatter` and an `all_gather`
            replace a `psum` and its transpose. One more sum is sent for each leaf held by all ranks. This is Megatron's
            sequence parallelism, along the same axis.

    Returns:
        The loss. After a run or a lowering, `as_text()` lists each collective with the bytes and the line of code.

    Raises:
        ValueError: the loss is partitioned already, or (when called) the batch is cut along `axes`, the loss writes to
            arguments, calls collectives, draws without a key, or has autograd functions with a custom backward.
        CaptureError: (when called) the loss depends on the value of a tensor. The message names the line.

    Example:
        >>> import torch
        >>> loss = partition(lambda w, x: (x @ w).square().mean())
        >>> loss(torch.ones(2, 2), torch.ones(1, 2))
        tensor(4.)

    References:
        Shoeybi et al., Megatron-LM, 2019, https://arxiv.org/abs/1909.08053
        Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
        https://arxiv.org/abs/2205.05198 (sequence parallelism)
        Xu et al., GSPMD: General and Scalable Parallelization for ML Computation Graphs, 2021,
        https://arxiv.org/abs/2105.04663
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names or not all(isinstance(x, str) for x in names) or len(set(names)) < len(names):
        raise ValueError(f"partition(axes={axes!r}): name a mesh axis, or several, each once.")
    engine.check_order("partition", loss, deep=True)
    return engine.Partitioned(loss, names, sequence)


def propose_specs(
    loss: Callable[..., Any],
    params: core.PyTree,
    mesh: core.Mesh,
    *batch: Any,
    axes: str | tuple[str, ...] = "tp",
    optimizer: GradientTransformation | None = None,
    memory: float | None = None,
    cluster: Cluster | str | None = None,
) -> core.PyTree:
    """Returns specs for `partition(loss)` with little traffic, under a limit of memory on each rank.

    All ranks get the same specs, for the largest batch of a rank. Collective, unless the mesh is abstract.

    The cost of a layout is the number of bytes in the transfers planned by `partition`, forward and backward. Without a
    `cluster` computation is not counted: then whole leaves are free, and are cut only because of the limit. For a
    transformer the result is Megatron's layout, or a layout with less traffic. Leaves at the same place of equal layers
    get the same spec. An unused leaf is cut, as the cut sends nothing. The search is not exhaustive: there may be a
    better layout.

    Args:
        loss: `loss(params, *batch)`, written for a single device, and accepted by `partition`. For an accumulated or
            pipelined loss one microbatch counts. The stacked layers of a pipelined loss are cut along the pipeline's
            axis, too, if the mesh has the axis. A rank holds the rows of the rank's stages.
        params: tree of tensors, with data or without.
        mesh: mesh with the axes, which may be abstract. Other axes do not matter, except a pipeline's axis.
        *batch: other arguments of the loss: the rows of a single rank, with data or without. Only shapes count, and
            ranks may have different numbers of rows, for example 4 and 3.
        axes: axis along which leaves are cut, or several, as for `partition`. Axes are searched in sequence: specs
            along the first axis are held during the search along the second. Each search prices the whole program along
            one axis, so a layout that pays only along both axes together is not found.
        optimizer: optimizer with the states to count. States with the shape of a leaf are cut as the leaf. None means
            that states do not count.
        memory: limit of bytes of parameters and the optimizer's states on a rank. Gradients and activations come on
            top. Default: an even share of all ranks along `axes` and a quarter more, or the least that the leaves need.
        cluster: `Cluster` or the name of a cluster. A matmul repeated by every rank costs the bytes that the axis's
            link could send in the same time. A cut matmul costs the rank's share. Transfers and arithmetic count
            without an overlap, and latencies are not counted. None means that work is free.

    Returns:
        A tree of specs like `params`: `P`, or `Sharding(P, stacked=True)` for the leaves of a scan.

    Raises:
        ValueError: the leaves do not fit, with any cut. The mesh has no such axis. The loss is partitioned already, or
            has stages along the axis. No device has the name, or the device does not compute in the dtype of most of
            the work, or see `partition`.
        TypeError: the cluster is neither a name nor a value.
        RankError: the batches of ranks differ in more than the numbers of rows. The message lists the batches.

    Example:
        >>> import torch
        >>> from shardfn.core import make_mesh
        >>> params = {"up": torch.ones(64, 256), "down": torch.ones(256, 64)}
        >>> loss = lambda p, x: ((x + 1) @ p["up"]).relu().matmul(p["down"]).square().mean()
        >>> propose_specs(loss, params, make_mesh({"tp": 2}, abstract=True), torch.ones(8, 64))
        {'up': P(None, 'tp'), 'down': P('tp')}

    References: Shoeybi et al., Megatron-LM, 2019, https://arxiv.org/abs/1909.08053
        Zheng et al., Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning, 2022,
        https://arxiv.org/abs/2201.12023
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names or len(set(names)) < len(names) or not set(names) <= set(mesh.shape):
        raise ValueError(
            f"propose_specs: axes must be different axes of the mesh, from {list(mesh.shape)}, got {axes!r}."
        )
    on = named_cluster(cluster) if isinstance(cluster, str) else cluster
    if on is not None and not isinstance(on, Cluster):
        raise TypeError(
            f"propose_specs(cluster={cluster!r}): a Cluster, as sf.graph.calibrate(mesh) and sf.graph.cluster(name)"
            " make, or a name of sf.graph.DEVICES."
        )
    of = engine.Unplaced.of(loss, params, _largest_batch(batch, mesh), mesh.shape)
    if of.stages in names:
        raise ValueError(
            f"propose_specs(axes={axes!r}): the layers of the pipeline lie along {of.stages!r}, and are cut along it"
            " anyway. Name another axis."
        )
    return engine.SpecSearch(of, mesh, names, _state_bytes(params, optimizer), memory, on).found()


def _largest_batch(batch: tuple[Any, ...], mesh: core.Mesh) -> tuple[Any, ...]:
    """Returns the shapes of the largest batch of any rank, or this rank's batch if all ranks have the same shapes.

    Raises:
        RankError: the batches of ranks differ in tree or dtype. The message lists the batches.
    """
    if mesh.abstract or mesh.size == 1:
        return batch
    control = engine.comms_of(mesh).control
    engine.agree_on_step(control, "propose_specs")
    shown = core.tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x, batch)
    of_all: list[Any] = control.gather(shown)
    tensors = [[(path, x) for path, x in core.named_leaves(b, "batch") if isinstance(x, Tensor)] for b in of_all]
    looks = [[(path, x.dtype, x.ndim) for path, x in own] for own in tensors]
    if any(look != looks[0] for look in looks):
        core.raise_all(
            core.RankError,
            "propose_specs: the batches of ranks must have the same leaves, dtypes and numbers of dims; got:",
            [
                f"rank {r}: {', '.join(f'{p} {tuple(x.shape)} {x.dtype}' for p, x in own)}"
                for r, own in enumerate(tensors)
            ],
        )
    if all([x.shape for _, x in own] == [x.shape for _, x in tensors[0]] for own in tensors):
        return batch
    return max(of_all, key=lambda b: sum(x.numel() for x in core.tree_leaves(b) if isinstance(x, Tensor)))


def _state_bytes(params: core.PyTree, optimizer: GradientTransformation | None) -> list[engine.HeldBytes]:
    """Returns the bytes kept for each leaf, from an optimizer's state without the other leaves."""
    leaves, treedef = core.tree_flatten(params)
    rule = None if optimizer is None else resolve_masks(optimizer, params)
    by_leaf = rule is not optimizer  # a rule that decides by leaf, as `multi_transform` does
    found: dict[Any, engine.HeldBytes] = {}
    out: list[engine.HeldBytes] = []
    for i, x in enumerate(leaves):
        key = i if by_leaf else (tuple(x.shape), x.dtype)
        if key not in found:
            alone = core.tree_unflatten(treedef, [y if j == i else None for j, y in enumerate(leaves)])
            found[key] = _resident_bytes(x, alone, rule if x.is_floating_point() else None)
        out.append(found[key])
    return out


def _resident_bytes(x: Tensor, alone: core.PyTree, rule: GradientTransformation | None) -> engine.HeldBytes:
    states = [] if rule is None else core.tree_leaves(eval_shape(rule.init, alone))
    tensors = [s for s in states if isinstance(s, Tensor)]
    like = sum(s.element_size() for s in tensors if s.shape == x.shape)
    other = sum(s.element_size() * s.numel() for s in tensors if s.shape != x.shape)
    return engine.HeldBytes(x.element_size() + like, other)
