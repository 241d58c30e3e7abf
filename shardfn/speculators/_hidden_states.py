"""Hidden states of a frozen model, to train speculators."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from shardfn.collectives import unshard
from shardfn.core import PyTree, raise_all
from shardfn.inference import Decoder, make_single_bodies


def hidden_states(
    decoder: Decoder, params: PyTree, tokens_NS: Int64[Tensor, "n s"], layers: Sequence[int] | None = None
) -> Iterator[Float32[Tensor, "s d"]]:
    """Yields the states of each row of tokens in turn: those that the model's head multiplies, or those after layers.

    An engine of the same batch-invariant decoder has the same bits.

    Args:
        decoder: decoder of a single rank, with hidden states.
        params: parameters: whole tensors, or `GlobalTensor`s. Collective for the latter.
        tokens_NS: ids.
        layers: layers that states are wanted after, concatenated, such as `EagleConfig.layers`. None is all layers: the
            states that the head multiplies.

    Raises:
        ValueError: the decoder gives no hidden states, or rows are longer than its context.

    Example:
        >>> from shardfn import core
        >>> from shardfn.inference import decoder
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4)
        >>> tokens = torch.zeros(2, 5, dtype=torch.int64)
        >>> [x.shape for x in hidden_states(decoder(config), gpt.init(config, core.key(0)), tokens)]
        [torch.Size([5, 32]), torch.Size([5, 32])]
    """
    S = tokens_NS.shape[1]
    problems = [] if decoder.embeds else ["the decoder does not give its hidden states. Take a batch-invariant decoder"]
    if S > decoder.context:
        problems.append(f"rows have {S} tokens, and the model's longest sequence has {decoder.context}")
    layers = (decoder.depth,) if layers is None else tuple(layers)
    if missing := [x for x in layers if x not in decoder.hidden_layers]:
        problems.append(f"the decoder has no states after {missing} layers. It has {[*decoder.hidden_layers]}")
    raise_all(ValueError, "hidden_states:", problems)
    return _run_rows(decoder, params, tokens_NS, layers)


@torch.no_grad()
def _run_rows(decoder: Decoder, params: PyTree, tokens_NS: Tensor, layers: tuple[int, ...]) -> Iterator[Tensor]:
    weights, S = decoder.pack(unshard(params)), tokens_NS.shape[1]
    at_S = torch.arange(S, dtype=torch.int32)
    for tokens_S in tokens_NS:
        bodies = make_single_bodies(decoder.cache, S)
        after = decoder.outputs(weights, tokens_S.int(), at_S, at_S, bodies).state_after
        yield torch.cat([x.float() for i in layers if (x := after(i)) is not None], -1)
