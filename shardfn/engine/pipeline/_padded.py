"""Stacks with unused rows, so that stages with unequal numbers of layers have blocks of equal size."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardfn.core import PyTree, raise_all, tree_map


def padded(stack: PyTree, per_stage: Sequence[int]) -> PyTree:
    """Adds unused rows of zeros to a stack, so that each stage has a row per layer of the longest stage.

    For example, 7 layers on 3 stages of 3, 2 and 2 layers become 9 rows.
    """
    most = max(per_stage)

    def pad_rows(x: Tensor) -> Tensor:
        parts = x.split(list(per_stage))
        return torch.cat([torch.cat([p, p.new_zeros((most - len(p), *p.shape[1:]))]) for p in parts])

    return tree_map(pad_rows, stack)


def unpadded(stack: PyTree, per_stage: Sequence[int]) -> PyTree:
    """Returns the inverse of `padded`: the layers, without unused rows."""
    used = layer_rows(per_stage)
    return tree_map(lambda x: x.index_select(0, torch.tensor(used, device=x.device)), stack)


def layer_rows(per_stage: Sequence[int]) -> list[int]:
    """Returns the rows of a stack of `padded` that are layers.

    Example:
        >>> layer_rows((2, 1))
        [0, 1, 2]
    """
    most = max(per_stage)
    return [stage * most + i for stage, num in enumerate(per_stage) for i in range(num)]


def refilled(stack: PyTree, layers: PyTree, used: Sequence[int]) -> PyTree:
    """Returns a stack with unused rows, with replaced used rows."""

    def fill_rows(old: Tensor, new: Tensor) -> Tensor:
        return old.index_copy(0, torch.tensor(used, device=old.device), new)

    return tree_map(fill_rows, stack, layers)


def check_rows(rows: Mapping[str, int], per_stage: tuple[int, ...]) -> None:
    """Refuses stacks that are not padded for stages of `per_stage` layers.

    Raises:
        ValueError: a stack is not padded. The message lists every such leaf.
    """
    want = len(per_stage) * max(per_stage)
    raise_all(
        ValueError,
        f"layers_per_stage={per_stage} wants stacks of {want} rows, as pad_layers makes them:",
        [f"{path} has {n}" for path, n in rows.items() if n != want],
    )
