"""Tokenizers of models, with their chat templates and the tokens that end a text."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardfn.data import Tokenizer

from ._template_time import check_template, render_template


class ModelText(NamedTuple):
    """Tokenizer of a model.

    Attributes:
        size: number of ids, from 0 to `size - 1`.
        encode: function from a text to the ids of a prompt.
        plain: function as `encode`, without further special tokens.
        tokenizer: tokenizer in a form that an engine takes.
        token: function from a token's text to its id, or None if there is no such token.
        chat: function from messages to a text for `plain`, or None without a chat template, with variables of the
            template, `add_generation_prompt` and `continue_final_message`.
        ends: tokens that end a completion.
        template: source of the chat template.
        pair: function from two texts to the ids of a prompt with both, or None.
    """

    size: int
    encode: Callable[[str], list[int]]
    plain: Callable[[str], list[int]]
    tokenizer: Any
    token: Callable[[str], int | None]
    chat: Callable[..., str] | None = None
    ends: frozenset[int] = frozenset()
    template: str = ""
    pair: Callable[[str, str], list[int]] | None = None


def wrap_transformers_tokenizer(tokenizer: Any, ends: frozenset[int] = frozenset()) -> ModelText:
    """Returns a tokenizer of transformers.

    Args:
        tokenizer: tokenizer from `AutoTokenizer`.
        ends: tokens that end a completion, by the model's files.
    """

    def render_chat(messages: list[dict[str, Any]], **options: Any) -> str:
        options = {"add_generation_prompt": not options.get("continue_final_message"), **options}
        try:
            check_template(tokenizer.get_chat_template(None, options.get("tools")))
            return render_template(lambda: tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # a template is a program and may, for example, divide by zero
            raise ValueError(f"--chat: the chat template refuses these messages: {describe_reason(error)}") from error

    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return ModelText(
        size=1 + max(vocabulary.values(), default=-1),
        encode=lambda text: list(tokenizer(text)["input_ids"]),
        plain=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        tokenizer=tokenizer,
        token=vocabulary.get,
        chat=render_chat if tokenizer.chat_template else None,
        ends=ends | {*own},
        template=_find_template(tokenizer),
        pair=lambda left, right: list(tokenizer(left, right)["input_ids"]),
    )


def _find_template(tokenizer: Any) -> str:
    """Returns the source of the chat template for requests with tools."""
    try:
        return tokenizer.get_chat_template(None, [{}]) if tokenizer.chat_template else ""
    except ValueError:  # several templates, none of them the default
        return ""


def describe_reason(error: Exception) -> str:
    """Returns the message of a template's error, or the type, where the message is empty."""
    return str(error) or type(error).__name__


def wrap_data_tokenizer(tokenizer: Tokenizer) -> ModelText:
    """Returns a tokenizer of `shardfn.data`."""

    def token_id(text: str) -> int | None:
        ids = tokenizer.encode(text).tolist()
        return ids[0] if len(ids) == 1 else None

    def encode_text(text: str) -> list[int]:
        return tokenizer.encode(text).tolist()

    return ModelText(tokenizer.vocab_size, encode_text, encode_text, tokenizer, token_id)
