"""Scores, ranks and classes of texts, in the shapes of vLLM's interface.

A pair of texts is scored by the classification head of the model, or else by the cosine of their embeddings. Choices,
which vLLM's interface lacks, are scored by their log probabilities after a prompt.
"""

import functools
import math
import operator
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardfn.inference import Request, Score, make_score_sampling

from ._embeddings import POOLED, check_embeds, check_number
from ._errors import ApiError
from ._fields import CLASSIFY, RERANK, SCORE, get_required, read_fields
from ._ipc import Classify, Embed, ScoreChoice
from ._model import Model, adapter_of
from ._parse_request import PooledRequest, check_fields, check_generates
from ._prompts import Prompt, list_prompts, read_chat, read_prompts

_Write = Callable[[list[float], int], dict[str, Any]]


class _Asked(NamedTuple):
    """Values that all requests of a body share."""

    given: Mapping[str, Any]
    model: Model
    adapter: bytes

    def make_request(self, ids: Sequence[int], field: str) -> Request:
        """Returns a request without tokens, checked under the name of a field."""
        request = Request(**self.model.place_prompt(ids), sampling=POOLED, adapter=self.adapter, salt=self.salt)
        check_fields([request], self.model.limits, {field: ids})
        return request

    def make_scored(self, ids: Sequence[int], choice: Sequence[int]) -> Request:
        """Returns a request for the log probabilities of a continuation."""
        placed: dict[str, Any] = self.model.place_prompt(ids)
        how = make_score_sampling(len(placed["prompt"]))
        placed["prompt"] += tuple(choice)
        return Request(**placed, sampling=how, adapter=self.adapter, salt=self.salt)

    @property
    def salt(self) -> bytes:
        return self.given.get("cache_salt", "").encode()

    def activate(self, result: bytes) -> list[float]:
        """Returns the values of classes."""
        logits = array("f", result).tolist()
        assert self.model.classes is not None
        return self.model.classes.activate(logits) if self.given.get("use_activation", True) else logits


def parse_score(body: Mapping[str, Any], model: Model) -> PooledRequest:
    """Returns the meaning of a body of `/v1/score`: pairs of texts, or choices after prompts.

    Raises:
        ApiError: names the field that is wrong, or the model has neither embeddings nor a single class.
    """
    given = read_fields(body, SCORE)
    asked = _Asked(given, model, adapter_of(given, model))
    if "choices" in given:
        return _parse_choices(asked)
    left, right = ("queries", "documents") if "queries" in given or "documents" in given else ("text_1", "text_2")
    for name in ("text_1", "text_2"):
        if left == "queries" and name in given:
            raise ApiError(400, f"{name} cannot be combined with {left} and {right}. Give text_1 and text_2.", name)
    lefts, rights = (_list_texts(asked, name) for name in (left, right))
    if len(lefts) not in (1, len(rights)):
        text = f"{left} must have one entry, or one for each entry of {right}, got {len(lefts)} and {len(rights)}."
        raise ApiError(400, text, left)

    def write_answer(scores: list[float], tokens: int) -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return _make_list(asked, "score-", data, tokens)

    return _score_pairs(asked, lefts, rights, (left, right), write_answer)


def parse_rerank(body: Mapping[str, Any], model: Model) -> PooledRequest:
    """Returns the meaning of a body of `/v1/rerank`: documents in the order of their scores with a query.

    Raises:
        ApiError: names the field that is wrong, or the model has neither embeddings nor a single class.
    """
    given = read_fields(body, RERANK)
    asked = _Asked(given, model, adapter_of(given, model))
    query = _list_texts(asked, "query")
    if len(query) > 1:
        raise ApiError(400, f"query must be one text, got {len(query)}.", "query")
    documents = _list_texts(asked, "documents")
    most = given.get("top_n", 0)
    if most < 0:
        raise ApiError(400, f"top_n must be at least 1, or 0 for all documents, got {most}.", "top_n")

    def write_answer(scores: list[float], tokens: int) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: most or None]
        rows = [{"index": i, "relevance_score": scores[i]} for i in order]
        if given.get("return_documents", True):
            texts = [x if isinstance(x, str) else None for x in documents]
            rows = [{**row, "document": {"text": texts[i]}} for i, row in zip(order, rows, strict=True)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"id": _make_id("rerank-"), "model": given["model"], "usage": usage, "results": rows}

    return _score_pairs(asked, query, documents, ("query", "documents"), write_answer)


