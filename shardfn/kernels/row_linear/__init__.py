"""Batch-invariant linear layers: a row's bits do not depend on the number of rows."""

from ._api import pack_rows as pack_rows, row_linear as row_linear, row_linears as row_linears
from ._blocks import block_bytes as block_bytes, dequantize_blocks as dequantize_blocks
from ._codes import BLOCK_BYTES as BLOCK_BYTES, GROUP as GROUP, PANEL as PANEL, Quantization as Quantization
from ._codes import quantize_blocks as quantize_blocks, pack_blocks as pack_blocks
from ._codes import packed_rows as packed_rows, packed_shape as packed_shape, unpack_rows as unpack_rows
from ._fit import fit_blocks as fit_blocks
from ._reference import joined as joined
