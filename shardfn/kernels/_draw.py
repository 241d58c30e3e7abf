"""Tokens drawn from logits, each row by itself."""

import torch
from jaxtyping import Float, Float64, Int, Integer
from torch import Tensor

from shardfn.kernels._arguments import check_dtype, check_exact, check_shape
from shardfn.kernels._dispatch import implementation, implementation_of_rows
from shardfn.kernels._library import define, refuse_backward
from shardfn.kernels._num_threads import num_threads

from . import _native


def draw(
    logits: Float[Tensor, "rows vocab"],
    uniform: Float[Tensor, " rows"],
    *,
    temperature: Float[Tensor, " rows"],
    top_k: Int[Tensor, " rows"],
    top_p: Float[Tensor, " rows"],
    min_p: Float[Tensor, " rows"],
    targets: Int[Tensor, " rows"] | None = None,
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Returns a token of each row, and its log probability.

    A row's token is a function of only the row's arguments (batch-invariant), with the same bits on every processor.
    The weights exp((logit - largest) / temperature) that pass the filters are added up in float64 in the order of
    indices, until the sum is above `uniform` times the total. A single number serves a draw. So speculative decoding
    accepts a guessed token exactly if the token would be drawn.

    The filters apply in the order top k, top p, min p. Of equal logits the lower index comes first. Apply penalties,
    biases and masks to the logits before.

    Args:
        logits: logits in float32 or float64. -inf excludes a token.
        uniform: float64 in [0, 1), not read where the temperature is 0 or a target is given.
        temperature: temperature in float64. 0 takes the largest logit, as does every temperature below 1e-5.
        top_k: number of largest logits that are kept, int64. 0 keeps all.
        top_p: part of the remaining weights, float64. The largest weights are kept until their sum reaches the part,
            for example 0.9. 1 keeps all.
        min_p: part of the largest weight, float64. A token with at least this weight is kept. 0 keeps all.
        targets: token to take in place of a draw, for its log probability, int64. -1 draws.

    Returns:
        Tokens int64, and log probabilities in the dtype of the logits, under the softmax of the logits as given, before
        temperature and filters. A row with a NaN, or without a finite largest logit, gives -1 and NaN, and no other row
        is affected.

    Raises:
        TypeError: for other dtypes.
        ValueError: shapes differ, there is no token, or an argument is out of range. The message names the argument and
            the first row.
        NotImplementedError: in a backward.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
        >>> def same(x, dtype=torch.float64):
        ...     return torch.full((3,), x, dtype=dtype)
        >>> tokens, logprobs = draw(
        ...     logits,
        ...     same(0.95),
        ...     temperature=torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64),
        ...     top_k=same(0, torch.int64),
        ...     top_p=same(1.0),
        ...     min_p=same(0.0),
        ...     targets=torch.tensor([-1, -1, 0]),
        ... )
        >>> tokens, logprobs
        (tensor([1, 2, 0]), tensor([-0.4076, -1.4076, -2.4076]))
    """
    check_exact("logits", logits)
    if not logits.shape[1]:
        raise ValueError(f"logits is of shape {tuple(logits.shape)}: there is no token to draw")
    given = {"uniform": uniform, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    if targets is not None:
        given["targets"] = targets
    for name, x in given.items():
        check_dtype(name, x, torch.int64 if name in ("top_k", "targets") else torch.float64)
        check_shape(name, x, (len(logits),), "one for each row")
    return torch.ops.shardfn_kernels.draw(logits, uniform, temperature, top_k, top_p, min_p, targets)


def top_logprobs(
    logits: Float[Tensor, "rows vocab"], num: int
) -> tuple[Int[Tensor, "rows num"], Float[Tensor, "rows num"]]:
    """Returns the most probable tokens of each row, and the log probabilities, by the expression of `draw`.

    Args:
        logits: float32 or float64.
        num: number of tokens, from 1 to the number of logits.

    Returns:
        Tokens int64, the most probable first, of equal logits the lower index first, and log probabilities, in the
        dtype of the logits, under the softmax of the logits, with the bits of `draw` for the token. A row with a NaN,
        or without a finite largest logit, gives -1 and NaN.

    Raises:
        TypeError: for another dtype.
        ValueError: `num` is out of range.
        NotImplementedError: in a backward.

    Example:
        >>> top_logprobs(torch.tensor([[0.0, 2.0, 1.0]]), 2)
        (tensor([[1, 2]]), tensor([[-0.4076, -1.4076]]))
    """
    check_exact("logits", logits)
    if not 1 <= num <= logits.shape[1]:
        raise ValueError(f"num must be from 1 to {logits.shape[1]}, the number of logits, got {num}")
    return torch.ops.shardfn_kernels.top_logprobs(logits, num)


def draw_uniforms(keys: Integer[Tensor, " rows"], places: Int[Tensor, " places"]) -> Float64[Tensor, " rows"]:
    """Returns a number from 0 to 1 for each row, as a function of only the row's key and place.

    The number is made of the words of threefry2x32 for the key and the place as counter: the upper 53 bits of
    `jax.random.bits(key, dtype=uint64)` at the place. A request draws tokens by a key and positions, for example the
    token at position 17 by place 17, whatever else is in the batch.

    Args:
        keys: int64 or uint64, the 64 bits of a key.
        places: places in int64 or int32. A negative place is a place, too, as 64 bits.

    Returns:
        float64 in [0, 1), multiples of 2^-53.

    Raises:
        TypeError: for other dtypes.
        ValueError: shapes differ.

    Example:
        >>> draw_uniforms(torch.tensor([42, 42, 43]), torch.tensor([0, 1, 1])).tolist()
        [0.4267275666499091, 0.015010069515314584, 0.09533355630366869]
    """
    for name, x, dtypes in (
        ("keys", keys, (torch.int64, torch.uint64)),
        ("places", places, (torch.int64, torch.int32)),
    ):
        if x.dtype not in dtypes:
            raise TypeError(f"{name} is {x.dtype}, must be {dtypes[0]} or {dtypes[1]}")
    check_shape("places", places, (len(keys),), "one for each key")
    return torch.ops.shardfn_kernels.draw_uniforms(keys, places)


def _draw_tokens(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    targets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    run = implementation_of_rows("draw", "draw", logits)
    rest = [x.contiguous() for x in (uniform, temperature, top_k, top_p, min_p)]
    return run(logits.contiguous(), *rest, None if targets is None else targets.contiguous())


def _top_logprobs(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    return implementation_of_rows("draw", "top_logprobs", logits)(logits.contiguous(), num)


def _draw_uniforms(keys: Tensor, places: Tensor) -> Tensor:
    run = implementation("draw", "draw_uniforms", keys.device)
    return run(keys.view(torch.int64).contiguous(), places.to(torch.int64).contiguous())


def _scratch_bytes(logits: Tensor, *rest: Tensor | None) -> int:
    del rest
    return 8 * _native.room(logits.shape[1]) * min(num_threads(), len(logits))


define(
    "draw(Tensor logits, Tensor uniform, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor? targets)"
    " -> (Tensor, Tensor)",
    _draw_tokens,
    lambda logits, *rest: (logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits))),
    scratch=_scratch_bytes,
)
refuse_backward("draw", "draw from logits.detach(), and take the log probabilities of its tokens from log_softmax.")
define(
    "top_logprobs(Tensor logits, int num) -> (Tensor, Tensor)",
    _top_logprobs,
    lambda logits, num: (logits.new_empty(len(logits), num, dtype=torch.int64), logits.new_empty(len(logits), num)),
    scratch=_scratch_bytes,
)
refuse_backward("top_logprobs", "call it on logits.detach().")
define(
    "draw_uniforms(Tensor keys, Tensor places) -> Tensor",
    _draw_uniforms,
    lambda keys, places: keys.new_empty(len(keys), dtype=torch.float64),
)
