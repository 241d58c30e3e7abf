"""The sums of an evaluation over batches: the total and the weight of each metric.

A metric other than a `WeightedMean` is a mean over rows, and its weight is their number.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfn.core import (
    PyTree,
    broadcast_prefix,
    evaluating,
    not_scalar,
    raise_all,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_structure,
    tree_unflatten,
)
from shardfn.engine.loss import Loss, Mixed, ModelState, WeightedMean, is_spec, of_whole_batch

Metric = Callable[..., Any]


def evaluation(loss: Loss, metrics: Metric | None, specs: PyTree, *, has_aux: bool, has_state: bool) -> Metric:
    """Returns `sums(params, batch[, key])`, or with `has_state` `sums(params, model_state, batch[, key])`.

    They are sums of this rank's rows. Modules run in eval mode, and nothing is dropped.

    Args:
        loss: the step's, bound to its leaves. A batch is not cut in microbatches.
        metrics: measures other values than the loss: `metrics(params, batch)`, or with `has_state`
            `metrics(params, model_state, batch)`, in the precision of the loss.
        specs: how the global batch is cut.
        has_aux: whether the loss returns aux.
        has_state: whether the loss takes a model state.

    Returns:
        A function to name -> [total, weight], float64; it raises `TypeError` or `ValueError` for a value that is not a
        metric.
    """
    loss = of_whole_batch(loss)

    def sums(params: PyTree, *args: Any) -> dict[str, Tensor]:
        state, batch, *key = args if has_state else ((), *args)
        if metrics is not None:
            measure = Mixed(metrics, loss.policy, has_state=has_state) if isinstance(loss, Mixed) else metrics
            with evaluating():
                found = measure(params, *([state] if has_state else []), batch)
            return _sums(found, "what metrics= returns", batch, specs)
        with evaluating(), ModelState(state).through():
            out = loss(params, batch, *key)
        main, aux = out if has_aux else (out, {})
        return _sums({"loss": main, **aux}, "the loss and its aux", batch, specs)

    return sums


def has_rows(batch: PyTree, specs: PyTree) -> bool:
    """Whether this rank has a row: of a leaf whose rows are cut, else of the first that has rows; True where none has.

    Leaves may have different numbers of rows, such as the patches of images.
    """
    return max(_rows(batch, specs)) > 0


def _rows(batch: PyTree, specs: PyTree) -> list[int]:
    """The numbers of rows of the leaves that are cut."""
    leaves = tree_leaves(batch)
    sizes = [x.shape[0] for x, c in zip(leaves, _cuts_rows(batch, specs), strict=True) if c]
    return sizes or [next((len(x) for x in leaves if isinstance(x, Tensor) and x.ndim), 1)]


def one_row(batch: PyTree, specs: PyTree, device: torch.device) -> PyTree:
    """A batch of one row of zeros, for a rank without a batch. Only the shapes and dtypes of `batch` count."""
    rows = [
        torch.zeros((1, *x.shape[1:]) if cut else x.shape, dtype=x.dtype, device=device) if isinstance(x, Tensor) else x
        for x, cut in zip(tree_leaves(batch), _cuts_rows(batch, specs), strict=True)
    ]
    return tree_unflatten(tree_structure(batch), rows)


def without_values(batch: PyTree) -> PyTree:
    """A batch that is cheap to send: shapes and dtypes."""
    return tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x, batch)


def _cuts_rows(batch: PyTree, specs: PyTree) -> list[bool]:
    found = broadcast_prefix(specs, batch, is_spec, names=("batch spec", "batch"))
    pairs = zip(tree_leaves(batch), found, strict=True)
    return [isinstance(x, Tensor) and x.ndim > 0 and bool(spec.dim_axes(0)) for x, spec in pairs]


def _sums(found: Any, what: str, batch: PyTree, specs: PyTree) -> dict[str, Tensor]:
    if not isinstance(found, dict) or not found:
        raise TypeError(f"{what} must be a dict of scalars with a name each; got {type(found).__name__} {found!r}.")
    rows = {n for n in _rows(batch, specs) if n} or {0}
    means = [name for name, x in found.items() if not isinstance(x, WeightedMean)]
    if means and len(rows) > 1:
        named = zip(tree_paths(batch, "batch"), tree_leaves(batch), _cuts_rows(batch, specs), strict=True)
        raise_all(
            ValueError,
            f"{', '.join(map(repr, means))} is a mean over the rows of a batch, whose leaves have different numbers of"
            " rows; return WeightedMean(total, weight) in its place:",
            [f"{path} has {len(x)} rows" for path, x, cut in named if cut],
        )
    pairs = {name: WeightedMean(x, max(rows)) if name in means else x for name, x in found.items()}
    raise_all(
        ValueError,
        f"{what}: 0-d tensors, numbers or WeightedMeans of them are wanted; take a mean, or a total and its weight:",
        [f"{name!r} is {told}" for name, pair in pairs.items() for x in pair if (told := not_scalar(x))],
    )
    device = next((x.device for pair in pairs.values() for x in pair if isinstance(x, Tensor)), None)
    out = {}
    for name, (total, weight) in pairs.items():
        row = [torch.as_tensor(x, device=device).detach().to(torch.float64) for x in (total, weight)]
        # A mean is made a total; a `WeightedMean` is one already.
        out[name] = torch.stack([row[0] * row[1], row[1]] if name in means else row)
    return out
