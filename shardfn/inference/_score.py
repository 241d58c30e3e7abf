"""Scores of choices: log probabilities of given continuations, without draws (prefill-only).

A score is the sum of its tokens' log probabilities in float64, in the order of positions. So it does not depend on the
other choices, batches, chunks or cached prefixes, if the decoder is batch-invariant.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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

    def make_sampling(self) -> Sampling:
        """Returns the sampling of a request whose prompt is the prompt and a continuation."""
        start = len(self.prompt)
        return Sampling(max_tokens=0, prompt_logprobs=True, prompt_logprobs_start=start, top_logprobs=1)


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
            greedy = greedy and token.top[0][0] == token.token
    if reason == "error":
        raise FloatingPointError("score: logits of a choice are not finite.")
    if reason != "length":
        raise ValueError(f"score: the request of a choice has ended as {reason!r}.")
    return Score(math.fsum(found), tuple(found), greedy)
