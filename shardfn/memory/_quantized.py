"""`QuantizedBlocks`: a block of a frozen leaf in codes, in the memory of the device or of the host."""

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from shardfn import core
from shardfn.kernels import block_bytes, dequantize_blocks, quantize_blocks


class QuantizedBlocks:
    """A block whose rows, along its last dim, are kept as blocks of codes: `Stored`. Immutable.

    Rows do not share groups. So a leaf that is cut between rows has the same codes as the whole leaf, for example 8
    rows on 2 ranks.

    Args:
        blocks: the codes, as from `kernels.quantize_blocks`.
        shape: shape of the decoded block.
        dtype: dtype of the decoded block.
        quantization: the kind of the codes.
        kind: the memory of `blocks`.

    Example:
        >>> held = QuantizedBlocks.of(torch.ones(3, 64), "int4")
        >>> held.nbytes, held.load().shape
        (120, torch.Size([3, 64]))
    """

    def __init__(
        self,
        blocks: UInt8[Tensor, "*rows bytes"],
        shape: torch.Size,
        dtype: torch.dtype,
        quantization: core.Quantization,
        kind: core.MemoryKind = "device",
    ) -> None:
        self.blocks, self.shape, self.dtype = blocks, torch.Size(shape), dtype
        self.quantization: core.Quantization = quantization
        self.kind: core.MemoryKind = kind

    @staticmethod
    def of(x: Shaped[Tensor, "..."], quantization: core.Quantization) -> "QuantizedBlocks":
        """Rounds a tensor of at least one dim."""
        rows = torch.nn.functional.pad(x.reshape(-1, x.shape[-1]), (0, -x.shape[-1] % 32))
        blocks = quantize_blocks(rows, quantization).view(*x.shape[:-1], block_bytes(x.shape[-1], quantization))
        return QuantizedBlocks(blocks, x.shape, x.dtype, quantization)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the codes."""
        return self.blocks.nbytes

    def with_blocks(self, blocks: UInt8[Tensor, "*rows bytes"], kind: core.MemoryKind) -> "QuantizedBlocks":
        """Returns the same block with these codes, in another memory."""
        return QuantizedBlocks(blocks, self.shape, self.dtype, self.quantization, kind)

    def layers(self) -> list["QuantizedBlocks"]:
        """Returns the parts along dim 0, with views of the codes."""
        return [
            QuantizedBlocks(x, self.shape[1:], self.dtype, self.quantization, self.kind) for x in self.blocks.unbind(0)
        ]

    def flat(self) -> "QuantizedBlocks":
        """Raises, because rows are quantized separately."""
        raise NotImplementedError

    def load(self) -> Shaped[Tensor, "..."]:
        """Returns the whole block."""
        return dequantize_blocks(self.blocks, self.shape[-1], self.dtype)

    def read(self, lo: int = 0, hi: int | None = None, out: Tensor | None = None) -> core.Pending[Tensor]:
        """Returns rows `lo:hi` of dim 0, decoded."""
        if self.blocks.ndim == 1:
            value = self.load()[lo:hi]
        else:
            value = dequantize_blocks(self.blocks[lo:hi], self.shape[-1], self.dtype)
        return core.Pending.of(value if out is None else out.copy_(value))
