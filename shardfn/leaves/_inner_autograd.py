"""Derivatives that a loss takes itself, with respect to leaves that are not gathered yet.

`torch.autograd.grad` gets the tensors at which the gradients of leaves arrive, in place of the leaves. `torch.func`
refuses the saved-tensor hooks that keep whole tensors out of the graph, so these rest while it differentiates, and
autograd keeps the whole tensors of that part of the loss until the backward.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn._torch import pop_saved_hooks, push_saved_hooks
from shardfn.core import Replaced, saved_tensors_hooks


class LeafEnds(NamedTuple):
    """The tensors at which the gradient of a leaf arrives.

    Attributes:
        handles: handle; for a stack, one per layer.
        stacked: whether it is a stack.
    """

    handles: list[Tensor]
    stacked: bool


def gradients(
    outputs: Any, inputs: Sequence[Any], ends_of: Callable[[Any], LeafEnds | None], **options: Any
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad(outputs, inputs)` for inputs that may be lazy leaves.

    Args:
        outputs: tensors.
        inputs: tensors and leaves.
        ends_of: returns the `Ends` of a leaf, or None for a tensor.
        **options: options of `torch.autograd.grad`.

    Raises:
        RuntimeError: an input is not used, and `allow_unused` is not set.
    """
    ends = [ends_of(x) or LeafEnds([x], False) for x in inputs]
    flat = [x for end in ends for x in end.handles]
    # Some layers of a stack may be unused.
    given: dict[str, Any] = options | {"allow_unused": True, "materialize_grads": False}
    found = iter(torch.autograd.grad(outputs, flat, **given))
    grads = [_whole_gradient(end, [next(found) for _ in end.handles]) for end in ends]
    unused = [i for i, g in enumerate(grads) if g is None]
    if unused and not options.get("allow_unused") and not options.get("materialize_grads"):
        raise RuntimeError(
            f"the differentiated tensor at index {unused[0]} appears to not have been used in the graph. Set"
            " allow_unused=True if this is the desired behavior."
        )
    if options.get("materialize_grads"):
        zeros = {i: [torch.zeros_like(x) for x in ends[i].handles] for i in unused}
        grads = [_whole_gradient(ends[i], zeros[i]) if i in zeros else g for i, g in enumerate(grads)]
    return tuple(grads)


def _whole_gradient(end: LeafEnds, grads: Sequence[Tensor | None]) -> Tensor | None:
    like = next((g for g in grads if g is not None), None)
    if like is None or not end.stacked:
        return like
    return torch.stack([torch.zeros_like(like) if g is None else g for g in grads])


def hooks_at_rest(are_ours: Callable[[Any], bool]) -> Replaced:
    """Returns a context that removes our hooks wherever torch.func refuses hooks.

    Args:
        are_ours: whether saved-tensor hooks are ours, from their pack function.
    """

    def resting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @contextlib.contextmanager
        def disabled(message: str) -> Iterator[None]:
            ours = []
            while (hooks := saved_tensors_hooks(while_tracing=False)) is not None and are_ours(hooks[0]):
                ours.append(hooks)
                pop_saved_hooks()
            try:
                with original(message):
                    yield
            finally:
                for pack, unpack in reversed(ours):
                    push_saved_hooks(pack, unpack)

        return disabled

    return Replaced(lambda: [(torch.autograd.graph, "disable_saved_tensors_hooks", resting)])
