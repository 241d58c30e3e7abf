"""Layout of a decoder: functions of a single rank's blocks, and the specs that cut the blocks, such as "tp"."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from shardfn.core import Axes, P, PyTree


class Outputs(NamedTuple):
    """Results of a decoder for T tokens, with R rows wanted.

    Attributes:
        logits: [R, V].
        hidden: [R, D], the states that the head multiplies. None from a decoder without `embeds`.
        experts: [T, m, k], the experts of each token in the m layers with experts. None from a decoder without
            `expert_shape`.
        state_after: function from a number of layers to the states of the rows after so many layers, [R, D], for
            `Decoder.hidden_layers`. After all layers the states are `hidden`.
    """

    logits: Tensor
    hidden: Tensor | None = None
    experts: Tensor | None = None
    state_after: Callable[[int], Tensor | None] = lambda layers: None


class Layout(NamedTuple):
    """Way in which a decoder is cut over the mesh. All layouts of a decoder read and write one KV cache.

    Attributes:
        outputs: function `outputs(weights, tokens, positions, rows, bodies, adapters)` of this rank's blocks of
            `weights`, with a body of attention for each layer, with results equal on all ranks.
        specs: compute specs of the parameters.
        pack: function from this rank's blocks of the parameters to the weights that `outputs` takes.
        packed: specs of the result of `pack`, a prefix tree.
        tokens: mesh axis that cuts the tokens of a step, or None where each rank computes all tokens.
    """

    outputs: Callable[..., Outputs]
    specs: PyTree
    pack: Callable[[PyTree], PyTree]
    packed: PyTree = P()
    tokens: Axes = None
