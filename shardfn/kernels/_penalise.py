"""Penalties on the logits of tokens already in a sequence, such as a repetition penalty.

Arithmetic of the definition is float64, each operation rounded once. Results have the dtype of the logits.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._arguments import check_dtype, check_shape, threads_for
from ._build import function
from ._op import EXACT, KernelOp

# Logits up to which a second thread does not pay.
FEW = 1 << 20
_SOURCE = "_penalise.cpp"


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
    PENALISE.check_dtype("logits", logits)
    check_dtype("history", history, torch.int32)
    check_shape("history", history, (len(logits), history.shape[-1]), "a history for each row")
    given = {"prompts": prompts, "repetition": repetition, "presence": presence, "frequency": frequency}
    for name, x in given.items():
        check_dtype(name, x, torch.int32 if name == "prompts" else torch.float64)
        check_shape(name, x, (len(logits),), "one for each row")
    return PENALISE(logits, history, *given.values())


def check_values(
    vocab: int, history: Tensor, prompts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Refuses arguments out of range. Each implementation checks the ranges at the run.

    Raises:
        ValueError: names the argument, the first row, and the range.
    """
    width = history.shape[1]
    for name, x, wrong, allowed in (
        ("history", history, (history < -1) | (history >= vocab), f"from -1 to {vocab - 1}"),
        ("prompts", prompts, (prompts < 0) | (prompts > width), f"from 0 to {width}"),
        ("repetition", repetition, ~((repetition > 0) & repetition.isfinite()), "above 0 and finite"),
        ("presence", presence, ~presence.isfinite(), "finite"),
        ("frequency", frequency, ~frequency.isfinite(), "finite"),
    ):
        if wrong.any():
            at = wrong.nonzero()[0].tolist()
            raise ValueError(f"{name} must be {allowed}, got {x[tuple(at)].item()} in row {at[0]}")


def _penalise_by_torch(
    logits: Tensor, history: Tensor, prompts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    (r, v), width = logits.shape, history.shape[1]
    check_values(v, history, prompts, repetition, presence, frequency)
    ids = torch.where(history < 0, v, history).long()  # the place after all tokens, dropped
    output = torch.arange(width, device=history.device) >= prompts[:, None]
    counts = logits.new_zeros(r, v + 1, dtype=torch.float64)
    seen = counts.scatter_add(1, ids, torch.ones_like(ids, dtype=torch.float64))[:, :v]
    drawn = counts.scatter_add(1, ids, output.double())[:, :v]
    x = logits.double()
    repeated = torch.where(x > 0, x / repetition[:, None], x * repetition[:, None])
    y = torch.where(seen > 0, repeated, x)
    lowered = (y - frequency[:, None] * drawn) - presence[:, None]
    y = torch.where(drawn > 0, lowered, y)
    neutral = (repetition == 1) & (presence == 0) & (frequency == 0)
    return torch.where(neutral[:, None] | (seen == 0), logits, y.to(logits.dtype))


def _penalise_natively(logits: Tensor, *arguments: Tensor) -> Tensor:
    (r, v), history = logits.shape, arguments[0]
    threads = threads_for(r * v, FEW, r)
    out, counts = torch.empty_like(logits), history.new_zeros(threads * v)
    at = (x.data_ptr() for x in (logits, *arguments, out, counts))
    if function(_SOURCE, "penalise", "p" * 8 + "i" * 4, returns=True)(*at, r, v, history.shape[1], threads):
        check_values(v, *arguments)
        raise AssertionError("C++ refuses arguments that Python takes")
    return out


PENALISE = KernelOp(
    schema="penalise(Tensor logits, Tensor history, Tensor prompts, Tensor repetition, Tensor presence,"
    " Tensor frequency) -> Tensor",
    reference=_penalise_by_torch,
    dtypes=EXACT,
    native=_penalise_natively,
    source=_SOURCE,
    triton="_penalise_triton.penalise",
    fast_dtypes=(torch.float32,),
    no_derivative="call it on logits.detach().",
)
