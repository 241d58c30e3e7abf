"""`reshard`: leaves to other layouts, memories, dtypes and meshes."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardfn._torch import DisableFuncTorch, disable_current_modes
from shardfn.capture import capturing
from shardfn.collectives import GlobalTensor, transforming
from shardfn.core import Mesh, PerMesh, PyTree, as_mesh, raise_all, tree_flatten, tree_leaves, tree_unflatten
from shardfn.engine.agreement import comms_of, losing_no_peer
from shardfn.engine.loss import agree_on_step, told_before
from shardfn.memory import Pool

from ._reshard_across_meshes import crossed
from ._reshard_local import moved, reshard_purely
from ._reshard_request import ReshardRequest, Transit, is_followed


def reshard(
    tree: PyTree,
    to: PyTree = None,
    *,
    into: PyTree | None = None,
    mesh: Mesh | DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    pool: Pool | None = None,
) -> PyTree:
    """Returns the same leaves in another layout, memory, dtype or mesh: `unshard(reshard(tree, to)) == unshard(tree)`.

    On one mesh each leaf goes along its `route`: by slices, all_to_alls and gathers. It works under `jit` and inside
    transforms of torch.func. Its transpose is the way back. Between two meshes each rank sends the others only what
    they lack, once, through the host and a few megabytes at a time. This is eager, and collective over the ranks of
    both meshes. Ranks compare their transfers before the first one.

    Args:
        tree: `GlobalTensor`s are placed. Other leaves pass through (`shard` places a tensor that all ranks hold).
        to: a prefix tree of targets: a `P` (on the device), a `Sharding`, or a `Placement`, which also has a dtype. It
            may be left out with `into`.
        into: leaves with the structure and shapes of `tree`, on the device or the host, that are overwritten and
            returned. Their layouts, dtypes and meshes are the targets. `to`, `mesh` and `dtype` must equal them. Not
            under `jit`, torch.func or autograd.
        mesh: the target mesh; default each leaf's own, or that of its leaf of `into`. It may have other ranks, or some
            of the same.
        dtype: dtype of floating-point leaves without a `Placement`. Default: their own. A cast to a narrower dtype
            comes before the transfer.
        pool: where leaves on disk are written. One for each rank.

    Returns:
        The tree. A leaf that is placed as asked is the same leaf. Every other one has memory of its own, and `tree` is
        not changed. With `into`, its leaves, in their own memory. On a rank outside of `mesh`, leaves have shape, dtype
        and layout, and no block.

    Raises:
        ValueError: a leaf does not fit its target or cannot be moved there, or leaves share memory with those of
            `into`. The message lists all. Or this rank is outside of all the meshes.
        DonatedError: a step has consumed a leaf of `tree` or `into`.
        RankError: ranks disagree on the transfers, or one has failed.

    Example:
        >>> import torch
        >>> from shardfn.collectives import shard
        >>> from shardfn.core import P, make_mesh
        >>> with make_mesh({"dp": -1}, device="cpu") as mesh:
        ...     tree = {"w": shard(torch.ones(4, 2), P("dp"), mesh)}
        ...     reshard(tree, P(None, "dp"), dtype=torch.bfloat16)
        {'w': GlobalTensor((4, 2), torch.bfloat16, P(None, 'dp'); 16 B here on device, mesh dp=1)}
        >>> with make_mesh({"dp": -1}, device="cpu") as mesh:
        ...     trained, served = ({"w": shard(torch.full((2,), x), P("dp"), mesh)} for x in (3.0, 0.0))
        ...     reshard(trained, into=served)["w"] is served["w"], served["w"].local
        (True, tensor([3., 3.]))
    """
    leaves, treedef = tree_flatten(tree)
    at = [i for i, x in enumerate(leaves) if isinstance(x, GlobalTensor)]
    held = [leaves[i] for i in at]
    if len(held) < len(leaves) and not held:
        raise ValueError(
            "reshard: the tree has leaves, but none is a GlobalTensor. A tensor that all ranks hold is placed by"
            " sf.shard(x, spec, mesh)."
        )
    targets = [y for y in tree_leaves(into) if isinstance(y, GlobalTensor)]
    if not held and not targets:
        return tree
    if to is None and into is None:
        raise ValueError("reshard: where to? Pass to=, such as P('dp'), or into=, leaves that are to be overwritten.")
    on = mesh if mesh is None or isinstance(mesh, Mesh) else as_mesh(mesh)
    meshes = {id(m): m for m in (*(() if on is None else (on,)), *(x.mesh for x in (*targets, *held)))}
    out = _place_leaves(ReshardRequest(tree, to, on, dtype, pool, into), held, list(meshes.values()))
    for i, x in zip(at, out, strict=True):
        leaves[i] = x
    return tree_unflatten(treedef, leaves)


def _place_leaves(request: ReshardRequest, held: Sequence[GlobalTensor], meshes: Sequence[Mesh]) -> list[GlobalTensor]:
    abstract = [f"{m!r} is abstract: its ranks do not exist" for m in meshes if m.abstract]
    raise_all(ValueError, "reshard: nothing can be moved:", abstract)
    if capturing():  # a capture sends no messages; the graph is the program of the ranks
        return reshard_purely(request.transits(pure=True))
    meeting = _join_meshes(meshes)
    if transforming() or any(map(is_followed, held)):
        with DisableFuncTorch(), disable_current_modes():  # messages, which transforms must not see
            transits = _agree_on_transfers(meeting, request, pure=True)
        return reshard_purely(transits)
    transits = _agree_on_transfers(meeting, request, pure=False)
    # In the order of the tree, first those that stay on a mesh: the same on all ranks, as they have agreed on the list.
    here = [i for i, t in enumerate(transits) if t.on_one_mesh]
    away = [i for i, t in enumerate(transits) if not t.on_one_mesh]
    comms = comms_of(meeting)
    with losing_no_peer(comms), torch.no_grad():
        out = dict(zip(here, moved([transits[i] for i in here]), strict=True))
        out |= zip(away, crossed([transits[i] for i in away], comms), strict=True)
    return [out[i] for i in range(len(transits))]


def _agree_on_transfers(meeting: Mesh, request: ReshardRequest, *, pure: bool) -> list[Transit]:
    """Returns the transfers that all ranks are about to make. Collective over the ranks of `meeting`."""
    control = comms_of(meeting).control
    with told_before(control):
        transits = request.transits(pure=pure)
        text = "\n".join(t.describe() for t in transits)
    agree_on_step(control, "reshard", (text, ()))
    return transits


# By ranks, the meshes that are made for messages between those of a call.
_MEETINGS: PerMesh[dict[tuple[int, ...], Mesh]] = PerMesh()


def _join_meshes(meshes: Sequence[Mesh]) -> Mesh:
    """Returns the mesh of all ranks of some meshes.

    One of these, if it has them all, else one that the first of them keeps.

    Raises:
        ValueError: this rank is not one of them.
    """
    if not any(m.is_member for m in meshes):
        raise ValueError(f"reshard: this rank is in none of {', '.join(map(repr, meshes))}; call it on their ranks.")
    ranks = tuple(sorted({rank for m in meshes for rank in m.ranks}))
    for m in meshes:
        if m.ranks == ranks and not m.closed:
            return m
    first = meshes[0]
    kept = _MEETINGS.of(first, dict)
    if ranks not in kept:
        limits = {"timeout": first.timeout, "agreement_timeout": first.agreement_timeout}
        kept[ranks] = made = Mesh({"rank": len(ranks)}, torch.device("cpu"), ranks=ranks, **limits)
        first.at_close(f"meeting of {ranks}", lambda why: made.close())
    return kept[ranks]
