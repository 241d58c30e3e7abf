"""Stacks of layers on the stages of a pipeline.

Stages with unequal numbers of layers have blocks of equal size, with unused rows. A placeholder replaces a stack whose
layers are on several ranks: code outside of the layers gets the placeholder, and must not use the placeholder.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import DisableTorchFunctionSubclass
from shardfn.core import MetadataTensor, PyTree, raise_all, tree_map


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


class ElsewhereTensor(MetadataTensor):
    """This rank's rows of a stack, for code outside of the layers: with shape and dtype, and without values.

    Raises:
        ValueError: something is computed from the placeholder. The result would only cover this rank's layers.
    """

    @staticmethod
    def of(x: Tensor) -> "ElsewhereTensor":
        """Returns a cached placeholder with the shape, dtype and device of this rank's block of a stacked leaf."""
        with DisableTorchFunctionSubclass():
            return _placeholder_like(tuple(x.shape), x.dtype, x.device)

    @classmethod
    def on_values(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuses the function."""
        del args, kwargs
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name
        raise ValueError(
            f"the loss of a pipeline uses the stacked layers outside of them, in {name}: they are on several ranks, and"
            " each would use its own alone. Let each layer add its part to the value that it hands on, or use an option"
            " of the optimizer (weight decay)."
        )


@functools.lru_cache(maxsize=256)
def _placeholder_like(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> ElsewhereTensor:
    return ElsewhereTensor.empty(shape, dtype, device)
