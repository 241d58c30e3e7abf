"""`torch.nn.Module`s as pure functions of their parameters."""

from ._from_module import from_module as from_module
from ._module_dtypes import computing_in as computing_in
from ._layers_run import LayerSpan as LayerSpan
from ._module_layers import LayeredFunction as LayeredFunction
