"""Log probabilities as OpenAI's two interfaces have them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardfn.inference import Detokenizer


class Spelled(NamedTuple):
    """A token with its log probability.

    Attributes:
        text: text of the single token.
        data: bytes of the token, or None for a token without bytes by itself.
        logprob: log probability under the raw logits, or None for the first token of a prompt.
        offset: place in the choice's text at which the token begins.
        top: most probable tokens at the token's position.
    """

    text: str
    data: bytes | None
    logprob: float | None
    offset: int = 0
    top: "Sequence[Spelled]" = ()


class Speller:
    """Speller of the tokens of a single choice.

    Args:
        spelling: texts of single tokens, also of special tokens.
        texts: texts of choices.
        prompt: tokens before the first token that is spelled.
    """

    def __init__(self, spelling: Detokenizer, texts: Detokenizer, prompt: Sequence[int]) -> None:
        self._spelling, self._growing, self._offset = spelling, texts.start(prompt), 0
        self._holds = False  # whether bytes wait for the rest of their character

    def spell(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]] = ()) -> Spelled:
        """Returns the next token."""
        made, text, begin = self._spell_token(token, logprob), self._growing.add(token), self._offset
        self._offset += len(text)
        if self._holds:  # bytes that turn out to be no character are a separate text before the token
            begin = max(begin, self._offset - len(made.text))
        self._holds = not text
        return made._replace(offset=begin, top=[self._spell_token(*x) for x in top])

    def _spell_token(self, token: int, logprob: float | None) -> Spelled:
        data = None if self._spelling.bytes_of is None else self._spelling.bytes_of(token)
        return Spelled(self._spelling.decode([token]), data, logprob)


Shape = Callable[[list[Spelled], int], dict[str, Any]]


def completion_logprobs(tokens: list[Spelled], num: int) -> dict[str, Any]:
    """Returns the form of `/v1/completions`, with `num` most probable tokens and the token itself, by their texts.

    Example:
        >>> completion_logprobs([Spelled("b", b"b", -1.5, 3, [Spelled("a", b"a", -0.5)])], 1)["top_logprobs"]
        [{'a': -0.5, 'b': -1.5}]
    """
    return {
        "tokens": [_name_token(t) for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [_group_texts([*t.top, t]) for t in tokens] if num else None,
        "text_offset": [t.offset for t in tokens],
    }


def chat_logprobs(tokens: list[Spelled], num: int) -> dict[str, Any]:
    """Returns the form of `/v1/chat/completions`.

    Example:
        >>> chat_logprobs([Spelled("b", b"b", -1.5)], 0)["content"]
        [{'token': 'b', 'logprob': -1.5, 'bytes': [98], 'top_logprobs': []}]
    """
    del num
    return {
        "content": [{**_make_row(t), "top_logprobs": [_make_row(x) for x in t.top]} for t in tokens],
        "refusal": None,
    }


def _make_row(token: Spelled) -> dict[str, Any]:
    data = None if token.data is None else list(token.data)
    return {"token": token.text, "logprob": token.logprob, "bytes": data}


def _name_token(token: Spelled) -> str:
    """Returns the text of a token, or its bytes as OpenAI writes them where the bytes are no text."""
    try:
        return token.text if token.data is None else token.data.decode() and token.text
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data or b"")


def _group_texts(tokens: Sequence[Spelled]) -> dict[str, float] | None:
    """Returns log probabilities by text, or None without a value. For equal texts the most probable token counts."""
    found: dict[str, float] = {}
    for token in tokens:
        if token.logprob is not None:
            found.setdefault(_name_token(token), token.logprob)
    return found or None
