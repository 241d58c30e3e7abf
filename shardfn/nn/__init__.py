"""Layers as mathematics: pure functions of explicit parameters, written for one device."""

from ._attention import attention as attention
from ._cross_entropy import cross_entropy as cross_entropy, cross_entropy_sum as cross_entropy_sum
from ._dropout import dropout as dropout
from ._linear import embedding as embedding, linear as linear
from ._tiled_linear import init_tiles as init_tiles, tile_shapes as tile_shapes
from ._tiled_linear import tiled_linear as tiled_linear, tiles as tiles, untile as untile
from ._mlp import mlp as mlp, swiglu as swiglu
from ._norm import layer_norm as layer_norm, rms_norm as rms_norm
from ._rope import rope as rope, rope_table as rope_table
from ._scan import Run as Run, looping as looping, plain_loop as plain_loop, scan as scan
