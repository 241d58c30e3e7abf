"""What `accumulate` makes: a loss over microbatches, and the fold over them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from shardfn.core import PyTree, tree_flatten, tree_leaves, tree_paths, tree_unflatten

from ._levels import Transform
from ._loss import Loss, WeightedMean

Sum = TypeVar("Sum")


@dataclasses.dataclass(frozen=True)
class Accumulated(Transform):
    """A mean over microbatches, over which `value_and_grad` and `sharded_step` fold, one graph at a time."""

    transform: ClassVar[str] = "accumulate"

    inner: Loss
    num_microbatches: int

    def __call__(self, params: PyTree, batch: PyTree, *args: Any) -> Any:
        """The loss of the whole batch (the graph of all microbatches is alive at once)."""
        outs = [self.inner(params, micro, *args) for micro in split_batch(batch, self.num_microbatches)]
        return _mean(outs)


def microbatches(loss: Loss, batch: PyTree) -> tuple[Loss, list[PyTree]]:
    """The loss of one microbatch, and the microbatches; nested `accumulate`s are flattened."""
    batches = [batch]
    while isinstance(loss, Accumulated):
        batches = [micro for b in batches for micro in split_batch(b, loss.num_microbatches)]
        loss = loss.inner
    return loss, batches


def fold(loss: Loss, batch: PyTree, one: Callable[[Loss, PyTree], Sum], add: Callable[[Sum, Sum], Sum]) -> Sum:
    """`one(inner, microbatch)` of each microbatch, added up one after another: of two at a time both are alive.

    For functions that make forward and backward in one; a step runs them apart, by its schedule.
    """
    inner, batches = microbatches(loss, batch)
    total = one(inner, batches[0])
    for micro in batches[1:]:
        total = add(total, one(inner, micro))
    return total


def of_whole_batch(loss: Loss) -> Loss:
    """The loss, of a batch that is not cut in microbatches."""
    while isinstance(loss, Accumulated):
        loss = loss.inner
    return loss


def num_microbatches(loss: Loss) -> int:
    """Into how many microbatches a loss cuts its batch."""
    num = 1
    while isinstance(loss, Accumulated):
        num, loss = num * loss.num_microbatches, loss.inner
    return num


def split_batch(batch: PyTree, n: int) -> list[PyTree]:
    """Cuts every leaf of a batch in `n` equal pieces along dim 0.

    Raises:
        ValueError: lists the leaves whose rows `n` does not divide.
    """
    if n == 1:
        return [batch]
    leaves = tree_leaves(batch)
    if any(_cuts(x) and x.shape[0] % n for x in leaves):  # paths for errors alone: they take longer than the cut
        pairs = zip(tree_paths(batch, "batch"), leaves, strict=True)
        bad = ", ".join(f"{p} has {x.shape[0]} rows" for p, x in pairs if _cuts(x) and x.shape[0] % n)
        raise ValueError(f"accumulate({n}) cannot cut the batch evenly: {bad}; use a divisor.")
    return cut_rows(batch, n, [_cuts(x) for x in leaves])


def cut_rows(batch: PyTree, n: int, cut: Sequence[bool]) -> list[PyTree]:
    """A batch in `n` parts: of a leaf that is `cut` a piece along dim 0 each, equal if `n` divides it; else all of it.

    Args:
        batch: a tree of tensors.
        n: how many parts.
        cut: by leaf, in flattening order.
    """
    leaves, treedef = tree_flatten(batch)
    columns = [x.chunk(n) if is_cut and x.shape[0] else [x] * n for x, is_cut in zip(leaves, cut, strict=True)]
    return [tree_unflatten(treedef, [column[i] for column in columns]) for i in range(n)]


def _cuts(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def _mean(outs: list[Any]) -> Any:
    first = outs[0]
    if isinstance(first, WeightedMean):
        return WeightedMean(sum(o.total for o in outs), sum(o.weight for o in outs))  # type: ignore[arg-type]
    if isinstance(first, tuple):
        loss = _mean([o[0] for o in outs])
        return loss, {k: _mean([o[1][k] for o in outs]) for k in first[1]}
    return torch.stack([torch.as_tensor(o) for o in outs]).mean()
