"""Classes of prompts: a classification head over the last token's hidden state, apart from the graphs of steps.

The product goes through one state at a time in float64 and is rounded once, so that its bits do not depend on the
other prompts of a batch.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxtyping import Float, Float32
from torch import Tensor

Activation = Literal["softmax", "sigmoid", "identity"]


class Classes(NamedTuple):
    """Classes of a model, with the function from logits to the values that clients see.

    Attributes:
        labels: name of each class.
        activation: "softmax" over the classes, "sigmoid" of each logit, or "identity", for example of a reward model.
    """

    labels: tuple[str, ...]
    activation: Activation

    def activate(self, logits: Sequence[float]) -> list[float]:
        """Returns the values of logits.

        Example:
            >>> Classes(("bad", "good"), "softmax").activate([1.0, 1.0])
            [0.5, 0.5]
            >>> Classes(("reward",), "identity").activate([-3.0])
            [-3.0]
        """
        if self.activation == "identity":
            return list(logits)
        if self.activation == "sigmoid":
            return [1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in logits]
        most = max(logits)
        parts = [math.exp(x - most) for x in logits]
        total = math.fsum(parts)
        return [x / total for x in parts]


class Classifier(NamedTuple):
    """Classification head, as of a `...ForSequenceClassification` of transformers or of a reward model.

    Attributes:
        weight_CD: weights, a row for each class.
        classes: classes.
    """

    weight_CD: Float[Tensor, "c d"]
    classes: Classes

    def compute_logits(self, state_D: Float32[Tensor, " d"]) -> Float32[Tensor, " c"]:
        """Returns the logits of a prompt.

        Args:
            state_D: embedding of the prompt with the pooling "last", as of `Engine.embed`, not normalized.

        Example:
            >>> import torch
            >>> head = Classifier(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), Classes(("a", "b"), "softmax"))
            >>> head.compute_logits(torch.tensor([3.0, 4.0]))
            tensor([3., 8.])
        """
        return (self.weight_CD.double() @ state_D.double()).float()
