"""Noise of routers: a function of the key and the number of the token in the batch, not of the mesh.

S tokens of the rank, N numbers of a token.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn.core import fold_in, threefry2x32


def token_numbers(
    index_B: Int64[Tensor, " b"], length: int, own: Sequence[tuple[int, int]] | None = None
) -> Int64[Tensor, " s"]:
    """Returns the number of each token of a rank among the tokens of all samples, in the order of `x.flatten(0, 1)`.

    Args:
        index_B: global number of each sample.
        length: tokens of a whole sequence.
        own: range (start, stop) of each stretch of the sequence on the rank, in order, from `nn.shard_rows`. None: all
            tokens.

    Example:
        >>> token_numbers(torch.tensor([4, 5]), 10, own=[(0, 1), (8, 10)]).tolist()
        [40, 48, 49, 50, 58, 59]
    """
    stretches = [(0, length)] if own is None else own
    at_T = torch.cat([torch.arange(start, stop, device=index_B.device) for start, stop in stretches])
    return (index_B[:, None] * length + at_T).flatten()


def jitter(
    key: Int64[Tensor, "2"], x: Float[Tensor, "s d"], rate: float, index: Int64[Tensor, " s"]
) -> Float[Tensor, "s d"]:
    """Multiplies each element by a uniform number in [1 - rate, 1 + rate): the noise of a router's input.

    Args:
        key: key for the layer and step.
        x: tokens of the rank, before the router's product.
        rate: rate in [0, 1), such as 0.01.
        index: global number of each token, from `token_numbers`.

    Raises:
        ValueError: the rate does not lie in [0, 1), or `index` has another number of tokens.

    Example:
        >>> from shardfn.core import key
        >>> x, index = torch.ones(4, 3), torch.arange(4)
        >>> torch.equal(jitter(key(0), x, 0.01, index)[2:], jitter(key(0), x[2:], 0.01, index[2:]))
        True

    References:
        Fedus et al., Switch Transformers, 2021, https://arxiv.org/abs/2101.03961
    """
    if not 0 <= rate < 1:
        raise ValueError(f"jitter: the rate must be in [0, 1), got rate={rate}. Factors are in [1 - rate, 1 + rate).")
    check_index("jitter", key, index, len(x))
    words = words_of(key, index, torch.arange(x.shape[1], device=x.device))
    return x * (1 - rate + 2 * rate * _unit_uniform(words)).to(x.dtype)


def gumbel(key: Tensor, index: Tensor, num: int) -> Tensor:
    """Returns [S, N] of float32: Gumbel noise, finite everywhere."""
    # Half a step from both ends, so neither logarithm is infinite.
    unit = _unit_uniform(words_of(key, index, torch.arange(num, device=index.device))) + 2.0**-24
    return -(-unit.log()).log()


def words_of(key: Tensor, index: Tensor, counter: Tensor) -> Tensor:
    """Returns [S, N] of int64 in [0, 2**24): random words of each token's counters, [N] or [S, N]."""
    hi, lo = threefry2x32(fold_in(key.to(index.device), index)[:, None], counter)
    return ((hi ^ lo) >> 8).long() & 0xFFFFFF


def check_index(who: str, key: Tensor | None, index: Tensor | None, size: int) -> None:
    """Raises for noise for tokens without numbers, and for numbers without matching tokens.

    Raises:
        ValueError: a key is given without an index, or the index has another shape.
    """
    if key is not None and index is None:
        raise ValueError(
            f"{who}: noise of a key needs the tokens' global numbers, or ranks would draw the same for different"
            " tokens: pass index=moe.token_numbers(index_B, T)."
        )
    if index is not None and index.shape != (size,):
        raise ValueError(f"{who}: index must have a number for each of {size} tokens, got shape {tuple(index.shape)}.")


def _unit_uniform(words: Tensor) -> Tensor:
    """Returns numbers in [0, 1) in float32, of 23 bits."""
    return (words >> 1).to(torch.float32) * 2.0**-23
