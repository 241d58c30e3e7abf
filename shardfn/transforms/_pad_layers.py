"""Stacks of layers for stages with unequal numbers of layers."""

from collections.abc import Sequence

from shardfn.core import PyTree, frozen, is_frozen, named_leaves, raise_all, tree_map
from shardfn.engine import padded, unpadded


def pad_layers(stack: PyTree, layers_per_stage: Sequence[int]) -> PyTree:
    """Returns a stack with unused rows added, so that each stage has as many rows as the longest stage.

    Ranks along an axis have equal blocks of a leaf. For stages of unequal numbers of layers, `pipeline` and
    `pipeline_module` take `layers_per_stage`, and stacks with rows that no stage runs: for example 9 rows for 2, 3 and
    3 layers, with the third row unused. Gradients of unused rows are zeros, and norms do not count such rows.

    Args:
        stack: tree of tensors [L, ...].
        layers_per_stage: numbers of layers of each stage, in order, for example from `schedules.balance`. The sum is L.

    Raises:
        ValueError: the sum is not L. Every leaf is listed.

    Example:
        >>> import torch
        >>> pad_layers({"w": torch.tensor([1.0, 2.0, 3.0])}, (1, 2))
        {'w': tensor([1., 0., 2., 3.])}
    """
    _check_stages(stack, sum(layers_per_stage), layers_per_stage)
    return _frozen_as(stack, padded(stack, layers_per_stage))


def unpad_layers(stack: PyTree, layers_per_stage: Sequence[int]) -> PyTree:
    """Returns the layers of a stack from `pad_layers`, for another number of stages or a checkpoint.

    Args:
        stack: tree of tensors.
        layers_per_stage: numbers of layers, see `pad_layers`.

    Raises:
        ValueError: the stack has another number of rows. Every leaf is listed.

    Example:
        >>> import torch
        >>> unpad_layers(torch.tensor([1.0, 0.0, 2.0, 3.0]), (1, 2))
        tensor([1., 2., 3.])
    """
    _check_stages(stack, len(layers_per_stage) * max(layers_per_stage, default=0), layers_per_stage)
    return _frozen_as(stack, unpadded(stack, layers_per_stage))


def _frozen_as(stack: PyTree, made: PyTree) -> PyTree:
    """Returns the leaves of `made`, frozen where the leaves of the stack are frozen."""
    return tree_map(lambda x, y: frozen(y) if is_frozen(x) else y, stack, made)


def _check_stages(stack: PyTree, rows: int, layers_per_stage: Sequence[int]) -> None:
    if not layers_per_stage or min(layers_per_stage) < 1:
        raise ValueError(f"every stage has a layer, got layers_per_stage={tuple(layers_per_stage)}.")
    pairs = named_leaves(stack, "stack")
    raise_all(
        ValueError,
        f"layers_per_stage={tuple(layers_per_stage)} is for {rows} rows:",
        [f"{path} has {x.shape[0]}" for path, x in pairs if x.shape[0] != rows],
    )
