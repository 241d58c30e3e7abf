"""Covers scores, ranks and classes: values of the engine alone, stages that share prefixes, and refusals."""

import math
from typing import Any

import pytest
import torch

from tests.serve.server import NAME, Running, classifier_of, metric, new_engine

Server = Any
TEXTS = ["abc", "the sea", "x" * 40]


@pytest.fixture(scope="module")
def rewards() -> Any:
    """A server whose model gives one reward."""
    made = Running(classifier=classifier_of("reward"))
    yield made
    made.wait_idle()
    assert made.close() == 0


def cosines(left: str, rights: list[str]) -> list[float]:
    rows = new_engine().embed([list(text.encode()) for text in (left, *rights)], normalize=True).tolist()
    return [math.fsum(x * y for x, y in zip(rows[0], row, strict=True)) for row in rows[1:]]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_pairs_have_the_cosines_of_their_embeddings(server: Running, path: str) -> None:
    body = {"model": NAME, "text_1": "hello", "text_2": TEXTS}
    found = server.send(path, body).json
    assert [row["score"] for row in found["data"]] == cosines("hello", TEXTS)
    assert found["data"][1] | {"score": 0} == {"index": 1, "object": "score", "score": 0}
    assert (found["object"], found["model"], found["id"][:6]) == ("list", NAME, "score-")
    num = 5 + sum(map(len, TEXTS))
    assert found["usage"] == {"prompt_tokens": num, "total_tokens": num, "completion_tokens": 0}
    ids = {"queries": list(b"hello"), "documents": [list(text.encode()) for text in TEXTS]}
    assert server.send(path, {"model": NAME, **ids}).json["data"] == found["data"]
    [last] = server.send(path, {"model": NAME, "text_1": ["hello"], "text_2": TEXTS[2]}).json["data"]
    assert last["score"] == found["data"][2]["score"]
    pairs = server.send(path, {"model": NAME, "text_1": ["hello"] * 3, "text_2": TEXTS}).json["data"]
    assert pairs == found["data"]


def test_documents_are_ranked_by_their_scores(server: Running) -> None:
    scores = cosines("hello", TEXTS)
    body = {"model": NAME, "query": "hello", "documents": [{"text": TEXTS[0]}, *TEXTS[1:]]}
    found = server.send("/v1/rerank", body).json
    order = sorted(range(3), key=lambda i: -scores[i])
    want = [{"index": i, "relevance_score": scores[i], "document": {"text": TEXTS[i]}} for i in order]
    assert found["results"] == want and found["usage"]["total_tokens"] == 5 + sum(map(len, TEXTS))
    for path in ("/rerank", "/v2/rerank"):
        assert server.send(path, body | {"top_n": 2}).json["results"] == want[:2]
    found = server.send("/v1/rerank", body | {"return_documents": False}).json
    assert found["results"] == [{"index": x["index"], "relevance_score": x["relevance_score"]} for x in want]
    equal = server.send("/v1/rerank", body | {"documents": ["same"] * 3}).json["results"]
    assert [x["index"] for x in equal] == [0, 1, 2]


def test_choices_have_the_scores_of_the_engine(server: Running) -> None:
    """The first choice of each prompt fills the cache, from which the others take the prompt."""
    prompts, choices = ["a long prompt of several blocks of 16 tokens", "short"], [["x", "yes", "no"], ["z"]]
    hits = metric(server, "vllm:prefix_cache_hits_total")
    found = server.send("/v1/score", {"model": NAME, "text_1": prompts, "choices": choices}).json
    ids = [[list(text.encode()) for text in several] for several in choices]
    scores = new_engine().score([list(text.encode()) for text in prompts], ids)
    want = [
        {
            "score": score.logprob,
            "logprobs": list(score.logprobs),
            "is_greedy": score.is_greedy,
            "prompt": i,
            "choice": j,
        }
        for i, several in enumerate(scores)
        for j, score in enumerate(several)
    ]
    assert found["data"] == [{"index": i, "object": "score", **row} for i, row in enumerate(want)]
    assert metric(server, "vllm:prefix_cache_hits_total") - hits >= 2 * 32
    one = server.send("/v1/score", {"model": NAME, "text_1": prompts[0], "choices": ids[0]}).json["data"]
    assert one == found["data"][:3]
    server.wait_idle()
    assert not server.engine.embeddings._pooled


