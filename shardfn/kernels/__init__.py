"""Fast operations on a single device, on plain tensors.

Each op has a folder, where `_reference.py` defines the result.
"""

from ._arguments import EXACT as EXACT
from ._build import NoCompilerError as NoCompilerError, build as build, building as building
from ._build import cxx_compiler as cxx_compiler, generation as generation
from ._build_all import Built as Built, build_all as build_all
from ._build import load_library as load_library
from ._dispatch import implemented_by as implemented_by, is_native as is_native
from ._num_threads import threads_for_kernels as threads_for_kernels
from ._sources import num_processors as num_processors
from ._chain import KernelCall as KernelCall, KernelChain as KernelChain, are_built as are_built, call_of as call_of
from ._library import scratch_bytes as scratch_bytes, without_dispatch as without_dispatch
from .signs import pack_signs as pack_signs, unpack_signs as unpack_signs
from .sign_compress import sign_compress as sign_compress, sign_compress_ as sign_compress_
from .sign_mean import sign_mean as sign_mean, sign_mean_ as sign_mean_
from .quantize import dequantize as dequantize, quantize as quantize
from .dequantize_sum import dequantize_sum as dequantize_sum, dequantize_sum_quantize as dequantize_sum_quantize
from .moving_average import moving_average_ as moving_average_
from .block_sparse_attention import Dropped as Dropped, Given as Given, Tiles as Tiles
from .block_sparse_attention import block_sparse_attention as block_sparse_attention
from .block_sparse_attention import block_sparse_attention_backward as block_sparse_attention_backward
from .preconditioned_step import preconditioned_step as preconditioned_step
from .preconditioned_step import preconditioned_step_ as preconditioned_step_
from .draw import draw as draw, draw_uniforms as draw_uniforms, top_logprobs as top_logprobs
from .penalise import penalise as penalise
from .row_linear import joined as joined, pack_rows as pack_rows
from .row_linear import row_linear as row_linear, row_linears as row_linears
from .row_linear import BLOCK_BYTES as BLOCK_BYTES, GROUP as GROUP, Quantization as Quantization
from .row_linear import block_bytes as block_bytes, dequantize_blocks as dequantize_blocks
from .row_linear import quantize_blocks as quantize_blocks, fit_blocks as fit_blocks, pack_blocks as pack_blocks
from .row_linear import packed_rows as packed_rows, packed_shape as packed_shape, unpack_rows as unpack_rows
from .pointwise import gated_silu as gated_silu, gated_silu_gradient as gated_silu_gradient
from .pointwise import gelu as gelu, rotate as rotate
from .row_norm import row_norm as row_norm
from .ragged_attention import (
    cache_row as cache_row,
    quantize_cache_rows as quantize_cache_rows,
    dequantize_cache_rows as dequantize_cache_rows,
)
from .ragged_attention import ragged_attention as ragged_attention
from .gather_rows import gather_rows as gather_rows, row_dots as row_dots
from .grouped_product import grouped_outer as grouped_outer, grouped_product as grouped_product
from ._row_ops import combined_to_rows as combined_to_rows
