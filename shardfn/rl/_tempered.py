"""A model that draws at another temperature, with the log probabilities of the distribution that it draws from."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from shardfn.core import PyTree
from shardfn.inference import Decoder, Outputs, widen_floats


def tempered(decoder: Decoder, temperature: float) -> Decoder:
    """Returns the model whose logits are the logits of another model, divided by a temperature.

    An engine of the result draws by `Sampling(temperature=1.0)` at this temperature. Its log probabilities belong to
    the sampled distribution, softmax(logits / temperature), and not to the full distribution, softmax(logits). With an
    batch-invariant model both have the bits of a training forward:

    | distribution | in training |
    |---|---|
    | sampled | `answer_logprobs(logits / temperature, ...)`, with first ratios of 1 |
    | full | `answer_logprobs(logits, ...)` |

    Args:
        decoder: decoder of the model.
        temperature: positive number. Below 1 fewer different tokens are drawn.

    Raises:
        ValueError: the temperature is not above 0 and finite.

    Example:
        >>> from shardfn import inference
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4)
        >>> tempered(inference.decoder(config), 0.7).vocab
        64
    """
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"tempered: temperature is {temperature}; it must be above 0 and finite. engine.generate with"
            " Sampling(temperature=0.0) draws the most probable tokens."
        )

    def divide_logits(outputs: Callable[..., Outputs]) -> Callable[..., Outputs]:
        def compute_outputs(weights: PyTree, *rest: Any) -> Outputs:
            found = outputs(weights, *rest)
            return found._replace(logits=widen_floats(found.logits) / temperature)

        return compute_outputs

    more = {name: x._replace(outputs=divide_logits(x.outputs)) for name, x in decoder.more_layouts.items()}
    return dataclasses.replace(decoder, outputs=divide_logits(decoder.outputs), more_layouts=more)
