"""Recurrent layers as pure functions, and the structured linear maps inside of smaller recurrent layers."""

from ._cells import KINDS as KINDS, Kind as Kind
from ._cells import CellWeights as CellWeights, LSTMState as LSTMState
from ._cells import gru as gru, highway as highway, lstm as lstm
from ._structure import Structure as Structure, block_diagonal as block_diagonal, dense as dense
from ._structure import grouped_low_rank as grouped_low_rank, low_rank as low_rank, shuffled as shuffled
from ._structure import apply_map as apply_map, count_flops as count_flops, dense_matrix as dense_matrix
from ._structure import map_shapes as map_shapes, map_specs as map_specs
