"""`torch.nn.Module`s as pure functions of their parameters."""

from ._from_module import from_module as from_module
from ._module_dtypes import computing_in as computing_in
from ._module_kept import beside_model_state as beside_model_state
from ._layers_run import LayerSpan as LayerSpan
from ._module_layers import LayeredFunction as LayeredFunction
from ._module_decoding import DecodingFunction as DecodingFunction, Scores as Scores, decoding as decoding
from ._module_rows import RowEdge as RowEdge, ExactRows as ExactRows, Linear as Linear
from ._module_rows import PackedWeight as PackedWeight, WeightUses as WeightUses
from ._same_input import InputUses as InputUses, SameInput as SameInput
