"""The loss that `accumulate` returns, a mean over microbatches (gradient accumulation), and the fold."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardfn import core

from ._loss import Loss, WeightedMean
from ._transform_order import Transform, find_transforms

Sum = TypeVar("Sum")
# Function from a batch and a number to this number of microbatches.
Split = Callable[[core.PyTree, int], Sequence[core.PyTree]]


class Microbatches(NamedTuple):
    """Batch that is already cut: `split` may read values, which a captured step does not have."""

    parts: tuple[core.PyTree, ...]


@dataclasses.dataclass(frozen=True)
class Accumulated(Transform):
    """Mean over microbatches, over which `value_and_grad` and `sharded_step` fold, one graph at a time.

    Attributes:
        inner: the loss.
        num_microbatches: number of microbatches.
        has_state: whether the loss takes a model state before the batch, and returns the state. A step carries a
            separate state.
        split: function that cuts the batch. None cuts every leaf along dim 0.
    """

    transform: ClassVar[str] = "accumulate"

    inner: Loss
    num_microbatches: int
    has_state: bool = False
    split: Split | None = None

    def __call__(self, params: core.PyTree, *args: Any) -> Any:
        """Returns the loss of the whole batch. The graphs of all microbatches then exist at once."""
        if self.has_state:
            return self._carry_state(params, *args)
        batch, *rest = args
        batches = self.cut(batch)
        loss = _weigh_parts(self.inner, batches)
        return _average_outputs([loss(params, micro, *rest) for micro in batches])

    def cut(self, batch: core.PyTree) -> list[core.PyTree]:
        """Returns the microbatches of a batch.

        Raises:
            TypeError, ValueError: the batch cannot be cut. The message gives the reason and the remedy.
        """
        if self.split is None:
            return split_batch(batch, self.num_microbatches)
        return _check_parts(self.split(batch, self.num_microbatches), batch, self.num_microbatches)

    def _carry_state(self, params: core.PyTree, state: core.PyTree, batch: core.PyTree, *args: Any) -> Any:
        """Returns the loss with a model state, which goes from microbatch to microbatch as a constant."""
        outs: list[Any] = []
        batches = self.cut(batch)
        loss = _weigh_parts(self.inner, batches)
        for micro in batches:
            *out, state = loss(params, state, micro, *args)
            state = core.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, state)
            outs.append(out[0] if len(out) == 1 else tuple(out))
        mean = _average_outputs(outs)
        return (*mean, state) if isinstance(outs[0], tuple) and not isinstance(mean, WeightedMean) else (mean, state)


def microbatches(loss: Loss, batch: core.PyTree) -> tuple[Loss, list[core.PyTree]]:
    """Returns the loss of a microbatch, and the list of microbatches. Nested `accumulate`s are a single list.

    Raises:
        ValueError: the loss takes a model state before the batch.
    """
    parts = batch.parts if isinstance(batch, Microbatches) else None
    batches = [batch]
    while isinstance(loss, Accumulated):
        if loss.has_state:
            raise ValueError(
                "a loss of accumulate(..., has_state=True) takes a model state, and is differentiated by"
                " sharded_step(..., has_state=True)."
            )
        batches = [micro for b in batches for micro in loss.cut(b)] if parts is None else list(parts)
        loss = loss.inner
    return _weigh_parts(loss, batches), batches


def cut_ahead(loss: Loss, batch: core.PyTree) -> core.PyTree:
    """Returns the batch for a step: already cut, if the user's function cuts the batch."""
    return Microbatches(tuple(microbatches(loss, batch)[1])) if cuts_by_function(loss) else batch


def cuts_by_function(loss: Loss) -> bool:
    """Returns whether a user's function cuts the batch."""
    while isinstance(loss, Accumulated):
        if loss.split is not None:
            return True
        loss = loss.inner
    return False


def fold(
    loss: Loss, batch: core.PyTree, one: Callable[[Loss, core.PyTree], Sum], add: Callable[[Sum, Sum], Sum]
) -> Sum:
    """Adds up `one(inner, microbatch)` over the microbatches, with at most two results at a time.

    For functions that run forward and backward in a single call. A step runs the two separately, by the schedule.
    """
    inner, batches = microbatches(loss, batch)
    total = one(inner, batches[0])
    for micro in batches[1:]:
        total = add(total, one(inner, micro))
    return total


def of_whole_batch(loss: Loss) -> Loss:
    """Returns the inner loss, for a batch that is not cut into microbatches."""
    while isinstance(loss, Accumulated):
        loss = loss.inner
    return loss


def num_microbatches(loss: Loss) -> int:
    """Returns the number of microbatches into which a loss cuts its batch."""
    num = 1
    while isinstance(loss, Accumulated):
        num, loss = num * loss.num_microbatches, loss.inner
    return num


def split_batch(batch: core.PyTree, n: int) -> list[core.PyTree]:
    """Cuts every leaf of a batch in `n` pieces along dim 0, for example 7 rows in 3 as 3, 2, 2.

    Raises:
        ValueError: leaves have different numbers of rows. The message lists the leaves.
    """
    if n == 1:
        return [batch]
    leaves = core.tree_leaves(batch)
    if len({x.shape[0] for x in leaves if _is_splittable(x) and x.shape[0]}) > 1:
        core.raise_all(
            ValueError,
            f"accumulate({n}) cuts every leaf along dim 0, and the leaves of the batch have different numbers of rows."
            f" Give each leaf one entry for a row, or cut the batch by a function, accumulate(loss, {n}, split=f), with"
            f" f(batch, {n}) -> {n} batches:",
            _rows_told(batch),
        )
    return cut_rows(batch, n, [_is_splittable(x) for x in leaves])


