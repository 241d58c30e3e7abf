"""Logits of a router, checked and in a wide dtype."""

import torch
from torch import Tensor

from shardfn.collectives import current_mesh


def wide_logits(logits: Tensor, mask: Tensor | None, name: str) -> Tensor:
    """The logits in float32, or as they are in float64; 0 in rows of padding, whose numbers may be anything.

    Raises:
        ValueError: a row that counts is not finite, or the mask does not fit.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if mask is not None:
        _check_mask(mask, logits, name)
        wide = torch.where(mask[:, None], wide, 0.0)
    rows = (~wide.detach().isfinite()).any(-1).sum()
    # A branch that only raises: a captured function keeps it as an operation.
    if rows != 0:
        raise ValueError(_not_finite(rows, len(wide), name))
    return wide


def _not_finite(rows: Tensor, size: int, name: str) -> str:
    return (
        f"{name}: the router's logits are not finite in {int(rows)} of {size} tokens{_of_rank()}, so that their experts"
        " would be arbitrary. Look for the first activation or parameter that is not finite: a learning rate that is"
        " too high, or activations beyond the range of float16."
    )


def _of_rank() -> str:
    mesh = current_mesh()
    at = ", ".join(f"{axis} {i}" for axis, i in mesh.coords.items()) if mesh.size > 1 else ""
    return f" on the rank at {at}" if at else ""


def _check_mask(mask: Tensor, logits: Tensor, name: str) -> None:
    if mask.shape != logits.shape[:1] or mask.dtype != torch.bool:
        raise ValueError(
            f"{name}: mask is {mask.dtype} of shape {tuple(mask.shape)} for {len(logits)} tokens. Give each token a"
            " bool, False for padding: mask.flatten() of [B, T]."
        )


def check_k(k: int, num_experts: int, name: str) -> None:
    """Refuses a number of choices that the experts do not allow.

    Raises:
        ValueError: it is less than 1, or more than there are experts.
    """
    if not 1 <= k <= num_experts:
        raise ValueError(
            f"{name}: k={k} choices of {num_experts} experts. A token takes each expert once at most, and one at least:"
            f" choose k in 1 .. {num_experts}."
        )


def check_chosen(chosen: Tensor, size: int, k: int, num_experts: int, name: str) -> None:
    """Refuses a replayed choice that does not fit.

    Raises:
        ValueError: another shape or dtype, or an expert that does not exist.
    """
    if chosen.shape != (size, k) or chosen.dtype != torch.int64:
        raise ValueError(
            f"{name}: chosen is {chosen.dtype} of shape {tuple(chosen.shape)}, but {size} tokens with k={k} choices"
            f" need int64 of shape {(size, k)}: the experts of an earlier routing."
        )
    outside = ((chosen < -1) | (chosen >= num_experts)).sum()
    if outside != 0:
        raise ValueError(
            f"{name}: {int(outside)} numbers in chosen are no expert: there are {num_experts}, from 0 on, and -1 is a"
            " choice without an expert. Replay the choices of a router of as many experts."
        )
