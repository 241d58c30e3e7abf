"""Covers beam search and prompts by their embeddings over HTTP: the answers of the engine, and mistakes by name."""

import base64
import io
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardfn.inference import BeamSearch, Sampling
from tests.serve.server import CONTEXT, NAME, TALKS, Running, chat_text, new_engine, parts
from tests.serve.test_tools import TOOLS

ENDS = (0,)  # of the tiny model


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    made = Running(prompt_embeds=True)
    yield made
    made.wait_idle()
    assert made.close() == 0


def ask(server: Running, /, route: str = "completions", **fields: Any) -> Any:
    return server.send(f"/v1/{route}", {"model": NAME, **fields})


@pytest.mark.parametrize(
    ("prompts", "rule", "more"),
    [
        (["abc", "the sea"], BeamSearch(3, 12, stop_tokens=ENDS), {}),
        (["abc"], BeamSearch(2, 40, 2.0, stop_tokens=(*range(32, 35), *ENDS)), {"stop_token_ids": [*range(32, 35)]}),
        (["abc"], BeamSearch(1, 5, -1.0), {"ignore_eos": True}),
    ],
    ids=["two", "ends", "greedy"],
)
def test_beams_are_those_of_the_engine(server: Running, prompts: list[str], rule: BeamSearch, more: Any) -> None:
    fields: Any = {"use_beam_search": True, "n": rule.num_beams, "max_tokens": rule.max_tokens, "temperature": 0}
    found = ask(server, prompt=prompts, length_penalty=rule.length_penalty, **fields, **more)
    assert found.status == 200, found.data
    want = [x for beams in new_engine().beam_search([list(p.encode()) for p in prompts], rule) for x in beams]
    choices = found.json["choices"]
    assert [(x["text"], x["finish_reason"]) for x in choices] == [(x.text, x.finish_reason) for x in want]
    assert [x["index"] for x in choices] == [*range(len(want))]
    usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": sum(len(x.tokens) for x in want)}
    assert found.json["usage"] == usage | {"total_tokens": sum(usage.values())}


@pytest.mark.nightly
def test_beams_of_a_chat_and_of_an_adapter(server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    fields: Any = {"use_beam_search": True, "n": 2, "max_tokens": 6, "model": "tuned"}
    found = ask(server, "chat/completions", messages=messages, **fields)
    rule, prompt = BeamSearch(2, 6, stop_tokens=ENDS), list(chat_text(messages).encode())
    [want] = new_engine().beam_search([prompt], rule, adapter="tuned")
    assert [x["message"]["content"] for x in found.json["choices"]] == [x.text for x in want]


def test_a_client_that_leaves_ends_the_search(server: Running) -> None:
    stream = server.connect()
    body = b'{"model": "tiny", "prompt": "abc", "use_beam_search": true, "n": 3, "max_tokens": 500}'
    stream.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    server.wait_for(lambda: len(server.front.calls) > 0)
    stream.close()
    server.wait_idle()


WRONG_BEAMS: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 11}, "n", "n must be at most 10 for 1 stop tokens"),
    ({"length_penalty": 11}, "length_penalty", "length_penalty must be from -10 to 10, got 11"),
    ({"use_beam_search": False, "length_penalty": 2}, "length_penalty", "no effect without use_beam_search"),
    ({"stream": True}, "stream", "stream cannot be combined with use_beam_search"),
    ({"temperature": 0.5}, "temperature", "temperature cannot be combined"),
    ({"top_p": 0.5}, "top_p", "top_p cannot be combined"),
    ({"logprobs": 0}, "logprobs", "logprobs cannot be combined"),
    ({"stop": "a"}, "stop", "stop cannot be combined"),
    ({"echo": True}, "echo", "echo cannot be combined"),
    ({"regex": "a*"}, "regex", "regex cannot be combined"),
    ({"max_tokens": CONTEXT}, "prompt", "together in the context"),
]


@pytest.mark.parametrize(("change", "param", "words"), WRONG_BEAMS, ids=lambda x: str(x)[:30])
def test_mistakes_of_searches(server: Running, change: dict[str, Any], param: str, words: str) -> None:
    fields: Any = {"prompt": "abc", "use_beam_search": True, "n": 2, "max_tokens": 4}
    found = ask(server, **(fields | change))
    assert (found.status, found.error["param"]) == (400, param) and words in found.error["message"], found.data
    plain: Any = {"temperature": 1, "top_p": 1, "stop": "", "echo": False, "presence_penalty": 0, "stream": False}
    assert ask(server, **fields, **plain).status == 200


def test_forced_calls_have_no_search(start: Any) -> None:
    pytest.importorskip("llguidance")
    fields: Any = {
        "messages": [{"role": "user", "content": "a"}],
        "use_beam_search": True,
        "tools": TOOLS,
        "max_tokens": 4,
    }
    server = start(text=TALKS)
    found = ask(server, "chat/completions", tool_choice="required", **fields)
    assert (found.status, found.error["param"]) == (400, "tools"), found.data
    assert ask(server, "chat/completions", **fields).status == 200


