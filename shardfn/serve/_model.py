"""The model of a server, as the reader of bodies sees it."""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from shardfn import inference

from ._errors import ApiError
from ._message_formats import ReasoningFormat, ToolFormat


class Text(NamedTuple):
    """Tokenizer as a server uses it. The functions are called in two threads, of which the second is for long bodies.

    Attributes:
        encode: function from a text to the ids of a prompt.
        tokenizer: tokenizer in a form that `shardfn.inference.detokenizer` takes.
        chat: function from messages to the text of a prompt, or None without a chat template. The function also takes
            variables that `template` names, such as `tools`, and `add_generation_prompt` and `continue_final_message`,
            as in transformers. A `ValueError` refuses messages.
        plain: function from the text of `chat` to the ids of a prompt, without further special tokens. None takes
            `encode`.
        template: source of the chat template. Requests may give the template's variables.
        images: reader of the images of messages, or None for a model of text.
        speech: reader of sounds, or None for a model that transcribes nothing.
        pair: function from two texts to the ids of a prompt with both, for a classification head. None joins the ids of
            the first text, and the ids of the second text without further special tokens.
    """

    encode: Callable[[str], list[int]]
    tokenizer: Any
    chat: Callable[..., str] | None = None
    plain: Callable[[str], list[int]] | None = None
    template: str = ""
    pair: Callable[[str, str], list[int]] | None = None
    images: inference.ImageReader | None = None
    speech: inference.SpeechReader | None = None


class Model(NamedTuple):
    """Model that bodies are read for.

    Attributes:
        name: name by which clients know the model.
        text: tokenizer.
        spelling: texts of single tokens, also of special tokens.
        limits: limits of the engine.
        ends: tokens that end a completion.
        max_choices: most choices of a single call.
        compiler: compiler of grammars, or None if grammars are not served.
        texts: texts of choices.
        adapters: names that clients may give in place of the model's.
        processors: names of logits processors that clients may give.
        width: width of embeddings, or 0 if embeddings are not served.
        longest: bytes of the longest token, or 0 where single tokens have no bytes.
        defaults: values of `Sampling` for fields that a body leaves out.
        tools: format of calls of tools, or None if tools are not served.
        reasoning: format of the model's reasoning, or None.
        pooling: pooling of embeddings.
        classes: classes of the model, or None for a model without a classification head.
        generates: whether the model has logits of tokens.
        start: first token of the decoder's sequence of an encoder-decoder model, or None for a decoder.
        embed_size: width of the embeddings that clients may give in place of a prompt's tokens, or 0.
    """

    name: str
    text: Text
    spelling: inference.Detokenizer
    limits: inference.Limits
    ends: frozenset[int]
    max_choices: int
    compiler: inference.Compiler | None
    texts: inference.Detokenizer
    adapters: tuple[str, ...] = ()
    width: int = 0
    processors: tuple[str, ...] = ()
    longest: int = 0
    defaults: Mapping[str, float] = MappingProxyType({})
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    pooling: str = "last"
    classes: inference.Classes | None = None
    generates: bool = True
    start: int | None = None
    embed_size: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names that clients may give."""
        return (self.name, *self.adapters)

    @property
    def longest_prompt(self) -> int:
        """Returns the most tokens of a prompt."""
        return self.limits.source or self.limits.context

    def place_prompt(self, ids: Sequence[int]) -> dict[str, Any]:
        """Returns the fields of a request with a prompt, which is the source of an encoder-decoder model.

        Raises:
            ApiError: the model reads sounds.
        """
        if self.text.speech is not None:
            text = f"model {self.name!r} reads sounds, and no texts. Send them to /v1/audio/transcriptions."
            raise ApiError(400, text, "model", "unsupported_parameter")
        return {"prompt": tuple(ids)} if self.start is None else {"prompt": (self.start,), "source": tuple(ids)}

    def names_variable(self, name: str) -> bool:
        """Returns whether the chat template has a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self.text.template) is not None

    def find_special(self, marker: str) -> int | None:
        """Returns the id of a marker that is a special token, whose text answers leave out. Otherwise None."""
        if not marker or self.texts.encode is None or self.texts.bytes_of is None:
            return None
        ids = self.texts.encode(marker)
        return ids[0] if len(ids) == 1 and self.texts.bytes_of(ids[0]) is None else None


def find_longest(spelling: inference.Detokenizer) -> int:
    """Returns the bytes of the longest token, also of special tokens, or 0 where single tokens have no bytes.

    Example:
        >>> from shardfn.inference import detokenizer
        >>> find_longest(detokenizer([b"a", b"the", None]))
        3
    """
    if spelling.bytes_of is None:
        return 0
    found = map(spelling.bytes_of, range(spelling.size))
    return max(len(spelling.decode([i]).encode() if x is None else x) for i, x in enumerate(found))


def adapter_of(given: Mapping[str, Any], model: Model) -> bytes:
    """Returns the adapter's name that a body asks for by its model, empty for the model without an adapter.

    Raises:
        ApiError: the model is missing or unknown.
    """
    if "model" not in given:
        text = f"model is missing; this server has {names_of(model)}."
        raise ApiError(400, text, "model", "missing_parameter")
    check_model(given["model"], model)
    return b"" if given["model"] == model.name else given["model"].encode()


def check_model(name: str, model: Model) -> None:
    """Checks that this server has a name.

    Raises:
        ApiError: has the known names.
    """
    if name not in model.names:
        text = f"model {name[:60]!r} does not exist; this server has {names_of(model)}."
        raise ApiError(404, text, "model", "model_not_found")


def names_of(model: Model) -> str:
    """Returns the names that clients may give, in words."""
    return ", ".join(map(repr, model.names))
