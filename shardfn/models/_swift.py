"""Rule of the layers that share keys and values from one state (SwiftKV, AcrossKV)."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Swift:
    """Layers from `first` on take keys and values from the state before layer `first`, and groups share them.

    So a prompt passes only its last token through these layers, and the KV cache has one layer for each group.

    Attributes:
        first: l, the layers that are computed for all tokens, from 1 to all L. With L the model is as without.
        group: g, the consecutive layers that share keys and values. It divides L - l.

    Example:
        >>> swift = Swift(first=2, group=2)
        >>> [swift.cache_layer(i) for i in range(6)]
        [0, 1, 2, 2, 3, 3]

    References:
        Qiao et al., SwiftKV: Fast Prefill-Optimized Inference with Knowledge-Preserving Model Transformation, 2024,
        https://arxiv.org/abs/2410.03960
    """

    first: int
    group: int = 1

    def is_leader(self, layer: int) -> bool:
        """Returns whether a layer is the first of a group, which has the weights of keys and values."""
        return layer >= self.first and (layer - self.first) % self.group == 0

    def cache_layer(self, layer: int) -> int:
        """Returns the layer of the KV cache that a layer reads."""
        return layer if layer < self.first else self.first + (layer - self.first) // self.group

    def list_problems(self, num_layers: int) -> list[str]:
        """Returns what is wrong for a number of layers."""
        if type(self.first) is not int or not 1 <= self.first <= num_layers:
            return [f"swift: first must be from 1 to num_layers={num_layers}, got {self.first!r}."]
        if type(self.group) is not int or self.group < 1 or (num_layers - self.first) % self.group:
            return [
                f"swift: group must divide the {num_layers - self.first} layers from first={self.first} on, got"
                f" {self.group!r}. For example group=1."
            ]
        return []
