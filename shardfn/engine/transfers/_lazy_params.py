"""How leaves enter a loss: the tensors that it is given in their place, and the handles that collect gradients."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from shardfn.capture import alias, capturing, recorder, traced_once
from shardfn.core import PyTree, StoredValue, tree_unflatten
from shardfn.engine.plan import Plan
from shardfn.graph import storage_of
from shardfn.leaves import LazyLeaf, LeafBook, LeafLayout, Watch, check_graph

from ._reduce import Reducer


def enter(
    plan: Plan,
    blocks: Sequence[StoredValue],
    book: LeafBook,
    reducer: Reducer | None,
    at_end: Collection[int] = (),
) -> tuple[PyTree, dict[int, Tensor]]:
    """Returns the parameter tree as the loss sees it, and by layer the handles at which its gradients arrive.

    Both serve all microbatches of a step; a gradient that arrives belongs to the backward that runs.

    Args:
        plan: the layout.
        blocks: this rank's block of each layer.
        book: gives the whole tensors of lazy leaves, and detects writes to the others.
        reducer: collects gradients, or None in a call without a backward.
        at_end: the layers whose gradients are not taken as they arrive, but by the backward's caller, at its end.
    """
    entered: list[Tensor] = []
    handles: dict[int, Tensor] = {}
    plain: list[tuple[str, Tensor]] = []
    aliased: Callable[[Tensor], Tensor] = alias if capturing() else Tensor.detach
    for i, (leaf, block) in enumerate(zip(plan.layers, blocks, strict=True)):
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
            if i not in at_end:
                handle.register_hook(_make_hook(reducer, i, alias(handle)))
            handles[i] = handle
        seen = LazyLeaf.make(i, leaf.path, handle, book) if leaf.lazy else handle
        if leaf.distinct_axes:
            if reducer is None:
                plan.following_function.declare(seen, leaf.distinct_axes)
            else:
                plan.following.declare(seen, (*plan.batch_axes, *leaf.distinct_axes))
        entered.append(seen)
    book.watch.enter(plain)
    if not plan.has_stacks:
        return tree_unflatten(plan.treedef, entered), handles
    layers = iter(entered)
    tree = [
        LazyLeaf.stack(leaf.path, [next(layers) for _ in leaf.layers], book) if leaf.layers else next(layers)
        for leaf in plan.leaves
    ]
    return tree_unflatten(plan.treedef, tree), handles


def make_write_detector(plan: Plan, blocks: Sequence[StoredValue], *, first: bool) -> Watch:
    """Detects writes to the blocks that the loss gets without a copy; the first time, by their bits too."""
    watch = Watch(bits=first and not plan.captured)
    if not plan.captured:
        pairs = zip(plan.leaves, blocks, strict=True)
        watch.keep([(leaf.path, x) for leaf, x in pairs if isinstance(x, Tensor) and not leaf.ways.use.hops])
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


def _make_hook(reducer: Reducer, leaf: int, stand_in: Tensor) -> Callable[[Tensor | None], Tensor | None]:
    """Returns a hook that hands a gradient to the reducer, and autograd a tensor of its shape without memory."""

    def take(grad: Tensor | None) -> Tensor | None:
        # It was taken before, or it is the loss's own, which differentiates something itself.
        if grad is None or not reducer.collects:
            return None
        reducer.take(leaf, alias(grad))
        return stand_in

    return take
