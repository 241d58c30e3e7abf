"""Log probabilities as OpenAI's two interfaces have them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardfn.inference import Detokenizer, Token


class Spelled(NamedTuple):
    """A token with its log probability.

    Attributes:
        text: of the token alone.
        data: its bytes; None for a token without bytes of its own.
        logprob: under the raw logits.
        offset: the place in the choice's text at which it begins.
        top: the most probable tokens at its position.
    """

    text: str
    data: bytes | None
    logprob: float
    offset: int = 0
    top: "Sequence[Spelled]" = ()


class Speller:
    """Spells the tokens of one choice.

    Args:
        spelling: the texts of tokens one by one, also of special ones.
        texts: the texts of choices.
        prompt: of the choice.
    """

    def __init__(self, spelling: Detokenizer, texts: Detokenizer, prompt: Sequence[int]) -> None:
        self._spelling, self._growing, self._offset = spelling, texts.start(prompt), 0
        self._holds = False  # whether bytes wait for the rest of their character

    def spell(self, token: Token) -> Spelled:
        """The next drawn token."""
        assert token.token is not None and token.logprob is not None
        made, text, begin = self._one(token.token, token.logprob), self._growing.add(token.token), self._offset
        self._offset += len(text)
        if self._holds:  # bytes that turn out to be no character are a text of their own before it
            begin = max(begin, self._offset - len(made.text))
        self._holds = not text
        return made._replace(offset=begin, top=[self._one(*x) for x in token.top])

    def _one(self, token: int, logprob: float) -> Spelled:
        data = None if self._spelling.bytes_of is None else self._spelling.bytes_of(token)
        return Spelled(self._spelling.decode([token]), data, logprob)


Shape = Callable[[list[Spelled], int], dict[str, Any]]


def older(tokens: list[Spelled], num: int) -> dict[str, Any]:
    """Those of `/v1/completions`, with `num` most probable tokens and the drawn one, by their texts.

    Example:
        >>> older([Spelled("b", b"b", -1.5, 3, [Spelled("a", b"a", -0.5)])], 1)["top_logprobs"]
        [{'a': -0.5, 'b': -1.5}]
    """
    return {
        "tokens": [_named(t) for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [_by_text([*t.top, t]) for t in tokens] if num else None,
        "text_offset": [t.offset for t in tokens],
    }


def newer(tokens: list[Spelled], num: int) -> dict[str, Any]:
    """Those of `/v1/chat/completions`.

    Example:
        >>> newer([Spelled("b", b"b", -1.5)], 0)["content"]
        [{'token': 'b', 'logprob': -1.5, 'bytes': [98], 'top_logprobs': []}]
    """
    del num
    return {"content": [{**_row(t), "top_logprobs": [_row(x) for x in t.top]} for t in tokens], "refusal": None}


def _row(token: Spelled) -> dict[str, Any]:
    data = None if token.data is None else list(token.data)
    return {"token": token.text, "logprob": token.logprob, "bytes": data}


def _named(token: Spelled) -> str:
    """The text of a token, or its bytes as OpenAI writes them where they are no text."""
    try:
        return token.text if token.data is None else token.data.decode() and token.text
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data or b"")


def _by_text(tokens: Sequence[Spelled]) -> dict[str, float]:
    """Log probabilities by text; of tokens with the same text, that of the most probable one."""
    found: dict[str, float] = {}
    for token in tokens:
        found.setdefault(_named(token), token.logprob)
    return found
