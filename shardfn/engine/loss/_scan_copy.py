"""Scans in captured steps: the traced steps of a single layer are copied into the graph for each layer.

Each copied layer is a node of autograd, with a forward and a backward that write the template's steps into the graph.
So autograd itself does the work between layers (sums of several uses, hooks, recomputation). Engine calls (such as
fetching a leaf, receiving a gradient) are not copied. The copied layer makes these calls again.
"""

import contextlib
import dataclasses
import logging
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardfn._torch import dispatch_modes
from shardfn.capture import Copy, Recorder, Written, capturing, recorder
from shardfn.collectives import no_axis_types, note_axes, same_axes, set_call_site, transforming
from shardfn.core import Ambient, PyTree, saved_tensors_hooks, tree_flatten, tree_leaves, tree_structure, tree_unflatten
from shardfn.graph import storage_of, tensors_in
from shardfn.leaves import LazyLeaf, packs_leaves
from shardfn.nn import Run, ScanBody, plain_loop, splitting

from ._layer_trace import (
    Template,
    Unfit,
    arrived,
    check_same,
    fetched,
)

log = logging.getLogger("shardfn.jit")

_SLOWLY = "a scan is captured layer by layer, which takes longer, since %s"
# Fewer layers than this are captured one by one.
MIN_COPIED = 3
_ALONE = Ambient[set[int]]("handles that one layer alone uses, while a backward runs")


@contextlib.contextmanager
def taking_early(root: Tensor) -> Iterator[None]:
    """Lets copied layers hand over gradients of leaves early, for leaves with a single use, in a backward of `root`.

    Autograd would call the hooks of all of a layer's leaves when the layer is done. The loop's graph sends each
    gradient as soon as the gradient is known.
    """
    if not capturing():
        yield
        return
    with _ALONE.bound(_used_once(root)):
        yield


@dataclasses.dataclass
class _Templates:
    """Record of a scan's function in a capture. The function may run once for each microbatch.

    Attributes:
        kept: the objects that identify the function, kept alive so that no other objects get the same addresses.
        calls: number of ended scans of the function.
        seen: looks of carry and x in runs of the function.
        splices: template by looks.
        structure: structure of (carry, y).
        own: whether a template uses values of only a single scan.
        fails: whether the layers cannot be copied.
    """

    kept: Any
    calls: int = 0
    seen: set[Any] = dataclasses.field(default_factory=set)
    splices: "dict[Any, Splice]" = dataclasses.field(default_factory=dict)
    structure: Any = None
    own: bool = False
    fails: bool = False


def copied_loop(run: Run, carry: PyTree, layers: Sequence[PyTree]) -> tuple[PyTree, list[PyTree]]:
    """Runs a scan: calls the function for the first layers, and then copies, once looks repeat.

    The same function over the same objects is known from scan to scan: all microbatches' layers are copies of a single
    layer.

    Raises:
        CaptureError: layers have different steps.
    """
    notes = recorder()
    if notes is None or transforming():
        return plain_loop(run, carry, layers)
    # Inside a recomputed section, a scan starts from the beginning both times: both runs must save the same tensors.
    key, kept = (None, None) if _is_hooked() else _identity(run)
    made: _Templates = _Templates(kept) if key is None else notes.known.setdefault(key, _Templates(kept))
    if made.fails or not (made.calls or len(layers) > MIN_COPIED) or _is_watched(layers):
        made.calls += 1
        return plain_loop(run, carry, layers)
    ys: list[PyTree] = []
    for i, x in enumerate(layers):
        look = tuple(_look(t) for t in (*tree_leaves(carry), *tree_leaves(x))), tree_structure((carry, x))
        # The first layers may see another carry: the dtype, or whether a gradient is needed, may change once.
        if look in made.seen and look not in made.splices and not made.fails:
            _make_templates(made, look, run, carry, layers[i:], notes)
        splice = made.splices.get(look)
        if splice is None:
            carry, y = run(carry, x, ys[:1])
            made.seen.add(look)
            made.structure = tree_structure((carry, y))
        else:
            carry, y = tree_unflatten(made.structure, splice(tree_leaves(carry), tree_leaves(x)))
        ys.append(y)
    made.calls += 1
    if made.own and key is not None:
        del notes.known[key]
    return carry, ys


