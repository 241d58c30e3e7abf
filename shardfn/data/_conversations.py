"""Tokens and labels of conversations: by default only the turns of the assistant are learnt.

The labels follow the masks of the chat template, if the template has `{% generation %}` blocks of transformers. Else
labels follow from differences of prefixes, for any template:

    answer i = render(messages[: i + 1])  without its beginning  render(messages[:i], reply=True)

So the learnt tokens are exactly the tokens that a model must generate after the prompt at inference.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._collate import IGNORED

Messages = Sequence[Mapping[str, Any]]
LEARN = ("answers", "everything")

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REMEDY = (
    "Write a row for each answer, {'prompt': [the messages before it], 'completion': [the answer]}; or use a template"
    " that marks answers by {% generation %}; or learn all tokens (learn='everything', --learn everything)"
)


def encode_chat(
    tokenizer: Any, messages: Messages, *, tools: Sequence[Any] | None = None, start: int = 0, learn: str = "answers"
) -> dict[str, list[int]]:
    """Encodes a conversation by the chat template of a tokenizer of transformers.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the conversation, dicts with "role" and "content". Messages of tools and calls of tools are as in
            transformers.
        tools: the tools that the template is given.
        start: the number of the first message that is learnt. Earlier answers of the assistant are part of the prompt.
        learn: "answers" gives a label only to tokens of the assistant's messages, "everything" gives a label to each
            token.

    Returns:
        "tokens", and "labels", -100 where nothing is learnt, for `pad` and `pack`.

    Raises:
        ValueError: the template refuses the messages. There is no answer, or the template does not show where an answer
            is.

    Example:
        >>> class Words:  # as a tokenizer of transformers
        ...     def get_chat_template(self, chat_template=None, tools=None):
        ...         return ""
        ...     def apply_chat_template(self, messages, add_generation_prompt=False, **options):
        ...         words = [n for m in messages for n in (len(m["role"]), *m["content"])]
        ...         return words + [9] * add_generation_prompt
        >>> talk = [{"role": "user", "content": [1, 2]}, {"role": "assistant", "content": [3]}]
        >>> encode_chat(Words(), talk)
        {'tokens': [4, 1, 2, 9, 3], 'labels': [-100, -100, -100, -100, 3]}
    """
    if learn not in LEARN:
        raise ValueError(f"learn must be one of {', '.join(map(repr, LEARN))}, got {learn!r}.")

    def render_part(part: Messages, reply: bool) -> list[int]:
        return list(_apply_template(tokenizer, part, tools, add_generation_prompt=reply, return_dict=False))

    if learn == "everything":
        tokens = render_part(messages, False)
        return {"tokens": tokens, "labels": [*tokens]}
    if _GENERATION.search(_template_of(tokenizer, tools)) and getattr(tokenizer, "is_fast", True):
        return _encode_masked(tokenizer, messages, tools, render_part(messages[:start], False) if start else [])
    return encode_answers(render_part, messages, start=start)


def encode_answers(
    render: Callable[[Messages, bool], Sequence[int]], messages: Messages, *, start: int = 0
) -> dict[str, list[int]]:
    """Encodes a conversation, with labels for the assistant's messages only.

    The messages are found by differences of prefixes.

    Args:
        render: function from messages to tokens. If its second argument is true, the tokens that begin an answer
            follow.
        messages: the conversation, dicts with "role" and "content".
        start: the number of the first message that is learnt.

    Returns:
        "tokens", and "labels", -100 where nothing is learnt.

    Raises:
        ValueError: there is no answer, the conversation begins with an answer, or the tokens of an answer cannot be
            found.

    Example:
        >>> def render(messages, reply):
        ...     return [n for m in messages for n in (len(m["role"]), *m["content"])] + [9] * reply
        >>> encode_answers(render, [{"role": "user", "content": [1]}, {"role": "assistant", "content": [2]}])
        {'tokens': [4, 1, 9, 2], 'labels': [-100, -100, -100, 2]}
    """
    answers = _answers_of(messages, start)
    if answers[0] == 0:
        raise ValueError(
            "the conversation must begin with a message of the user or the system, got one of the assistant."
        )
    tokens = list(render(messages, False))
    labels = [IGNORED] * len(tokens)
    for i in answers:
        before, after = list(render(messages[:i], True)), list(render(messages[: i + 1], False))
        if after[: len(before)] != before:
            raise ValueError(
                f"the template does not write message {i}, an answer, after the tokens that begin an answer, so that"
                f" its tokens cannot"
                f" be found. {_REMEDY}."
            )
        if tokens[: len(after)] != after:
            raise ValueError(
                f"the template writes messages 0 to {i} in another way when more messages follow, so that the tokens"
                f" of the answer"
                f" cannot be found. {_REMEDY}."
            )
        labels[len(before) : len(after)] = tokens[len(before) : len(after)]
    return {"tokens": tokens, "labels": labels}


def _encode_masked(tokenizer: Any, messages: Messages, tools: Any, prompt: list[int]) -> dict[str, list[int]]:
    """Returns tokens and labels by the masks of the template. Tokens of the prompt are not learnt."""
    _answers_of(messages, 0)
    found = _apply_template(tokenizer, messages, tools, return_dict=True, return_assistant_tokens_mask=True)
    tokens, mask = list(found["input_ids"]), found["assistant_masks"]
    if tokens[: len(prompt)] != prompt:
        raise ValueError(
            f"the template writes the prompt in another way when an answer follows, so that the answer cannot be"
            f" found. {_REMEDY}."
        )
    labels = [t if m and i >= len(prompt) else IGNORED for i, (t, m) in enumerate(zip(tokens, mask, strict=True))]
    if all(x == IGNORED for x in labels):
        raise ValueError(f"the template marks no token of the answers by {{% generation %}}. {_REMEDY}.")
    return {"tokens": tokens, "labels": labels}


def _answers_of(messages: Messages, start: int) -> list[int]:
    """Returns the numbers of the assistant's messages from `start` on."""
    found = [i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"]
    if not found:
        roles = sorted({str(m["role"]) for m in messages[start:]})
        raise ValueError(
            f"expected a message with role 'assistant', from which the model learns, got the roles {roles}. To train"
            f" on all tokens of"
            " such rows, learn everything (learn='everything', --learn everything)."
        )
    return found


def _template_of(tokenizer: Any, tools: Any) -> str:
    try:
        return tokenizer.get_chat_template(None, tools)
    except ValueError as error:
        raise ValueError(
            "the tokenizer has no chat template, which rows of messages need. Set tokenizer.chat_template and save the"
            " tokenizer, or write rows of {'prompt': text, 'completion': text}."
        ) from error


def _apply_template(tokenizer: Any, messages: Messages, tools: Any, **options: Any) -> Any:
    """Applies the chat template, and raises ValueError for refused messages."""
    _template_of(tokenizer, tools)
    try:
        return tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=True, **options)
    except Exception as error:  # a template is a program, and may raise anything
        raise ValueError(f"the chat template refuses these messages: {type(error).__name__}: {error}") from error
