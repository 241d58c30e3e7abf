"""`torch.nn.Module`s as pure functions of their parameters."""

from ._from_module import from_module as from_module
from ._from_module import computing_in as computing_in
from ._checks import beside_model_state as beside_model_state
from ._partial_forward import LayerSpan as LayerSpan
from ._layers import LayeredFunction as LayeredFunction
from ._decoding import DecodingFunction as DecodingFunction, AttentionScores as AttentionScores, decoding as decoding
from ._decoding import ImageReading as ImageReading, find_reading as find_reading, split_parts as split_parts
from ._batch_invariant import RowEdge as RowEdge, ExactRows as ExactRows, Linear as Linear
from ._batch_invariant import PackedWeight as PackedWeight, WeightUses as WeightUses
from ._batch_invariant import InputUses as InputUses, SameInput as SameInput