def test_scores_of_an_adapter(server: Running) -> None:
    body = {"model": "tuned", "text_1": "hello", "choices": ["x"], "cache_salt": "s"}
    [[want]] = new_engine().score([list(b"hello")], [[list(b"x")]], adapter="tuned")
    assert server.send("/v1/score", body).json["data"][0]["score"] == want.logprob


@pytest.mark.parametrize("labels", [("reward",), ("bad", "fair", "good")])
def test_classes_are_those_of_the_head(start: Any, labels: tuple[str, ...]) -> None:
    head = classifier_of(*labels)
    server = start(classifier=head)
    logits = [head.compute_logits(x) for x in new_engine().embed([list(text.encode()) for text in TEXTS])]
    raw = server.send("/classify", {"model": NAME, "input": TEXTS, "use_activation": False}).json
    assert [row["probs"] for row in raw["data"]] == [x.tolist() for x in logits]
    found = server.send("/v1/classify", {"model": NAME, "input": TEXTS}).json["data"]
    want = torch.stack(logits).double()
    want = want.sigmoid() if len(labels) == 1 else want.softmax(-1)
    torch.testing.assert_close(torch.tensor([row["probs"] for row in found]).double(), want, rtol=1e-6, atol=0)
    assert [row["label"] for row in found] == [labels[int(x.argmax())] for x in logits]
    assert {row["num_classes"] for row in found} == {len(labels)}
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    text = "user: hi\nassistant: ho\n"
    of_chat, of_text = (server.send("/classify", {"model": NAME, **x}).json["data"] for x in (chat, {"input": text}))
    assert of_chat == of_text
    if len(labels) > 1:
        refused = server.send("/v1/score", {"model": NAME, "text_1": "a", "text_2": "b"})
        assert (refused.status, refused.error["param"]) == (400, "model") and "3 classes" in refused.error["message"]


def test_pairs_are_scored_by_the_head(rewards: Running) -> None:
    """A query is the prefix of all pairs: the first pair's blocks serve the others."""
    query, head = "a query of more than two blocks of 16", classifier_of("reward")
    hits = metric(rewards, "vllm:prefix_cache_hits_total")
    pairs = [list((query + text).encode()) for text in TEXTS]
    want = [head.compute_logits(x).item() for x in new_engine().embed(pairs)]
    body = {"model": NAME, "query": query, "documents": TEXTS, "use_activation": False}
    found = rewards.send("/v1/rerank", body).json["results"]
    assert sorted(x["relevance_score"] for x in found) == sorted(want)
    assert [x["index"] for x in found] == sorted(range(3), key=lambda i: -want[i])
    assert metric(rewards, "vllm:prefix_cache_hits_total") - hits >= 2 * 32
    data = rewards.send("/v1/score", {"model": NAME, "text_1": query, "text_2": TEXTS}).json["data"]
    assert [row["score"] for row in data] == head.classes.activate(want)


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/classify", {"input": "a"}, "model", "has no classification head"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "use_activation": True}, "use_activation", "no effect on cosines"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "got 2 and 1"),
    ("/v1/score", {"text_1": "a", "queries": "b", "documents": "c"}, "text_1", "combined with queries"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "choices": ["c"]}, "text_2", "no effect beside choices"),
    ("/v1/score", {"text_1": ["a", "b"], "choices": [["c"]]}, "choices", "for each entry of text_1"),
    ("/v1/score", {"text_1": "a" * 500, "choices": ["c" * 20]}, "choices", "the context has 512"),
    ("/classify", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "combined with input"),
    ("/classify", {"input": "a", "add_generation_prompt": True}, "add_generation_prompt", "is a field of chats"),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), WRONG)
def test_wrong_bodies(server: Running, path: str, body: dict[str, Any], param: str, words: str) -> None:
    found = server.send(path, {"model": NAME, **body})
    assert (found.status, found.error["param"]) == (400, param) and words in found.error["message"]


def test_a_classifier_has_no_completions(start: Any) -> None:
    server = start(classifier=classifier_of("reward"))
    server.front.app.model = server.front.app.model._replace(generates=False)
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/score", {"text_1": "a", "choices": ["b"]})):
        found = server.send(path, {"model": NAME, **body})
        assert (found.status, found.error["param"]) == (400, "model") and "in place of tokens" in found.error["message"]
