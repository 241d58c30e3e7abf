"""Tokenizers as `shardfn generate` uses them, and the text of tokens that come one after another."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardfn.data import Tokenizer

_HALF = "\ufffd"  # decoders write it for bytes that are not a character, such as the first ones of a longer one


class Text(NamedTuple):
    """A tokenizer.

    Attributes:
        size: ids are 0 to `size - 1`.
        encode: from a text to the ids of a prompt.
        decode: from ids to their text, without special tokens.
        token: from a token's text to its id; None if there is no such token.
        chat: from messages to the ids of a prompt; None without a chat template.
        ends: tokens that end a completion.
        tokenizer: as `shardfn.inference.detokenizer` takes.
    """

    size: int
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    token: Callable[[str], int | None]
    chat: Callable[[list[dict[str, str]]], list[int]] | None = None
    ends: frozenset[int] = frozenset()
    tokenizer: Any = None


def text_of_transformers(tokenizer: Any, ends: frozenset[int] = frozenset()) -> Text:
    """A tokenizer of transformers.

    Args:
        tokenizer: from `AutoTokenizer`.
        ends: the tokens that end a completion, by the model's files.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(messages: list[dict[str, str]]) -> list[int]:
        import jinja2

        try:  # the template has the special tokens, and none is added to them
            ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        except jinja2.TemplateError as error:
            raise ValueError(f"--chat: the chat template refuses these messages: {error}") from error
        return list(ids)

    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return Text(
        size=1 + max(vocabulary.values(), default=-1),
        encode=lambda text: list(tokenizer(text)["input_ids"]),
        decode=decode,
        token=vocabulary.get,
        chat=chat if tokenizer.chat_template else None,
        ends=ends | {*own},
        tokenizer=tokenizer,
    )


def text_of_data(tokenizer: Tokenizer) -> Text:
    """A tokenizer of `shardfn.data`."""

    def token(text: str) -> int | None:
        ids = tokenizer.encode(text).tolist()
        return ids[0] if len(ids) == 1 else None

    return Text(
        tokenizer.vocab_size, lambda text: tokenizer.encode(text).tolist(), tokenizer.decode, token, tokenizer=tokenizer
    )


class Growing:
    """The text of a completion whose tokens come one after another, in pieces of whole characters.

    All tokens are decoded each time, as a token's text may depend on those before it.

    Args:
        decode: from ids to their text.
        prompt: the ids before the completion.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode, self._ids = decode, list(prompt)
        self._given = decode(self._ids)

    def add(self, *tokens: int) -> str:
        """The text that these tokens add; an unfinished character is held back."""
        self._ids += tokens
        whole = self._decode(self._ids).rstrip(_HALF)
        if not whole.startswith(self._given):
            return ""
        piece, self._given = whole[len(self._given) :], whole
        return piece

    def end(self) -> str:
        """The text that was held back."""
        whole = self._decode(self._ids)
        pairs = enumerate(zip(whole, self._given, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(whole), len(self._given)))
        self._given = whole
        return whole[shared:]


def continuation(decode: Callable[[Sequence[int]], str], prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of a completion."""
    growing = Growing(decode, prompt)
    return growing.add(*tokens) + growing.end()
