"""Logits of a router, checked and in a wide dtype."""

import torch
from torch import Tensor

from shardfn._torch import FakeTensor, check_tensor_all, functorch, is_functorch_wrapped_tensor
from shardfn.collectives import current_mesh


def wide_logits(logits: Tensor, mask: Tensor | None, name: str) -> Tensor:
    """Returns the logits in float32, or float64 logits in float64.

    Rows of padding become 0, whatever the numbers.

    Raises:
        ValueError: the logits are not [tokens, experts], a counted row is not finite, or the mask does not fit.
    """
    if logits.ndim != 2:
        raise ValueError(
            f"{name}: logits must be [S, E], a row for each token, got shape {tuple(logits.shape)}. Pass"
            " logits.flatten(0, -2), and route the tokens x.flatten(0, -2)."
        )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if mask is not None:
        _check_mask(mask, logits, name)
        wide = torch.where(mask[:, None], wide, 0.0)
    check_finite(wide, name, "logits")
    return wide


def check_finite(x: Tensor, name: str, noun: str = "weights") -> None:
    """Raises for infinite or NaN numbers of a router, also in a captured step, but not under vmap.

    Args:
        x: [S, ...] of tokens.
        name: the layer.
        noun: the numbers.

    Raises:
        ValueError: some numbers are not finite. The message has the layer, the rank and the number of tokens.

    Example:
        >>> check_finite(torch.ones(3, 2), "layers.0")
    """
    rows = (~x.detach().isfinite()).any(-1).sum()
    if _is_batched(rows):
        return  # vmap has no branch on a value
    if isinstance(rows, FakeTensor):
        # Each rank captures a separate graph. In a graph a message is a constant, without a number of rows.
        check_tensor_all(rows == 0, lambda: _not_finite(noun, "some", name + _describe_rank()))
        return
    if rows != 0:
        raise ValueError(_not_finite(noun, f"{int(rows)} of {len(x)}", name + _describe_rank()))


def refuse(wrong: Tensor, text: str) -> None:
    """Raises where a number is not 0, also in a captured step, but not under vmap: vmap has no branch on a value.

    Raises:
        ValueError: with the text.
    """
    if isinstance(wrong, FakeTensor):
        check_tensor_all(wrong == 0, lambda: text)
    elif not _is_batched(wrong) and wrong != 0:
        raise ValueError(text)


def _is_batched(x: Tensor) -> bool:
    while is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def _not_finite(noun: str, rows: str, where: str) -> str:
    return (
        f"{where}: the router's {noun} are not finite in {rows} tokens, so that their experts would be arbitrary. Look"
        " for the first activation or parameter that is not finite: a learning rate that is too high, or activations"
        " beyond the range of float16."
    )


def _describe_rank() -> str:
    mesh = current_mesh()
    at = ", ".join(f"{axis} {i}" for axis, i in mesh.coords.items()) if mesh.size > 1 else ""
    return f" (on the rank at {at})" if at else ""


def _check_mask(mask: Tensor, logits: Tensor, name: str) -> None:
    if mask.shape != logits.shape[:1] or mask.dtype != torch.bool:
        raise ValueError(
            f"{name}: mask is {mask.dtype} of shape {tuple(mask.shape)} for {len(logits)} tokens. Give each token a"
            " bool, False for padding: mask.flatten() of [B, T]."
        )


def check_k(k: int, num_experts: int, name: str) -> None:
    """Raises for a number of choices not allowed by the experts.

    Raises:
        ValueError: k is less than 1, or more than the number of experts.
    """
    if not 1 <= k <= num_experts:
        raise ValueError(
            f"{name}: k={k} choices of {num_experts} experts. A token takes each expert once at most, and one at least:"
            f" choose k in 1 .. {num_experts}."
        )


def check_chosen(chosen: Tensor, size: int, k: int, num_experts: int, name: str) -> None:
    """Raises for a replayed choice of the wrong shape, dtype or expert.

    Args:
        chosen: a number for each choice of each token.
        size: S.
        k: choices of a token.
        num_experts: E.
        name: begins the message.

    Raises:
        ValueError: another shape or dtype, or an unknown expert.

    Example:
        >>> check_chosen(torch.tensor([[0, 1], [-1, -1]]), 2, 2, 4, "router")
    """
    if chosen.shape != (size, k) or chosen.dtype != torch.int64:
        raise ValueError(
            f"{name}: chosen is {chosen.dtype} of shape {tuple(chosen.shape)}, but {size} tokens with k={k} choices"
            f" need int64 of shape {(size, k)}: the experts of an earlier routing."
        )
    outside = ((chosen < -1) | (chosen >= num_experts)).sum()
    # In a graph a message is a constant, without a number of choices.
    num = "some" if isinstance(outside, FakeTensor) or _is_batched(outside) else int(outside)
    refuse(
        outside,
        f"{name}: {num} numbers in chosen are no expert: there are {num_experts}, from 0 on, and -1 is a choice without"
        f" an expert. Replay the choices of a router of {num_experts} experts.",
    )
