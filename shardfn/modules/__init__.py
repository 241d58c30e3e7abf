"""`torch.nn.Module`s as pure functions of their parameters."""

from ._from_module import from_module as from_module
from ._module_dtypes import computing_in as computing_in