def _make_templates(
    made: _Templates, look: Any, run: Run, carry: PyTree, layers: Sequence[PyTree], notes: Recorder
) -> None:
    (flat, carry_def), x_def = tree_flatten(carry), tree_structure(layers[0])

    def call_body(given: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
        return tree_leaves(run(tree_unflatten(carry_def, given), tree_unflatten(x_def, x), []))

    try:
        # The last layer's only to be compared: a function that treats layers unlike is refused, and not copied wrongly.
        template, other = (Template(call_body, flat, tree_leaves(x), notes) for x in (layers[0], layers[-1]))
    except Unfit as reason:
        torch.clear_autocast_cache()  # the template may hold values that were taken out of the graph again
        log.warning(_SLOWLY, reason)
        made.fails = True
        return
    check_same(template, other)
    made.splices[look] = Splice(template, notes)
    made.own |= bool(template.outside)


def _identity(run: Run) -> tuple[Any, Any]:
    """Returns the key that identifies a scan's function, and the objects with addresses in the key.

    None without a key.
    """
    if not isinstance(run, ScanBody) or not isinstance(run.f, types.FunctionType):
        return None, None
    f = run.f
    try:
        held = [cell.cell_contents for cell in f.__closure__ or ()]
    except ValueError:  # a variable that has no value yet
        return None, None
    kept = [f.__code__, *held, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]
    return ("scan", torch.is_grad_enabled(), *map(id, kept)), kept


class Splice:
    """Copier of a template into the graph, layer by layer.

    Args:
        template: the steps of a layer.
        recorder: recorder of the capture that is running.
    """

    def __init__(self, template: Template, recorder: Recorder) -> None:
        self._template, self._recorder, self._tracer = template, recorder, recorder.tracer
        # Storages that the layers share and do not make, held so that the addresses stay in use.
        outside = [t for n in template.outside for t in tensors_in(n.meta["val"])]
        self._outside = {storage_of(t): (t.untyped_storage(), 0) for t in outside}

    def __call__(self, carry: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
        """Returns the body's result for a layer."""
        # So that autograd knows the leaf of a layer's gradient. The whole leaf is fetched inside.
        ends = [t.handle if type(t) is LazyLeaf else t for t in x]
        with no_axis_types():  # the steps already have casts
            values: Any = _SplicedLayer.apply(self, x, *carry, *ends)
        for value, like in zip(values, self._template.made, strict=True):
            same_axes(value, like)
        kinds = {"carry": carry, "x": x, "value": values}
        return [kinds[kind][i] for kind, i in self._template.outs]

    def forward(self, x: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Copies the forward, and returns the values, and the tensors saved for the backward."""
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
        """Copies the backward, and returns the gradients of carry and x."""
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
        """Returns whether each value has a gradient."""
        return self._template.differentiable


class _SplicedLayer(torch.autograd.Function):
    """Layer as a function of carry and the leaves of x (handles, for lazy leaves) -> values."""

    @staticmethod
    def forward(ctx: Any, splice: Splice, x: Sequence[Tensor], *given: Tensor) -> Any:
        values, saved = splice.forward(x, given)
        # Not saved as tensors: lazy leaves have no memory, and handles are looked up by identity.
        ctx.splice, ctx.x, ctx.ends = splice, x, given[len(given) - len(x) :]
        # A missing cotangent stays missing: a template has a backward for each set of cotangents.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(v for v, d in zip(values, splice.differentiable, strict=True) if not d))
        ctx.save_for_backward(*saved)
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *ctx.splice.backward(ctx.x, ctx.ends, ctx.saved_tensors, grads)


def _is_hooked() -> bool:
    """Returns whether hooks change the tensors saved for the backward, for example of a remat around the scan."""
    hooks = saved_tensors_hooks()
    return hooks is not None and not packs_leaves(hooks[0])


def _is_watched(layers: Sequence[PyTree]) -> bool:
    """Returns whether a dispatch mode watches the run.

    The mode would see nothing of a copied layer, and a template's ops twice.
    """
    if splitting():  # product by product
        return True
    watched = any(getattr(m, "_mode_key", None) is None for m in dispatch_modes())
    if watched and len(layers) > MIN_COPIED:
        log.warning(_SLOWLY, "a mode of torch around it, as that of a remat with a policy, is to see each operation")
    return watched


def _look(t: Tensor) -> Any:
    return type(t), t.shape, t.stride(), t.dtype, t.requires_grad, note_axes(t)


def _take(end: Tensor, grad: Tensor, step: Written) -> bool:
    """Hands a gradient to the hooks of the handle, if nothing else adds to the gradient."""
    hooks: Any = end._backward_hooks
    if not hooks or id(end) not in (_ALONE.innermost() or ()):
        return False
    with set_call_site(step.meta.get("where")):
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
            # An edge for each use: a handle that two layers or two ops use gets the sum of both, made by autograd.
            if hasattr(g, "variable"):
                counts[id(g.variable)] = counts.get(id(g.variable), 0) + 1
            elif g is not None:
                stack.append(g)
    return {i for i, n in counts.items() if n == 1}
