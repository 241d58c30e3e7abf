"""Rotary positions: tables of angles, for a whole head or a part of its dims, stretched to longer sequences or not.

T tokens, H heads, K head dim, R rotated dims.

Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864 Chen et al., Extending Context Window via Positional
Interpolation, 2023, https://arxiv.org/abs/2306.15595
Peng et al., YaRN: Efficient Context Window Extension, 2023, https://arxiv.org/abs/2309.00071 Dubey et al., The Llama 3
Herd of Models, 2024, https://arxiv.org/abs/2407.21783
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn.core import raise_all

from ._batch_invariant_functions import batch_invariant_rope_table


def rope_table(
    positions_T: Int64[Tensor, " t"],
    head_dim: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    frequencies: Sequence[float] | None = None,
) -> tuple[Float[Tensor, "t k"], Float[Tensor, "t k"]]:
    """Returns the cos and sin of position * base^(-2i / K), i = 0 .. K/2 - 1, both halves equal.

    Args:
        positions_T: global positions of the tokens.
        head_dim: K, even.
        base: the longest wave is 2 pi base tokens.
        dtype: dtype of the result. Angles are always formed in float32 or better.
        frequencies: K/2 angles of a step from position to position, in place of the powers of `base`.

    Returns: cos_TK and sin_TK, for `rope`.

    Raises:
        ValueError: `head_dim` is odd.

    Example:
        >>> cos_TK, sin_TK = rope_table(torch.arange(3), 4)
        >>> cos_TK.shape
        torch.Size([3, 4])
    """
    if head_dim % 2:
        raise ValueError(f"rope_table(head_dim={head_dim}): rotation pairs dims, so the head dim must be even.")
    work = torch.float64 if dtype == torch.float64 else torch.float32
    if frequencies is None:
        powers = torch.arange(0, head_dim, 2, dtype=work, device=positions_T.device) / head_dim
        steps = base**-powers
    else:
        steps = torch.tensor(frequencies, dtype=work, device=positions_T.device)
    angles_TK = torch.outer(positions_T.to(work), steps).repeat(1, 2)
    return angles_TK.cos().to(dtype), angles_TK.sin().to(dtype)


def rope(
    x_BTHK: Float[Tensor, "b t h k"], cos_TK: Float[Tensor, "t r"], sin_TK: Float[Tensor, "t r"]
) -> Float[Tensor, "b t h k"]:
    """Rotates each pair (a, b) = (x_k, x_(k + K/2)) by the pair's angle: x cos + (-b, a) sin.

    So <rope(q)_s, rope(k)_t> depends on the positions only through s - t. With tables of fewer dims R < K, the first R
    dims are rotated, and the rest stays.

    Args:
        x_BTHK: queries or keys.
        cos_TK: cosines from `rope_table`, [T, K] or [T, R].
        sin_TK: sines from `rope_table`.

    Example:
        >>> x_BTHK = torch.ones(1, 1, 1, 2)
        >>> torch.equal(rope(x_BTHK, *rope_table(torch.tensor([0]), 2)), x_BTHK)
        True
    """
    if cos_TK.shape[-1] < x_BTHK.shape[-1]:
        rotated, kept = x_BTHK.tensor_split((cos_TK.shape[-1],), dim=-1)
        return torch.cat((rope(rotated, cos_TK, sin_TK), kept), dim=-1)
    a, b = x_BTHK.chunk(2, dim=-1)
    return x_BTHK * cos_TK[:, None] + torch.cat((-b, a), dim=-1) * sin_TK[:, None]


def _check_above(owner: object, **numbers: float | None) -> None:
    raise_all(
        ValueError,
        f"{type(owner).__name__}:",
        [f"{name}={x} must be above 0." for name, x in numbers.items() if x is not None and not x > 0],
    )


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Stretch of all waves by a factor: position 8 has the angles of position 4 with `factor=2`.

    Attributes:
        factor: factor of the waves.

    Raises:
        ValueError: the factor is not above 0.

    Example:
        >>> LinearScaling(2.0).scale([1.0, 0.5], 10000.0)
        [0.5, 0.25]
    """

    factor: float

    def __post_init__(self) -> None:
        _check_above(self, factor=self.factor)

    @property
    def amplitude(self) -> float:
        """Returns the factor of cosines and sines."""
        return 1.0

    def scale(self, frequencies: Sequence[float], base: float) -> list[float]:
        """Returns the frequencies of the stretched waves."""
        del base
        return [f / self.factor for f in frequencies]


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's stretch: long waves by a factor, short waves not at all, with a smooth passage between both.

    Attributes:
        factor: factor of long waves.
        original_max_len: longest sequence before the stretch.
        low: waves longer than `original_max_len / low` are stretched by the whole factor.
        high: waves shorter than `original_max_len / high` are not stretched.

    Raises:
        ValueError: a number is not above 0, or `high` is not above `low`.

    Example:
        >>> Llama3Scaling(8.0, original_max_len=8192).scale([1.0, 1e-6], 10000.0)
        [1.0, 1.25e-07]
    """

    factor: float
    original_max_len: int
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        _check_above(self, factor=self.factor, original_max_len=self.original_max_len, low=self.low)
        if not self.high > self.low:
            raise ValueError(f"Llama3Scaling: high={self.high} must be above low={self.low}.")

    @property
    def amplitude(self) -> float:
        """Returns the factor of cosines and sines."""
        return 1.0

    def scale(self, frequencies: Sequence[float], base: float) -> list[float]:
        """Returns the frequencies of the stretched waves."""
        del base
        out = []
        for f in frequencies:
            turns = self.original_max_len * f / (2 * math.pi)
            kept = min(max((turns - self.low) / (self.high - self.low), 0.0), 1.0)
            out.append(kept * f + (1 - kept) * f / self.factor)
        return out


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN's stretch: dims with few turns in the original length by a factor, dims with many turns not at all.

    Attributes:
        factor: factor of long waves.
        original_max_len: longest sequence before the stretch.
        fast: least number of turns of a wave that is not stretched.
        slow: largest number of turns of a wave that is stretched by the whole factor.
        truncate: whether the ends of the passage are rounded to whole dims.
        attention_factor: factor of cosines and sines. None is 1 + ln(factor) / 10.

    Raises:
        ValueError: a number is not above 0, or `fast` is not above `slow`.

    Example:
        >>> YarnScaling(4.0, original_max_len=32).scale([1.0, 0.01], 10000.0)
        [1.0, 0.0025]
    """

    factor: float
    original_max_len: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        numbers = {"factor": self.factor, "original_max_len": self.original_max_len, "slow": self.slow}
        _check_above(self, **numbers, attention_factor=self.attention_factor)
        if not self.fast > self.slow:
            raise ValueError(f"YarnScaling: fast={self.fast} must be above slow={self.slow}.")

    @property
    def amplitude(self) -> float:
        """Returns the factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def scale(self, frequencies: Sequence[float], base: float) -> list[float]:
        """Returns the frequencies of the stretched waves."""
        num = len(frequencies)
        low, high = (self._find_dim(turns, 2 * num, base) for turns in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num - 1)
        high += 0.001 if low == high else 0
        out = []
        for i, f in enumerate(frequencies):
            stretched = min(max((i - low) / (high - low), 0.0), 1.0)
            out.append(stretched * f / self.factor + (1 - stretched) * f)
        return out

    def _find_dim(self, turns: float, dims: int, base: float) -> float:
        """Returns the dim of the wave with a number of turns in the original length."""
        return dims * math.log(self.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(base))


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions of a layer: the angles of a position's dims.

    Attributes:
        base: base of the angles. The longest wave is 2 pi base tokens.
        fraction: part of a head's dims that is rotated, for example 0.5 for the first half. The rest has no positions.
        scaling: stretch of the waves to longer sequences. None: no stretch.

    Raises:
        ValueError: the base is not above 0, or the fraction is not in (0, 1].

    Example:
        >>> Rope(fraction=0.5).num_dims(8)
        4
        >>> Rope(scaling=Llama3Scaling(8.0, original_max_len=8192)).find_table(torch.arange(3), 4)[0].shape
        torch.Size([3, 4])
    """

    base: float = 10000.0
    fraction: float = 1.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _check_above(self, base=self.base)
        if not 0 < self.fraction <= 1:
            raise ValueError(f"Rope: fraction={self.fraction} must be above 0, and at most 1.")

    def num_dims(self, head_dim: int) -> int:
        """Returns R, the number of rotated dims of a head."""
        return int(head_dim * self.fraction)

    def find_table(
        self,
        positions_T: Int64[Tensor, " t"],
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        batch_invariant: bool = False,
    ) -> tuple[Float[Tensor, "t r"], Float[Tensor, "t r"]]:
        """Returns the cos and sin of positions, for `rope`.

        Args:
            positions_T: global positions of the tokens.
            head_dim: K.
            dtype: dtype of the result.
            batch_invariant: whether the numbers are those of `batch_invariant_rope_table`.

        Raises:
            ValueError: the number of rotated dims is odd or 0.
        """
        dims = self.num_dims(head_dim)
        if dims < 2:
            raise ValueError(f"{self} must rotate at least 2 dims, got {dims} of {head_dim} dims. Raise fraction.")
        frequencies = None
        if self.scaling is not None:
            plain = [self.base ** -(i / dims) for i in range(0, dims, 2)]
            frequencies = self.scaling.scale(plain, self.base)
        find = batch_invariant_rope_table if batch_invariant else rope_table
        cos_TR, sin_TR = find(positions_T, dims, base=self.base, dtype=dtype, frequencies=frequencies)
        if self.scaling is None or self.scaling.amplitude == 1:
            return cos_TR, sin_TR
        return cos_TR * self.scaling.amplitude, sin_TR * self.scaling.amplitude
