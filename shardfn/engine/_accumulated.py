"""The loss that `accumulate` returns, a mean over microbatches, and the fold over these."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from shardfn.core import PyTree, raise_all, tree_flatten, tree_leaves, tree_map, tree_paths, tree_unflatten

from ._levels import Transform
from ._loss import Loss, WeightedMean

Sum = TypeVar("Sum")


@dataclasses.dataclass(frozen=True)
class Accumulated(Transform):
    """A mean over microbatches, over which `value_and_grad` and `sharded_step` fold, one graph at a time.

    Attributes:
        inner: the loss.
        num_microbatches: how many there are.
        has_state: whether it is called with a model state before the batch, and returns it; a step carries its own.
    """

    transform: ClassVar[str] = "accumulate"

    inner: Loss
    num_microbatches: int
    has_state: bool = False

    def __call__(self, params: PyTree, *args: Any) -> Any:
        """The loss of the whole batch. Called so, the graphs of all microbatches exist at once."""
        if self.has_state:
            return self._carried(params, *args)
        batch, *rest = args
        outs = [self.inner(params, micro, *rest) for micro in split_batch(batch, self.num_microbatches)]
        return _mean(outs)

    def _carried(self, params: PyTree, state: PyTree, batch: PyTree, *args: Any) -> Any:
        """With a model state, that goes from microbatch to microbatch as a constant."""
        outs: list[Any] = []
        for micro in split_batch(batch, self.num_microbatches):
            *out, state = self.inner(params, state, micro, *args)
            state = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, state)
            outs.append(out[0] if len(out) == 1 else tuple(out))
        mean = _mean(outs)
        return (*mean, state) if isinstance(outs[0], tuple) and not isinstance(mean, WeightedMean) else (mean, state)


def microbatches(loss: Loss, batch: PyTree) -> tuple[Loss, list[PyTree]]:
    """The loss of one microbatch, and the list of microbatches; nested `accumulate`s are one list.

    Raises:
        ValueError: it takes a model state before the batch.
    """
    batches = [batch]
    while isinstance(loss, Accumulated):
        if loss.has_state:
            raise ValueError(
                "a loss of accumulate(..., has_state=True) takes a model state, and is differentiated by"
                " sharded_step(..., has_state=True)."
            )
        batches = [micro for b in batches for micro in split_batch(b, loss.num_microbatches)]
        loss = loss.inner
    return loss, batches


def fold(loss: Loss, batch: PyTree, one: Callable[[Loss, PyTree], Sum], add: Callable[[Sum, Sum], Sum]) -> Sum:
    """Adds up `one(inner, microbatch)` over the microbatches, one after another; at most two results exist at a time.

    For functions that run forward and backward in one call. A step runs these separately, by its schedule.
    """
    inner, batches = microbatches(loss, batch)
    total = one(inner, batches[0])
    for micro in batches[1:]:
        total = add(total, one(inner, micro))
    return total


def of_whole_batch(loss: Loss) -> Loss:
    """The inner loss, for a batch that is not cut into microbatches."""
    while isinstance(loss, Accumulated):
        loss = loss.inner
    return loss


def num_microbatches(loss: Loss) -> int:
    """The number of microbatches into which a loss cuts its batch."""
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
    """Cuts a batch into `n` parts. A leaf that is `cut` is cut along dim 0; other leaves are whole in each part.

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
        _check_aux(first)
        loss = _mean([o[0] for o in outs])
        return loss, {k: _mean([o[1][k] for o in outs]) for k in first[1]}
    return torch.stack([torch.as_tensor(o) for o in outs]).mean()


def _check_aux(out: tuple[Any, ...]) -> None:
    """Refuses what is no `(loss, aux)` whose values can be averaged over microbatches.

    Raises:
        ValueError: lists the values that cannot.
    """
    _, *rest = out
    if len(rest) != 1 or not isinstance(rest[0], Mapping):
        told = [f"a loss, {', '.join(type(x).__name__ for x in rest)}"]
    else:
        plain = {k: torch.as_tensor(x) for k, x in rest[0].items() if not isinstance(x, WeightedMean)}
        told = [f"{k!r} of shape {tuple(x.shape)}" for k, x in plain.items() if x.ndim]
    raise_all(
        ValueError,
        "accumulate averages what microbatches return: a loss, or (loss, aux) with a dict of 0-d values; if what comes"
        " last is a model state, write accumulate(loss, n, has_state=True). Got:",
        told,
    )
