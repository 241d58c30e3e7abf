"""Windows of layers in models of transformers with windows only in masks, such as Phi-3.5-MoE and Qwen2-MoE."""

from typing import Any

from shardfn.core import Ambient


class Windows:
    """Windows of the masks that a call of a model has made. None is a mask without a window.

    Example:
        >>> windows = Windows()
        >>> windows.made.add(5)
        >>> windows.of(object(), None)
        5
    """

    def __init__(self) -> None:
        self.made: set[int | None] = set()

    def of(self, module: Any, given: int | None) -> int | None:
        """Returns the window of a layer: the given window, or the window of the mask.

        Args:
            module: the attention of the layer.
            given: window in the arguments, or None.

        Raises:
            ValueError: masks have several windows.
        """
        kind = kind_of(module)
        if given is not None or kind == "chunked_attention" or (None in self.made and kind != "sliding_attention"):
            return given
        found = sorted(w for w in self.made if w is not None)
        if len(found) > 1:
            raise ValueError(
                f"{type(module).__name__} has no window of its own, and masks of the model have windows of {found}; one"
                " window is supported there."
            )
        return found[0] if found else None


def kind_of(module: Any) -> str | None:
    """Returns the kind of a layer, as its model's config names it."""
    kinds, at = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[at] if kinds and at is not None else None


WINDOWS = Ambient[Windows]("windows of a module's call", by_thread=True)
