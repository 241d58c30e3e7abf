"""The specs that a search finds for the leaves of a loss that is written for one device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shardfn.core import P, PyTree, Sharding, tree_flatten, tree_paths, tree_unflatten
from shardfn.graph import Form, HeldBytes, Proposer, looped

from ._partitioned import FlatLoss, captured_forward, constants_of

# What a rank may hold where no limit is given, as a multiple of an even share.
_SHARE = 1.25
_TOLD = 4


def proposed(
    loss: Callable[..., Any],
    params: PyTree,
    args: Sequence[Any],
    axis: str,
    num: int,
    kept: Sequence[HeldBytes],
    limit: float | None,
) -> PyTree:
    """The specs: see `propose_specs`.

    Raises:
        ValueError: the leaves do not fit, whatever is cut; names the biggest, the limit, and what would fit.
    """
    leaves, treedef = tree_flatten(params)
    rest, rest_def = tree_flatten(tuple(args))
    tensors = [x for x in rest if isinstance(x, Tensor)]
    static = tuple(None if isinstance(x, Tensor) else x for x in rest)
    call = FlatLoss(loss, treedef, rest_def, static, len(leaves))
    gm = captured_forward(call, leaves, [tuple(x.shape) for x in leaves], tensors)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    nodes = inputs[: len(leaves)]
    trained = set(nodes) | {n for n, x in zip(inputs[len(leaves) :], tensors, strict=True) if x.requires_grad}
    by_node = dict(zip(nodes, kept, strict=True))
    proposer = Proposer(gm.graph, num, by_node, trained.__contains__, constants_of(gm))
    total = [k.fixed + k.per_element * x.numel() for k, x in zip(kept, leaves, strict=True)]
    least = proposer.least_held()
    if limit is None:
        limit = max(_SHARE * sum(total) / num, least)
    if least > limit:
        sizes = sorted(zip(total, tree_paths(params, "params"), strict=True), reverse=True)[:_TOLD]
        biggest = "; ".join(f"{path}, {int(size)} bytes" for size, path in sizes)
        raise ValueError(
            f"propose_specs(memory={int(limit)}): parameters and optimizer states are {int(sum(total))} bytes, of which"
            f" a rank of the {num} along {axis!r} holds at least {int(least)}, with each leaf cut where that leaves"
            f" least. The biggest leaves: {biggest}. Pass memory={int(least)} or more, use a longer axis {axis!r}, or"
            " let ZeRO cut the states along another axis."
        )
    forms = proposer.best(limit).forms
    return tree_unflatten(treedef, [_spec(n, forms[n], axis) for n in nodes])


def _spec(node: Node, form: Form, axis: str) -> P | Sharding:
    spec = P(*[None] * form.dim, axis) if form.kind == "cut" else P()
    users = list(node.users)
    return Sharding(spec, stacked=True) if users and all(map(_in_layers, users)) else spec


def _in_layers(node: Node) -> bool:
    """Whether an op takes a leaf apart into the layers of a scan."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    along: Any = node.args[1] if len(node.args) > 1 else 0
    layers: bool = packet is torch.ops.aten.unbind and along == 0
    return layers and all(u.target is looped for part in node.users for u in part.users)
