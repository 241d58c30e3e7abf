"""Layers as mathematics: pure functions of explicit parameters, for a single device or cut along a mesh axis."""

from ._attention import alibi_slopes as alibi_slopes, attention as attention
from ._masks import Mask as Mask, Full as Full, Causal as Causal, Window as Window, Prefix as Prefix
from ._masks import Segments as Segments, segments as segments, Both as Both
from ._jacobi_blocks import JacobiBlocks as JacobiBlocks
from ._block_layout import BlockLayout as BlockLayout
from ._data_masks import Added as Added, Keys as Keys, Relative as Relative, relative_buckets as relative_buckets
from ._dropout import PairDropout as PairDropout
from ._attention_backends import BlockSparse as BlockSparse
from ._chunked import Chunked as Chunked
from ._attention_backends import Local as Local
from ._online import OnlineScores as OnlineScores
from . import layouts as layouts
from ._attention_backends import (
    Dense as Dense,
    Blockwise as Blockwise,
    Ulysses as Ulysses,
    Ring as Ring,
    AttentionBackend as AttentionBackend,
)
from ._attention_backends import Attending as Attending, whole_sequence as whole_sequence
from ._ring_rounds import part_of as part_of
from ._attention_backends import whole_length as whole_length
from ._attention_backends import (
    rank_positions as rank_positions,
    shard_rows as shard_rows,
    sequence_order as sequence_order,
)
from ._multimodal import Modality as Modality, MultimodalCausal as MultimodalCausal
from ._multimodal import multimodal_attention as multimodal_attention
from ._cross_entropy import cross_entropy as cross_entropy, cross_entropy_sum as cross_entropy_sum
from ._cross_entropy import next_tokens as next_tokens
from ._cross_entropy import tiled_cross_entropy as tiled_cross_entropy
from ._deferred import DeferredGradients as DeferredGradients, splitting as splitting
from ._dropout import dropout as dropout, dropout_of_rows as dropout_of_rows
from ._batch_invariant import BatchInvariantWeight as BatchInvariantWeight, Then as Then
from ._batch_invariant_attention import BatchInvariant as BatchInvariant
from ._batch_invariant_functions import (
    batch_invariant_gated_silu as batch_invariant_gated_silu,
    batch_invariant_gelu as batch_invariant_gelu,
    softcap as softcap,
)
from ._batch_invariant_functions import batch_invariant_sum as batch_invariant_sum
from ._batch_invariant_functions import partials_of_gated_silu as partials_of_gated_silu
from ._batch_invariant_functions import (
    batch_invariant_layer_norm as batch_invariant_layer_norm,
    batch_invariant_rms_norm as batch_invariant_rms_norm,
)
from ._batch_invariant_functions import (
    batch_invariant_sigmoid as batch_invariant_sigmoid,
    batch_invariant_softmax as batch_invariant_softmax,
)
from ._batch_invariant_functions import batch_invariant_rope_table as batch_invariant_rope_table
from ._layers import embedding as embedding, linear as linear
from ._tiled_linear import init_tiles as init_tiles, tile_shapes as tile_shapes
from ._tiled_linear import tiled_linear as tiled_linear, tiles as tiles, untile as untile
from ._mlp import fused_swiglu as fused_swiglu, gated_gelu as gated_gelu, mlp as mlp, swiglu as swiglu
from ._layers import layer_norm as layer_norm, rms_norm as rms_norm
from ._parallel import column_linear as column_linear, row_linear as row_linear
from ._parallel import enter_parallel as enter_parallel, leave_parallel as leave_parallel
from ._parallel import (
    all_ranges as all_ranges,
    between as between,
    rank_range as rank_range,
    rank_tokens as rank_tokens,
)
from ._self_attention import AttentionWeights as AttentionWeights, HeadNorms as HeadNorms, Heads as Heads
from ._self_attention import KeyValues as KeyValues, project_keys as project_keys
from ._self_attention import fused_self_attention as fused_self_attention, self_attention as self_attention
from ._products import Product as Product, product_of as product_of
from ._rounded_products import is_rounding as is_rounding, round_operand as round_operand
from ._rounded_products import rounding_products as rounding_products
from ._products import Trilinear as Trilinear, derivative as derivative
from ._rope import LinearScaling as LinearScaling, Llama3Scaling as Llama3Scaling, YarnScaling as YarnScaling
from ._rope import Rope as Rope, RopeScaling as RopeScaling, rope as rope, rope_table as rope_table
from ._as_ops import as_ops as as_ops, is_differentiated as is_differentiated
from ._as_ops import run_op as run_op, runs_as_ops as runs_as_ops
from ._scan import (
    Run as Run,
    ScanBody as ScanBody,
    looping as looping,
    plain_loop as plain_loop,
    run_layers as run_layers,
    scan as scan,
)
from . import moe as moe
