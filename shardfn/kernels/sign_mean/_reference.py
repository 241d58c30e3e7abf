"""The mean of signs plus the previous error, as signs and a scale: the definition."""

from torch import Tensor

from shardfn.kernels.sign_compress._reference import compress_into
from shardfn.kernels.signs import _reference as signs


def sign_mean(bits: Tensor, scale: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Maps uint8 [k, b], fp32 [k], fp32 [8 b] to uint8 [b], fp32 [1]. Overwrites the error."""
    k, b = bits.shape
    values = error.new_empty(k, 8 * b)
    signs.unpack_signs(bits, scale, values)
    total = values[0].clone()
    for i in range(1, k):
        total += values[i]
    packed, root = compress_into((total / k + error)[None], error[None], True)
    return packed[0], root
