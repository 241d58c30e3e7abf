"""Tokens drawn from logits, each row separately.

All arithmetic of the definition is float64, each operation rounded once. Log probabilities are in the dtype of the
logits.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64, Int, Integer
from torch import Tensor

from ._arguments import check_dtype, check_shape, num_threads, threads_for
from ._build import function
from ._chain import KernelCall, are_dense
from ._fixed_bits import WIDE_HIGH, WIDE_LOW, exponential
from ._op import EXACT, KernelOp

# A lower temperature counts as 0: a quotient by such a temperature could overflow.
COLDEST = 1e-5
# Weights are added up in blocks, each by 8 lanes over its 8 rows and a tree over the lanes.
LANES, BLOCK = 8, 64
ODD_TERMS = 14
# Words of threefry2x32.
MASK, PARITY = 0xFFFFFFFF, 0x1BD11BDA
ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
# Logits up to which a second thread does not pay.
FEW = 1 << 16
_SOURCE = "_draw.cpp"


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
    DRAW.check_dtype("logits", logits)
    if not logits.shape[1]:
        raise ValueError(f"logits must have at least one row and one token, got the shape {tuple(logits.shape)}")
    given = {"uniform": uniform, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    if targets is not None:
        given["targets"] = targets
    for name, x in given.items():
        check_dtype(name, x, torch.int64 if name in ("top_k", "targets") else torch.float64)
        check_shape(name, x, (len(logits),), "one for each row")
    return DRAW(logits, uniform, temperature, top_k, top_p, min_p, targets)


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
    TOP_LOGPROBS.check_dtype("logits", logits)
    if not 1 <= num <= logits.shape[1]:
        raise ValueError(f"num must be from 1 to {logits.shape[1]}, the number of logits, got {num}")
    return TOP_LOGPROBS(logits, num)


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
    return DRAW_UNIFORMS(keys, places)


def check_values(
    vocab: int,
    uniform: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    targets: Tensor | None,
) -> None:
    """Refuses arguments out of range. Each implementation checks the ranges at the run, for captured programs, too.

    Arguments that are None are in range.

    Raises:
        ValueError: names the argument, the first row, and the range.
    """
    drawn = torch.tensor(True) if temperature is None else temperature >= COLDEST
    if targets is not None:
        drawn = drawn & (targets < 0)
    for name, x, low, high in (
        ("temperature", temperature, 0, math.inf),
        ("top_p", top_p, 0, 1.0),
        ("min_p", min_p, 0, 1.0),
        ("uniform", uniform, 0, 1.0),
        ("top_k", top_k, 0, vocab),
        ("targets", targets, -1, vocab - 1),
    ):
        if x is None:
            continue
        wrong = ~((x >= low) & (x <= high))
        if name == "uniform":
            wrong = (wrong | (x == 1)) & drawn
        if torch.any(wrong):
            row = int(wrong.nonzero()[0])
            below = " and below" if name == "uniform" else " to"
            raise ValueError(f"{name} must be from {low}{below} {high}, got {x[row].item()} in row {row}")


# The definitions.


def _draw_by_torch(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *per_row, targets = arguments
    check_values(logits.shape[1], *arguments)
    given = logits.new_full((len(logits),), -1, dtype=torch.int64) if targets is None else targets
    tokens, logprobs = [], []
    for row, *how in zip(logits, *per_row, given, strict=True):
        token, logprob = _draw_row(row, *(x.item() for x in how))
        tokens.append(token)
        logprobs.append(logprob)
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device), logits.new_tensor(logprobs)


def _top_by_torch(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    tokens = torch.full((len(logits), num), -1, dtype=torch.int64)
    logprobs = torch.full((len(logits), num), math.nan, dtype=logits.dtype)
    for i, row in enumerate(logits.cpu()):
        shifted = row.double() - float(row.max())
        if math.isfinite(float(row.max())):
            tokens[i] = row.sort(descending=True, stable=True).indices[:num]
            logprobs[i] = shifted[tokens[i]] - compute_logarithm(_sum_blocks(exponential(shifted))[-1])
    return tokens.to(logits.device), logprobs.to(logits.device)


def _uniforms_by_torch(keys: Tensor, places: Tensor) -> Tensor:
    keys, places = _convert_words(keys, places)
    k0, k1 = keys >> 32 & MASK, keys & MASK
    ks = k0, k1, k0 ^ k1 ^ PARITY
    x0, x1 = (places >> 32 & MASK) + k0 & MASK, (places & MASK) + k1 & MASK
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x0 = x0 + x1 & MASK
            x1 = (x1 << r | x1 >> 32 - r) & MASK ^ x0
        x0, x1 = x0 + ks[(i + 1) % 3] & MASK, x1 + ks[(i + 2) % 3] + i + 1 & MASK
    return (x0 << 21 | x1 >> 11).double() * 2.0**-53


def _draw_row(
    row: Tensor, u: float, temperature: float, top_k: int, top_p: float, min_p: float, target: int
) -> tuple[int, float]:
    x = row.double()
    most = float(x.max())
    if not math.isfinite(most):  # also a NaN as the maximum
        return -1, math.nan
    shifted = x - most
    sums = _sum_blocks(exponential(shifted))
    if target >= 0:
        token = target
    elif temperature < COLDEST:
        token = int((row == row.max()).nonzero()[0])
    else:
        # An excluded logit at an infinite temperature is NaN, and has no weight.
        weights = exponential(shifted / temperature).nan_to_num(0.0)
        token = _find_token(_filter_weights(weights, row, top_k, top_p, min_p), u)
    return token, float(shifted[token]) - compute_logarithm(sums[-1])


def _filter_weights(weights: Tensor, row: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Returns the weights, with zeros where the filters leave a token out."""
    order = row.sort(descending=True, stable=True).indices.tolist()
    order = order[:top_k] if top_k else order
    if top_p < 1:
        left = torch.zeros_like(weights)
        left[order] = weights[order]
        values, wanted, so_far, num = weights.tolist(), top_p * _sum_blocks(left)[-1], 0.0, 0
        while num < len(order) and (num == 0 or so_far < wanted):
            so_far += values[order[num]]
            num += 1
        order = order[:num]
    kept = torch.zeros_like(weights)
    kept[order] = weights[order]
    return torch.where(kept >= min_p, kept, 0.0)


