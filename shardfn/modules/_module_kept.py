"""Warns where a module runs with the module's buffers, while the state of the step has other values.

A copy of a module in eval mode, made by `from_module(copy.deepcopy(module).eval())`, has the statistics from before
training. The statistics of training are in the model state.
"""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from shardfn.core import Ambient, PyTree, tree_entries, tree_leaves

from ._module_parts import GivenTensors, ModuleParts

_KEPT = Ambient[Mapping[Any, tuple[int, ...]]]("buffers of the model state", by_thread=True)


def beside_model_state(model_state: PyTree) -> AbstractContextManager[Any]:
    """Watches modules that run while the context is open, as `warn_of_own_buffers` describes.

    Args:
        model_state: model state of the step. A leaf of a dict may be the buffer of the same name.
    """
    pairs = zip(tree_entries(model_state), tree_leaves(model_state), strict=True)
    return _KEPT.bound({entries[-1]: tuple(x.shape) for entries, x in pairs if entries})


def warn_of_own_buffers(module: Any, parts: ModuleParts, given: GivenTensors) -> None:
    """Warns if a module runs with the module's values of buffers in the model state.

    Args:
        module: the module.
        parts: places of the module's tensors.
        given: tensors of the call, in place of the module's.
    """
    kept = _KEPT.innermost()
    if not kept:
        return
    own = {name: slot.owner._buffers[slot.name] for name, slot in parts.buffers.items() if name not in given.buffers}
    stale = [name for name, x in own.items() if x is not None and kept.get(name) == tuple(x.shape)]
    if stale:
        warnings.warn(
            f"this {type(module).__name__} runs with buffers of its own, {', '.join(stale)}, which are not those that"
            " training has left in the model state. Give it these: predict(params | model_state, batch), where"
            " evaluate(metrics=) passes both, metrics(params, model_state, batch).",
            stacklevel=4,
        )
