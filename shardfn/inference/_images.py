"""Images in the prompts of an engine: features of image tokens, and the positions that attention reads as images.

A request has the features of all image tokens of its prompt. Their digest is part of the key of a block's content, so
that requests share a prefix only with the same images. Drawn tokens are text.

N image tokens, D model.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._decoder import Decoder
from ._hooks import EngineHooks
from ._limits import Limits
from ._plan import StepPlan
from ._state import State
from ._tensors import make_image_padding


class ImageInputs:
    """Images of an engine's requests.

    Args:
        limits: limits of the engine.
        decoder: model.
    """

    def __init__(self, limits: Limits, decoder: Decoder) -> None:
        self._limits, self._decoder = limits, decoder

    @property
    def hooks(self) -> EngineHooks:
        """Returns the engine hooks that find the image tokens of each step."""
        return EngineHooks() if self._decoder.images is None else EngineHooks(columns=self.columns)

    def admit(self, prompt: Sequence[int], features: Any) -> dict[str, Any]:
        """Returns the fields of a request with images. Without images there are none.

        Raises:
            TypeError: features are no tensor.
            ValueError: the model has no images, or there are more or fewer features than image tokens, or features of
                another width, or not finite.
        """
        rule, D = self._decoder.images, self._decoder.hidden_size
        if rule is None:
            if features is not None:
                raise ValueError("image_features need a model with images, as of gpt.Config(images=). Leave them out.")
            return {}
        count = sum(token == rule.token for token in prompt)
        if features is None:
            features = torch.zeros(0, D)
        if not isinstance(features, Tensor):
            raise TypeError(f"image_features must be a tensor, got a {type(features).__name__}.")
        if features.ndim != 2 or features.shape[1] != D or len(features) != count:
            raise ValueError(
                f"image_features must have shape ({count}, {D}), a row for each of {count} image tokens of the prompt,"
                f" got {tuple(features.shape)}. The prompt has the image token {rule.token} once for each feature."
            )
        features = features.detach().to("cpu", torch.float32).contiguous()
        if not bool(features.isfinite().all()):
            raise ValueError("image_features must be finite numbers, got inf or nan. Look at the tower's input.")
        if not count:
            return {}
        digest = hashlib.blake2b(features.numpy().tobytes(), digest_size=16).digest()
        return {"images": digest, "image_features": features}

    def columns(self, state: State, plan: StepPlan) -> dict[str, Any]:
        """Returns the image tokens of a plan."""
        assert self._decoder.images is not None
        found, first = make_image_padding(plan.bucket, self._limits, self._decoder.hidden_size), 0
        for number, (chunk, sequence, _) in enumerate(state.rows_in_flight()):
            features = sequence.request.image_features
            if features is not None:
                flags = np.array(sequence.request.prompt) == self._decoder.images.token
                bits = np.packbits(np.pad(flags, (0, -len(flags) % 32)), bitorder="little").view(np.int32)
                found.words[number, : len(bits)] = torch.from_numpy(bits)
                own = np.nonzero(flags[chunk.start : chunk.start + chunk.count])[0]
                rows = torch.from_numpy(own) + first
                found.rows[rows] = True
                begin = int(flags[: chunk.start].sum())
                found.features[rows] = features[begin : begin + len(own)]
            first += chunk.count
        return {"images": found}
