"""`shard_map`: a function over blocks, as a function over whole tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives import Following, GlobalTensor, all_gather_invariant, bind_mesh, following, take_own_block
from shardfn.core import Mesh, P, PyTree, Zero, as_mesh, broadcast_prefix, tree_flatten, tree_paths, tree_unflatten
from shardfn.engine import Interface, block_of, check_specs, is_spec, size_along


def shard_map(
    f: Callable[..., Any], *, mesh: Mesh | DeviceMesh | None, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """Runs `f` on each rank's blocks: in it a dim that a spec cuts has the block's size, and collectives know the axes.

    Every rank passes the same whole tensors, takes its own blocks of them, and gets the same whole results. It can be
    differentiated: the transpose of a cut is `all_gather_invariant`. Inside, values have JAX's types: an argument
    varies along the axes of its spec, a closed-over tensor along no axis, and where a value that is the same on all
    ranks meets one that varies, `pvary` is inserted, whose transpose is the sum.

    Args:
        f: a function over blocks; may use `psum` and the others with the mesh's axis names.
        mesh: the mesh.
        in_specs: a prefix tree of `P` for the tuple of arguments.
        out_specs: a prefix tree of `P` for the result. A result must not vary along axes that its spec leaves out.

    Returns:
        `g(*args)` with whole tensors (or `GlobalTensor`s of just that spec, whose blocks are used directly).

    Raises:
        ValueError: a spec names an unknown axis, or (when called) does not fit its argument.
        AxisTypeError: (when called) a result varies along an axis that its spec leaves out, or `pvary` is applied to a
            value that varies already.

    Example:
        >>> import torch
        >>> from shardfn.collectives import psum
        >>> total = shard_map(lambda x: psum(x.sum(), "dp"), mesh=None, in_specs=P("dp"), out_specs=P())
        >>> total(torch.arange(4.0))
        tensor(6.)
    """
    on = as_mesh(mesh)
    check_specs({"in_specs": in_specs, "out_specs": out_specs}, P(), Zero(), on)
    mode, interface = Following(on, on.axis_names), Interface(on, out_specs=out_specs)

    def mapped_call(*args: Any) -> Any:
        given = args[0] if is_spec(in_specs) and len(args) == 1 else args
        with bind_mesh(on):
            leaves, treedef = tree_flatten(given)
            specs = broadcast_prefix(in_specs, given, is_spec, names=("in_specs", "args"))
            names = tree_paths(given, "args")
            entered = [_enter_body(x, s, n, mode) for x, s, n in zip(leaves, specs, names, strict=True)]
            blocks = tree_unflatten(treedef, entered)
            with following(mode):
                out = interface.typed(f(blocks) if given is not args else f(*blocks), mode)
            leaves, treedef = tree_flatten(out)
            specs = broadcast_prefix(out_specs, out, is_spec, names=("out_specs", "result"))
            paths = tree_paths(out, "result")
            return tree_unflatten(
                treedef, [_leave_body(x, s, n, on) for x, s, n in zip(leaves, specs, paths, strict=True)]
            )

    return mapped_call


def _enter_body(x: Any, spec: P, name: str, mode: Following) -> Any:
    if isinstance(x, GlobalTensor):
        return mode.declare(block_of(x, spec, name, "in_specs").view_as(x.local), spec.axes)
    if not isinstance(x, Tensor):
        return x
    if len(spec) > x.ndim:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} has spec {spec!r}, which has more entries than it has dims."
        )
    for dim in range(len(spec)):
        for axis in spec.dim_axes(dim):
            x = take_own_block(x, axis, dim=dim)
    return mode.declare(x.view_as(x), spec.axes)  # an object of its own, which carries the axes


def _leave_body(x: Any, spec: P, name: str, mesh: Mesh) -> Any:
    if not isinstance(x, Tensor):
        return x
    if len(spec) > x.ndim:
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} has spec {spec!r} in out_specs, which has more entries than it has dims."
        )
    for dim in range(len(spec)):
        # The minor axis first: it cut the blocks of the major one.
        for axis in reversed(mesh.axes(spec.dim_axes(dim))):
            x = all_gather_invariant(x, axis, dim=dim, size=size_along(x.shape[dim], axis, mesh))
    return x
