"""Checks of the tensors of a loss: broadcasting would take other shapes, too, and give another number."""

import math
from typing import Literal

import torch
from torch import Tensor

from shardfn._torch import FakeTensor, check_tensor_all, functorch, is_functorch_wrapped_tensor
from shardfn.core import raise_all


def check_shapes(who: str, **named: Tensor | None) -> None:
    """Refuses tensors whose shapes do not fit their names: `x_BT` is [B, T], of the same B and T everywhere.

    Raises:
        ValueError: lists each such tensor with its shape and the shape of its name.

    Example:
        >>> check_shapes("dpo", chosen_B=torch.ones(2), rejected_B=torch.ones(2))
    """
    sizes, wrong = dict[str, int](), list[str]()
    for name, x in named.items():
        if x is None:
            continue
        dims = name.rpartition("_")[2]
        wanted = tuple(sizes.get(dim, size) for dim, size in zip(dims, x.shape, strict=False))
        if x.ndim != len(dims) or tuple(x.shape) != wanted:
            needs = ", ".join(f"{dim} = {sizes[dim]}" if dim in sizes else dim for dim in dims)
            wrong.append(f"{name} has shape {tuple(x.shape)}; it must be [{needs}]")
        else:
            sizes |= zip(dims, x.shape, strict=True)
    raise_all(ValueError, f"{who}: shapes do not fit:", wrong)


def check_lengths(who: str, width: int, **named: Tensor) -> None:
    """Refuses lengths that are not from 0 to T. Tokens beyond would be left out of sums, but not of their means.

    Args:
        who: function, for the error.
        width: T of the function's tensors.
        **named: lengths by the names of the arguments.

    Raises:
        ValueError: names the argument, the first such length and T. In a captured step, where a message is a constant,
            the argument and T.

    Example:
        >>> check_lengths("grpo", 4, lengths_B=torch.tensor([4, 0]))
    """
    for name, lengths_B in named.items():
        outside_B = (lengths_B < 0) | (lengths_B > width)
        remedy = f"lengths are from 0 to T: pass tensors of more tokens, or cut the answers to {width}."
        if isinstance(outside_B, FakeTensor):
            text = f"{who}: a length in {name} is not from 0 to T = {width} of the other tensors; {remedy}"
            check_tensor_all(~outside_B, lambda text=text: text)
        elif not _is_batched(outside_B) and outside_B.any():  # vmap has no branch on a value
            row = int(outside_B.nonzero()[0])
            raise ValueError(
                f"{who}: {name}[{row}] is {int(lengths_B[row])}, and the other tensors have T = {width} tokens;"
                f" {remedy}"
            )


def check_numbers(
    who: str, wanted: Literal["above 0", "0 or more", "from 0 to 1"] = "above 0", /, **named: float
) -> None:
    """Refuses numbers that are not finite, or out of range.

    Args:
        who: function, for the error.
        wanted: range.
        **named: numbers by the names of the arguments.

    Raises:
        ValueError: names the argument, its value and the range.

    Example:
        >>> check_numbers("dpo", beta=0.1)
    """
    for name, value in named.items():
        inside = {"above 0": 0 < value, "0 or more": 0 <= value, "from 0 to 1": 0 <= value <= 1}[wanted]
        if not (inside and value < math.inf):
            finite = "" if wanted == "from 0 to 1" else " and finite"
            raise ValueError(f"{who}: {name} must be {wanted}{finite}, got {value}.")


def check_negative(who: str, **named: Tensor) -> None:
    """Refuses mean log probabilities that are not below 0, such as the mean of an answer without tokens.

    Args:
        who: function, for the error.
        **named: means by the names of the arguments.

    Raises:
        ValueError: names the argument, and the first row with its value. In a captured step, where a message is a
            constant, the argument.
    """
    for name, x_B in named.items():
        wrong_B = ~(x_B < 0) & ~x_B.isnan()
        remedy = "odds need mean log probabilities below 0; leave out pairs in which an answer is empty."
        if isinstance(wrong_B, FakeTensor):
            text = f"{who}: a number in {name} is not below 0; {remedy}"
            check_tensor_all(~wrong_B, lambda text=text: text)
        elif not _is_batched(wrong_B) and wrong_B.any():  # vmap has no branch on a value
            row = int(wrong_B.nonzero()[0])
            raise ValueError(f"{who}: {name}[{row}] is {float(x_B[row])}; {remedy}")


def check_places(
    who: str,
    prompts_B: Tensor,
    lengths_B: Tensor,
    width: int,
    positions: int,
    ids: int | None = None,
    places_BT: Tensor | None = None,
) -> None:
    """Refuses answers that do not lie in their rows, whose tokens would be taken from other places.

    Args:
        who: function, for the error.
        prompts_B: tokens of each prompt.
        lengths_B: tokens of each answer.
        width: T.
        positions: L of the logits or values, which may leave the last position out.
        ids: L of the tokens, or None without tokens.
        places_BT: places of the answers' tokens in their rows, or None where each answer is right behind its prompt.

    Raises:
        ValueError: names the limits.
    """
    most = positions + 1 if ids is None else min(positions + 1, ids)
    if places_BT is None:
        outside_B = (lengths_B > 0) & ((prompts_B < 1) | (prompts_B + lengths_B > most))
        where = f"prompts at least 1, and both together at most {most}"
    else:
        outside_BT = (places_BT < 1) | (places_BT >= most)
        outside_B = (outside_BT & (torch.arange(width, device=lengths_B.device) < lengths_B[:, None])).any(1)
        where = f"and places from 1 to {most - 1}"
    outside_B = outside_B | (lengths_B < 0) | (lengths_B > width)
    text = (
        f"{who}: an answer does not lie in its row: lengths must be from 0 to width = {width}, {where}, by the shapes"
        " of the rows. Pass longer rows, or cut the answer."
    )
    if isinstance(outside_B, FakeTensor):
        check_tensor_all(~outside_B, lambda: text)
    elif not _is_batched(outside_B) and outside_B.any():  # vmap has no branch on a value
        raise ValueError(text)


def has_values(x: Tensor) -> bool:
    """Returns whether a branch may depend on the values of `x`: not in a captured step, nor under vmap."""
    return not isinstance(x, FakeTensor) and not _is_batched(x)


def _is_batched(x: Tensor) -> bool:
    while is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False
