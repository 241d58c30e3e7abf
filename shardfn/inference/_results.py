"""The results of an engine: tokens one by one, and whole completions."""

from typing import NamedTuple


class Token(NamedTuple):
    """A token of a request, or its end, or both.

    Attributes:
        name: of the request.
        choice: of the request.
        position: of the token in its sequence; below the prompt's length if it is a scored one.
        token: its id; None for an end without a token.
        logprob: under the softmax of the raw logits; None without a token.
        version: of the weights that computed it.
        finish: "stop", "length", "cancelled", "deadline", "error" or "refused" with the last token of a choice.
    """

    name: str
    choice: int
    position: int
    token: int | None
    logprob: float | None
    version: int
    finish: str | None


class Completion(NamedTuple):
    """One choice of a request.

    Attributes:
        tokens: drawn after the prompt.
        logprobs: of these tokens, under the softmax of the raw logits.
        finish: "stop", "length", "cancelled", "deadline", "error" or "refused".
        versions: of the weights that computed each token.
        prompt_logprobs: of the prompt's tokens but the first; empty unless the request wants them.
        prompt_versions: of the weights that computed each of `prompt_logprobs`.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: str | None
    versions: list[int]
    prompt_logprobs: list[float]
    prompt_versions: list[int]


def append(made: list[Completion], token: Token, prompt: int) -> bool:
    """Adds a token to its choice; returns whether the choice ends."""
    one = made[token.choice]
    if token.token is not None and token.logprob is not None:
        if token.position < prompt:
            one.prompt_logprobs.append(token.logprob)
            one.prompt_versions.append(token.version)
        else:
            one.tokens.append(token.token)
            one.logprobs.append(token.logprob)
            one.versions.append(token.version)
    if token.finish is not None:
        made[token.choice] = one._replace(finish=token.finish)
    return token.finish is not None
