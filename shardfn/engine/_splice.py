"""A scan in a captured step: one layer's steps, written down for each layer with its own values.

Each copied layer is one node of autograd, whose forward and backward write the template's steps into the graph. So what
autograd does between layers (sums of several uses, hooks, recomputation) it does itself; and what the engine must know
of, a leaf that is fetched or a gradient that arrives, is not copied but asked for again.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardfn.capture import Copy, Recorder, Written, capturing, recorder
from shardfn.collectives import at_line, transforming
from shardfn.core import Ambient, PyTree, tree_flatten, tree_leaves, tree_structure, tree_unflatten
from shardfn.graph import storage_of, tensors_in
from shardfn.leaves import LazyLeaf
from shardfn.nn import Run, plain_loop

from ._template import Template, Unfit, arrived, check_same, fetched

log = logging.getLogger("shardfn.jit")

_SLOWLY = "a scan is captured layer by layer, which takes longer, since %s"
# Fewer layers than this are captured one by one.
MIN_COPIED = 3
_ALONE = Ambient[set[int]]("handles that one layer alone uses, while a backward runs")


@contextlib.contextmanager
def taking_early(root: Tensor) -> Iterator[None]:
    """While a captured backward of `root` runs, a copied layer hands over the gradients of leaves that it alone uses.

    Autograd would call the hooks of all of a layer's leaves when the layer is done; the loop's graph has each gradient
    sent as soon as it is known.
    """
    if not capturing():
        yield
        return
    with _ALONE.bound(_used_once(root)):
        yield


def copied_loop(run: Run, carry: PyTree, layers: Sequence[PyTree]) -> tuple[PyTree, list[PyTree]]:
    """The layers of a scan: the first ones as they are; once carry and x look as in the layer before, copies.

    Raises:
        CaptureError: layers do not do the same.
    """
    notes = recorder()
    if notes is None or transforming() or len(layers) <= MIN_COPIED:
        return plain_loop(run, carry, layers)
    if _watched():
        log.warning(_SLOWLY, "a mode of torch around it, as that of a remat with a policy, is to see each operation")
        return plain_loop(run, carry, layers)
    ys: list[PyTree] = []
    last = None
    for i, x in enumerate(layers):
        looks = [_look(t) for t in (*tree_leaves(carry), *tree_leaves(x))]
        # The first layers may see another carry: its dtype, or whether it needs a gradient, may change once.
        if looks == last:
            return _copied(run, carry, layers[i:], ys, notes)
        last = looks
        carry, y = run(carry, x, ys[:1])
        ys.append(y)
    return carry, ys


def _copied(
    run: Run, carry: PyTree, layers: Sequence[PyTree], ys: list[PyTree], notes: Recorder
) -> tuple[PyTree, list[PyTree]]:
    (flat, carry_def), x_def, out_def = tree_flatten(carry), tree_structure(layers[0]), tree_structure((carry, ys[0]))

    def body(given: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
        return tree_leaves(run(tree_unflatten(carry_def, given), tree_unflatten(x_def, x), ys[:1]))

    try:
        # The last layer's only to be compared: a function that treats layers unlike is refused, and not copied wrongly.
        template, other = (Template(body, flat, tree_leaves(x), notes) for x in (layers[0], layers[-1]))
    except Unfit as reason:
        torch.clear_autocast_cache()  # it may hold what was taken out of the graph again
        log.warning(_SLOWLY, reason)
        carry, more = plain_loop(run, carry, layers)
        return carry, ys + more
    check_same(template, other)
    splice = Splice(template, notes)
    for x in layers:
        carry, y = tree_unflatten(out_def, splice(tree_leaves(carry), tree_leaves(x)))
        ys.append(y)
    return carry, ys


class Splice:
    """Writes a template down, layer by layer.

    Args:
        template: what a layer does.
        recorder: of the capture that is running.
    """

    def __init__(self, template: Template, recorder: Recorder) -> None:
        self._template, self._recorder, self._tracer = template, recorder, recorder.tracer
        # Storages that the layers share and do not make, held so that their addresses stay theirs.
        outside = [t for n in template.outside for t in tensors_in(n.meta["val"])]
        self._outside = {storage_of(t): (t.untyped_storage(), 0) for t in outside}

    def __call__(self, carry: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
        """What the body returns for a layer."""
        # So that autograd knows whose gradient a layer makes; the whole leaf is fetched inside.
        ends = [t.handle if type(t) is LazyLeaf else t for t in x]
        values: Any = _SplicedLayer.apply(self, x, *carry, *ends)
        kinds = {"carry": carry, "x": x, "value": values}
        return [kinds[kind][i] for kind, i in self._template.outs]

    def forward(self, x: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Writes the forward down: the values, and what is saved for the backward."""
        copy = Copy(self._recorder, self._outside)
        for node, t in zip(self._template.inputs, given, strict=True):
            copy.let(node, t)
        for step in self._template.steps:
            if step.target is fetched:
                copy.fetch(step, x)
            else:
                copy.write(step, step.meta.get("where"))
        return [copy.tensor(n) for n in self._template.values], [copy.tensor(n) for n in self._template.saved]

    def backward(
        self, x: Sequence[Tensor], ends: Sequence[Tensor], saved: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Writes the backward down: the gradients of carry and x."""
        plan = self._template.backward(tuple(None if g is None else g.stride() for g in cotangents))
        copy = Copy(self._recorder, self._outside)
        for node, t in zip(self._template.saved, saved, strict=True):
            copy.let(node, t)
        for node, t in zip(plan.cotangents, cotangents, strict=True):
            if node is not None and t is not None:
                copy.let(node, t)
        late: dict[int, Tensor] = {}
        for step in plan.steps:
            if step.target is fetched:
                copy.fetch(step, x)
            elif step.target is arrived:
                j, grad = step.args[0], copy.tensor(step.args[1])
                if not _take(ends[j], grad, step):
                    late[j] = grad
            else:
                copy.write(step, step.meta.get("where"))
        num = len(plan.grads) - len(ends)
        return [None if n is None else copy.tensor(n) for n in plan.grads[:num]] + [
            late.get(j) for j in range(len(ends))
        ]

    @property
    def differentiable(self) -> list[bool]:
        """Which values have a gradient."""
        return self._template.differentiable


class _SplicedLayer(torch.autograd.Function):
    """One layer: carry and the leaves of x (their handles, where they are lazy) -> values."""

    @staticmethod
    def forward(ctx: Any, splice: Splice, x: Sequence[Tensor], *given: Tensor) -> Any:
        values, saved = splice.forward(x, given)
        # Not saved as tensors: lazy leaves have no memory, and handles are looked up by identity.
        ctx.splice, ctx.x, ctx.ends = splice, x, given[len(given) - len(x) :]
        # A cotangent that is missing stays so: a template has a backward for each set of them.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(v for v, d in zip(values, splice.differentiable, strict=True) if not d))
        ctx.save_for_backward(*saved)
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *ctx.splice.backward(ctx.x, ctx.ends, ctx.saved_tensors, grads)


def _watched() -> bool:
    """Whether a mode sees what is run: it would see nothing of a layer that is copied, and a template's twice."""
    return any(getattr(m, "_mode_key", None) is None for m in _get_current_dispatch_mode_stack())


def _look(t: Tensor) -> Any:
    return type(t), t.shape, t.stride(), t.dtype, t.requires_grad


def _take(end: Tensor, grad: Tensor, step: Written) -> bool:
    """Hands a gradient to the hooks of its handle, if nothing else adds to it."""
    hooks: Any = end._backward_hooks
    if not hooks or id(end) not in (_ALONE.innermost() or ()):
        return False
    with at_line(step.meta.get("where")):
        for hook in hooks.values():
            hook(grad)
    return True


def _used_once(root: Tensor) -> set[int]:
    counts: dict[int, int] = {}
    stack: list[Any] = [root.grad_fn]
    seen: set[Any] = set()
    while stack:
        fn = stack.pop()
        if fn in seen:
            continue
        seen.add(fn)
        for g, _ in fn.next_functions if fn is not None else ():
            # An edge for each use: a handle that two layers or two ops use gets the sum of both, which autograd makes.
            if hasattr(g, "variable"):
                counts[id(g.variable)] = counts.get(id(g.variable), 0) + 1
            elif g is not None:
                stack.append(g)
    return {i for i, n in counts.items() if n == 1}
