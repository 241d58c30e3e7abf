"""Inputs of a speculator's program: the last states of B sequences, and how each sequence draws.

N chains of drafts, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from shardfn import kernels
from shardfn.inference import Context


class DraftSteps(NamedTuple):
    """Program of a kind of speculator, draft by draft, for N chains. At the start there is one chain a sequence.

    Attributes:
        state: state at the start.
        advance: function `advance(i, state, tokens_N)` -> state, and logits [N, V] of draft i of each chain. The tokens
            are the last of each chain.
        select: function `select(state, index_M)` -> state of M chains, copies of the chains with these numbers.
        find_tokens: function from numbers of logits to tokens, for a head with fewer tokens than the vocabulary.
    """

    state: Any
    advance: Callable[[int, Any, Tensor], tuple[Any, Tensor]]
    select: Callable[[Any, Tensor], Any]
    find_tokens: Callable[[Tensor], Tensor] = lambda numbers: numbers


class DraftInputs(NamedTuple):
    """Inputs for B sequences and W states. The last four are arguments of `kernels.draw`.

    Attributes:
        hidden_BWN: hidden states of the model behind the last draws, oldest first, then zeros.
        tokens_BW: token drawn from each state, then zeros.
        counts_B: number of states of each sequence, at least 1.
        keys: key of the draws.
        places: place of the first draft.
        temperature: see `Sampling`.
        top_k: see `Sampling`.
        top_p: see `Sampling`.
        min_p: see `Sampling`.
    """

    hidden_BWN: Float32[Tensor, "b w n"]
    tokens_BW: Int64[Tensor, "b w"]
    counts_B: Int64[Tensor, " b"]
    keys: Int64[Tensor, " b"]
    places: Int64[Tensor, " b"]
    temperature: Float64[Tensor, " b"]
    top_k: Int64[Tensor, " b"]
    top_p: Float64[Tensor, " b"]
    min_p: Float64[Tensor, " b"]

    @property
    def last_B(self) -> Int64[Tensor, " b"]:
        """Returns the last drawn token of each sequence."""
        return self.tokens_BW.take_along_dim(self.counts_B[:, None] - 1, 1)[:, 0]

    def list_places(self, num: int) -> list[Int64[Tensor, " b"]]:
        """Returns the places of `num` drafts. They are made before the drafts, which are then a chain of kernels."""
        return [self.places + i for i in range(num)]

    def draw(self, places_B: Int64[Tensor, " b"], logits_NV: Tensor) -> tuple[Tensor, Float[Tensor, " n"]]:
        """Returns a draft of each chain, drawn as the engine draws that place, and the log probabilities.

        N is a multiple of B. The chains of a sequence follow one another.
        """
        chains = len(logits_NV) // len(self.keys)
        given = kernels.draw_uniforms(self.keys, places_B), *self[5:]
        uniforms_N, *how = (x.repeat_interleave(chains) for x in given) if chains > 1 else given
        return kernels.draw(logits_NV, uniforms_N, **dict(zip(self._fields[5:], how, strict=True)))


def make_inputs(contexts: Sequence[Context], size: int, window: int, device: torch.device) -> DraftInputs:
    """Returns the inputs of sequences with hidden states, and of padding up to `size` sequences."""
    hows, padding = [context.sampling for context in contexts], size - len(contexts)
    states = [torch.stack(context.states[-window:]) for context in contexts]
    tokens = [context.tokens[-len(x) :].tolist() for context, x in zip(contexts, states, strict=True)]
    integers = {
        "counts_B": ([len(x) for x in states], 1),
        "keys": ([context.key - (context.key >> 63 << 64) for context in contexts], 0),
        "places": ([len(context.tokens) for context in contexts], 0),
        "top_k": ([how.top_k for how in hows], 0),
    }
    floats = {
        "temperature": ([how.temperature for how in hows], 0.0),
        "top_p": ([how.top_p for how in hows], 1.0),
        "min_p": ([how.min_p for how in hows], 0.0),
    }
    columns = {
        name: torch.tensor([*values, *[fill] * padding], dtype=dtype, device=device)
        for dtype, each in ((torch.int64, integers), (torch.float64, floats))
        for name, (values, fill) in each.items()
    }
    hidden = torch.stack([F.pad(x, (0, 0, 0, window - len(x))) for x in states])
    drawn = [[*x, *[0] * (window - len(x))] for x in tokens] + [[0] * window] * padding
    return DraftInputs(
        F.pad(hidden.to(device), (0, 0, 0, 0, 0, padding)), torch.tensor(drawn, device=device), **columns
    )