def parse_classify(body: Mapping[str, Any], model: Model) -> PooledRequest:
    """Returns the meaning of a body of `/classify`: texts, or a chat.

    Raises:
        ApiError: names the field that is wrong, or the model has no classification head.
    """
    given = read_fields(body, CLASSIFY)
    asked = _Asked(given, model, adapter_of(given, model))
    classes = model.classes
    if "messages" in given:
        if "input" in given:
            raise ApiError(400, "messages cannot be combined with input. Give one of them.", "messages")
        prompts, field = [read_chat({"add_generation_prompt": False, **given}, model).ids], "messages"
    else:
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if name in given:
                raise ApiError(400, f"{name} is a field of chats. Give messages, or leave it out.", name)
        prompts, field = read_prompts(given, model, "input", functools.partial(check_number, "input")), "input"
    if classes is None:
        text = f"model {model.name!r} has no classification head; serve a model of sequence classification."
        raise ApiError(400, text, "model", "unsupported_parameter")
    requests = [asked.make_request(prompt, field) for prompt in prompts]

    def write_answer(results: list[bytes], tokens: int) -> dict[str, Any]:
        data = list[dict[str, Any]]()
        for i, result in enumerate(results):
            logits = array("f", result)
            label = classes.labels[max(range(len(logits)), key=logits.__getitem__)]
            row = {"index": i, "label": label, "probs": asked.activate(result), "num_classes": len(logits)}
            data.append(row)
        return _make_list(asked, "classify-", data, tokens)

    return PooledRequest([requests], Classify, write_answer)


def _parse_choices(asked: _Asked) -> PooledRequest:
    """Returns requests for the log probabilities of continuations. A prompt's first request fills the prefix cache."""
    given, model = asked.given, asked.model
    check_generates(model)
    for name in ("text_2", "queries", "documents", "use_activation"):
        if name in given:
            raise ApiError(400, f"{name} has no effect beside choices. Leave it out.", name, "unsupported_parameter")
    prompts = read_prompts(given, model, "text_1", functools.partial(check_number, "text_1"))
    choices = _list_choices(asked, len(prompts))
    check_number("choices", sum(map(len, choices)))
    requests = [
        [asked.make_scored(x, choice) for choice in several] for x, several in zip(prompts, choices, strict=True)
    ]
    for prompt, several in zip(prompts, requests, strict=True):
        asked.make_request(prompt, "text_1")
        check_fields(several, model.limits, {"choices": several})
    parts = slice(0, 1), slice(1, None)
    places = [(i, j) for part in parts for i, x in enumerate(choices) for j in range(len(x))[part]]

    def write_answer(results: list[Score], tokens: int) -> dict[str, Any]:
        data = list[dict[str, Any]]()
        for (i, j), score in sorted(zip(places, results, strict=True), key=lambda pair: pair[0]):
            row = {"index": len(data), "object": "score", "score": score.logprob, "prompt": i, "choice": j}
            data.append({**row, "logprobs": list(score.logprobs), "is_greedy": score.is_greedy})
        return _make_list(asked, "score-", data, tokens)

    stages = [[x for several in requests for x in several[part]] for part in parts]
    return PooledRequest([stage for stage in stages if stage], ScoreChoice, write_answer)


def _list_choices(asked: _Asked, num: int) -> list[list[list[int]]]:
    """Returns the ids of the choices of each prompt."""
    value, model = get_required(asked.given, "choices"), asked.model
    nested = isinstance(value, list) and bool(value) and all(_is_prompts(x) for x in value)
    lists = value if nested else [value]
    if not all(_is_prompts(several) for several in lists) or len(lists) != num:
        text = "choices must be a list of strings or of lists of token ids, for one text_1, or such a list for each"
        raise ApiError(400, f"{text} entry of text_1, and none of them empty.", "choices")
    encode = model.text.plain or model.text.encode
    made = list[list[list[int]]]()
    for several in lists:
        listed = list_prompts({"choices": several}, model, "choices", functools.partial(check_number, "choices"))
        made.append([encode(x) if isinstance(x, str) else x for x in listed])
        if not all(made[-1]):
            raise ApiError(400, "choices must have at least one token each, got an empty choice.", "choices")
    return made


