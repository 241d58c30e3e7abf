"""Linear layers of one input, such as the projections to queries, keys and values, computed in one call.

A module calls such layers one after another. The first call computes all layers. Later calls find the results.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfn.kernels import row_linears

from ._module_rows import PackedWeight, RowEdge, linear_operands


class SameInput:
    """Layers that a module calls with one input.

    Args:
        layers: layers by name, in any order. A rank must have all inputs: no layer is `RowEdge.LEAVE`.

    Example:
        >>> import torch
        >>> from shardfn.kernels import pack_rows
        >>> x, panels = torch.ones(2, 5), pack_rows(torch.ones(3, 5))
        >>> both = SameInput({"k": PackedWeight(panels, 3), "v": PackedWeight(panels, 3)})
        >>> torch.equal(both("k", x, None), both("v", x, None))
        True
    """

    def __init__(self, layers: Mapping[str, PackedWeight]) -> None:
        self._layers = layers
        self._input: Tensor | None = None
        self._results: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the affine map of one of the layers."""
        if x is not self._input or name not in self._results:
            layers = list(self._layers.values())
            assert all(layer.edge is not RowEdge.LEAVE for layer in layers)
            ys = row_linears(x.float(), [layer.panels for layer in layers], [layer.own_num for layer in layers])
            self._input, self._results = x, dict(zip(self._layers, ys, strict=True))
        y = self._results.pop(name)
        if not self._results:
            self._input = None
        own = self._layers[name].own_bias(bias)
        return self._layers[name].joined((y if own is None else y + own).to(x.dtype))


class InputUses(TorchFunctionMode):
    """Records the weights of linear layers that multiply the same input.

    Args:
        params: parameters by name, as in the module.

    Attributes:
        groups: names of weights that are called one after another with one tensor.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in params.items()}
        self._input: Tensor | None = None
        self.groups: list[list[str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function."""
        del types
        kwargs = kwargs or {}
        found = linear_operands(func, args, kwargs)
        name = None if found is None else self._names.get(id(found[1]))
        if found is not None and name is not None:
            if found[0] is not self._input:
                self.groups.append([])
            self._input = found[0]
            self.groups[-1].append(name)
        return func(*args, **kwargs)
