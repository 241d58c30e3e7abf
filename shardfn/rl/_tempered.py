"""A model that draws at another temperature, with the log probabilities of the distribution that it draws from."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardfn.core import PyTree
from shardfn.inference import Decoder


def tempered(decoder: Decoder, temperature: float) -> Decoder:
    """The model whose logits are those of another, divided by a temperature.

    An engine of it draws by `Sampling(temperature=1.0)` at this temperature. Its log probabilities are those of the
    sampled distribution, softmax(logits / temperature); those of the full distribution, softmax(logits), it does not
    have. With an exact model both have the bits of a training forward:

    | distribution | in training |
    |---|---|
    | sampled | `answer_logprobs(logits / temperature, ...)`; its first ratio is 1 |
    | full | `answer_logprobs(logits, ...)` |

    Args:
        decoder: of the model.
        temperature: positive; below 1 draws fewer tokens.

    Raises:
        ValueError: the temperature is not positive.

    Example:
        >>> from shardfn import inference
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4)
        >>> tempered(inference.decoder(config), 0.7).vocab
        64
    """
    if not temperature > 0:
        raise ValueError(
            f"tempered: temperature is {temperature}; it must be positive. engine.generate with"
            " Sampling(temperature=0.0) draws the most probable tokens."
        )

    def logits(weights: PyTree, *rest: Any) -> Tensor:
        return decoder.logits(weights, *rest).float() / temperature

    def cooled(inner: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """A function whose first result are logits."""

        def run(weights: PyTree, *rest: Any) -> Any:
            assert inner is not None
            logits_RV, *more = inner(weights, *rest)
            return logits_RV.float() / temperature, *more

        return None if inner is None else run

    return dataclasses.replace(decoder, logits=logits, outputs=cooled(decoder.outputs), routed=cooled(decoder.routed))
