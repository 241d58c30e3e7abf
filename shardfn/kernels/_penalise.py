"""Penalties on the logits of tokens already in a sequence, such as a repetition penalty."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_exact, check_shape
from shardfn.kernels._dispatch import implementation_of_rows
from shardfn.kernels._library import define, refuse_backward


def penalise(
    logits: Float[Tensor, "rows vocab"],
    history: Int[Tensor, "rows width"],
    prompts: Int[Tensor, " rows"],
    *,
    repetition: Float[Tensor, " rows"],
    presence: Float[Tensor, " rows"],
    frequency: Float[Tensor, " rows"],
) -> Float[Tensor, "rows vocab"]:
    """Returns the logits, changed for the tokens of each row's history.

    For a token of the history, first positive logits are divided by `repetition`, negative logits multiplied by
    `repetition`. For a token of the output, `frequency` times the token's count there and then `presence` are
    subtracted. For example a token that occurs 3 times in the output loses 3 `frequency` + `presence`. Arithmetic is
    float64, and the result is rounded to the dtype of the logits at the end. Apply penalties before biases, masks and
    `draw`.

    Args:
        logits: float32 or float64.
        history: ids of the prompt and then of the output, int32. -1 anywhere is left out.
        prompts: number of first ids of a row in the prompt, int32.
        repetition: penalty over prompt and output, float64 above 0. 1 changes nothing.
        presence: penalty over the output, float64. 0 changes nothing.
        frequency: penalty over the output, float64. 0 changes nothing.

    Returns:
        New logits. A row with three penalties that change nothing has unchanged bits, and so has every logit of a token
        outside of the history.

    Raises:
        TypeError: for other dtypes.
        ValueError: shapes differ, or a value is out of range. The message names the value and the first row.
        NotImplementedError: in a backward.

    Example:
        >>> same = torch.ones(1, dtype=torch.float64)
        >>> history, prompts = torch.tensor([[0, 1, 2, 2, -1]]).int(), torch.tensor([1]).int()
        >>> logits = torch.tensor([[3.0, -1.0, 4.0, 5.0]])
        >>> penalise(logits, history, prompts, repetition=same * 2, presence=same, frequency=same * 0.5)
        tensor([[ 1.5000, -3.5000,  0.0000,  5.0000]])
    """
    check_exact("logits", logits)
    check_dtype("history", history, torch.int32)
    check_shape("history", history, (len(logits), history.shape[-1]), "a history for each row")
    given = {"prompts": prompts, "repetition": repetition, "presence": presence, "frequency": frequency}
    for name, x in given.items():
        check_dtype(name, x, torch.int32 if name == "prompts" else torch.float64)
        check_shape(name, x, (len(logits),), "one for each row")
    return torch.ops.shardfn_kernels.penalise(logits, history, *given.values())


def _penalise_rows(
    logits: Tensor, history: Tensor, prompts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    run = implementation_of_rows("penalise", "penalise", logits)
    return run(*(x.contiguous() for x in (logits, history, prompts, repetition, presence, frequency)))


define(
    "penalise(Tensor logits, Tensor history, Tensor prompts, Tensor repetition, Tensor presence, Tensor frequency)"
    " -> Tensor",
    _penalise_rows,
    lambda logits, *rest: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
refuse_backward("penalise", "call it on logits.detach().")
