"""Fast operations on a single device, on plain tensors.

A kernel is a record, `KernelOp`, in the kernel's file, with the definition of the result. Triton is in a second file.
"""

from ._build import Built as Built, NoCompilerError as NoCompilerError, build as build, build_all as build_all
from ._build import building as building, cxx_compiler as cxx_compiler, generation as generation
from ._build import load_library as load_library
from ._op import EXACT as EXACT, KERNELS as KERNELS, DimLabels as DimLabels, KernelOp as KernelOp
from ._op import implemented_by as implemented_by, is_native as is_native
from ._op import kernel_of as kernel_of, scratch_bytes as scratch_bytes, without_dispatch as without_dispatch
from ._arguments import threads_for_kernels as threads_for_kernels
from ._sources import num_processors as num_processors
from ._chain import KernelCall as KernelCall, KernelChain as KernelChain, are_built as are_built, call_of as call_of
from ._chain import TensorLayouts as TensorLayouts
from ._signs import pack_signs as pack_signs, unpack_signs as unpack_signs
from ._signs import sign_compress as sign_compress, sign_compress_ as sign_compress_
from ._signs import sign_mean as sign_mean, sign_mean_ as sign_mean_
from ._quantize import dequantize as dequantize, quantize as quantize
from ._quantize import dequantize_sum as dequantize_sum, dequantize_sum_quantize as dequantize_sum_quantize
from ._preconditioned_step import moving_average_ as moving_average_
from ._preconditioned_step import preconditioned_step as preconditioned_step
from ._preconditioned_step import preconditioned_step_ as preconditioned_step_
from ._block_sparse_attention import Dropped as Dropped, Given as Given, Tiles as Tiles
from ._block_sparse_attention import block_sparse_attention as block_sparse_attention
from ._block_sparse_attention import block_sparse_attention_backward as block_sparse_attention_backward
from ._draw import draw as draw, draw_uniforms as draw_uniforms, top_logprobs as top_logprobs
from ._penalise import penalise as penalise
from ._row_linear import sum_chunks as sum_chunks, pack_rows as pack_rows
from ._row_linear import row_linear as row_linear, row_linears as row_linears
from ._integer_linear import Activations as Activations, integer_linears as integer_linears, linears as linears
from ._row_codes import BLOCK_BYTES as BLOCK_BYTES, Codes as Codes, GROUP as GROUP, Quantization as Quantization
from ._row_codes import block_bytes as block_bytes, dequantize_blocks as dequantize_blocks
from ._row_codes import quantize_blocks as quantize_blocks, pack_blocks as pack_blocks, slice_panels as slice_panels
from ._row_codes import take_rows as take_rows, packed_shape as packed_shape, unpack_rows as unpack_rows
from ._fit_blocks import fit_blocks as fit_blocks
from ._pointwise import gated_sigmoid as gated_sigmoid, gated_silu as gated_silu
from ._pointwise import gated_silu_gradient as gated_silu_gradient
from ._pointwise import gelu as gelu, rotate as rotate
from ._row_norm import row_norm as row_norm
from ._ragged_attention import cache_row as cache_row, encode_rows as encode_rows, decode_rows as decode_rows
from ._ragged_attention import pack_bits as pack_bits, ragged_attention as ragged_attention
from ._ragged_attention import write_cache as write_cache
from ._gather_rows import gather_rows as gather_rows, row_dots as row_dots
from ._grouped_product import grouped_outer as grouped_outer, grouped_product as grouped_product
from ._row_ops import combined_to_rows as combined_to_rows
from ._harness_process import CandidateError as CandidateError, ProcessLimits as ProcessLimits
from ._harness import CheckReport as CheckReport, Verdict as Verdict, check as check
from ._harness import check_file as check_file, list_checks as list_checks, swap as swap
from ._harness_measure import MeasureReport as MeasureReport, measure as measure
from ._harness_measure import measure_file as measure_file
from ._harness_modules import ArchitectureCoverage as ArchitectureCoverage, ModuleOp as ModuleOp
from ._harness_modules import MODULE_OPS as MODULE_OPS, find_architectures as find_architectures, find_op as find_op
from ._harness_modules import make_arguments as make_arguments