def cut_rows(batch: core.PyTree, n: int, cut: Sequence[bool]) -> list[core.PyTree]:
    """Cuts a batch into `n` parts. A leaf that is `cut` is cut along dim 0. Other leaves are whole in each part.

    Args:
        batch: a tree of tensors.
        n: number of parts.
        cut: whether a leaf is cut, in flattening order.
    """
    leaves, treedef = core.tree_flatten(batch)
    columns = [_split_rows(x, n) if is_cut else [x] * n for x, is_cut in zip(leaves, cut, strict=True)]
    return [core.tree_unflatten(treedef, [column[i] for column in columns]) for i in range(n)]


def _split_rows(x: Tensor, n: int) -> Sequence[Tensor]:
    if not x.shape[0]:
        return [x] * n
    return x.tensor_split(n) if x.shape[0] % n else x.chunk(n)


def _check_parts(parts: Any, batch: core.PyTree, n: int) -> list[core.PyTree]:
    """Returns the result of the user's `split`, as a list.

    Raises:
        TypeError: the result is not a sequence of batches.
        ValueError: there are not `n` batches, or their leaves differ from the whole batch's.
    """
    name = f"accumulate(loss, {n}, split=f): f(batch, {n})"
    if not isinstance(parts, Sequence):
        raise TypeError(f"{name} returned a {type(parts).__name__}. Return a list of {n} batches.")
    if len(parts) != n:
        raise ValueError(f"{name} returned {len(parts)} batches. Return {n}.")
    whole = core.tree_structure(batch)
    others = [
        f"batch {i} has {core.tree_paths(x, 'batch')}" for i, x in enumerate(parts) if core.tree_structure(x) != whole
    ]
    core.raise_all(
        ValueError,
        f"{name} returned batches with other leaves than {core.tree_paths(batch, 'batch')}. Return all of them in each,"
        " a tensor without rows where a microbatch lacks them:",
        others,
    )
    return list(parts)


def _weigh_parts(loss: Loss, batches: Sequence[core.PyTree]) -> Loss:
    """Returns the loss for these microbatches. With unequal shapes the loss must return a `WeightedMean`.

    Raises:
        ValueError: shapes differ, and the loss is a pipeline with ranks that exchange tensors of the same shape.
    """
    num = len(batches)
    if num == 1 or len({tuple(getattr(x, "shape", ()) for x in core.tree_leaves(b)) for b in batches}) == 1:
        return loss
    if getattr(find_transforms(loss)[1], "transform", None) == "pipeline":
        raise ValueError(
            f"the {num} microbatches of a pipeline must have the same shapes, since its ranks exchange tensors of one"
            f" shape. Pass a multiple of {num} rows: pad the batch, or drop a shorter last one (drop_last=True). Got"
            f" {_sizes_told(batches)}."
        )

    def weigh_loss(params: core.PyTree, *args: Any) -> Any:
        out = loss(params, *args)
        if not isinstance(out[0] if type(out) is tuple and out else out, WeightedMean):
            raise ValueError(
                f"accumulate({num}) cuts the batch unevenly, so that the mean of the microbatches' losses is not its"
                f" mean: {_sizes_told(batches)}. Return WeightedMean(total, weight) from the loss, or use a divisor of"
                " the rows, or drop a shorter last batch (drop_last=True)."
            )
        return out

    return weigh_loss


def _sizes_told(batches: Sequence[core.PyTree]) -> str:
    of_each = [f"microbatch {i}: {', '.join(_rows_told(b))}" for i, b in enumerate(batches)]
    return "; ".join(core.first_of(of_each, _SHOWN))


_SHOWN = 4


def _rows_told(batch: core.PyTree) -> list[str]:
    """Returns the leaves of a batch that are cut, with their numbers of rows."""
    pairs = core.named_leaves(batch, "batch")
    return [f"{path} has {len(x)} row{'s' * (len(x) != 1)}" for path, x in pairs if _is_splittable(x)]


def _is_splittable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def _average_outputs(outs: list[Any]) -> Any:
    first = outs[0]
    if isinstance(first, WeightedMean):
        return WeightedMean(sum(o.total for o in outs), sum(o.weight for o in outs))  # type: ignore[arg-type]
    if isinstance(first, tuple):
        _check_aux(first)
        loss = _average_outputs([o[0] for o in outs])
        return loss, {k: _average_outputs([o[1][k] for o in outs]) for k in first[1]}
    return torch.stack([torch.as_tensor(o) for o in outs]).mean()


def _check_aux(out: tuple[Any, ...]) -> None:
    """Refuses results other than `(loss, aux)` with values that can be averaged over microbatches.

    Raises:
        ValueError: lists the values that cannot be averaged.
    """
    _, *rest = out
    if len(rest) != 1 or not isinstance(rest[0], Mapping):
        told = [f"a loss, {', '.join(type(x).__name__ for x in rest)}"]
    else:
        plain = {k: torch.as_tensor(x) for k, x in rest[0].items() if not isinstance(x, WeightedMean)}
        told = [f"{k!r} of shape {tuple(x.shape)}" for k, x in plain.items() if x.ndim]
    core.raise_all(
        ValueError,
        "accumulate averages the results of microbatches: a loss, or (loss, aux) with a dict of 0-d values; if the last"
        " one is a model state, write accumulate(loss, n, has_state=True). Got:",
        told,
    )
