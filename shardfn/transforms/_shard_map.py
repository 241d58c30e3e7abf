"""`shard_map`: a function over blocks, as a function over whole tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn import collectives, core, engine
from shardfn.core import P


def shard_map(
    f: Callable[..., Any], *, mesh: core.Mesh | DeviceMesh | None, in_specs: core.PyTree, out_specs: core.PyTree
) -> Callable[..., Any]:
    """Runs `f` on each rank's blocks: inside, cut dims have the block's size, and collectives know the axes.

    Every rank passes the same whole tensors, takes the rank's blocks, and gets the same whole results. For example a
    [6, 4] argument with P("dp") is [2, 4] inside, on 3 ranks. The call can be differentiated: the transpose of a cut is
    `all_gather_invariant`. Inside, values have JAX's types: an argument varies along the axes of the spec, a
    closed-over tensor along no axis. Where an invariant value meets a varying value, `pvary` is inserted, with a sum as
    the transpose.

    Args:
        f: function over blocks, which may use collectives such as `psum` with the mesh's axis names.
        mesh: mesh with the axes.
        in_specs: prefix tree of `P` for the tuple of arguments.
        out_specs: prefix tree of `P` for the result. A result must not vary along an axis without an entry in its spec.

    Returns:
        `g(*args)` with whole tensors (or `GlobalTensor`s of exactly the spec, with blocks used directly).

    Raises:
        ValueError: a spec names an unknown axis, or (when called) does not fit the argument.
        AxisTypeError: (when called) a result varies along an axis that the spec leaves out, or `pvary` is applied to a
            varying value.

    Example:
        >>> import torch
        >>> from shardfn.collectives import psum
        >>> total = shard_map(lambda x: psum(x.sum(), "dp"), mesh=None, in_specs=P("dp"), out_specs=P())
        >>> total(torch.arange(4.0))
        tensor(6.)
    """
    on = core.as_mesh(mesh)
    engine.check_specs({"in_specs": in_specs, "out_specs": out_specs}, P(), core.Zero(), on)
    mode, interface = collectives.AxisTypeMode(on, on.axis_names), engine.Interface(on, out_specs=out_specs)

    def mapped_call(*args: Any) -> Any:
        given = args[0] if engine.is_spec(in_specs) and len(args) == 1 else args
        with collectives.bind_mesh(on):
            leaves, treedef = core.tree_flatten(given)
            specs = core.broadcast_prefix(in_specs, given, engine.is_spec, names=("in_specs", "args"))
            names = core.tree_paths(given, "args")
            entered = [_enter_body(x, s, n, mode) for x, s, n in zip(leaves, specs, names, strict=True)]
            blocks = core.tree_unflatten(treedef, entered)
            with collectives.track_axis_types(mode):
                out = interface.typed(f(blocks) if given is not args else f(*blocks), mode)
            leaves, treedef = core.tree_flatten(out)
            specs = core.broadcast_prefix(out_specs, out, engine.is_spec, names=("out_specs", "result"))
            paths = core.tree_paths(out, "result")
            return core.tree_unflatten(
                treedef, [_leave_body(x, s, n, on) for x, s, n in zip(leaves, specs, paths, strict=True)]
            )

    return mapped_call


def _enter_body(x: Any, spec: P, name: str, mode: collectives.AxisTypeMode) -> Any:
    if isinstance(x, collectives.GlobalTensor):
        return mode.declare(engine.block_of(x, spec, name, "in_specs").view_as(x.local), spec.axes)
    if not isinstance(x, Tensor):
        return x
    if len(spec) > x.ndim:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} has spec {spec!r}, which has more entries than it has dims."
        )
    for dim in range(len(spec)):
        for axis in spec.dim_axes(dim):
            x = collectives.take_own_block(x, axis, dim=dim)
    return mode.declare(x.view_as(x), spec.axes)  # a new object, which carries the axes


def _leave_body(x: Any, spec: P, name: str, mesh: core.Mesh) -> Any:
    if not isinstance(x, Tensor):
        return x
    if len(spec) > x.ndim:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} has spec {spec!r} in out_specs, which has more entries than it has dims."
        )
    for dim in range(len(spec)):
        # The minor axis first: the minor axis cut the blocks of the major axis.
        for axis in reversed(mesh.axes(spec.dim_axes(dim))):
            x = collectives.all_gather_invariant(x, axis, dim=dim, size=engine.size_along(x.shape[dim], axis, mesh))
    return x
