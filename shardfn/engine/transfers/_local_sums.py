"""Gradients that are added up on this rank before any of them is sent, by leaf."""

import functools

import torch
from torch import Tensor

from shardfn.capture import capturing
from shardfn.collectives import may_be_added_to
from shardfn.engine.plan import Plan


def added(before: Tensor | None, part: Tensor, key: int, summed: set[int]) -> Tensor:
    """Returns `before + part`; adds in place where no other tensor shares the memory of `before`.

    A sum that was made here has its own memory. The first summand is autograd's, or came in a message: the
    caller holds an alias of it, and others may hold tensors that share its memory.

    Args:
        before: sum so far; None = `part` is the first summand.
        part: next summand, of the same dtype.
        key: key of the sum.
        summed: keys whose sum so far was made here; is changed.
    """
    if before is None:
        summed.discard(key)
        return part
    if capturing():  # a graph's memory is planned when it is compiled
        return before + part
    out = before.add_(part) if key in summed or may_be_added_to(before) else before + part
    summed.add(key)
    return out


class LocalSums:
    """One step's sums of backwards that did not send. Gradients must be aliases that only the caller has.

    The first gradient of a leaf is kept without a copy, since others may hold its memory; the second is added to it in
    place if no other does, and all others in place. Sums of the layers of one stack that are not sent lie side by side
    in memory of their own, so that they need not be joined: the second gradient's sum is written there.

    Args:
        plan: the layout.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._leaves = plan, plan.layers
        self._at: dict[int, Tensor] = {}
        # The leaves whose sum has been made here, so that its memory is this step's alone; see `added`.
        self._made: set[int] = set()
        self._stacks: dict[int, Tensor] = {}

    def __bool__(self) -> bool:
        """Whether anything has been added up."""
        return bool(self._at or self._made)

    def add(self, leaf: int, grad: Tensor, *, stays: bool) -> None:
        """Adds a gradient.

        Args:
            leaf: the leaf's number.
            grad: the gradient.
            stays: whether the sum is not sent.
        """
        before = self._at.get(leaf)
        if before is not None and leaf in self._made:  # as nearly always, of many microbatches
            before.add_(grad.to(before.dtype))
            return
        self._at[leaf] = self._sum(before, leaf, grad, stays)

    def total(self, leaf: int, grad: Tensor, *, stays: bool) -> Tensor:
        """The sum with a last gradient, which is let go; a gradient that is alone is as it came."""
        before = self._at.pop(leaf, None)
        if before is None:
            self._made.discard(leaf)
            return grad
        return self._sum(before, leaf, grad, stays)

    def pop(self, leaf: int) -> Tensor | None:
        """The sum so far, which is let go; None if nothing was added."""
        return self._at.pop(leaf, None)

    def has_made(self, leaf: int) -> bool:
        """Whether the last sum of a leaf was made here."""
        return leaf in self._made

    def _sum(self, before: Tensor | None, leaf: int, grad: Tensor, stays: bool) -> Tensor:
        # Gradients are added up in the dtype of sums.
        grad = grad.to(self._leaves[leaf].dtypes.accum)
        first = stays and leaf not in self._made and type(before) is Tensor and type(grad) is Tensor
        row = self._row(leaf, grad) if first else None
        if before is None or row is None:
            return added(before, grad, leaf, self._made)
        self._made.add(leaf)
        return torch.add(before, grad, out=row)

    def _row(self, leaf: int, like: Tensor) -> Tensor | None:
        """The place of the sum of a stack's layer; None for other leaves."""
        place = self._places.get(leaf)
        if place is None:
            return None
        first, num = place
        if first not in self._stacks:
            self._stacks[first] = like.new_empty((num, *like.shape))
        return self._stacks[first][leaf - first]

    @functools.cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """By layer, the first layer of its stack and how many it has."""
        stacks = [(first, len(x.layers)) for first, x in zip(self._plan.first_layers, self._plan.leaves, strict=True)]
        return {first + k: (first, num) for first, num in stacks for k in range(num)}
