"""How leaves enter a loss: the tensors that it is given in their place, and the handles that collect gradients."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.capture import alias, find_alias, recorder, traced_once
from shardfn.core import PyTree, StoredValue, tree_unflatten
from shardfn.engine.loss import LeafUses, LeavesByUse
from shardfn.engine.plan import Plan
from shardfn.graph import storage_of
from shardfn.leaves import LazyLeaf, LeafBook, LeafLayout, Watch, check_graph

from ._canonical import Use
from ._reduce import Reducer


class Entered(NamedTuple):
    """Leaves that have entered a loss, for all microbatches of a step.

    Attributes:
        params: parameter tree as the loss sees it.
        handles: tensors at which the gradients of trained layers arrive. A gradient belongs to the backward that runs.
        by_use: separate tensors of leaves with several uses.
    """

    params: PyTree
    handles: dict[Use, Tensor]
    by_use: LeavesByUse


def enter(
    plan: Plan,
    blocks: Sequence[StoredValue],
    book: LeafBook,
    reducer: Reducer | None,
    at_end: Collection[int] = (),
) -> Entered:
    """Returns the parameter tree as the loss sees it, and the handles at which its gradients arrive.

    Args:
        plan: the layout.
        blocks: this rank's block of each layer.
        book: gives the whole tensors of lazy leaves, and detects writes to the others.
        reducer: collects gradients, or None in a call without a backward.
        at_end: the layers whose gradients are not taken as they arrive, but by the backward's caller, at its end.
    """
    seen: dict[Use, Tensor] = {}
    handles: dict[Use, Tensor] = {}
    plain: list[tuple[str, Tensor]] = []
    aliased = find_alias()
    further = _list_further_uses({} if reducer is None else reducer.uses)
    for key in [*((i, 0) for i in range(len(blocks))), *(key for keys in further.values() for key in keys)]:
        i, use = key
        leaf, block = plan.layers[i], blocks[i]
        if leaf.lazy:
            handle = _make_handle(plan, leaf)
        else:
            assert isinstance(block, Tensor)
            handle = aliased(block.to(leaf.dtypes.compute) if leaf.ways.use.hops else block)
            if leaf.ways.use.hops:
                book.look_after(leaf.path, handle)
            plain.append((leaf.path, handle))
        if reducer is not None and leaf.trainable:
            handle.requires_grad_()
            if use == REFUSED:
                handle.register_hook(_make_refusal(leaf))
            elif i not in at_end:
                handle.register_hook(_make_hook(reducer, key, alias(handle)))
            handles[key] = handle
        value = LazyLeaf.make(i, leaf.path, handle, book) if leaf.lazy else handle
        if leaf.distinct_axes:
            if reducer is None:
                plan.following_function.declare(value, leaf.distinct_axes)
            else:
                plan.following.declare(value, (*plan.batch_axes, *leaf.distinct_axes))
        seen[key] = value
    book.watch.enter(plain)
    entered = [*seen.values()][: len(blocks)]
    leaves, by_use = _join_layers(plan, entered, book), dict[int, dict[int, Tensor]]()
    for function, keys in further.items():
        own = dict(enumerate(entered)) | {i: seen[i, use] for i, use in keys}
        by_use[function] = {id(x): y for x, y in zip(leaves, _join_layers(plan, [*own.values()], book), strict=True)}
    return Entered(tree_unflatten(plan.treedef, leaves), handles, by_use)


def _join_layers(plan: Plan, layers: Sequence[Tensor], book: LeafBook) -> list[Any]:
    """Returns the leaves that a loss sees, from their layers."""
    if not plan.has_stacks:
        return [*layers]
    rest = iter(layers)
    return [
        LazyLeaf.stack(leaf.path, [next(rest) for _ in leaf.layers], book) if leaf.layers else next(rest)
        for leaf in plan.leaves
    ]


# In place of the place of a function that must not use a leaf.
REFUSED = -1


def _list_further_uses(uses: Mapping[int, LeafUses]) -> dict[int, list[Use]]:
    """Returns by function the uses with separate tensors: all but the first use, with the tensor that the loss sees.

    Only functions that this rank runs, and those that must not use a leaf.
    """
    out: dict[int, list[Use]] = {}
    for layer, (functions, here, refused) in uses.items():
        own = [(f, (layer, place)) for place, f in enumerate(functions) if place and here[place]]
        for function, use in [*own, *((f, (layer, REFUSED)) for f in refused)]:
            out.setdefault(function, []).append(use)
    return out


def make_write_detector(
    plan: Plan, blocks: Sequence[StoredValue], others: Sequence[tuple[str, Tensor]], *, first: bool
) -> Watch:
    """Detects writes to the blocks that the loss gets without a copy, and to others; first, by their bits too."""
    if plan.captured:  # the ops of the graph show the writes, see `check_capture`
        return Watch()
    watch, pairs = Watch(bits=first), zip(plan.leaves, blocks, strict=True)
    own = [(leaf.path, x) for leaf, x in pairs if isinstance(x, Tensor) and not leaf.ways.use.hops]
    watch.keep([*own, *others])
    return watch


def check_capture(
    plan: Plan, blocks: Sequence[StoredValue], book: LeafBook, name: str, others: Sequence[tuple[str, Tensor]] = ()
) -> None:
    """Refuses a captured loss, called `name`, that writes to parameters, or to others that it is given.

    Raises:
        ValueError: lists every such op.
    """
    notes = recorder()
    if notes is None:
        return
    here = [(leaf.path, x) for leaf, x in zip(plan.layers, blocks, strict=True) if isinstance(x, Tensor)]
    leaves = {storage_of(x): path for path, x in (*here, *others)} | {k: path for k, (path, _) in book.captured.items()}
    check_graph(notes.tracer.graph, leaves, name)


def _make_handle(plan: Plan, leaf: LeafLayout) -> Tensor:
    """Returns a tensor of the leaf's shape that costs one element."""
    dtype = leaf.dtypes.compute

    def make() -> list[Tensor]:
        return [torch.empty_strided(leaf.block, (0,) * len(leaf.block), dtype=dtype, device=plan.mesh.device)]

    return traced_once(("handle", leaf.block, dtype), make, [])[0]


def _make_hook(reducer: Reducer, use: Use, stand_in: Tensor) -> Callable[[Tensor | None], Tensor | None]:
    """Returns a hook that hands a gradient to the reducer, and autograd a tensor of its shape without memory."""

    def take(grad: Tensor | None) -> Tensor | None:
        # It was taken before, or it is the loss's own, which differentiates something itself.
        if grad is None or not reducer.collects:
            return None
        reducer.take(use, alias(grad))
        return stand_in

    return take


def _make_refusal(leaf: LeafLayout) -> Callable[[Tensor], None]:
    """Returns a hook that refuses a gradient.

    Raises:
        ValueError: (in the backward) always.
    """

    def refuse(grad: Tensor) -> None:
        del grad
        raise ValueError(
            f"Zero(reduction='canonical'): the layers of a pipeline use {leaf.path}, a leaf outside of the layers, by"
            " an argument that code in front of the layers computes. Each rank would add up the uses of its own layers."
            " Pass the layers values without a gradient, freeze the leaf, or use reduction='by_rank'."
        )

    return refuse
