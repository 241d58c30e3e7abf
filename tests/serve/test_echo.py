"""Covers prompts that are sent back: their texts and log probabilities, also without a completion."""

import json
from typing import Any

import pytest

from shardfn.inference import Sampling
from tests.serve.server import NAME, Running, new_engine

PROMPT = "The sea é"
BODY = {"model": NAME, "prompt": PROMPT, "echo": True, "temperature": 0}


def rows(choice: Any) -> list[tuple[Any, ...]]:
    found = choice["logprobs"]
    return list(zip(*(found[x] for x in ("tokens", "token_logprobs", "top_logprobs", "text_offset")), strict=True))


@pytest.mark.parametrize("num", [1, 0])
def test_log_probabilities_of_a_prompt(server: Running, num: int) -> None:
    found = server.send("/v1/completions", BODY | {"max_tokens": num, "logprobs": 1}).json
    [choice], ids = found["choices"], list(PROMPT.encode())
    how = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=True, top_logprobs=1)
    [want] = new_engine().generate([ids], how)
    made = rows(choice)
    assert [x[1] for x in made] == [None, *want.prompt_logprobs, *want.logprobs[:num]]
    assert choice["text"] == PROMPT + want.text * num and choice["finish_reason"] == "length"
    assert made[0][2] is None and all(x[0] in x[2] and 1 <= len(x[2]) <= 2 for x in made[1:])
    assert [x[3] for x in made] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, *[9] * num]
    assert all(max(x[2].values()) >= x[1] for x in made[1:])
    assert found["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": num,
        "total_tokens": len(ids) + num,
    }
    server.wait_idle()


def test_an_echo_beside_choices_prompts_and_a_prefix_in_the_cache(server: Running) -> None:
    ids = [list(b"x" * 40), list(b"the")]
    body = BODY | {"prompt": ids, "n": 2, "max_tokens": 3, "logprobs": 2, "seed": 5, "temperature": 1}
    for _ in range(2):  # the second time from the cache
        choices = server.send("/v1/completions", body).json["choices"]
        how = Sampling(max_tokens=3, seed=5, n=2, prompt_logprobs=True, top_logprobs=2, stop_tokens=(0,))
        want = [one for both in new_engine().generate(ids, how) for one in both]
        for i, (choice, one) in enumerate(zip(choices, want, strict=True)):
            assert [x[1] for x in rows(choice)] == [None, *one.prompt_logprobs, *one.logprobs]
            assert choice["text"] == bytes(ids[i // 2]).decode() + one.text


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stream_begins_with_its_prompt(server: Running, logprobs: int | None) -> None:
    body = BODY | {"max_tokens": 3, "logprobs": logprobs, "prompt": ["ab", "c"]}
    whole = server.send("/v1/completions", body).json["choices"]
    data = server.send("/v1/completions", body | {"stream": True}).data.decode()
    texts, found = ["", ""], [list[Any](), list[Any]()]
    for line in data.strip().split("\n\n")[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
            found[choice["index"]] += rows(choice) if choice["logprobs"] else []
    assert texts == [choice["text"] for choice in whole]
    assert found == [rows(choice) if choice["logprobs"] else [] for choice in whole]


def test_an_answer_without_a_completion_has_no_end_of_one(server: Running) -> None:
    body = BODY | {"max_tokens": 0, "stop": "x", "stop_token_ids": [*range(100)], "regex": "yes"}
    pytest.importorskip("llguidance")
    found = server.send("/v1/completions", body).json
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == (PROMPT, "length")
    assert found["usage"]["completion_tokens"] == 0
    assert server.send("/v1/completions", body | {"echo": False}).error["param"] == "max_tokens"
    server.wait_idle()


def test_a_seed_that_the_server_has_drawn_repeats_its_choices(server: Running) -> None:
    body: dict[str, Any] = {"model": NAME, "prompt": "ab", "max_tokens": 12, "n": 2}
    first, other = (server.send("/v1/completions", body).json for _ in range(2))
    assert first["seed"] != other["seed"] and first["seed"] < 2**53
    assert server.send("/v1/completions", body | {"seed": first["seed"]}).json["choices"] == first["choices"]
    assert server.send("/v1/completions", body | {"seed": -1}).json["seed"] not in (-1, first["seed"])
    several = server.send("/v1/completions", body | {"prompt": ["ab", "ab"]}).json
    assert "seed" not in several
    for i in (0, 2):
        found = server.send("/v1/completions", body | {"seed": several["choices"][i]["seed"]}).json
        assert [x["text"] for x in found["choices"]] == [x["text"] for x in several["choices"][i : i + 2]]
    chat = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    events = server.send("/v1/chat/completions", chat).data.decode().strip().split("\n\n")[:-1]
    assert len({json.loads(event.removeprefix("data: "))["seed"] for event in events}) == 1


def test_a_text_ends_after_its_stop_string_where_that_is_asked_for(server: Running) -> None:
    body = {"model": NAME, "prompt": "ab", "max_tokens": 60, "seed": 1, "ignore_eos": True}
    whole = server.send("/v1/completions", body).json["choices"][0]["text"]
    stop = whole[5]
    for include in (False, True):
        found = server.send("/v1/completions", body | {"stop": stop, "include_stop_str_in_output": include})
        want = whole.split(stop)[0] + stop * include
        assert found.json["choices"][0]["text"] == want


def test_values_of_a_model_hold_where_a_body_gives_none(start: Any) -> None:
    server = start(defaults={"temperature": 0.0, "repetition_penalty": 1.5})
    body = {"model": NAME, "prompt": "abab", "max_tokens": 12}
    given = {"temperature": 0, "repetition_penalty": 1.5}
    texts = [
        server.send("/v1/completions", body | more).json["choices"][0]["text"]
        for more in ({}, given, {"repetition_penalty": 1}, {"temperature": None})
    ]
    assert texts[0] == texts[1] == texts[3] != texts[2]