def _find_token(weights: Tensor, u: float) -> int:
    """Returns the first token at which the sum of weights is above `u` times the total.

    Else returns the last token with a weight.
    """
    sums = _sum_blocks(weights)
    target = u * sums[-1]
    at = next((i for i, end in enumerate(sums[1:]) if end > target), None)
    if at is None:
        return int(weights.nonzero()[-1])
    so_far, last = sums[at], -1
    for i, weight in enumerate(weights[at * BLOCK : (at + 1) * BLOCK].tolist()):
        so_far += weight
        last = at * BLOCK + i if weight > 0 else last
        if weight > 0 and so_far > target:
            break
    return last


def _sum_blocks(weights: Tensor) -> list[float]:
    """Returns, for each block, the sum of all earlier blocks, and at the end the total."""
    x = torch.nn.functional.pad(weights, (0, -len(weights) % BLOCK)).view(-1, BLOCK // LANES, LANES)
    lanes = x[:, 0]
    for i in range(1, x.shape[1]):
        lanes = lanes + x[:, i]
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    sums = [0.0]
    for block in lanes[:, 0].tolist():
        sums.append(sums[-1] + block)
    return sums


def compute_logarithm(x: float) -> float:
    """Returns the logarithm of a normal number, by x = m 2^e and the series of the inverse hyperbolic tangent."""
    m, e = math.frexp(x)
    if m < 0.7071067811865476:
        m, e = m * 2, e - 1
    f = (m - 1) / (m + 1)
    square, y = f * f, 0.0
    for i in range(ODD_TERMS, -1, -1):
        y = y * square + 1 / (2 * i + 1)
    return e * WIDE_LOW + (2 * f * y) + e * WIDE_HIGH


# In C++.


def _draw_natively(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    r, v = logits.shape
    threads = threads_for(r * v, FEW, r)
    tokens, logprobs = logits.new_empty(r, dtype=torch.int64), logits.new_empty(r)
    memory = logits.new_empty(threads * count_room(v), dtype=torch.float64)
    at = (None if x is None else x.data_ptr() for x in (logits, *arguments, tokens, logprobs, memory))
    if function(_SOURCE, "draw_rows", "p" * 10 + "i" * 4, returns=True)(*at, count_room(v), r, v, threads):
        check_values(v, *arguments)
        raise AssertionError("C++ refuses arguments that Python takes")
    return tokens, logprobs


def _top_natively(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    r, v = logits.shape
    threads = threads_for(r * v, FEW, r)
    tokens, logprobs = _empty_top(logits, num)
    memory = logits.new_empty(threads * count_room(v), dtype=torch.float64)
    at = (x.data_ptr() for x in (logits, tokens, logprobs, memory))
    function(_SOURCE, "top_rows", "p" * 4 + "i" * 5)(*at, count_room(v), r, v, num, threads)
    return tokens, logprobs


def _uniforms_natively(keys: Tensor, places: Tensor) -> Tensor:
    keys, places = _convert_words(keys, places)
    out = torch.empty(keys.shape, dtype=torch.float64)
    function(_SOURCE, "draw_uniforms", "pppi")(keys.data_ptr(), places.data_ptr(), out.data_ptr(), len(keys))
    return out


def _call_draw(arguments: Sequence[Any], results: Sequence[Tensor]) -> KernelCall | None:
    logits, *per_row = arguments
    rows, vocab = logits.shape
    if not are_dense(logits) or not all(x is None or x.is_contiguous() for x in per_row):
        return None
    sizes = count_room(vocab), rows, vocab, threads_for(rows * vocab, FEW, rows)
    check = check_values, (vocab, *per_row)
    return KernelCall(_SOURCE, "draw_rows_alone", (logits, *per_row, *results, *sizes), check)


def _call_uniforms(arguments: Sequence[Any], out: Tensor) -> KernelCall | None:
    are_words = all(x.dtype == torch.int64 and x.is_contiguous() for x in arguments)
    return KernelCall(_SOURCE, "draw_uniforms", (*arguments, out, len(out))) if are_words else None


def count_room(vocab: int) -> int:
    """Returns the float64 numbers of memory that a thread needs.

    Example:
        >>> count_room(49152)
        115458
    """
    blocks, ends = -(-vocab // 64), 8192 // 2
    return blocks * 64 + (blocks + 1) + vocab + ends + vocab // 4 + 1


def _scratch_bytes(logits: Tensor, *rest: Tensor | None) -> int:
    del rest
    return 8 * count_room(logits.shape[1]) * min(num_threads(), len(logits))


def _convert_words(keys: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and places as int64."""
    return keys.view(torch.int64), places.to(torch.int64)


def _empty_top(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    r = logits.shape[0]
    return logits.new_empty(r, num, dtype=torch.int64), logits.new_empty(r, num)


DRAW = KernelOp(
    schema="draw(Tensor logits, Tensor uniform, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,"
    " Tensor? targets) -> (Tensor, Tensor)",
    abstract=lambda logits, *_: (logits.new_empty(logits.shape[0], dtype=torch.int64), logits.new_empty(len(logits))),
    reference=_draw_by_torch,
    dtypes=EXACT,
    native=_draw_natively,
    source=_SOURCE,
    triton="_draw_triton.draw",
    fast_dtypes=(torch.float32,),
    no_derivative="draw from logits.detach(), and take the log probabilities of its tokens from log_softmax.",
    scratch=_scratch_bytes,
    chain=_call_draw,
)
TOP_LOGPROBS = KernelOp(
    schema="top_logprobs(Tensor logits, int num) -> (Tensor, Tensor)",
    abstract=_empty_top,
    reference=_top_by_torch,
    dtypes=EXACT,
    native=_top_natively,
    source=_SOURCE,
    triton="_draw_triton.top_logprobs",
    fast_dtypes=(torch.float32,),
    no_derivative="call it on logits.detach().",
    scratch=_scratch_bytes,
)
DRAW_UNIFORMS = KernelOp(
    schema="draw_uniforms(Tensor keys, Tensor places) -> Tensor",
    abstract=lambda keys, places: keys.new_empty(len(keys), dtype=torch.float64),
    reference=_uniforms_by_torch,
    native=_uniforms_natively,
    source=_SOURCE,
    triton="_draw_triton.draw_uniforms",
    chain=_call_uniforms,
)
