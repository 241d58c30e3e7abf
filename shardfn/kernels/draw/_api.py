"""Tokens drawn from logits, each row by itself."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_shape
from shardfn.kernels._dispatch import implementation
from shardfn.kernels._library import define, refuse_backward


def draw(
    logits: Float[Tensor, "rows vocab"],
    uniform: Float[Tensor, " rows"],
    *,
    temperature: Float[Tensor, " rows"],
    top_k: Int[Tensor, " rows"],
    top_p: Float[Tensor, " rows"],
    min_p: Float[Tensor, " rows"],
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """A token of each row, and its log probability.

    A row's token is a function of the row's own arguments, with the same bits on every processor: weights
    exp((logit - largest) / temperature), without those that the filters leave out, are added up in float64 in the order
    of their indices, until the sum is above `uniform` times the total. One number serves a draw, so a guessed token is
    accepted exactly if it is the token that would be drawn.

    The filters apply in the order top k, top p, min p. Of equal logits the one of the lower index comes first.

    Args:
        logits: float32; -inf excludes a token.
        uniform: float64 in [0, 1); not read where the temperature is 0.
        temperature: float64; 0 takes the largest logit.
        top_k: int64; the number of largest logits that are kept. 0 keeps all.
        top_p: float64; the largest ones are kept until their weights reach this part of all that are left. 1 keeps all.
        min_p: float64; a token is kept if its weight is at least this part of the largest one's. 0 keeps all.

    Returns:
        Tokens int64, and float32 log probabilities under the softmax of the logits as given, before temperature and
        filters. A row with a NaN, or without a finite largest logit, gives -1 and NaN, and no other row is affected.

    Raises:
        TypeError: for other dtypes.
        ValueError: shapes differ, there is no token, or an argument is out of range; names it and the first row.
        NotImplementedError: in a backward.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
        >>> def same(x, dtype=torch.float64):
        ...     return torch.full((2,), x, dtype=dtype)
        >>> tokens, logprobs = draw(
        ...     logits,
        ...     same(0.95),
        ...     temperature=torch.tensor([0.0, 1.0], dtype=torch.float64),
        ...     top_k=same(0, torch.int64),
        ...     top_p=same(1.0),
        ...     min_p=same(0.0),
        ... )
        >>> tokens, logprobs
        (tensor([1, 2]), tensor([-0.4076, -1.4076]))
    """
    check_dtype("logits", logits, torch.float32)
    if not logits.shape[1]:
        raise ValueError(f"logits is of shape {tuple(logits.shape)}: there is no token to draw")
    given = {"uniform": uniform, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, x in given.items():
        check_dtype(name, x, torch.int64 if name == "top_k" else torch.float64)
        check_shape(name, x, (len(logits),), "one for each row")
    return torch.ops.shardfn_kernels.draw(logits, *given.values())


def _check_values(
    vocab: int, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> None:
    for name, x, high in (
        ("temperature", temperature, math.inf),
        ("top_p", top_p, 1.0),
        ("min_p", min_p, 1.0),
        ("uniform", uniform, 1.0),
        ("top_k", top_k, vocab),
    ):
        wrong = ~((x >= 0) & (x <= high))
        if name == "uniform":
            wrong = (wrong | (x == 1)) & (temperature != 0)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            below = " and below" if name == "uniform" else " to"
            raise ValueError(f"{name} is {x[row].item()} in row {row}; must be from 0{below} {high}")


def _draw(
    logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    # Here, and not in the function above: a captured program has the values only when it runs.
    _check_values(logits.shape[1], uniform, temperature, top_k, top_p, min_p)
    run = implementation("draw", "draw", logits.device)
    rest = (x.contiguous() for x in (uniform, temperature, top_k, top_p, min_p))
    return run(logits.contiguous(), *rest)


define(
    "draw(Tensor logits, Tensor uniform, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p)"
    " -> (Tensor, Tensor)",
    _draw,
    lambda logits, *rest: (logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits))),
)
refuse_backward("draw", "draw from logits.detach(), and take the log probabilities of its tokens from log_softmax.")