def encode(value: Any, **how: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return base64.b64encode(file.getvalue()).decode()


def embed(text: str) -> torch.Tensor:
    return parts()[1]["embed"][list(text.encode())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embeddings_are_their_tokens(server: Running, dtype: torch.dtype) -> None:
    fields: Any = {"max_tokens": 12, "temperature": 0, "seed": 3, "logprobs": 2}
    want = ask(server, prompt=["abc", "the sea", "xy"], **fields).json
    given = [encode(embed(x).to(dtype)) for x in ("abc", "the sea")]
    found = ask(server, prompt_embeds=given, prompt="xy", **fields)
    assert found.status == 200, found.data
    assert (found.json["choices"], found.json["usage"]) == (want["choices"], want["usage"])
    [one] = ask(server, prompt_embeds=encode(embed("abc").T.contiguous().T), **fields).json["choices"]
    assert one == want["choices"][0]
    half = embed("the sea").bfloat16()
    how = Sampling(max_tokens=12, temperature=0.0, stop_tokens=ENDS)
    made = ask(server, prompt_embeds=encode(half), max_tokens=12, temperature=0).json["choices"][0]["text"]
    assert made == new_engine().generate([half.float()], how)[0].text


class Runs:
    def __reduce__(self) -> Any:
        return (print, ("a pickle has run",))


def pack_bomb() -> str:
    """A file whose numbers are compressed."""
    plain, packed = zipfile.ZipFile(io.BytesIO(base64.b64decode(encode(torch.zeros(4000, 32))))), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    return base64.b64encode(packed.getvalue()).decode()


class Changed(torch.Tensor):
    """A tensor whose pickle sets another shape after the tensor was made."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = torch.zeros(2, 32)
        function, arguments = plain.__reduce_ex__(2)[:2]
        return function, arguments, (arguments[0], 0, (10**8, 32), (0, 0))


WRONG_EMBEDS: list[tuple[Any, str]] = [
    ("", "must be a file of torch.save with a tensor"),
    ("***", "must be base64"),
    (base64.b64encode(pickle.dumps([1.0])).decode(), "other pickles are refused"),
    (encode(torch.zeros(2, 32), _use_new_zipfile_serialization=False), "other pickles are refused"),
    (encode([1.0]), "must be a tensor, got a list"),
    (encode({"a": torch.zeros(2, 32)}), "must be a tensor, got a dict"),
    (encode(Runs()), "print is not permitted"),
    (encode(torch.zeros(2, 32).to_sparse()), "is not permitted"),
    (encode(torch.zeros(1, 32).expand(10**9, 32)), "more elements than the file has numbers"),
    (encode(torch.zeros(2, 32, dtype=torch.int64)), "is not permitted"),
    (pack_bomb(), "without compression"),
    (encode([torch.zeros(2, 32), torch.ones(2, 32)]), "numbers of several tensors"),
    (encode(torch.zeros(2, 32).as_subclass(Changed)), "an object is changed after it was made"),
    (encode(list(range(4000))), "more than 4096"),
    (encode(torch.zeros(2, 31)), "must have shape [P, 32], a row for each token, got [2, 31]"),
    (encode(torch.zeros(0, 32)), "got [0, 32]"),
    (encode(torch.zeros(32)), "got [32]"),
    (encode(torch.full((2, 32), torch.nan)), "must be finite numbers"),
    (encode(torch.zeros(CONTEXT, 32)), "context"),
    ([], "at least one tensor"),
    ([encode(torch.zeros(2, 32)), "x"], "prompt_embeds[1] must be"),
    ([encode(torch.zeros(2, 32))] * 129, "n must give at most 128 choices"),
]


@pytest.mark.parametrize(("given", "words"), WRONG_EMBEDS, ids=range(len(WRONG_EMBEDS)))
def test_mistakes_of_embeddings(server: Running, capfd: Any, given: Any, words: str) -> None:
    found = ask(server, prompt_embeds=given, max_tokens=2)
    assert found.status == 400 and words in found.error["message"], found.data
    assert "a pickle has run" not in "".join(capfd.readouterr())


def test_options_that_read_the_tokens_of_a_prompt(server: Running, start: Any) -> None:
    given = encode(embed("abc"))
    change: Any
    for change, param in (({"echo": True}, "echo"), ({"repetition_penalty": 1.1}, "repetition_penalty")):
        found = ask(server, prompt_embeds=given, **change)
        assert (found.status, found.error["param"]) == (400, param), found.data
    assert ask(server, prompt_embeds=given, use_beam_search=True, n=2, max_tokens=2).status == 400
    found = ask(start(), prompt_embeds=given)
    assert "--enable-prompt-embeds" in found.error["message"] and found.status == 400
