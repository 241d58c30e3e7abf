"""Scores by an engine: log probabilities of given continuations, and classes of texts.

A score is the sum of its tokens' log probabilities in float64, in the order of positions. So it does not depend on the
other choices, batches, chunks or cached prefixes, if the decoder is batch-invariant.

The product goes through one state at a time in float64 and is rounded once, so that its bits do not depend on the
other prompts of a batch.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from jaxtyping import Float, Float32
from torch import Tensor

from ._requests import Sampling, ids_of
from ._results import Token


class Score(NamedTuple):
    """Score of a continuation.

    Attributes:
        logprob: log probability of the continuation after its prompt.
        logprobs: log probability of each token.
        is_greedy: whether each token is the most probable token at its position.
    """

    logprob: float
    logprobs: tuple[float, ...]
    is_greedy: bool


class ScoredPrompt(NamedTuple):
    """Prompt with its continuations.

    Attributes:
        prompt: token ids.
        choices: token ids of each continuation.
    """

    prompt: tuple[int, ...]
    choices: list[tuple[int, ...]]


def make_score_sampling(start: int) -> Sampling:
    """Returns the sampling of a request whose prompt ends with a continuation.

    Args:
        start: number of tokens before the continuation in the decoder's sequence: those of the prompt, or only the
            first token of an encoder-decoder model.
    """
    return Sampling(max_tokens=0, prompt_logprobs=True, prompt_logprobs_start=start)


def read_choices(prompts: Iterable[Sequence[int]], choices: Iterable[Iterable[Sequence[int]]]) -> list[ScoredPrompt]:
    """Returns prompts with their continuations.

    Raises:
        TypeError: ids are not integers.
        ValueError: a prompt or a continuation is empty, or the numbers of prompts and lists of choices differ.

    Example:
        >>> read_choices([[5, 6]], [[[7], [8, 9]]])
        [ScoredPrompt(prompt=(5, 6), choices=[(7,), (8, 9)])]
    """
    made = [ids_of(prompt) for prompt in prompts]
    listed = [[ids_of(choice) for choice in several] for several in choices]
    if len(made) != len(listed):
        raise ValueError(
            f"score: got {len(made)} prompts and {len(listed)} lists of choices. Pass a list for each prompt."
        )
    for i, (prompt, several) in enumerate(zip(made, listed, strict=True)):
        if not prompt:
            raise ValueError(f"score: prompt {i} has no tokens. Begin with a token such as the tokenizer's bos token.")
        if empty := [j for j, choice in enumerate(several) if not choice]:
            raise ValueError(
                f"score: a choice must have at least one token, but choice {empty[0]} of prompt {i} is empty."
            )
    return [ScoredPrompt(prompt, several) for prompt, several in zip(made, listed, strict=True)]


def sum_tokens(tokens: Iterable[Token], start: int) -> Score:
    """Returns the score of the tokens of a request from a position on.

    Raises:
        FloatingPointError: logits are not finite.
        ValueError: the request has ended otherwise, for example by `cancel`.
    """
    found, greedy, reason = list[float](), True, None
    for token in tokens:
        reason = token.finish_reason or reason
        if token.token is not None and token.logprob is not None and token.position >= start:
            found.append(token.logprob)
            greedy = greedy and token.is_greedy
    if reason == "error":
        raise FloatingPointError("score: logits of a choice are not finite.")
    if reason != "length":
        raise ValueError(f"score: the request of a choice has ended as {reason!r}.")
    return Score(math.fsum(found), tuple(found), greedy)


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
    """Classification head of a `...ForSequenceClassification` of transformers, or of a reward model.

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