def _is_prompts(value: Any) -> bool:
    """Returns whether a value is a list of texts, or of lists of ids, that is not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(x, str) or _is_ids(x) for x in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _is_text_object(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["text"] and isinstance(value["text"], str)


def _list_texts(asked: _Asked, field: str) -> list[Prompt]:
    """Returns the texts of a field. An object `{"text": ...}` is its text."""
    value = asked.given.get(field)
    if isinstance(value, list):
        value = [x["text"] if _is_text_object(x) else x for x in value]
    prompts = list_prompts({field: value}, asked.model, field, functools.partial(check_number, field))
    if "" in prompts:
        raise ApiError(400, f"{field} must have texts that are not empty.", field)
    return prompts


def _score_pairs(
    asked: _Asked, lefts: list[Prompt], rights: list[Prompt], fields: tuple[str, str], write: _Write
) -> PooledRequest:
    """Returns the requests of pairs, by the classification head if there is one, and else by embeddings."""
    model = asked.model
    if model.classes is not None:
        return _classify_pairs(asked, lefts, rights, fields[1], write)
    if "use_activation" in asked.given:
        text = "use_activation has no effect on cosines of embeddings. Leave it out."
        raise ApiError(400, text, "use_activation", "unsupported_parameter")
    check_embeds(model)
    encode = model.text.encode
    requests = [
        asked.make_request(encode(x) if isinstance(x, str) else x, field)
        for field, several in zip(fields, (lefts, rights), strict=True)
        for x in several
    ]

    def write_answer(vectors: list[bytes], tokens: int) -> dict[str, Any]:
        rows = [array("f", vector) for vector in vectors]
        left, right = rows[: len(lefts)], rows[len(lefts) :]
        left = left * len(right) if len(left) == 1 else left
        cosines = [math.fsum(map(operator.mul, x, y)) for x, y in zip(left, right, strict=True)]
        return write(cosines, tokens)

    return PooledRequest([requests], functools.partial(Embed, pooling=model.pooling), write_answer)


def _classify_pairs(
    asked: _Asked, lefts: list[Prompt], rights: list[Prompt], field: str, write: _Write
) -> PooledRequest:
    """Returns a request for each pair. The first pair with a left text fills the prefix cache for the other pairs."""
    classes = asked.model.classes
    assert classes is not None
    if len(classes.labels) > 1:
        text = f"model {asked.model.name!r} has {len(classes.labels)} classes, and a score needs a single class. Use"
        raise ApiError(400, f"{text} /classify.", "model", "unsupported_parameter")
    pairs = list(zip(lefts * len(rights) if len(lefts) == 1 else lefts, rights, strict=True))
    requests = [asked.make_request(_join_pair(asked.model, *pair), field) for pair in pairs]
    stages = [requests[:1], requests[1:]] if len(lefts) == 1 else [requests]

    def write_answer(results: list[bytes], tokens: int) -> dict[str, Any]:
        return write([asked.activate(result)[0] for result in results], tokens)

    return PooledRequest([stage for stage in stages if stage], Classify, write_answer)


def _join_pair(model: Model, left: Prompt, right: Prompt) -> list[int]:
    """Returns the ids of a prompt with both texts."""
    text = model.text
    if isinstance(left, str) and isinstance(right, str) and text.pair is not None:
        return text.pair(left, right)
    first = text.encode(left) if isinstance(left, str) else left
    return [*first, *((text.plain or text.encode)(right) if isinstance(right, str) else right)]


def _make_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def _make_list(asked: _Asked, prefix: str, data: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    head = {"id": _make_id(prefix), "object": "list", "created": int(time.time()), "model": asked.given["model"]}
    return {**head, "data": data, "usage": usage}
