"""Covers Triton's kernels as compiled for a GPU: they compile without one; all but attention's without fused operations
and with rounded divisions."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shardfn.kernels import _block_sparse_attention_triton as sparse
from shardfn.kernels import _draw_triton as draw
from shardfn.kernels import _gather_rows_triton as gather
from shardfn.kernels import _grouped_product_triton as grouped
from shardfn.kernels import _quantize_triton as sums
from shardfn.kernels import _preconditioned_step_triton as average
from shardfn.kernels import _pointwise_triton as pointwise
from shardfn.kernels import _penalise_triton as penalise
from shardfn.kernels import _preconditioned_step_triton as step
from shardfn.kernels import _quantize_triton as quantize
from shardfn.kernels import _ragged_attention_triton as ragged
from shardfn.kernels import _integer_linear_triton as whole
from shardfn.kernels import _row_linear_triton as rows
from shardfn.kernels import _row_norm_triton as norm
from shardfn.kernels import _signs_triton as compress
from shardfn.kernels import _signs_triton as mean
from shardfn.kernels import _signs_triton as signs

LANES = dict(LANES=1024, SPAN=1 << 18, TILE=256)
CASES = [
    (signs._pack_kernel, "*bf16 *u8 i64", dict(BYTES=128)),
    (signs._unpack_kernel, "*u8 *fp32 *fp32 i32 i32", dict(WIDTH=1024)),
    (compress._add_kernel, "*fp16 *fp32 *fp64 i32 i32 i32", LANES),
    (compress._subtract_kernel, "*fp32 *fp32 *u8 i32 i32", dict(BYTES=128)),
    (step._step_kernel, "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 fp32 fp32 i64",
     dict(DECAYS=True, ADDS=True, WIDTH=1024)),
    (average._average_kernel, "*fp32 *fp32 fp32 fp32 i32", dict(WIDTH=1024)),
    (mean._add_mean, "*u8 *fp32 *fp32 *fp64 i32 i32", LANES),
    (draw._weights_kernel, "*fp32 *fp64 *fp64 *fp64 *fp64 i32 i32 i32", dict(TERMS=13, WIDTH=1024)),
    (draw._block_sums_kernel, "*fp64 *fp64 i32", dict(WIDTH=1024)),
    (draw._running_sums_kernel, "*fp64 *fp64 i32", {}),
    (draw._nucleus_kernel, "*fp64 *i64 *fp64 *i64 i32", {}),
    (draw._find_in_block_kernel, "*fp64 *fp64 *fp64 *i64 *i64 i32", dict(BLOCK=64)),
    (draw._uniforms_kernel, "*i64 *i64 *fp64 i32", dict(WIDTH=1024)),
    (penalise._penalise_kernel, "*fp32 *i32 *i32 *fp64 *fp64 *fp64 *i32 *fp32 i32 i32 i32", dict(WIDTH=1024)),
]
for bits, code in ((8, "*i8"), (4, "*u8")):
    block, tile = dict(BITS=bits, WIDTH=256), dict(BITS=bits, WIDTH=1024)
    CASES += [
        (quantize._quantize_kernel, f"*bf16 {code} *fp32 i32 i32 i32", block),
        (quantize._dequantize_kernel, f"{code} *fp32 *bf16 i32 i32 i32 i32", tile),
        (sums._dequantize_sum, f"{code} *fp32 *fp32 i32 i32 i32 i32 i32 i32", tile),
        (sums._sum_quantize, f"{code} *fp32 {code} *fp32 i32 i32 i32 i32 i32", block),
    ]
for x, double in (("bf16", False), ("fp64", True)):
    wide = "fp64" if double else "fp32"
    row = f"*{x} *i64 *{wide} *{x} i32 i32 i32 i32"
    CASES += [(gather._gather_kernel, row, dict(WEIGHTED=True, DOUBLE=double, WIDTH=1024))]
EXACT = len(CASES)
# The chains of a linear layer, exponentials and norms are fused on purpose.
for x in ("fp32", "bf16"):
    CASES += [(rows._chain_kernel, f"*fp32 *{x} *fp32 i32 i32 i32 i32 i32 i32", dict(ROWS=16, N=64))]
for record, bits, half in ((2176, 8, 2), (1280, 4, 2), (1536, 4, 4)):
    code, number = dict(ROWS=16, N=64, BITS=bits, HALF=half, GROUP=32, RECORD=record), f"*fp{8 * half}"
    CASES += [(rows._coded_chain, f"*fp32 *u8 {number} *fp32 i32 i32 i32 i32 i32 i32", code)]
    CASES += [(whole._whole_chain, f"*i8 *fp32 *fp32 *u8 {number} *fp32 i32 i32 i32 i32 i32 i32", code)]
CASES += [
    (
        ragged._row_kernel,
        f"*fp32 *{x} *fp32 *i64 *i32 *fp32 *fp32 *fp32 *fp32 *fp32 fp32 fp32 i32 i32 i32 i32 i32",
        dict(K=k, ROW=k, WIDTH=w, N=32, CODES=0, PARTS=parts),
    )
    for x, k, w, parts in (("fp32", 64, 64, 2), ("bf16", 64, 64, 2), ("fp32", 576, 1024, 1))
]
CASES += [
    (pointwise._gated_silu, "*fp32 *fp32 *fp32 i64", dict(WIDTH=1024)),
    (pointwise._gated_sigmoid, "*fp32 *fp32 *fp32 i64", dict(WIDTH=1024)),
    (pointwise._gelu_kernel, "*fp32 *fp32 i64", dict(WIDTH=1024)),
    (pointwise._rotate_kernel, "*fp32 *fp32 *fp32 *fp32 i64 i64 i64", dict(WIDTH=1024)),
]
for case in (dict(CENTERED=True, BIASED=True), dict(CENTERED=False, BIASED=False)):
    CASES += [(norm._norm_kernel, "*fp32 *fp32 *fp32 *fp32 i32 fp32", dict(case, LANES=64))]
for x, chain in (("bf16", False), ("fp32", False), ("fp32", True), ("fp64", True)):
    tile = dict(CHAIN=chain, WIDENED=False, N=64, K=32)
    CASES += [
        (grouped._product_kernel, f"*{x} *{x} *i64 *{x} i32 i32 i32 i32 i32 i32 i32 i32 i32", dict(tile, ROWS=32)),
        (grouped._outer_kernel, f"*{x} *{x} *i64 *{x} i32 i32 i32 i32", dict(tile, M=64)),
    ]
CASES += [(gather._dots_kernel, "*bf16 *bf16 *i64 *fp32 i32 i32 i32", dict(DOUBLE=False, WIDTH=1024))]
for x in ("bf16", "fp32"):
    told = f"*{x} *{x} *{x} *i32 *i32 *i32 *u8 *i64 *i64 *fp32 i64 i64 i64 i64 *fp32 i32 *i64 i32 fp32"
    told += " i32 i32 i32 i32 i32 i32 i32 i32 fp32"
    sides = dict(K=64, BLOCK=64, WIDTH=64, ROWS=64, PARTS=1, WIDENED=False)
    CASES += [
        (sparse._forward_kernel, f"{told} *{x} *fp32", sides),
        (sparse._backward_queries, f"{told} *{x} *fp32 *fp32 *{x}", sides),
        (sparse._backward_keys, f"{told} *{x} *fp32 *fp32 *i32 *i32 *i32 *{x} *{x}", sides),
    ]
for number, (kernel, types, constants) in enumerate(CASES):
    for ones in (False, True):  # sizes that are 1 become constants
        names, kinds = kernel.arg_names, types.split()
        known = dict(constants, **{n: 1 for n, kind in zip(names, kinds) if ones and kind[0] == "i"})
        signature = dict(zip(names, kinds), **dict.fromkeys(known, "constexpr"))
        source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in known.items()})
        asm = triton.compile(source, GPUTarget("cuda", 90, 32), {"enable_fp_fusion": False}).asm["ptx"]
        assert number >= EXACT or not re.search(r"fma\\.rn\\.f32|div\\.(full|approx)", asm), kernel.__name__
print("compiled", len(CASES))
"""


@pytest.mark.nightly
def test_every_kernel_compiles_for_a_gpu() -> None:
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["compiled", "56"], run.stderr
