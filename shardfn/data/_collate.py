"""Collators: combine examples of different lengths into a batch, by padding or by packing.

An example is a sequence of token ids, or a mapping with "tokens" and optionally "labels", with -100 for tokens that are
not predicted, as in Hugging Face and torch. A label belongs to the token at the same place: the model, or the loss,
shifts.

Conversations become tokens and labels. By default only the turns of the assistant are learnt.

The labels follow the masks of the chat template, if the template has `{% generation %}` blocks of transformers. Else
labels follow from differences of prefixes, for any template:

    answer i = render(messages[: i + 1])  without its beginning  render(messages[:i], reply=True)

So the learnt tokens are exactly the tokens that a model must generate after the prompt at inference.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn import core

IGNORED = -100  # cross-entropy's `ignore_index` in torch, and so the usual one

Collate = Callable[[list[Any]], dict[str, Tensor]]


def pad(length: int | None = None, *, token: int = 0) -> Collate:
    """Returns a collator that pads examples to one length.

    Batches have "tokens" [B, T], "labels" [B, T] with -100 where no token is predicted, padding included, and
    "attention_mask" [B, T], 1 at tokens, all int64, and "weight" [B] float32, the number of predicted tokens: the first
    token of a row is never predicted, and does not count.

    Args:
        length: T. Default: length of the longest example in the batch, only for a single rank. Several ranks need the
            same T, so pass `length`.
        token: id for padding.

    Raises:
        ValueError: (on use) an example is longer than `length`, or the numbers of labels and tokens differ. The message
            lists all such examples.

    Example:
        >>> batch = pad(4)([[5, 6, 7], {"tokens": [8, 9], "labels": [-100, 9]}])
        >>> batch["tokens"].tolist(), batch["labels"].tolist(), batch["weight"].tolist()
        ([[5, 6, 7, 0], [8, 9, 0, 0]], [[5, 6, 7, -100], [-100, 9, -100, -100]], [2.0, 1.0])
    """

    def collate_padded(examples: list[Any]) -> dict[str, Tensor]:
        pairs = _token_pairs(examples, length)
        width = length or max((len(tokens) for tokens, _ in pairs), default=0)
        out = _empty_rows(len(pairs), width, token)
        mask = torch.zeros(len(pairs), width, dtype=torch.int64)
        for row, (tokens, labels) in enumerate(pairs):
            out["tokens"][row, : len(tokens)] = tokens
            out["labels"][row, : len(tokens)] = labels
            mask[row, : len(tokens)] = 1
        return {**out, "attention_mask": mask, "weight": _label_weights(out["labels"])}

    return collate_padded


def pack(length: int, *, token: int = 0, rows: int | None = None) -> Collate:
    """Returns a collator that packs several examples into a row, by first fit of decreasing length.

    Batches have "tokens" and "labels" [R, T] as in `pad`. The first label of each example is -100, because the token
    would be predicted from another example. For masks, "position_ids" [R, T] start at 0 in each example, and
    "segment_ids" [R, T] are 1 for the first example of a row, 2 for the second, 0 for padding. Finally "weight" [R]
    float32, the number of predicted tokens.

    Args:
        length: T.
        token: id for padding.
        rows: R. Default: the number that the examples need. If given, rows that are not needed are padding, with weight
            0.

    Raises:
        ValueError: (on use) an example is longer than `length`, or the examples need more than `rows`. The message
            lists all such examples.

    Example:
        >>> batch = pack(6)([[5, 6, 7], [1, 2, 3, 4], [8, 9]])
        >>> batch["tokens"].tolist(), batch["position_ids"].tolist()
        ([[1, 2, 3, 4, 8, 9], [5, 6, 7, 0, 0, 0]], [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]])
        >>> batch["labels"].tolist()
        [[-100, 2, 3, 4, -100, 9], [-100, 6, 7, -100, -100, -100]]
    """

    def collate_packed(examples: list[Any]) -> dict[str, Tensor]:
        pairs = _token_pairs(examples, length)
        places, needed = first_fit([len(tokens) for tokens, _ in pairs], length)
        if rows is not None and needed > rows:
            raise ValueError(
                f"pack(rows={rows}): these {len(pairs)} examples take {needed} rows of {length} tokens. Pass fewer"
                " examples, more rows, or rows=None."
            )
        out = _empty_rows(needed if rows is None else rows, length, token)
        positions, segments = torch.zeros_like(out["tokens"]), torch.zeros_like(out["tokens"])
        for (row, start), (tokens, labels) in zip(places, pairs, strict=True):
            at = slice(start, start + len(tokens))
            out["tokens"][row, at], out["labels"][row, at] = tokens, labels
            out["labels"][row, start : start + 1] = IGNORED
            positions[row, at] = torch.arange(len(tokens))
        for row in range(len(segments)):
            starts = sorted((start, len(pairs[i][0])) for i, (r, start) in enumerate(places) if r == row)
            for number, (start, count) in enumerate(starts, 1):
                segments[row, start : start + count] = number
        return {**out, "position_ids": positions, "segment_ids": segments, "weight": _label_weights(out["labels"])}

    return collate_packed


def first_fit(lengths: Sequence[int], length: int) -> tuple[list[tuple[int, int]], int]:
    """Returns the place of each example, as (row, first position), and the number of rows.

    The longest are placed first.

    The number of rows is at most 11/9 of the minimum, plus 1.

    Example:
        >>> first_fit([3, 4, 2], 6)
        ([(1, 0), (0, 0), (0, 4)], 2)

    References:
        Johnson, Near-Optimal Bin Packing Algorithms, 1973, https://dspace.mit.edu/handle/1721.1/57819
    """
    used: list[int] = []
    places = [(0, 0)] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, n in enumerate(used) if n + lengths[i] <= length), len(used))
        if row == len(used):
            used.append(0)
        places[i] = row, used[row]
        used[row] += lengths[i]
    return places, len(used)


def first_rows(batch: core.PyTree, count: int) -> core.PyTree:
    """Returns the first rows of every tensor of a batch."""
    return core.tree_map(lambda x: x[:count] if isinstance(x, Tensor) and x.ndim else x, batch)


def _token_pairs(examples: list[Any], length: int | None) -> list[tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]]:
    """Returns tokens and labels of each example."""
    pairs = []
    _check_examples(examples)
    for example in examples:
        tokens = example["tokens"] if isinstance(example, Mapping) else example
        labels = example.get("labels", tokens) if isinstance(example, Mapping) else tokens
        pairs.append((torch.as_tensor(tokens, dtype=torch.int64), torch.as_tensor(labels, dtype=torch.int64)))
    problems = [
        f"example {i} of the batch has {len(tokens)} tokens; cut it, or take length={len(tokens)}"
        for i, (tokens, _) in enumerate(pairs)
        if length is not None and len(tokens) > length
    ]
    problems += [
        f"example {i} of the batch has {len(tokens)} tokens and {len(labels)} labels; one label a token"
        for i, (tokens, labels) in enumerate(pairs)
        if len(tokens) != len(labels)
    ]
    if problems:
        raise ValueError(f"examples do not fit a row of {length} tokens: " + "; ".join(problems) + ".")
    return pairs


def _check_examples(examples: list[Any]) -> None:
    """Refuses examples that are not tokenized, or have tokens under another name.

    Raises:
        TypeError: there are such examples. The message lists all, each with a remedy.
    """
    problems = []
    for i, example in enumerate(examples):
        if isinstance(example, str):
            problems.append(f"example {i} of the batch is a text; make ids of it: tokenizer(text)['input_ids']")
        elif isinstance(example, Mapping) and "tokens" not in example:
            ids = next((name for name in ("input_ids", "ids") if name in example), "ids")
            problems.append(f"example {i} of the batch has {sorted(example)}; write {{'tokens': example[{ids!r}]}}")
    core.raise_all(
        TypeError, "an example is a sequence of token ids, or a dict with 'tokens' and perhaps 'labels':", problems
    )


def _empty_rows(rows: int, length: int, token: int) -> dict[str, Tensor]:
    return {
        "tokens": torch.full((rows, length), token, dtype=torch.int64),
        "labels": torch.full((rows, length), IGNORED, dtype=torch.int64),
    }


def _label_weights(labels: Int64[Tensor, "b t"]) -> Tensor:
    # No token predicts the first token of a row.
    return (labels[:, 1:] != IGNORED).sum(1).to(torch.float32)


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

    Returns: "tokens", and "labels", -100 where nothing is learnt, for `pad` and `pack`.

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

    Returns: "tokens", and "labels", -100 where nothing is learnt.

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
